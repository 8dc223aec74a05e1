"""What the functions of the page table accept and refuse."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import pallas_paged as pp
from tests.support.page_tables import INT32_MAX, INT32_MIN, i32, make_table


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: pp.extend(t, i32(1)), r"num_new_tokens must be int32\[4\], got int32\[1\]"),
        (lambda t: pp.extend(t, np.ones(4, np.int64)), r"must be int32\[4\], got int64\[4\]"),
        (lambda t: pp.extend(t, np.ones(4)), r"must be int32\[4\], got float64\[4\]"),
        (lambda t: pp.extend(t, i32(0, 0, 0, 0), max_new_tokens=0), r"max_new_tokens=0 must be"),
        (lambda t: pp.extend(t, i32(0, 0, 0, 0), max_new_tokens=True), r"max_new_tokens=True must"),
        (lambda t: pp.free(t, i32(1, 0, 0, 0)), r"rows must be bool\[4\], got int32\[4\]"),
        (lambda t: pp.free(t, np.ones((4, 1), bool)), r"rows must be bool\[4\], got bool\[4, 1\]"),
        (lambda t: pp.free_before(t, i32(0)), r"positions must be int32\[4\], got int32\[1\]"),
        (lambda t: pp.free_before(t, i32(0, 0, 0, 0), max_pages=0), r"max_pages=0 must be a pos"),
        (lambda t: pp.free_before(t, i32(0, 0, 0, 0), max_pages=2.0), r"max_pages=2.0 must be"),
        (lambda t: pp.fork(t, i32(0), i32(1, 2)), r"dst must be int32\[1\], got int32\[2\]"),
        (lambda t: pp.fork(t, np.int32(0), np.int32(1)), r"src must be int32\[1\], got int32\[\]"),
        (lambda t: pp.fork(t, np.zeros(1, np.int8), i32(1)), r"src must be .* got int8\[1\]"),
        (lambda t: pp.truncate(t, i32(0, 0)), r"new_lens must be int32\[4\], got int32\[2\]"),
        (lambda t: pp.retain(t, np.int32(0)), r"pages must be int32\[1\], got int32\[\]"),
        (lambda t: pp.retain(t, i32([0])), r"pages must be int32\[1\], got int32\[1, 1\]"),
        (lambda t: pp.release(t, np.ones(2)), r"pages must be int32\[2\], got float64\[2\]"),
        (lambda t: pp.attach(t, np.int8([0]), i32([0])), r"rows must be int32\[1\], got int8\[1\]"),
        (lambda t: pp.attach(t, i32(0), i32(0, 1)), r"pages must be int32\[1, 2\], got int32\[2\]"),
        (
            lambda t: pp.attach(t, i32(0), i32([0], [1])),
            r"must be int32\[1, 1\], got int32\[2, 1\]",
        ),
        (lambda t: pp.attach(t, i32(0), np.int32(0)), r"must be int32\[1, 0\], got int32\[\]"),
        (lambda t: pp.slot_mapping(t, i32(0), i32(0, 1)), r"positions must be int32\[1\]"),
        (lambda t: pp.slot_mapping(t, np.ones(1), i32(0)), r"rows must be int32\[1\], got float64"),
    ],
)
def test_bad_arguments_are_refused_also_under_jit(call, message):
    with pytest.raises(ValueError, match=message):
        call(make_table())
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(call, make_table())


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("num_new_tokens", pp.extend),
        ("rows", pp.free),
        ("positions", pp.free_before),
        ("src", lambda t, x: pp.fork(t, x, [1])),
        ("dst", lambda t, x: pp.fork(t, [1], x)),
        ("new_lens", pp.truncate),
        ("pages", pp.retain),
        ("pages", pp.release),
        ("rows", lambda t, x: pp.attach(t, x, [[0]])),
        ("pages", lambda t, x: pp.attach(t, [0], x)),
        ("rows", lambda t, x: pp.slot_mapping(t, x, [0])),
        ("positions", lambda t, x: pp.slot_mapping(t, [0], x)),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_other_values_than_int32_arrays_are_named(name, call):
    bad = [
        (None, "=None must be an array"),
        ("1234", "='1234' must be an array"),
        ([None] * 4, r"=\[None, .* must be an array"),
        (["a"] * 4, r"=\['a', .* must be an array"),
        ([[1, 2], [3], [4], [5]], r"=\[\[1, 2\], .* must be an array"),
        ([[0.5]] * 4, r" must be (int32|bool)\[.*\], got float32\[4, 1\]"),
        (1.5, r" must be (int32|bool)\[.*\], got float32\[\]"),
        ([2**40, 0, 0, 0], r"=\[1099511627776, .* must hold integers of int32"),
        ([-(2**31) - 1, 0, 0, 0], r"=\[-2147483649, .* must hold integers of int32"),
        (2**31, "=2147483648 must hold integers of int32"),
        ([10**400, 0, 0, 0], "=.* must be an array"),
    ]
    table = make_table()
    for value, rule in bad:
        with pytest.raises(ValueError, match=f"^{name}{rule}"):
            call(table, value)
        with pytest.raises(ValueError, match=f"^{name}{rule}"):
            jax.eval_shape(lambda t, value=value: call(t, value), table)


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
