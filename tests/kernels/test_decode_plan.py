"""How decoding is divided: ranges of programs, and the partial states that rows have."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_paged.kernels.decode_plan import DecodePlan
from pallas_paged.kernels.logits import LogitOptions
from pallas_paged.kernels.triton.config import DecodeConfig

BLOCK = 16
MAX_ROWS, MAX_PROGRAMS = 256, 132  # of all plans here, which so share a program


def plan_of(num_seqs, num_programs, fixed_split_size=None, **more):
    sizes = dict(block_k=BLOCK, num_programs=num_programs, fixed_split_size=fixed_split_size)
    config = DecodeConfig(num_warps=1, num_stages=1, **sizes)
    options = LogitOptions(sm_scale=1.0)
    sizes = dict(num_seqs=num_seqs, num_kv_heads=1, max_kv_len=200 * BLOCK)
    return DecodePlan.of(config, options, **sizes, **more)


@functools.partial(jax.jit, static_argnames="plan")
def _divide(plan, num_programs, num_seqs, lens):
    plan = dataclasses.replace(plan, num_programs=num_programs, num_seqs=num_seqs)
    ends = plan.unit_ends(lens)
    ranges = jax.vmap(plan.units_of_program, (0, None))(jnp.arange(MAX_PROGRAMS), ends[-1])
    return ends, ranges, jax.vmap(plan.partials_of_row, (0, None))(jnp.arange(len(lens)), ends)


def divide(plan, blocks):
    """Where the units of rows of these numbers of blocks end, the ranges, and the states of rows.

    A range is the units of a program; states are their indices, as the merge finds them.
    """
    lens = np.zeros(MAX_ROWS, np.int32)
    lens[: len(blocks)] = np.array(blocks) * BLOCK
    plain = dataclasses.replace(plan, num_programs=0, num_seqs=0, num_partials=0)
    ends, ranges, states = jax.device_get(
        _divide(plain, np.int32(plan.num_programs), np.int32(plan.num_seqs), lens)
    )
    assert not states[1][len(blocks) :].any()
    ranges = np.transpose(ranges)[: plan.num_programs + plan.num_short_programs]
    return (
        ends[: len(blocks)],
        [range(start, stop) for start, stop in ranges.tolist()],
        [list(range(a, a + n)) for a, n in np.transpose(states)[: len(blocks)].tolist()],
    )


RNG = np.random.default_rng(0)
BATCHES = [
    [0, 0, 0],
    [1],
    [7, 0, 1, 30, 0, 2, 0],
    [4] * 16,
    [8, 9, 7, 8],  # equal by their sum alone
    [0, 5, 5, 5, 5, 0],
    [64] * 64,
    [2] * 200,
    RNG.integers(0, 40, 100).tolist(),
    RNG.integers(0, 90, 100).tolist(),
]
UNSPLIT, SHORT = {"with_whole_rows": True}, {"with_short_programs": True}


@pytest.mark.parametrize(
    "options",
    [{}, UNSPLIT, SHORT, UNSPLIT | SHORT, {"fixed_split_size": 3 * BLOCK}],
    ids=lambda options: "-".join(options) or "even",
)
@pytest.mark.parametrize("num_programs", [1, 5, 66])
def test_each_unit_has_one_program_and_the_merge_finds_all_states(num_programs, options):
    for blocks in BATCHES:
        name = f"{len(blocks)} rows, {sum(blocks)} blocks"
        plan = plan_of(len(blocks), num_programs, **options)
        ends, ranges, states = divide(plan, blocks)
        units_of_rows = -(-np.array(blocks) // 3) if plan.fixed_split_size else np.array(blocks)
        np.testing.assert_array_equal(ends, np.cumsum(units_of_rows), name)
        units = np.arange(ends[-1])
        assert [unit for units in ranges for unit in units] == units.tolist(), name
        if not options:
            assert max(map(len, ranges)) == -(-len(units) // num_programs), name
        program = np.repeat(np.arange(len(ranges)), [len(x) for x in ranges])
        row = np.searchsorted(ends, units, side="right")
        index = plan.partial_index(program=program, row=row, unit=units)
        for i, found in enumerate(states):
            assert found == list(dict.fromkeys(index[row == i].tolist())), (name, i)
        indices = [index for found in states for index in found]
        assert len(set(indices)) == len(indices), name
        assert max(indices, default=0) < plan.num_partials, name


@pytest.mark.parametrize(
    ("blocks", "num_programs", "options", "longest"),
    [
        ([64] * 64, 66, UNSPLIT, 64),  # a row each, where 63 blocks would be the even share
        ([32] * 128, 66, UNSPLIT, 64),
        ([16] * 256, 66, UNSPLIT, 64),
        ([1024] * 64, 66, UNSPLIT, 1024),
        ([32] * 32, 66, UNSPLIT, 16),  # half a row each: nothing to gain
        ([64] * 60, 66, UNSPLIT, 59),  # a row would be 8% more than an even share
        ([64], 66, UNSPLIT, 1),
        ([64], 1, UNSPLIT, 64),
        ([63] + [64] * 63, 66, UNSPLIT, 63),
        ([64] * 64, 66, {}, 63),
        # Beside short programs, only rows that are not long.
        ([16] * 64, 66, UNSPLIT | SHORT, 16),
        ([32] * 64, 66, UNSPLIT | SHORT, 32),
        ([64] * 64, 66, UNSPLIT | SHORT, 60),
        ([15, 16] * 32, 66, UNSPLIT | SHORT, 15),
    ],
    ids=lambda x: f"{len(x)} rows of {x[0]}" if isinstance(x, list) else None,
)
def test_equal_rows_are_not_split_where_that_costs_little(blocks, num_programs, options, longest):
    _, ranges, states = divide(plan_of(len(blocks), num_programs, **options), blocks)
    assert max(map(len, ranges)) == longest
    assert all(len(x) == 1 for x in states) == (longest % max(blocks) == 0)


def test_short_programs_have_the_end_of_a_long_line():
    plan = plan_of(64, 66, with_short_programs=True)
    assert plan.num_short_programs == 66

    def lengths(num_units):
        return [len(x) for x in divide(plan, [num_units])[1]]

    found = lengths(66 * 64 - 5)
    assert found[:66] == [60] * 66
    assert set(found[66:-2]) == {4} and sum(found) == 66 * 64 - 5
    assert lengths(66 * 16) == [15] * 66 + [1] * 66
    assert lengths(66 * 15) == [15] * 66 + [0] * 66  # a short line


def test_without_long_rows_there_are_no_short_programs():
    assert plan_of(5, 66, with_short_programs=True).num_short_programs == 0
    assert plan_of(20, 66, 4 * BLOCK, with_short_programs=True).num_short_programs == 0
