"""The plan of ragged work: the queries of each tile, and the keys of each piece of a tile."""

from __future__ import annotations

import itertools
from functools import partial

import jax
import numpy as np
import pytest

from pallas_paged.kernels.logits import LogitOptions
from pallas_paged.kernels.ragged_plan import PlanShape, make_plan
from pallas_paged.prefix_sums import prefix_sums
from tests.support.marks import slow

BLOCK_K, TILE = 64, 32
STATIC = ("num_tokens", "num_programs", "fixed_split_size", "window", "align")


def shape_of(*, window=None, **sizes):
    """The sizes of a plan of tiles of 32 rows and blocks of 64 keys."""
    return PlanShape(
        block_q=TILE,
        block_k=BLOCK_K,
        options=LogitOptions(sm_scale=1.0, sliding_window=window),
        **dict(group=1, max_kv_len=320, num_programs=40, has_tree=False) | sizes,
    )


@partial(jax.jit, static_argnames=STATIC)
def plan_of(seq_lens, ends, **sizes):
    return make_plan(seq_lens, ends, None, shape_of(num_seqs=seq_lens.size, **sizes))


Q_LENS = (0, 1, 7, 8, 9, 31, 32, 33, 70, 25)
SEQ_LENS = (64, 65, 129, 8, 0, 128, 17, 97, 300, 233)


COMBINATIONS = [*itertools.product([1, 8], [None, 128], [None, 1, 150])]
FEW = [(1, None, None), (8, None, 150), (8, 128, None), (1, 128, 1), (1, None, 150)]


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
    slots = []
    for i in np.flatnonzero(plan.items.q_len):
        piece = {name: int(x[i]) for name, x in vars(plan.items).items()}
        assert (piece["q_start"] + piece["offset"]) % align == 0
        mine = np.arange(max(piece["offset"], 0), min(piece["offset"] + TILE, piece["q_len"]))
        blocks[piece["q_start"] + mine, piece["lo"] : piece["hi"]] += 1
        if plan.partial[i] < 0:
            stored[piece["q_start"] + mine] += 1
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
    merged = []
    for first, count in zip(plan.first_item, plan.num_items, strict=True):
        if count:
            pieces = slice(int(first), int(first + count))
            merged += np.asarray(plan.partial[pieces]).tolist()
            q_start, offset, q_len = (
                int(getattr(plan.items, name)[first]) for name in ("q_start", "offset", "q_len")
            )
            mine = np.arange(max(offset, 0), min(offset + TILE, q_len))
            stored[q_start + mine] += 1
    assert sorted(merged) == sorted(slots)
    np.testing.assert_array_equal(stored, 1)


def test_splits_of_a_row_do_not_depend_on_where_it_begins():
    def cuts(start):
        """Where the keys of each query of a row are cut; its window begins in several blocks."""
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

    expected = cuts(0)
    assert expected[0] == {2, 4}
    for start in range(1, 10):
        assert cuts(start) == expected


def test_prefix_sums_below_and_above_the_block_size():
    rows = [np.random.default_rng(n).integers(0, 9, (3, n), np.int32) for n in (1, 2048, 2049)]
    for x, sums in zip(rows, jax.jit(lambda x: [*map(prefix_sums, x)])(rows), strict=True):
        np.testing.assert_array_equal(sums, np.cumsum(x, axis=-1))
