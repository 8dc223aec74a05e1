"""Rows whose first pages were dropped: `free_before`, and the other functions on such rows."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_paged as pp
from tests.support.page_tables import (
    INT32_MAX,
    INT32_MIN,
    assert_same,
    attach,
    extend,
    extended,
    fork,
    free,
    free_before,
    i32,
    make_table,
    release,
    retain,
    slot_mapping,
    truncate,
)

DROPPED = 8  # the sentinel of the tables here


def dropped_row(length=10, position=8):
    """A table of 8 pages; row 0 holds `length` tokens, and its pages before `position` are gone."""
    return free_before(extended([length, 0, 0, 0]), i32(position, 0, 0, 0))


@pytest.mark.parametrize(
    ("length", "position", "num_dropped"),
    [
        (10, 0, 0),
        (10, -1, 0),
        (10, INT32_MIN, 0),
        (10, 3, 0),
        (10, 4, 1),
        (10, 7, 1),
        (10, 8, 2),
        (10, 10, 2),  # the partial last page stays
        (10, 16, 2),
        (10, INT32_MAX, 2),
        (12, 11, 2),
        (12, 12, 3),  # the next token needs a new page
        (16, INT32_MAX, 4),
        (1, 1, 0),
        (0, INT32_MAX, 0),
    ],
)
def test_pages_wholly_before_the_position_are_freed(length, position, num_dropped):
    before = extended([length, 3, 0, 0])
    after = free_before(before, i32(position, 0, position, position))
    pp.check_page_table(after)
    assert after.seq_lens.tolist() == before.seq_lens.tolist()
    blocks = np.array(before.block_tables)
    blocks[0, :num_dropped] = DROPPED
    np.testing.assert_array_equal(after.block_tables, blocks)
    assert after.num_free == before.num_free + num_dropped
    assert_same(after, free_before(after, i32(position, 0, 0, 0)))
    later = free_before(dropped_row(length, 4), i32(position, 0, 0, 0))
    assert later.num_free == 8 - -(-length // 4) + max(num_dropped, int(length >= 4))


@pytest.mark.parametrize("max_pages", [1, 2, 3, 100])
def test_max_pages_bounds_a_call_and_later_calls_drop_the_rest(max_pages):
    for position in (3, 4, 9, 12, 16):
        table = extended([16, 7, 0, 0])
        left = np.array([position // 4, 1, 0, 0])  # pages that are to go
        while left.any():
            num_free = table.num_free
            table = free_before(table, i32(position, 4, 0, 0), max_pages=max_pages)
            assert table.num_free == num_free + np.minimum(left, max_pages).sum()
            left = np.maximum(left - max_pages, 0)
            pp.check_page_table(table)
        assert_same(table.block_tables, free_before(table, i32(position, 4, 0, 0)).block_tables)
        assert (table.block_tables[0] == DROPPED).sum() == position // 4


def test_shared_and_retained_pages_lose_one_reference():
    table, _, _ = fork(extended([12, 0, 0, 0]), i32(0), i32(1))
    table, _ = retain(table, i32(1))
    table = free_before(table, i32(12, 8, 0, 0))
    assert table.ref_counts.tolist() == [0, 1, 1, 0, 0, 0, 0, 0]
    pp.check_page_table(table, retained=[1])
    table = release(free_before(table, i32(12, 12, 0, 0)), i32(1))
    assert table.num_free == 8
    pp.check_page_table(table)


def test_row_goes_on_growing_and_is_freed():
    table, ok = extend(dropped_row(), i32(6, 0, 0, 0))
    assert np.all(ok)
    assert table.block_tables[0, :3].tolist() == [DROPPED, DROPPED, 2]
    assert table.seq_lens[0] == 16 and table.num_free == 6
    pp.check_page_table(table)
    table, ok = extend(table, i32(1, 0, 0, 0))
    assert not ok[0], "dropped pages count for pages_per_seq: positions stay"
    assert free(table, np.ones(4, bool)).num_free == 8


def test_slots_of_dropped_positions_are_out_of_range():
    slots = slot_mapping(dropped_row(), i32(*[0] * 11), np.arange(11, dtype=np.int32))
    assert slots.tolist() == [32] * 8 + [8, 9, 32]
    num_pages = 2**23 - 1  # slots are near the end of int32
    sizes = dict(num_free=i32(0)[0], page_size=256, free_pages=np.zeros(num_pages, np.int32))
    largest = pp.PageTable(
        block_tables=i32([num_pages, num_pages - 1]), seq_lens=i32(512), **sizes,
        ref_counts=sizes["free_pages"],
    )  # fmt: skip
    slots = slot_mapping(largest, i32(0, 0), i32(255, 511))
    assert slots.tolist() == [num_pages * 256, num_pages * 256 - 1]


@pytest.mark.parametrize(("length", "position"), [(10, 8), (12, 8), (12, 12)])
def test_fork_shares_what_is_left(length, position):
    table, copies, ok = fork(dropped_row(length, position), i32(0), i32(2))
    assert np.all(ok)
    pp.check_page_table(table)
    assert table.seq_lens.tolist() == [length, 0, length, 0]
    num_full = length // 4
    assert table.block_tables[2, :num_full].tolist() == table.block_tables[0, :num_full].tolist()
    assert (copies.src_pages[0] < 8) == (length % 4 > 0)
    assert free(table, np.ones(4, bool)).num_free == 8


@pytest.mark.parametrize(
    ("length", "position", "new_len", "expected"),
    [
        (10, 8, 10, True),
        (10, 8, 9, True),
        (10, 8, 8, False),  # the last page would be a dropped one
        (10, 8, 7, False),
        (10, 8, 1, False),
        (10, 8, 0, True),
        (14, 8, 12, True),
        (12, 12, 12, True),  # its own length
        (12, 12, 11, False),
        (12, 12, 0, True),
    ],
)
def test_truncate_keeps_the_last_page_or_fails(length, position, new_len, expected):
    before = dropped_row(length, position)
    after, _, ok = truncate(before, i32(new_len, 0, 0, 0))
    assert ok.tolist() == [expected, True, True, True]
    assert after.seq_lens[0] == (new_len if expected else length)
    pp.check_page_table(after)
    if not expected or new_len == length:
        assert_same(after, before)
    assert free(after, np.ones(4, bool)).num_free == 8


def test_truncate_into_a_shared_page_after_dropped_ones_copies_it():
    table, _, _ = fork(dropped_row(12, 4), i32(0), i32(1))
    table, copies, ok = truncate(table, i32(12, 7, 0, 0))
    assert np.all(ok)
    assert table.block_tables[1].tolist() == [DROPPED, copies.dst_pages[1], DROPPED, DROPPED]
    assert copies.src_pages[1] == 1
    pp.check_page_table(table)


def test_pages_after_dropped_ones_can_be_attached_and_dropped_again():
    table, ok = attach(dropped_row(12, 4), i32(1, 2), i32([1, 2], [DROPPED, 1]))
    assert ok.tolist() == [True, False], "a row cannot begin with dropped pages"
    table = free_before(table, i32(12, 4, 0, 0))
    assert table.block_tables[:2].tolist() == [[DROPPED] * 4, [DROPPED, 2, DROPPED, DROPPED]]
    pp.check_page_table(table)


def test_check_allows_dropped_pages_only_at_the_start_of_a_row():
    table = extended([11, 0, 0, 0])
    for block in [[1], [0, 1, 2]]:  # a hole; also the partial last page
        blocks = table.block_tables.copy()
        blocks[0, block] = DROPPED
        with pytest.raises(ValueError, match=rf"a block needs .* row 0, block {block[-1]}"):
            pp.check_page_table(replace(table, block_tables=blocks))
    blocks = table.block_tables.copy()
    blocks[0, 0] = DROPPED
    with pytest.raises(ValueError, match="ref_counts=1, entries=0, retained=0 at page 0"):
        pp.check_page_table(replace(table, block_tables=blocks))


def test_window_in_a_donated_loop_needs_no_more_pages():
    """A window of 5 tokens is in at most 3 pages of 4, the one with the next token included."""

    def decode(table):
        def step(carry):
            table, _ = carry
            table, ok = pp.extend(table, i32(1, 1, 0, 0), max_new_tokens=1)
            return pp.free_before(table, table.seq_lens - 4, max_pages=1), jnp.all(ok)

        return jax.lax.while_loop(lambda carry: carry[1], step, (table, True))

    table = make_table(num_pages=6, pages_per_seq=100)
    with jax.numpy_rank_promotion("raise"):
        table, _ = jax.jit(decode, donate_argnums=0)(table)
    assert table.seq_lens.tolist() == [400, 400, 0, 0], "until the rows are full"
    assert table.num_free == 6 - 2 * 1
    pp.check_page_table(table)
