"""The plan of ragged work, its queries and keys piece by piece; by XLA, and by a kernel."""

import itertools
from functools import partial

import jax
import numpy as np
import pytest

from pallas_paged.kernels.logits import LogitOptions
from pallas_paged.kernels.ragged_plan import PlanShape, make_plan
from pallas_paged.kernels.ragged_plan_kernel import (
    can_plan,
    packed_types,
    plan_by_kernel,
    plan_types,
)
from pallas_paged.pages.prefix_sums import prefix_sums
from tests.support.marks import slow

BLOCK_K, TILE = 64, 32
STATIC = ("num_tokens", "num_programs", "fixed_split_size", "window", "align")
Q_LENS = (0, 1, 7, 8, 9, 31, 32, 33, 70, 25)
SEQ_LENS = (64, 65, 129, 8, 0, 128, 17, 97, 300, 233)
COMBINATIONS = [*itertools.product([1, 8], [None, 128], [None, 1, 150])]
FEW = [(1, None, None), (8, None, 150), (8, 128, None), (1, 128, 1), (1, None, 150)]


def shape_of(*, window=None, **sizes):
    """The sizes of a plan of tiles of 32 rows and blocks of 64 keys."""
    sizes = dict(group=1, max_kv_len=320, num_programs=40, has_tree=False) | sizes
    options = LogitOptions(sm_scale=1.0, sliding_window=window)
    return PlanShape(block_q=TILE, block_k=BLOCK_K, options=options, **sizes)


@partial(jax.jit, static_argnames=STATIC)
def plan_of(seq_lens, ends, **sizes):
    return make_plan(seq_lens, ends, None, shape_of(num_seqs=seq_lens.size, **sizes))


@pytest.mark.parametrize(
    ("align", "fixed_split_size", "window"), [*FEW, *slow(x for x in COMBINATIONS if x not in FEW)]
)
def test_pieces_hold_every_query_with_every_key_once(align, fixed_split_size, window):
    ends = np.cumsum((0, *Q_LENS)).astype(np.int32)
    num_tokens = int(ends[-1]) + 6  # the last 6 are padding
    options = dict(fixed_split_size=fixed_split_size, window=window, align=align)
    plan = plan_of(np.int32(SEQ_LENS), ends, num_tokens=num_tokens, num_programs=40, **options)
    plan = jax.device_get(plan)
    blocks = np.zeros((num_tokens, 5), int)  # how often a query got each block of keys
    stored = np.zeros(num_tokens, int)
    slots, merged = [], []

    def piece_of(i):
        """A piece and its queries, in its row and in the batch."""
        piece = {name: int(x[i]) for name, x in vars(plan.items).items()}
        mine = np.arange(max(piece["offset"], 0), min(piece["offset"] + TILE, piece["q_len"]))
        return piece, mine, piece["q_start"] + mine

    for i in np.flatnonzero(plan.items.q_len):
        piece, mine, queries = piece_of(i)
        assert (piece["q_start"] + piece["offset"]) % align == 0
        blocks[queries, piece["lo"] : piece["hi"]] += 1
        if plan.partial[i] < 0:
            stored[queries] += 1
        else:
            slots.append(int(plan.partial[i]))
        # The first and the last query see every key of the blocks marked as full.
        if piece["full_lo"] < piece["full_hi"]:
            first, last = piece["kv_len"] - piece["q_len"] + mine[[0, -1]]
            assert piece["full_hi"] * BLOCK_K <= first + 1
            assert window is None or last - window < piece["full_lo"] * BLOCK_K
    for row, (q_len, seq_len) in enumerate(zip(Q_LENS, SEQ_LENS, strict=True)):
        for query in range(q_len):
            position = seq_len - q_len + query
            first = 0 if window is None else max(position - window + 1, 0)
            seen = range(first // BLOCK_K, position // BLOCK_K + 1) if position >= 0 else []
            assert (blocks[ends[row] + query][list(seen)] == 1).all()
    assert blocks.max() == 1
    # A slot is written once, and all slots of a tile are merged once into the tile's queries.
    assert len(set(slots)) == len(slots) and max(slots, default=0) < plan.num_partials
    for first, count in zip(plan.first_item.tolist(), plan.num_items.tolist(), strict=True):
        if count:
            merged += plan.partial[first : first + count].tolist()
            stored[piece_of(first)[2]] += 1
    assert sorted(merged) == sorted(slots)
    np.testing.assert_array_equal(stored, 1)


def test_splits_of_a_row_do_not_depend_on_where_it_begins():
    def splits(start):
        """Where the keys of each query of a row end; its window begins in several blocks."""
        ends = np.int32([0, start, start + 30])
        options = dict(num_tokens=40, num_programs=4, fixed_split_size=128, window=150, align=8)
        plan = jax.device_get(plan_of(np.int32([70, 232]), ends, **options))
        found = [set() for _ in range(30)]
        for i in np.flatnonzero(plan.items.q_len):
            offset, hi = int(plan.items.offset[i]), int(plan.items.hi[i])
            if plan.items.row[i] == 1:
                for query in range(max(offset, 0), min(offset + TILE, 30)):
                    found[query].add(hi)
        return found

    expected = splits(0)
    assert expected[0] == {2, 4}
    for start in range(1, 10):
        assert splits(start) == expected


def test_prefix_sums_below_and_above_the_block_size():
    rows = [np.random.default_rng(n).integers(0, 9, (3, n), np.int32) for n in (1, 2048, 2049)]
    for x, sums in zip(rows, jax.jit(lambda x: [*map(prefix_sums, x)])(rows), strict=True):
        np.testing.assert_array_equal(sums, np.cumsum(x, axis=-1))


OF_KERNEL = dict(num_seqs=11, num_tokens=120, max_kv_len=900, fixed_split_size=None)
SHAPES = {
    "heads in a tile": dict(group=4),
    "a tree": dict(has_tree=True),
    "few programs": dict(group=2, num_programs=3, num_tokens=9),
    "one sequence": dict(group=2, num_programs=30, num_seqs=1),
    "a fixed split": dict(fixed_split_size=128, align=8),
    "aligned tiles": dict(num_programs=7, align=8),
}
FEW_OF_KERNEL = [("heads in a tile", None), ("a tree", 150), ("a fixed split", None)]
ALL_OF_KERNEL = [*itertools.product(SHAPES, (None, 150))]


def kernel_shape(name, **more):
    return shape_of(**OF_KERNEL | SHAPES[name] | more)


def random_lens(shape, seed):
    """Lengths, with empty rows, rows without queries or with one, and tokens of no row."""
    rng = np.random.default_rng(seed)
    q_lens = rng.choice([0, 1, 1, 2, 8, 31, 70], shape.num_seqs)
    while q_lens.sum() > shape.num_tokens:
        q_lens[rng.integers(shape.num_seqs)] = 0
    older = rng.integers(0, rng.choice([2, 100, shape.max_kv_len]), shape.num_seqs)
    seq_lens = np.where(rng.random(shape.num_seqs) < 0.8, np.minimum(q_lens + older, 900), 0)
    return np.int32(seq_lens), np.int32(np.cumsum([0, *q_lens]))


def plans_of(shape, *makers):
    """The plans of each maker, for several lengths."""
    every = jax.jit(lambda *lens: [make(*lens) for make in makers])
    return [jax.device_get(every(*random_lens(shape, seed))) for seed in range(5)]


@pytest.mark.parametrize(
    ("name", "window"), [*FEW_OF_KERNEL, *slow(x for x in ALL_OF_KERNEL if x not in FEW_OF_KERNEL)]
)
def test_plan_of_the_kernel_is_that_of_its_definition(name, window):
    shape = kernel_shape(name, window=window)
    assert can_plan(shape)

    for expected, plan in plans_of(
        shape,
        lambda *lens: make_plan(*lens, None, shape),
        lambda *lens: plan_by_kernel(*lens, plan_types(shape), shape, interpret=True),
    ):
        exists = expected.items.q_len > 0
        for field, values in vars(expected.items).items():
            actual = getattr(plan.items, field)
            np.testing.assert_array_equal(actual[exists], values[exists], field)
        assert not plan.items.q_len[~exists].any()  # and a program has no blocks to read there
        np.testing.assert_array_equal(plan.items.lo[~exists], plan.items.hi[~exists])
        for field in ("partial", "first_item", "num_items"):
            np.testing.assert_array_equal(getattr(plan, field), getattr(expected, field), field)


def test_packed_plan_of_the_kernel_is_that_of_its_definition():
    pack = pytest.importorskip("pallas_paged.kernels.mosaic.ragged_work").pack_plan
    shape = kernel_shape("aligned tiles")

    types = packed_types(shape, 32)
    for expected, plan in plans_of(
        shape,
        lambda *lens: pack(make_plan(*lens, None, shape), 3),
        lambda *lens: plan_by_kernel(*lens, types, shape, count_factor=3, interpret=True),
    ):
        (count,) = expected.count
        assert plan.count == count
        words = np.s_[: count // 3, :11]
        np.testing.assert_array_equal(plan.items[words], expected.items[words])
        np.testing.assert_array_equal(plan.merges[:, 0], expected.merges[:, 0])
        is_split = expected.merges[:, 0] > 0
        np.testing.assert_array_equal(plan.merges[is_split], expected.merges[is_split])


LARGE = dict(num_seqs=2000, num_tokens=2000), dict(num_tokens=1 << 19), dict(max_kv_len=1 << 28)


@pytest.mark.parametrize("sizes", LARGE, ids=str)
def test_large_plans_are_left_to_xla(sizes):
    assert not can_plan(kernel_shape("a tree", **sizes))
