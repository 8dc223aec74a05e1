"""Small page tables and the functions over them: jitted, strict about types, results in NumPy."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

import pallas_paged as pp
from tests.support.promotion import strict_promotion

INT32_MAX, INT32_MIN = 2**31 - 1, -(2**31)
MIN_ENTRIES = 11  # of a call: fewer are padded, so that most calls share a program


def jitted(function: Callable[..., Any], static: Sequence[str] = (), **how: Any) -> Any:
    """Return a jitted function under JAX's strict promotion rules, whose results are in NumPy."""
    run = jax.jit(function, static_argnames=static, **how)

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        with strict_promotion():
            return jax.device_get(run(*arguments, **options))

    return call


def padded(x: Any, *more: int) -> np.ndarray:
    """Return `x` with -1, which is no row and no page, up to `MIN_ENTRIES` entries."""
    x = np.asarray(x, np.int32)
    sizes = (MIN_ENTRIES, *more)
    return np.pad(x, [(0, max(size - n, 0)) for n, size in zip(x.shape, sizes, strict=True)],
                  constant_values=-1)  # fmt: skip


extend = jitted(pp.extend, ["max_new_tokens"])
free, truncate = jitted(pp.free), jitted(pp.truncate)
free_before = jitted(pp.free_before, ["max_pages"])
write_kv, copy_pages = jitted(pp.write_kv), jitted(pp.copy_pages)
_fork, _slot_mapping = jitted(pp.fork), jitted(pp.slot_mapping)
_retain, _release, _attach = jitted(pp.retain), jitted(pp.release), jitted(pp.attach)


def fork(table, src, dst):
    table, copies, ok = _fork(table, padded(src), padded(dst))
    return table, jax.tree.map(lambda x: x[: len(src)], copies), ok[: len(src)]


def slot_mapping(table, rows, positions):
    return _slot_mapping(table, padded(rows), padded(positions))[: len(rows)]


def retain(table, pages):
    table, ok = _retain(table, padded(pages))
    return table, ok[: len(pages)]


def release(table, pages):
    return _release(table, padded(pages))


def attach(table, rows, pages):
    table, ok = _attach(table, padded(rows), padded(pages, 6))
    return table, ok[: len(rows)]


SIZES = dict(num_pages=8, page_size=4, max_seqs=4, pages_per_seq=4)
_create = functools.cache(jitted(pp.create_page_table, SIZES))


def make_table(**sizes):
    return _create(**SIZES | sizes)


def i32(*values):
    return np.array(values, np.int32)


def extended(lens, **sizes):
    """A table whose rows hold these numbers of tokens, in pages 0, 1, 2, ..."""
    table, ok = extend(make_table(**sizes), i32(*lens))
    assert np.all(ok)
    return table


def assert_same(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)
