"""The page table: each rule of the contract, and facts about its compiled programs."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_paged as pp
from pallas_paged.page_table import validate_pool_size
from tests.support.page_tables import (
    INT32_MAX,
    INT32_MIN,
    assert_same,
    extend,
    extended,
    fork,
    free,
    i32,
    jitted,
    make_table,
    slot_mapping,
    truncate,
)
from tests.support.promotion import assert_is_strict, strict_promotion


def test_the_functions_here_run_under_strict_promotion():
    with strict_promotion():
        assert_is_strict()
    with pytest.raises(ValueError, match="promotion"):
        jitted(lambda x, y: x + y)(np.float32([1]), i32(1))


def test_created_table_is_empty_and_sound():
    table = make_table(num_pages=5, page_size=2, max_seqs=3, pages_per_seq=2)
    pp.check_page_table(table)
    assert (table.num_pages, table.max_seqs, table.pages_per_seq) == (5, 3, 2)
    assert table.num_free == 5 and np.all(table.block_tables == 5)
    assert table.free_pages.tolist() == [4, 3, 2, 1, 0]
    assert [leaf.dtype for leaf in jax.tree.leaves(table)] == [jnp.int32] * 5


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (dict(num_pages=0), r"num_pages=0 must be a positive integer"),
        (dict(max_seqs=-1), r"max_seqs=-1 must be a positive integer"),
        (dict(pages_per_seq=2.0), r"pages_per_seq=2.0 must be a positive integer"),
        (dict(max_seqs=True), r"max_seqs=True must be a positive integer"),
        (dict(page_size=0), r"page_size=0 must be a positive integer"),
        (dict(page_size=12), r"page_size=12 must be a power of two from 1 to 256"),
        (dict(page_size=512), r"page_size=512 must be a power of two from 1 to 256"),
        (dict(num_pages=2**23, page_size=256), r"num_pages=8388608 \* page_size=256 \+ 1"),
        (dict(num_pages=np.int32(2**24), page_size=np.int32(256)), "must be at most"),
        (dict(pages_per_seq=2**29), r"pages_per_seq=536870912 \* page_size=4"),
        (dict(max_seqs=2**16, pages_per_seq=2**15), r"max_seqs=65536 \* pages_per_seq=32768"),
    ],
)
def test_create_refuses(sizes, message):
    sizes = dict(num_pages=8, page_size=4, max_seqs=4, pages_per_seq=4) | sizes
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda: pp.create_page_table(**sizes))


def test_the_largest_sizes_are_allowed():
    validate_pool_size(INT32_MAX - 1, 1)
    with pytest.raises(ValueError, match=r"page_size=1 \+ 1 must be at most"):
        validate_pool_size(INT32_MAX, 1)
    one = dict(num_pages=8, page_size=1, max_seqs=1, pages_per_seq=1)
    for sizes in (dict(pages_per_seq=INT32_MAX), dict(max_seqs=INT32_MAX)):
        sizes = one | sizes
        jax.eval_shape(lambda sizes=sizes: pp.create_page_table(**sizes))


@pytest.mark.smoke
def test_extend_hands_out_pages_in_order():
    table, ok = extend(make_table(), i32(5, 0, 4, 1))
    assert np.all(ok)
    assert table.block_tables.tolist() == [[0, 1, 8, 8], [8] * 4, [2, 8, 8, 8], [3, 8, 8, 8]]
    assert table.seq_lens.tolist() == [5, 0, 4, 1]
    assert table.ref_counts.tolist() == [1, 1, 1, 1, 0, 0, 0, 0]
    assert table.num_free == 4
    pp.check_page_table(table)


def test_extend_serves_rows_until_the_first_that_does_not_fit():
    table = extended([8, 8, 4, 1])  # 2 pages left
    table, ok = extend(table, i32(4, 5, 1, 3))
    # Row 1 needs 2 pages, 1 is left; row 2 comes after row 1; row 3 needs no page.
    assert ok.tolist() == [True, False, False, True]
    assert table.seq_lens.tolist() == [12, 8, 4, 4]
    assert table.num_free == 1
    pp.check_page_table(table)
    table, ok = extend(table, i32(0, 4, 0, 0))
    assert ok.all() and table.num_free == 0 and table.block_tables[1].tolist() == [2, 3, 7, 8]


@pytest.mark.parametrize("odd", [-1, 17, INT32_MAX, INT32_MAX - 15, INT32_MIN])
def test_invalid_requests_fail_alone_and_never_wrap(odd):
    table = extended([16, 5, 1, 0])  # 1 page left
    after, ok = extend(table, i32(odd, odd, odd, 4))
    assert ok.tolist() == [False, False, False, True]
    assert after.seq_lens.tolist() == [16, 5, 1, 4]
    pp.check_page_table(after)


def test_zero_tokens_are_ok_even_with_no_page_left():
    table = extended([16, 8, 8, 0])
    after, ok = extend(table, i32(0, 0, 0, 1))
    assert ok.tolist() == [True, True, True, False]
    assert_same(table, after)


@pytest.mark.parametrize("bound", [1, 4, 5, 1000])
def test_max_new_tokens_bounds_requests_and_not_results(bound):
    for held in range(5):
        table = extended([held, 0, 0, 0])
        wanted = min(bound, 16 - held)
        bounded, ok = extend(table, i32(wanted, 0, 0, 0), max_new_tokens=bound)
        assert np.all(ok)
        assert_same(bounded, extend(table, i32(wanted, 0, 0, 0))[0])
        pp.check_page_table(bounded)
        if bound < 16:
            after, ok = extend(table, i32(0, bound + 1, 0, 0), max_new_tokens=bound)
            assert ok.tolist() == [True, False, True, True]
            assert_same(table, after)


def test_free_returns_pages_and_clears_rows():
    table = free(extended([5, 3, 4, 0]), np.array([True, False, True, True]))
    assert table.seq_lens.tolist() == [0, 3, 0, 0]
    assert table.block_tables.tolist() == [[8] * 4, [2, 8, 8, 8], [8] * 4, [8] * 4]
    assert table.num_free == 7
    pp.check_page_table(table)


def test_page_shared_by_freed_rows_returns_once():
    table, _, ok = fork(extended([8, 0, 0, 0]), i32(0, 0), i32(1, 2))
    assert np.all(ok)
    assert table.ref_counts[:2].tolist() == [3, 3]
    for rows, refs, num_free in [((0, 2), 1, 6), ((0, 1, 2), 0, 8)]:
        freed = free(table, np.isin(np.arange(4), rows))
        assert freed.ref_counts[:2].tolist() == [refs, refs]
        assert freed.num_free == num_free
        pp.check_page_table(freed)


@pytest.mark.smoke
def test_fork_shares_full_pages_and_copies_the_tail():
    table, copies, ok = fork(extended([6, 0, 0, 0]), i32(0, 0), i32(1, 3))
    assert np.all(ok)
    assert table.block_tables.tolist() == [[0, 1, 8, 8], [0, 2, 8, 8], [8] * 4, [0, 3, 8, 8]]
    assert table.seq_lens.tolist() == [6, 6, 0, 6]
    assert copies.src_pages.tolist() == [1, 1]
    assert copies.dst_pages.tolist() == [2, 3]
    assert table.ref_counts.tolist() == [3, 1, 1, 1, 0, 0, 0, 0]
    pp.check_page_table(table)


@pytest.mark.parametrize("length", [0, 4, 16])
def test_fork_without_a_tail_copies_nothing(length):
    table, copies, ok = fork(extended([length, 0, 0, 0]), i32(0), i32(2))
    assert ok.tolist() == [True]
    assert copies.src_pages.tolist() == copies.dst_pages.tolist() == [8]
    assert table.seq_lens[2] == length
    assert table.block_tables[2].tolist() == table.block_tables[0].tolist()
    pp.check_page_table(table)


@pytest.mark.parametrize(
    ("src", "dst", "expected"),
    [
        ([-1, 4, 0, 0], [1, 1, -1, 4], [False] * 4),  # padding
        ([INT32_MIN, INT32_MAX], [1, 1], [False] * 2),
        ([0], [3], [False]),  # dst holds tokens
        ([0], [0], [False]),  # itself
        ([0, 3], [1, 1], [True, False]),  # repeated dst
        ([0, 1], [1, 2], [True, False]),  # src is filled by this call
        ([1, 0], [2, 1], [False, True]),
        ([4, 0], [1, 1], [False, True]),  # padding takes no row
        ([4, 0], [0, 1], [False, True]),
        ([1], [2], [True]),  # an empty row
    ],
)
def test_fork_entries(src, dst, expected):
    table = extended([6, 0, 0, 2])
    after, copies, ok = fork(table, i32(*src), i32(*dst))
    assert ok.tolist() == expected
    pp.check_page_table(after)
    for s, d, good, page in zip(src, dst, expected, copies.dst_pages.tolist(), strict=True):
        if good:
            assert after.seq_lens[d] == table.seq_lens[s]
        else:
            assert page == 8
    if not any(expected):
        assert_same(table, after)


def test_fork_serves_entries_until_pages_run_out():
    table = extended([5, 4, 0, 0, 0, 12], num_pages=8, max_seqs=6)  # 2 pages left
    # Entry 1 repeats dst 2 and must not take a page from entry 2.
    table, copies, ok = fork(table, i32(0, 0, 0, 0, 1), i32(2, 2, 3, 4, 5))
    assert ok.tolist() == [True, False, True, False, False]
    table, _, ok = fork(table, i32(1), i32(4))
    assert ok.tolist() == [True], "a copy needs no page if there is no tail"
    assert copies.src_pages.tolist() == [1, 8, 1, 8, 8]
    assert table.seq_lens.tolist() == [5, 4, 5, 5, 4, 12]
    pp.check_page_table(table)


def test_truncate_releases_blocks_and_keeps_an_own_tail():
    table, copies, ok = truncate(extended([9, 8, 3, 4]), i32(2, 4, 0, 4))
    assert np.all(ok)
    assert table.seq_lens.tolist() == [2, 4, 0, 4]
    assert table.block_tables[:, 0].tolist() == [0, 3, 8, 6]
    assert np.all(table.block_tables[:, 1:] == 8)
    assert copies.src_pages.tolist() == copies.dst_pages.tolist() == [8] * 4
    pp.check_page_table(table)


def test_truncate_refuses_longer_and_negative():
    table = extended([5, 4, 0, 7])
    after, _, ok = truncate(table, i32(6, -1, INT32_MAX, INT32_MIN))
    assert not np.any(ok)
    assert_same(table, after)


def test_truncate_to_the_same_length_changes_nothing():
    table, _, _ = fork(extended([5, 4, 0, 0]), i32(0), i32(2))
    after, copies, ok = truncate(table, table.seq_lens)
    assert np.all(ok)
    assert np.all(copies.dst_pages == 8)
    assert_same(table, after)


def test_truncate_into_a_shared_page_replaces_it():
    table, _, _ = fork(extended([8, 0, 0, 0]), i32(0), i32(1))
    table, copies, ok = truncate(table, i32(8, 6, 0, 0))
    assert np.all(ok)
    assert table.block_tables[:2].tolist() == [[0, 1, 8, 8], [0, 2, 8, 8]]
    assert (copies.src_pages[1], copies.dst_pages[1]) == (1, 2)
    pp.check_page_table(table)


def test_truncate_to_the_end_of_a_shared_page_needs_no_copy():
    table, _, _ = fork(extended([12, 0, 0, 0]), i32(0), i32(1))
    table, copies, ok = truncate(table, i32(12, 4, 0, 0))
    assert np.all(ok) and np.all(copies.dst_pages == 8) and table.num_free == 5
    assert table.block_tables[1].tolist() == [0, 8, 8, 8]
    pp.check_page_table(table)


def test_sharers_truncated_together_get_a_free_page_each():
    table, _, _ = fork(extended([8, 0, 16, 0]), i32(0), i32(1))  # 2 pages left
    table, copies, ok = truncate(table, i32(5, 6, 16, 0))
    assert np.all(ok)
    assert copies.src_pages[:2].tolist() == [1, 1]
    assert copies.dst_pages[:2].tolist() == [6, 7]
    assert table.num_free == 1, "the shared page is free again"
    pp.check_page_table(table)


def test_truncate_cannot_use_pages_released_by_the_same_call():
    table, _, _ = fork(extended([8, 0, 16, 4]), i32(0), i32(1))  # 1 page left
    after, copies, ok = truncate(table, i32(6, 6, 0, 2))
    assert ok.tolist() == [True, False, True, True]
    assert after.seq_lens.tolist() == [6, 8, 0, 2]
    assert copies.dst_pages.tolist() == [7, 8, 8, 8]
    pp.check_page_table(after)


def test_slot_mapping():
    table = extended([6, 0, 3, 2])
    slots = slot_mapping(table, i32(0, 0, 0, 2, 2), i32(0, 3, 5, 0, 2))
    assert slots.tolist() == [0, 3, 5, 8, 10]
    assert slots.dtype == jnp.int32
    rows = i32(0, 0, 1, -1, -4, 4, INT32_MAX, INT32_MIN, 2, 2, 2)
    positions = i32(6, -1, 0, 0, 0, 0, 0, 0, INT32_MAX, INT32_MIN, 3)
    assert np.all(slot_mapping(table, rows, positions) == 32)


def test_calls_without_entries_change_nothing():
    table = extended([4, 0, 0, 0])
    none = i32()
    unchanged, slots, *counts = jitted(
        lambda t: (
            pp.release(
                pp.attach(pp.retain(pp.fork(t, none, none)[0], none)[0], none, none[:, None])[0],
                none,
            ),
            pp.slot_mapping(t, none, none),
            pp.retain(t, none)[1],
            pp.fork(t, none, none)[2],
            pp.attach(t, none, none[:, None])[1],
        )
    )(table)
    assert_same(unchanged, table)
    assert {x.shape for x in (slots, *counts)} == {(0,)}


def decode(table, active):
    """Reserves a token per step for the active rows until each has failed."""

    def step(carry):
        table, active = carry
        table, ok = pp.extend(table, active.astype(jnp.int32), max_new_tokens=1)
        return table, active & ok

    return jax.lax.while_loop(lambda carry: jnp.any(carry[1]), step, (table, active))


def writers(jaxpr, size):
    """Names of the primitives with an output of `size` elements, inner jaxprs included."""
    names = set()
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        inner = [p.jaxpr for p in equation.params.values() if hasattr(p, "jaxpr")]
        # A scatter's inner jaxpr only combines two numbers.
        if inner and not name.startswith("scatter"):
            names = names.union(*(writers(sub, size) for sub in inner))
        elif any(out.aval.size >= size for out in equation.outvars):
            names.add(name)
    return names


OPERATIONS = {
    "extend": lambda t, n: pp.extend(t, n)[0],
    "extend by one": lambda t, n: pp.extend(t, n, max_new_tokens=1)[0],
    "fork": lambda t, n: pp.fork(t, n, n)[0],
    "truncate": lambda t, n: pp.truncate(t, n)[0],
    "retain": lambda t, n: pp.retain(t, n)[0],
    "attach": lambda t, n: pp.attach(t, n, jnp.broadcast_to(n, (8, 8)))[0],
    "release": pp.release,
    "free_before": pp.free_before,
    "free_before of one": lambda t, n: pp.free_before(t, n, max_pages=1),
    "free": lambda t, n: pp.free(t, n > 0),
    "decode": lambda t, n: decode(t, n > 0)[0],
}


def test_operations_only_scatter_into_the_pool_and_in_place():
    num_pages = 1_000_003
    table = jax.eval_shape(
        lambda: pp.create_page_table(num_pages=num_pages, page_size=4, max_seqs=8, pages_per_seq=16)
    )
    rows = jax.ShapeDtypeStruct((8,), jnp.int32)
    for name, operation in OPERATIONS.items():
        names = writers(jax.jit(operation).trace(table, rows).jaxpr.jaxpr, num_pages)
        assert names and all(x.startswith("scatter") for x in names), (name, names)

    def all_of_them(table, rows):
        for operation in OPERATIONS.values():
            table = operation(table, rows)
        return table

    lowered = jax.jit(all_of_them, donate_argnums=0).lower(table, rows)
    memory = lowered.compile().memory_analysis()
    assert memory.alias_size_in_bytes >= 2 * 4 * num_pages
    assert memory.temp_size_in_bytes < 4 * num_pages // 100


def test_while_loop_ends_when_pages_run_out():
    traced = jax.jit(chex.assert_max_traces(decode, n=1), donate_argnums=0)
    for active, expected in [
        ([True, True, True, False], [12, 12, 8, 0]),
        ([True, False, False, False], [16, 0, 0, 0]),
    ]:
        table, _ = traced(make_table(), np.array(active))
        assert table.seq_lens.tolist() == expected
        pp.check_page_table(table)


def test_tables_stay_int32_under_x64():
    def use_all(active):
        table, _ = decode(
            pp.create_page_table(num_pages=8, page_size=4, max_seqs=4, pages_per_seq=4), active
        )
        table, copies, _ = pp.fork(table, i32(0), i32(2))
        table, _, _ = pp.truncate(table, i32(1, 2, 0, 0))
        table, _ = pp.retain(table, i32(0))
        table, _ = pp.attach(table, i32(3), i32([0, 8]))
        table = pp.release(pp.free_before(table, i32(0, 0, 0, 4), max_pages=1), i32(0))
        return pp.free(table, active), copies, pp.slot_mapping(table, i32(1), i32(1))

    with jax.enable_x64(True):
        out = jax.eval_shape(use_all, np.array([True, True, False, False]))
    assert {leaf.dtype for leaf in jax.tree.leaves(out)} == {jnp.dtype(jnp.int32)}
