"""The page table: order of pages, slots, compiled programs, and what is accepted and refused."""

from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_paged as pp
from pallas_paged.pages.table import validate_pool_size
from tests.support.page_tables import (
    INT32_MAX,
    INT32_MIN,
    assert_same,
    extend,
    extended,
    fork,
    free_before,
    i32,
    jitted,
    make_table,
    release,
    retain,
    slot_mapping,
)


def test_a_created_table_is_empty_and_may_have_the_largest_sizes():
    table = make_table(num_pages=5, page_size=2, max_seqs=3, pages_per_seq=2)
    pp.check_page_table(table)
    assert (table.num_pages, table.max_seqs, table.pages_per_seq) == (5, 3, 2)
    assert table.num_free == 5 and np.all(table.block_tables == 5)
    assert table.free_pages.tolist() == [4, 3, 2, 1, 0]
    assert [leaf.dtype for leaf in jax.tree.leaves(table)] == [jnp.int32] * 5
    validate_pool_size(INT32_MAX - 1, 1)
    with pytest.raises(ValueError, match=r"page_size=1 \+ 1 must be at most"):
        validate_pool_size(INT32_MAX, 1)
    one = dict(num_pages=8, page_size=1, max_seqs=1, pages_per_seq=1)
    for sizes in (one | dict(pages_per_seq=INT32_MAX), one | dict(max_seqs=INT32_MAX)):
        jax.eval_shape(lambda sizes=sizes: pp.create_page_table(**sizes))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (dict(num_pages=0), r"num_pages=0 must be a positive integer"),
        (dict(max_seqs=-1), r"max_seqs=-1 must be a positive integer"),
        (dict(pages_per_seq=2.0), r"pages_per_seq=2.0 must be a positive integer"),
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


@pytest.mark.smoke
def test_extend_and_fork_take_pages_in_order():
    table, ok = extend(make_table(), i32(6, 0, 4, 0))
    table, copies, forked = fork(table, i32(0, 0), i32(1, 3))
    assert ok.all() and forked.all()
    assert table.block_tables.tolist() == [[0, 1, 8, 8], [0, 3, 8, 8], [2, 8, 8, 8], [0, 4, 8, 8]]
    assert table.seq_lens.tolist() == [6, 6, 4, 6]
    assert (copies.src_pages.tolist(), copies.dst_pages.tolist()) == ([1, 1], [3, 4])
    assert table.ref_counts.tolist() == [3, 1, 1, 1, 1, 0, 0, 0]
    assert table.num_free == 3
    pp.check_page_table(table)


def test_slots_of_rows_and_positions_outside_are_none_and_the_largest_do_not_overflow():
    table = free_before(extended([10, 0, 3, 2]), i32(8, 0, 0, 0))
    assert slot_mapping(table, i32(0, 0, 2, 2), i32(8, 9, 0, 2)).tolist() == [8, 9, 12, 14]
    # Dropped positions, then rows and positions outside the table.
    rows = i32(0, 0, 0, 0, 1, -1, -4, 4, INT32_MAX, INT32_MIN, 2, 2, 2)
    positions = i32(0, 7, 10, -1, 0, 0, 0, 0, 0, 0, INT32_MAX, INT32_MIN, 3)
    assert np.all(slot_mapping(table, rows, positions) == 32)
    num_pages = 2**23 - 1
    pages = np.zeros(num_pages, np.int32)
    largest = pp.PageTable(
        block_tables=i32([num_pages, num_pages - 1]), seq_lens=i32(512), num_free=i32(0)[0],
        page_size=256, free_pages=pages, ref_counts=pages,
    )  # fmt: skip
    slots = slot_mapping(largest, i32(0, 0), i32(255, 511))
    assert slots.tolist() == [num_pages * 256, num_pages * 256 - 1]


@pytest.mark.parametrize("none", [i32(), []], ids=["arrays", "lists"])
def test_calls_without_entries_change_nothing_and_pages_are_freed_once(none):
    """A prefix cache answers with empty lists, which have no integer dtype."""
    table = extended([4, 0, 0, 0])
    released = release(retain(table, i32(0))[0], i32(0, 0, 0))
    assert released.num_free == 8 and released.ref_counts[0] == 0  # once, and not too often

    def call_all(table):
        table, _, forked = pp.fork(table, none, none)
        table, retained = pp.retain(table, none)
        table, attached = pp.attach(table, none, np.zeros((0, 1), np.int32))
        table, emptied = pp.attach(table, [3], [none])
        slots = pp.slot_mapping(table, none, none)
        return pp.release(table, none), emptied, (forked, retained, attached, slots)

    unchanged, emptied, results = jitted(call_all)(table)
    assert_same(unchanged, table)
    assert emptied.tolist() == [True]
    assert {x.shape for x in results} == {(0,)}


def decode(table, active, window=None):
    """Reserves a token per step for the active rows until each has failed."""

    def step(carry):
        table, active = carry
        table, ok = pp.extend(table, active.astype(jnp.int32), max_new_tokens=1)
        if window is not None:
            table = pp.free_before(table, table.seq_lens - window + 1, max_pages=1)
        return table, active & ok

    return jax.lax.while_loop(lambda carry: jnp.any(carry[1]), step, (table, active))[0]


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
    "attach": lambda t, n: pp.attach(t, n, jnp.broadcast_to(n, (n.size, n.size)))[0],
    "release": pp.release,
    "free_before": pp.free_before,
    "free_before of one": lambda t, n: pp.free_before(t, n, max_pages=1),
    "free": lambda t, n: pp.free(t, n > 0),
    "decode": lambda t, n: decode(t, n > 0),
}


def test_operations_only_scatter_into_the_pool_and_in_place():
    num_pages = 1_000_003
    sizes = dict(num_pages=num_pages, page_size=4, max_seqs=8, pages_per_seq=16)
    table = jax.eval_shape(lambda: pp.create_page_table(**sizes))
    rows = jax.ShapeDtypeStruct((8,), jnp.int32)
    for name, operation in OPERATIONS.items():
        names = writers(jax.jit(operation).trace(table, rows).jaxpr.jaxpr, num_pages)
        assert names and all(x.startswith("scatter") for x in names), (name, names)

    def all_of_them(table, rows):
        for operation in OPERATIONS.values():
            table = operation(table, rows)
        return table

    memory = jax.jit(all_of_them, donate_argnums=0).lower(table, rows).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= 2 * 4 * num_pages
    assert memory.temp_size_in_bytes < 4 * num_pages // 100


def test_a_decode_loop_ends_when_pages_run_out_but_not_with_a_window():
    traced = jax.jit(chex.assert_max_traces(decode, n=1), donate_argnums=0)
    for active, expected in [([1, 1, 1, 0], [12, 12, 8, 0]), ([1, 0, 0, 0], [16, 0, 0, 0])]:
        table = traced(make_table(), np.array(active, bool))
        assert table.seq_lens.tolist() == expected
        pp.check_page_table(table)
    # A window of 5 tokens is in at most 3 pages of 4, the one with the next token included.
    table = make_table(num_pages=6, pages_per_seq=100)
    loop = jax.jit(decode, static_argnums=2, donate_argnums=0)
    table = loop(table, np.array([True, True, False, False]), 5)
    assert table.seq_lens.tolist() == [400, 400, 0, 0], "until the rows are full"
    assert table.num_free == 6 - 2 * 1
    pp.check_page_table(table)


def test_tables_stay_int32_under_x64():
    def use_all(rows):
        table = pp.create_page_table(num_pages=8, page_size=4, max_seqs=4, pages_per_seq=4)
        for operation in OPERATIONS.values():
            table = operation(table, rows)
        _, forked, _ = pp.fork(table, rows, rows)
        _, truncated, _ = pp.truncate(table, rows)
        return table, forked, truncated, pp.slot_mapping(table, rows, rows)

    with jax.enable_x64(True):
        out = jax.eval_shape(use_all, i32(1, 1, 0, 0))
    assert {leaf.dtype for leaf in jax.tree.leaves(out)} == {jnp.dtype(jnp.int32)}


# For each argument: its name, a call with a value of it, and the type that it must have.
ARGUMENTS = [
    ("num_new_tokens", pp.extend, "int32[4]"),
    ("rows", pp.free, "bool[4]"),
    ("positions", pp.free_before, "int32[4]"),
    ("src", lambda t, x: pp.fork(t, x, [1]), "int32[6]"),
    ("dst", lambda t, x: pp.fork(t, [1], x), "int32[1]"),
    ("new_lens", pp.truncate, "int32[4]"),
    ("pages", pp.retain, "int32[6]"),
    ("pages", pp.release, "int32[6]"),
    ("rows", lambda t, x: pp.attach(t, x, [[0]]), "int32[6]"),
    ("pages", lambda t, x: pp.attach(t, [0], x), "int32[1, 3]"),
    ("rows", lambda t, x: pp.slot_mapping(t, x, [0]), "int32[6]"),
    ("positions", lambda t, x: pp.slot_mapping(t, [0], x), "int32[1]"),
]


def assert_refused(message, call, *arguments, **options):
    """By itself and under jit."""

    def run(table):
        return call(table, *arguments, **options)

    for how in (run, lambda table: jax.eval_shape(run, table)):
        with pytest.raises(ValueError) as error:
            how(make_table())
        assert str(error.value).startswith(message)


@pytest.mark.parametrize(("name", "call", "wanted"), ARGUMENTS)
def test_arrays_of_another_type_or_shape_are_refused(name, call, wanted):
    for dtype in ("int32", "int64", "int8", "float32"):
        message = f"{name} must be {wanted}, got {dtype}[2, 3]"
        assert_refused(message, call, np.ones((2, 3), dtype))
    assert_refused(f"{name}=None must be an array", call, None)


@pytest.mark.parametrize(
    "call",
    [pp.extend, pp.free, pp.free_before, pp.fork, pp.truncate, pp.slot_mapping, pp.attach,
     pp.retain, pp.release, pp.check_page_table],
)  # fmt: skip
def test_verbs_take_a_table_only(call):
    with pytest.raises(ValueError, match="table must be a PageTable, got NoneType"):
        call(None, [1])


@pytest.mark.parametrize(
    ("value", "rule"),
    [
        ("1234", "='1234' must be an array"),
        ([[0.5]] * 4, " must be int32[4], got float32[4, 1]"),
        (np.ones(4, np.int64), " must be int32[4], got int64[4]"),
        ([-(2**31) - 1], "=[-2147483649] must hold integers of int32"),
        (2**31, "=2147483648 must hold integers of int32"),
        ([10**400], "=[1"),
    ],
)
def test_other_values_than_int32_arrays_are_named(value, rule):
    assert_refused(f"num_new_tokens{rule}", pp.extend, value)


@pytest.mark.parametrize("bound", [0, -1, 2.0, True])
def test_bounds_of_the_work_must_be_positive_integers(bound):
    for call, name in ((pp.extend, "max_new_tokens"), (pp.free_before, "max_pages")):
        message = f"{name}={bound} must be a positive integer"
        assert_refused(message, call, i32(0, 0, 0, 0), **{name: bound})


def test_pages_are_attached_behind_blocks_that_stay_without():
    """As a row has them whose first pages were freed; a row has at most 4."""
    pages = i32([1, 2, -1], [2, -1, -1], [-1] * 3, [0, -1, -1])

    def use(table):
        table, _ = pp.extend(table, [12, 0, 0, 0])
        return pp.attach(table, [1, 2, 3, 9], pages, first_blocks=[1, 4, 2, 0])

    attached, ok = jax.jit(use)(make_table())
    assert ok.tolist() == [True, False, True, False]
    assert attached.seq_lens.tolist() == [12, 12, 0, 8]
    assert attached.block_tables.tolist() == [[0, 1, 2, 8], [8, 1, 2, 8], [8] * 4, [8] * 4]
    pp.check_page_table(attached)
    for outside in (-1, -4, INT32_MIN, INT32_MAX, INT32_MAX - 1):
        table, ok = pp.attach(attached, [2], pages[:1], first_blocks=[outside])
        assert not ok.any()
        assert_same(table, attached)


def test_lists_are_accepted():
    def use(table):
        table, first = pp.extend(table, [4, 2, 0, 0])
        table, _, second = pp.fork(table, [1], [2])
        slots = pp.slot_mapping(table, [2, INT32_MIN, INT32_MAX], [1, 0, 0])
        table, third = pp.attach(pp.release(pp.retain(table, [0])[0], [0]), [3], [[0]])
        return pp.free(table, [True, True, False, True]), slots, (first, second, third)

    table, slots, oks = jax.jit(use)(make_table())
    assert all(ok.all() for ok in oks)
    assert slots.tolist() == [9, 32, 32] and table.block_tables[:, 0].tolist() == [8, 8, 2, 8]


# The check of a table.


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
