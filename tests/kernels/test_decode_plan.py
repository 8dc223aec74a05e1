"""How decoding is divided: ranges of programs, and the partial states that rows have."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_paged.kernels.decode_plan import DecodePlan
from pallas_paged.kernels.logits import LogitOptions
from pallas_paged.kernels.triton.config import DecodeConfig

BLOCK = 16


def plan_of(num_seqs, num_programs, fixed_split_size=None, **more):
    config = DecodeConfig(
        block_k=BLOCK,
        num_programs=num_programs,
        num_warps=1,
        num_stages=1,
        fixed_split_size=fixed_split_size,
    )
    return DecodePlan.of(
        config,
        LogitOptions(sm_scale=1.0),
        num_seqs=num_seqs,
        num_kv_heads=1,
        max_kv_len=200 * BLOCK,
        **more,
    )


def ranges_of(plan, num_units):
    programs = jnp.arange(plan.num_programs + plan.num_short_programs)
    ranges = jax.vmap(plan.units_of_program, (0, None))(programs, num_units)
    return [range(start, stop) for start, stop in np.transpose(np.asarray(ranges)).tolist()]


def states_of_rows(plan, ends):
    """The indices of the partial states of each row, as the merge finds them."""
    rows = jnp.arange(len(ends))
    first, count = jax.vmap(plan.partials_of_row, (0, None))(rows, jnp.asarray(ends))
    return [list(range(a, a + n)) for a, n in zip(first.tolist(), count.tolist(), strict=True)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"with_whole_rows": True},
        {"with_short_programs": True},
        {"with_whole_rows": True, "with_short_programs": True},
        {"fixed_split_size": 3 * BLOCK},
    ],
    ids=lambda options: "-".join(options) or "even",
)
@pytest.mark.parametrize("num_programs", [1, 5, 66])
@pytest.mark.parametrize(
    "blocks",
    [
        [0, 0, 0],
        [1],
        [7, 0, 1, 30, 0, 2, 0],
        [4] * 16,
        [8, 9, 7, 8],  # equal by their sum alone
        [0, 5, 5, 5, 5, 0],
        [64] * 64,
        [2] * 200,
        np.random.default_rng(0).integers(0, 40, 100).tolist(),
        np.random.default_rng(0).integers(0, 90, 100).tolist(),
    ],
    ids=lambda blocks: f"{len(blocks)}-rows-{sum(blocks)}-blocks",
)
def test_each_unit_has_one_program_and_the_merge_finds_all_states(blocks, num_programs, options):
    plan = plan_of(len(blocks), num_programs, **options)
    ends = np.asarray(plan.unit_ends(jnp.array(blocks, jnp.int32) * BLOCK))
    ranges = ranges_of(plan, ends[-1])
    assert [unit for units in ranges for unit in units] == list(range(ends[-1]))
    left = {row: [] for row in range(len(blocks))}
    for program, units in enumerate(ranges):
        for unit in units:
            row = int(np.searchsorted(ends, unit, side="right"))
            index = int(plan.partial_index(program=program, row=row, unit=unit))
            if index not in left[row]:
                left[row].append(index)
    assert states_of_rows(plan, ends) == list(left.values())
    indices = [index for states in left.values() for index in states]
    assert len(set(indices)) == len(indices) and max(indices, default=0) < plan.num_partials


@pytest.mark.parametrize(
    ("num_rows", "blocks", "num_programs", "longest"),
    [
        (64, 64, 66, 64),  # a row each, where 63 blocks would be the even share
        (128, 32, 66, 64),
        (256, 16, 66, 64),
        (64, 1024, 66, 1024),
        (32, 32, 66, 16),  # half a row each: nothing to gain
        (60, 64, 66, 59),  # a row would be 8% more than an even share
        (1, 64, 66, 1),
        (1, 64, 1, 64),
    ],
)
def test_equal_rows_are_not_split_where_that_costs_little(num_rows, blocks, num_programs, longest):
    plan = plan_of(num_rows, num_programs, with_whole_rows=True)
    ends = blocks * np.arange(1, num_rows + 1, dtype=np.int32)
    assert max(map(len, ranges_of(plan, ends[-1]))) == longest
    is_whole = [len(states) == 1 for states in states_of_rows(plan, ends)]
    assert all(is_whole) == (longest % blocks == 0)


@pytest.mark.parametrize(
    ("with_whole_rows", "first"), [(True, 63), (False, 64)], ids=["unequal", "not asked for"]
)
def test_other_rows_have_even_ranges(with_whole_rows, first):
    plan = plan_of(64, 66, with_whole_rows=with_whole_rows)
    ends = np.cumsum([first] + [64] * 63).astype(np.int32)
    assert max(map(len, ranges_of(plan, ends[-1]))) == 63 == -(-int(ends[-1]) // 66)


def test_short_programs_have_the_end_of_a_long_line():
    plan = plan_of(64, 66, with_short_programs=True)
    assert plan.num_short_programs == 66
    lengths = [len(units) for units in ranges_of(plan, jnp.int32(66 * 64 - 5))]
    assert lengths[:66] == [60] * 66
    assert set(lengths[66:-2]) == {4} and sum(lengths) == 66 * 64 - 5
    lengths = [len(units) for units in ranges_of(plan, jnp.int32(66 * 16))]
    assert lengths == [15] * 66 + [1] * 66
    lengths = [len(units) for units in ranges_of(plan, jnp.int32(66 * 15))]  # a short line
    assert lengths == [15] * 66 + [0] * 66


@pytest.mark.parametrize(
    ("blocks", "is_whole"),
    [(16, True), (32, True), (64, False), ([15, 16] * 32, False)],
    ids=["16", "32", "64", "15-and-16"],
)
def test_equal_rows_that_are_not_long_are_whole_beside_short_programs(blocks, is_whole):
    plan = plan_of(64, 66, with_whole_rows=True, with_short_programs=True)
    ends = np.cumsum(np.broadcast_to(blocks, 64)).astype(np.int32)
    assert all(len(states) == 1 for states in states_of_rows(plan, ends)) == is_whole
    assert (max(map(len, ranges_of(plan, ends[-1])[66:])) == 0) == is_whole


def test_without_long_rows_there_are_no_short_programs():
    assert plan_of(5, 66, with_short_programs=True).num_short_programs == 0
    assert plan_of(20, 66, 4 * BLOCK, with_short_programs=True).num_short_programs == 0
