"""Pages held outside the rows, and rows that begin with them: `retain`, `release`, `attach`."""

from __future__ import annotations

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
    free,
    i32,
    make_table,
    release,
    retain,
    slot_mapping,
)

ALL_ROWS = np.ones(4, bool)


def retained_prefix(**sizes):
    """All rows empty; pages 0 and 1 retained."""
    table, ok = retain(extended([9, 0, 0, 0], **sizes), i32(0, 1))
    assert np.all(ok)
    return free(table, ALL_ROWS)


def test_retained_page_survives_its_rows():
    table = retained_prefix()
    assert table.ref_counts.tolist() == [1, 1, 0, 0, 0, 0, 0, 0]
    assert table.num_free == 6
    pp.check_page_table(table, retained=[0, 1])
    table, ok = extend(table, i32(16, 8, 0, 0))
    assert np.all(ok)
    assert set(table.block_tables[:2].ravel().tolist()).isdisjoint({0, 1})
    pp.check_page_table(table, retained=[0, 1])


def test_release_of_the_last_reference_frees_once():
    table, ok = retain(retained_prefix(), i32(1))
    assert np.all(ok)
    table = release(table, i32(1, 0))
    assert table.ref_counts[:2].tolist() == [0, 1]
    assert table.num_free == 7
    pp.check_page_table(table, retained=[1])
    table = release(table, i32(1))
    assert table.num_free == 8
    pp.check_page_table(table)


def test_page_named_twice_has_two_references():
    table, ok = retain(extended([4, 0, 0, 0]), i32(0, 0))
    assert np.all(ok)
    table = free(table, ALL_ROWS)
    pp.check_page_table(table, retained=[0, 0])
    once, twice = release(table, i32(0)), release(table, i32(0, 0))
    pp.check_page_table(once, retained=[0])
    assert twice.num_free == 8
    pp.check_page_table(twice)


def test_retain_refuses_free_and_partial_pages_and_drops_padding():
    table = extended([4, 6, 0, 1])  # pages 2 and 3 are partial
    after, ok = retain(table, i32(2, 3, 4, 7, 8, -1, -8, INT32_MAX, INT32_MIN))
    assert not np.any(ok)
    assert_same(table, after)
    after, ok = retain(table, i32(4, 0, 2, 1, -8))
    assert ok.tolist() == [False, True, False, True, False]
    assert after.ref_counts.tolist() == [2, 2, 1, 1, 0, 0, 0, 0]
    pp.check_page_table(after, retained=[0, 1])


def test_release_leaves_free_pages_and_drops_padding():
    table = retained_prefix()
    assert_same(table, release(table, i32(2, 7, 7, 8, -1, -8, INT32_MAX, INT32_MIN)))
    assert release(table, i32(-8, 7, 0, 8)).num_free == 7


def test_page_released_too_often_is_freed_once():
    table = release(retained_prefix(), i32(0, 0, 0))
    assert table.num_free == 7
    pp.check_page_table(table, retained=[1])


def test_attached_pages_are_shared_and_new_tokens_go_elsewhere():
    table, ok = attach(retained_prefix(), i32(2, 0), i32([1, 0, 8], [0, 8, 8]))
    assert np.all(ok)
    assert table.block_tables.tolist() == [[0, 8, 8, 8], [8] * 4, [1, 0, 8, 8], [8] * 4]
    assert table.seq_lens.tolist() == [4, 0, 8, 0]
    assert table.ref_counts[:2].tolist() == [3, 2]
    assert table.num_free == 6
    pp.check_page_table(table, retained=[0, 1])
    table, ok = extend(table, i32(1, 0, 5, 0))
    assert np.all(ok)
    assert table.block_tables[0, :2].tolist() == [0, 2]
    assert table.block_tables[2].tolist() == [1, 0, 3, 4]
    slots = slot_mapping(table, i32(0, 2), i32(4, 8))
    assert slots.tolist() == [8, 12]
    pp.check_page_table(table, retained=[0, 1])
    assert release(free(table, ALL_ROWS), i32(0, 1)).num_free == 8


@pytest.mark.parametrize(
    ("rows", "pages", "expected"),
    [
        ([4, -1, INT32_MAX, INT32_MIN], [[0]] * 4, [False] * 4),  # padding
        ([0], [[0]], [False]),  # holds tokens
        ([2, 2, 3], [[0], [1], [0]], [True, False, True]),  # the row is taken by an earlier entry
        ([2, 2], [[7], [0]], [False, False]),  # even if the earlier entry fails
        ([4, 2], [[0], [0]], [False, True]),  # padding takes no row
        ([2], [[7]], [False]),  # a free page
        ([2], [[2]], [False]),  # a partial page
        ([2, 3], [[0, 7], [0, 1]], [False, True]),  # one free page fails its entry alone
        ([2], [[0, 0]], [False]),  # a page twice
        ([2], [[1, 0, 1]], [False]),
        ([2], [[0, 8, 1]], [False]),  # a hole
        ([2], [[8, 0]], [False]),
        ([2], [[-1, 0]], [False]),
        ([2], [[0, 1, -1, 8, INT32_MAX, INT32_MIN]], [True]),  # padding only, wider than 4 columns
        ([2], [[0, 1, 3, 4, 5]], [False]),  # over 4 pages
        ([2, 3], [[0, 1, 3, 4], [6, 8, 8, 8]], [True, True]),
        ([2, 3], [[8, 8], [-1, -8]], [True, True]),  # no pages
        ([2, 3], [[], []], [True, True]),
    ],
)
def test_attach_entries(rows, pages, expected):
    table, ok = extend(extended([10, 12, 0, 0]), i32(0, 0, 4, 0))  # page 2 is partial, 7 is free
    assert np.all(ok)
    table, _ = retain(table, i32(0, 1, 6))
    table = free(table, np.arange(4) == 2)
    after, ok = attach(table, i32(*rows), np.asarray(pages, np.int32))
    assert ok.tolist() == expected
    pp.check_page_table(after, retained=[0, 1, 6])
    blocks, lens = np.array(table.block_tables), np.array(table.seq_lens)
    for row, entry, is_ok in zip(rows, pages, expected, strict=True):
        if is_ok:
            attached = [page for page in entry if 0 <= page < 8]
            blocks[row, : len(attached)], lens[row] = attached, 4 * len(attached)
    assert_same((after.block_tables, after.seq_lens), (blocks, lens))
    assert_same((after.free_pages, after.num_free), (table.free_pages, table.num_free))


def test_all_operations_run_in_one_donated_call():
    def serve(table, pages):
        table, retained = pp.retain(table, pages)
        table = pp.free(table, ALL_ROWS)
        table, attached = pp.attach(table, i32(1, 2), jnp.stack([pages, pages]))
        table, extended = pp.extend(table, i32(0, 1, 1, 0))
        return pp.release(table, pages), retained, attached, extended

    donated = jax.jit(serve, donate_argnums=0)
    table, *oks = donated(extended([9, 0, 0, 0]), i32(0, 1, 8))
    assert [ok.tolist() for ok in oks] == [[True, True, False], [True, True], [True] * 4]
    assert table.seq_lens.tolist() == [0, 9, 9, 0]
    assert table.ref_counts.tolist()[:2] == [2, 2]
    pp.check_page_table(table)


def test_empty_answers_of_a_prefix_cache_are_accepted():
    """They are empty lists, which have no integer dtype."""
    cache = pp.PrefixCache(page_size=4)
    lease = cache.lookup([1, 2, 3])

    def use(table):
        table, attached = pp.attach(table, [0], [lease.pages])
        table, retained = pp.retain(table, cache.insert(lease, [1], [0]))
        return pp.release(table, cache.evict(1)), attached, retained

    table, attached, retained = jax.jit(use)(make_table())
    assert attached.all() and retained.shape == (0,)
    assert_same(table, make_table())
