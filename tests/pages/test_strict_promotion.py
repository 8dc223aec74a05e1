"""Page functions give the same results under JAX's strict promotion rules."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_paged as pp
from tests.support.kv_pools import make_pool
from tests.support.page_tables import assert_same, i32, make_table
from tests.support.promotion import assert_is_strict, strict_promotion

MODES = pytest.mark.parametrize("mode", [lambda f: f, jax.jit], ids=["eager", "jit"])


def test_the_rules_are_in_force():
    with strict_promotion():
        assert_is_strict()


def use_pages(counts):
    """Every function over a page table; returns all that they return."""
    table = make_table()
    table, ok = pp.extend(table, counts)  # rows 0, 1 and 2 hold 5, 4 and 2 tokens
    table, one_ok = pp.extend(table, [1, 0, 0, 0], max_new_tokens=1)
    table, fork_copies, fork_ok = pp.fork(table, i32(0), [3])
    table, copies, truncate_ok = pp.truncate(table, i32(6, 4, 2, 3))
    table, retain_ok = pp.retain(table, i32(0, 9))
    table = pp.free(table, np.array([True, False, False, True]))
    table = pp.free_before(table, i32(0, 4, 2, 0), max_pages=1)
    table, attach_ok = pp.attach(table, i32(3), i32([0, 8]))
    slots = pp.slot_mapping(table, i32(1, 2, 3, 0), i32(3, 1, 0, 0))
    released = pp.release(table, i32(0))
    oks = (ok, one_ok, fork_ok, truncate_ok, retain_ok, attach_ok)
    return (table, released), (fork_copies, copies), oks, slots


@MODES
def test_page_tables(mode):
    counts = i32(5, 4, 2, 0)
    expected = jax.jit(use_pages)(counts)
    assert np.all([ok[0] for ok in expected[2]])
    with strict_promotion():
        actual = mode(use_pages)(counts)
        pp.check_page_table(actual[0][0], retained=[0])
        pp.check_page_table(actual[0][1])
    assert_same(actual, expected)


def use_pool(k, v, slots, dtype, scales):
    """Every function over a pool; returns the pool."""
    pool = make_pool(dtype=dtype, **scales)
    pool = pp.KVPool(layers=tuple(pp.write_kv(layer, k, v, slots) for layer in pool.layers))
    return pp.copy_pages(pool, pp.PageCopies(src_pages=slots[:1], dst_pages=slots[1:2]))


@MODES
@pytest.mark.parametrize(
    ("dtype", "scales"),
    [
        ("float32", {}),
        ("int8", {}),
        ("int8", dict(k_scales=[0.1, 0.2], v_scales=[0.3, 0.4])),
        ("float8_e4m3fn", {}),
    ],
    ids=["float32", "int8", "int8 per layer", "float8"],
)
def test_pools(mode, dtype, scales):
    k, v = np.random.default_rng(0).standard_normal((2, 3, 2, 3)).astype(np.float32)
    k, v, slots = jnp.bfloat16(k), np.float32(v), i32(0, 3, 8)

    def use(k, v, slots):
        return use_pool(k, v, slots, dtype, scales)

    expected = mode(use)(k, v, slots)
    with strict_promotion():
        assert_same(mode(use)(k, v, slots), expected)
