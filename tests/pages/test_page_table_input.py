"""What the functions of the page table accept and refuse."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import pallas_paged as pp
from tests.support.page_tables import INT32_MAX, INT32_MIN, assert_same, i32, make_table

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
    ("value", "rule"),
    [
        ("1234", "='1234' must be an array"),
        ([None] * 4, "=[None, None, None, None] must be an array"),
        (["a"] * 4, "=['a', 'a', 'a', 'a'] must be an array"),
        ([[1, 2], [3]], "=[[1, 2], [3]] must be an array"),
        ([[0.5]] * 4, " must be int32[4], got float32[4, 1]"),
        (1.5, " must be int32[4], got float32[]"),
        (np.ones(4, np.int64), " must be int32[4], got int64[4]"),
        ([2**40, 0], "=[1099511627776, 0] must hold integers of int32"),
        ([-(2**31) - 1], "=[-2147483649] must hold integers of int32"),
        (2**31, "=2147483648 must hold integers of int32"),
        ([10**400], "=[1"),
    ],
)
def test_other_values_than_int32_arrays_are_named(value, rule):
    assert_refused(f"num_new_tokens{rule}", pp.extend, value)


@pytest.mark.parametrize(
    ("call", "name"), [(pp.extend, "max_new_tokens"), (pp.free_before, "max_pages")]
)
@pytest.mark.parametrize("bound", [0, -1, 2.0, True])
def test_bounds_of_the_work_must_be_positive_integers(call, name, bound):
    message = f"{name}={bound} must be a positive integer"
    assert_refused(message, call, i32(0, 0, 0, 0), **{name: bound})


def test_lists_are_accepted_and_empty_answers_of_a_prefix_cache():
    cache = pp.PrefixCache(page_size=4)
    lease = cache.lookup([1, 2, 3])

    def use(table):
        table, first = pp.extend(table, [4, 2, 0, 0])
        table, _, second = pp.fork(table, [1], [2])
        slots = pp.slot_mapping(table, [2, INT32_MIN, INT32_MAX], [1, 0, 0])
        table, third = pp.attach(pp.release(pp.retain(table, [0])[0], [0]), [3], [[0]])
        return pp.free(table, [True, True, False, True]), slots, (first, second, third)

    def use_nothing(table):
        table, attached = pp.attach(table, [0], [lease.pages])
        table, retained = pp.retain(table, cache.insert(lease, [1], [0]))
        return pp.release(table, cache.evict(1)), attached, retained

    table, slots, oks = jax.jit(use)(make_table())
    assert all(ok.all() for ok in oks)
    assert slots.tolist() == [9, 32, 32] and table.block_tables[:, 0].tolist() == [8, 8, 2, 8]
    same, attached, retained = jax.jit(use_nothing)(make_table())
    assert attached.all() and retained.shape == (0,)
    assert_same(same, make_table())
