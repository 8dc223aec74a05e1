"""Small page tables, and the jitted functions over them."""

from __future__ import annotations

import jax
import numpy as np

import pallas_paged as pp

INT32_MAX, INT32_MIN = 2**31 - 1, -(2**31)
extend = jax.jit(pp.extend, static_argnames="max_new_tokens")
free, fork, truncate = jax.jit(pp.free), jax.jit(pp.fork), jax.jit(pp.truncate)
free_before = jax.jit(pp.free_before, static_argnames="max_pages")
retain, release, attach = jax.jit(pp.retain), jax.jit(pp.release), jax.jit(pp.attach)


def make_table(num_pages=8, page_size=4, max_seqs=4, pages_per_seq=4):
    return pp.create_page_table(
        num_pages=num_pages, page_size=page_size, max_seqs=max_seqs, pages_per_seq=pages_per_seq
    )


def i32(*values):
    return np.array(values, np.int32)


def extended(lens, **sizes):
    table, ok = extend(make_table(**sizes), i32(*lens))
    assert np.all(ok)
    return table


def assert_same(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)
