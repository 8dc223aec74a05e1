"""Pools of every page layout: created, written and copied in place."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_paged as pp
from tests.support.kv_pools import copies_of, make_pool, pool_bytes
from tests.support.page_layouts import LAYOUTS, OTHERS, layer_in_layout
from tests.support.page_tables import INT32_MAX, INT32_MIN, i32

STORED = {
    "float32": dict(dtype=jnp.float32),
    "bfloat16": dict(dtype=jnp.bfloat16),
    "int8": dict(dtype=jnp.int8),
    "fp8 of one scale": dict(dtype="float8_e4m3fn", k_scales=[0.01, 0.02], v_scales=[0.01, 0.03]),
}
SIZES = dict(num_pages=5, num_kv_heads=3, page_size=4, head_dim=8)


def random_layer(kv_layout, **stored):
    """A layer with random elements and scales, in the default layout and in another."""
    rng = np.random.default_rng(0)
    layer = jax.tree.map(
        lambda x: jnp.asarray(rng.integers(1, 100, x.shape)).astype(x.dtype) if x.ndim else x,
        make_pool(**SIZES, **stored).layers[0],
    )
    return layer, pp.LayerKV(**layer_in_layout(kv_layout, layer), kv_layout=kv_layout)


def assert_same_layer(got, want):
    """`got` holds what `want`, of the default layout, does."""
    expected = layer_in_layout(got.kv_layout, want)
    for name, x in expected.items():
        if x is None:
            assert getattr(got, name) is None
        else:
            np.testing.assert_array_equal(getattr(got, name), x)


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("kv_layout", LAYOUTS)
def test_a_pool_is_created_in_any_layout(kv_layout, stored):
    pool = make_pool(**SIZES, **STORED[stored], kv_layout=kv_layout)
    plain = make_pool(**SIZES, **STORED[stored])
    assert pool_bytes(pool) == pool_bytes(plain)
    for layer, want in zip(pool.layers, plain.layers, strict=True):
        assert layer.kv_layout == kv_layout
        assert (layer.num_kv_heads, layer.num_pages, layer.page_size) == (3, 5, 4)
        assert_same_layer(layer, want)
    assert jax.tree.structure(pool) == jax.tree.structure(jax.tree.map(jnp.copy, pool))


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("kv_layout", OTHERS)
def test_tokens_are_written_where_the_layout_has_them(kv_layout, stored):
    plain, layer = random_layer(kv_layout, **STORED[stored])
    k, v = np.random.default_rng(1).standard_normal((2, 8, 3, 8)).astype(np.float32)
    slots = i32(2, 20, 0, -1, 19, INT32_MAX, INT32_MIN, -20)
    got = jax.jit(pp.write_kv)(layer, k, v, slots)
    assert jax.tree.structure(got) == jax.tree.structure(layer)
    assert_same_layer(got, pp.write_kv(plain, k, v, slots))


@pytest.mark.parametrize("stored", ["bfloat16", "int8"])
@pytest.mark.parametrize("kv_layout", OTHERS)
def test_pages_are_copied_in_any_layout(kv_layout, stored):
    plain, layer = random_layer(kv_layout, **STORED[stored])
    copies = copies_of(i32(0, 1, 5, 2, -1, 3), i32(1, 3, 0, 5, 0, -1))
    [got] = jax.jit(pp.copy_pages)(pp.KVPool(layers=(layer,)), copies).layers
    [want] = pp.copy_pages(pp.KVPool(layers=(plain,)), copies).layers
    assert_same_layer(got, want)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.int8])
@pytest.mark.parametrize("kv_layout", LAYOUTS)
def test_donated_pools_are_written_and_copied_in_place(kv_layout, dtype):
    pool = jax.eval_shape(
        partial(
            make_pool, num_pages=4096, page_size=16, head_dim=64, dtype=dtype, kv_layout=kv_layout
        )
    )
    tokens = jax.ShapeDtypeStruct((8, 2, 64), jnp.float32)
    slots = jax.ShapeDtypeStruct((8,), jnp.int32)

    def step(pool, k, v, slots):
        layers = tuple(pp.write_kv(layer, k, v, slots) for layer in pool.layers)
        return pp.copy_pages(pp.KVPool(layers=layers), copies_of(slots, slots + 1))

    lowered = jax.jit(step, donate_argnums=0).lower(pool, tokens, tokens, slots)
    memory = lowered.compile().memory_analysis()
    assert memory.alias_size_in_bytes == pool_bytes(pool)
    assert memory.temp_size_in_bytes < pool_bytes(pool) // 100


def test_the_layout_may_be_named_beside_the_arrays():
    _, layer = random_layer("2NHD", dtype=jnp.float32)
    bare = pp.LayerKV(k_pages=layer.k_pages)
    k, v = np.random.default_rng(1).standard_normal((2, 1, 3, 8)).astype(np.float32)
    got = pp.write_kv(bare, k, v, i32(2), kv_layout="2NHD")
    want = pp.write_kv(layer, k, v, i32(2))
    np.testing.assert_array_equal(got.k_pages, want.k_pages)
    assert got.kv_layout == "2NHD"
    copies = copies_of(i32(0), i32(1))
    [got] = pp.copy_pages(pp.KVPool(layers=(bare,)), copies, kv_layout="2NHD").layers
    [want] = pp.copy_pages(pp.KVPool(layers=(layer,)), copies).layers
    np.testing.assert_array_equal(got.k_pages, want.k_pages)
    with pytest.raises(ValueError, match="kv_layout='HND' must be that of the layer, '2NHD'"):
        pp.write_kv(layer, k, v, i32(2), kv_layout="HND")


def test_layers_that_are_not_of_their_layout_are_refused():
    one, two = np.zeros((5, 4, 6, 8), np.float32), np.zeros((5, 2, 4, 3, 8), np.float32)
    k = np.zeros((1, 3, 8), np.float32)
    for fields, message in (
        (dict(k_pages=one, v_pages=one, kv_layout="NH2D"), "layer.v_pages must be None with kv_la"),
        (dict(k_pages=one[:, :, :3], kv_layout="NHD"), "layer.v_pages=None must be an array"),
        (dict(k_pages=one[:, :, :5], kv_layout="N2HD"), r"be \[num_pages, .*2 \* num_kv_heads"),
        (dict(k_pages=two[:, :1], kv_layout="2NHD"), r"must be \[num_pages, 2, page_size, num_kv"),
        (dict(k_pages=one, kv_layout="NHXD"), "kv_layout='NHXD' must be one of .*'NH2D'"),
    ):
        with pytest.raises(ValueError, match=message):
            pp.write_kv(pp.LayerKV(**fields), k, k, i32(0))
    with pytest.raises(ValueError, match="kv_layout=None must be one of"):
        make_pool(kv_layout=None)
