"""The check of a page table: each invariant, broken."""

from dataclasses import replace

import jax
import numpy as np
import pytest

import pallas_paged as pp
from tests.support.page_tables import extended, fork, free_before, i32, make_table, retain


@pytest.mark.parametrize(
    ("name", "index", "value", "message"),
    [
        ("num_free", (), 9, r"num_free must be in .*got num_free=9"),
        ("num_free", (), 3, r"ref_counts=0, times_free=0 at page 4"),
        ("seq_lens", 2, -1, r"seq_lens must be in \[0, 16\], got seq_lens=-1 at row 2"),
        ("seq_lens", 0, 17, r"got seq_lens=17 at row 0"),
        ("seq_lens", 0, 13, r"a block needs .*got page=8, seq_lens=13 at row 0, block 3"),
        ("seq_lens", 0, 8, r"an unused one .*got page=2, seq_lens=8 at row 0, block 2"),
        ("seq_lens", 1, 10, r"partial last page .*page=2, ref_counts=2 at row 1, block 2"),
        ("block_tables", (0, 0), -1, r"got page=-1, seq_lens=12 at row 0, block 0"),
        ("block_tables", (2, 3), 7, r"got page=7, seq_lens=0 at row 2, block 3"),
        ("block_tables", (0, 1), 2, r"hold a page twice, got page=2 at row 0"),
        ("block_tables", (3, 0), 0, r"ref_counts=2, entries=3, retained=0 at page 0"),
        # Sentinels that `free_before` did not leave: a hole, a partial last page, a page not freed.
        ("block_tables", (0, 1), 8, r"a block needs .* at row 0, block 1"),
        ("block_tables", (3, 0), 8, r"a block needs .* at row 3, block 0"),
        ("block_tables", (0, 0), 8, r"ref_counts=2, entries=1, retained=0 at page 0"),
        ("ref_counts", 5, 1, r"ref_counts=1, entries=0, retained=0 at page 5"),
        ("free_pages", 2, 8, r"free page must be in .*page=8 at free_pages entry 2"),
        ("free_pages", 2, 7, r"ref_counts=0, times_free=0 at page 5"),
        ("free_pages", 0, 1, r"ref_counts=2, times_free=1 at page 1"),
        ("free_pages", 0, 4, r"ref_counts=0, times_free=2 at page 4"),
    ],
)
def test_check_names_the_broken_invariant(name, index, value, message):
    table, _, _ = fork(extended([12, 0, 0, 2]), i32(0), i32(1))  # rows 0 and 1 share 3 pages
    pp.check_page_table(table)
    changed = np.array(getattr(table, name))
    changed[index] = value
    broken = replace(table, **{name: changed})
    with pytest.raises(ValueError, match=message):
        pp.check_page_table(broken)


def test_retained_pages_count_as_references_and_tracers_are_refused():
    table = free_before(extended([8, 4, 0, 0]), i32(4, 0, 0, 0))  # page 0 is dropped
    table, _ = retain(table, i32(1, 2, 2))
    for same in [(1, 2, 2), i32([2], [1], [2]), jax.device_put(i32(2, 2, 1))]:
        pp.check_page_table(table, same)
    with pytest.raises(ValueError, match="on the host"):
        jax.jit(pp.check_page_table)(make_table())
    with pytest.raises(ValueError, match="on the host"):
        jax.jit(lambda pages: pp.check_page_table(make_table(), pages))(i32(0))


@pytest.mark.parametrize(
    ("retained", "message"),
    [
        ((), "ref_counts=2, entries=1, retained=0 at page 0"),
        ([0, 2], "ref_counts=3, entries=1, retained=1 at page 2"),
        ([0, 2, 2, 3], "ref_counts=0, entries=0, retained=1 at page 3"),
        ([0, -1], r"must be in \[0, .*page=-1 at retained entry 1"),
        ([0, 8], r"must be in \[0, .*page=8 at retained entry 1"),
        ([0.0], "retained must be integers, got float32"),
        (None, "retained=None must be an array"),
        ("0", "retained='0' must be an array"),
        ([[0], [1, 2]], "retained=.* must be an array"),
        ([2**40], r"retained=\[1099511627776\] must hold integers of int32"),
    ],
)
def test_check_refuses_other_retained_pages(retained, message):
    table, _ = retain(extended([8, 4, 0, 0]), i32(0, 2, 2))
    with pytest.raises(ValueError, match=message):
        pp.check_page_table(table, retained)
