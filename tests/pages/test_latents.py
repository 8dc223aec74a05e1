"""Pools of latents: created, written and copied, in every layout and in place."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_paged as pp
from tests.support.kv_pools import assert_written_and_copied_in_place
from tests.support.lowering import few_with_every_level, named, pairwise
from tests.support.marks import slow
from tests.support.page_layouts import of_heads
from tests.support.page_tables import (
    assert_same,
    copy_pages,
    i32,
    write_kv,
)
from tests.support.quantized_cases import LARGEST, quantize

LAYOUTS = ["NHD", "HND", "HPND"]
P, N, LATENT, ROPE = 5, 4, 6, 2
SIZES = dict(num_pages=P, num_kv_heads=1, page_size=N, head_dim=LATENT + ROPE, v_head_dim=LATENT)
STORED = {
    **{x: dict(dtype=x) for x in ("float32", "bfloat16", "float16", *LARGEST)},
    **{f"{x} of one scale": dict(dtype=x, k_scales=[0.01, 0.01]) for x in LARGEST},
}


def create(num_layers=2, dtype="float32", **more):
    return pp.create_kv_pool(num_layers=num_layers, dtype=dtype, **SIZES | more)


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("kv_layout", LAYOUTS)
def test_a_pool_has_one_array_and_one_kind_of_scales(kv_layout, stored):
    pool = create(**STORED[stored], kv_layout=kv_layout)
    pages = of_heads(np.zeros((1, P, N, LATENT + ROPE)), kv_layout).shape
    scales = of_heads(np.zeros((1, P, N)), kv_layout).shape
    for layer in pool.layers:
        assert layer.is_latent and layer.v_pages is None and layer.v_scales is None
        assert (layer.v_head_dim, layer.head_dim) == (LATENT, LATENT + ROPE)
        assert layer.k_pages.shape == pages and not np.any(np.asarray(layer.k_pages))
        if layer.k_pages.dtype.name not in LARGEST:
            assert layer.k_scales is None
        elif "one scale" in stored:
            assert layer.k_scales.shape == () and layer.k_scales == np.float32(0.01)
        else:
            assert layer.k_scales.shape == scales


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(v_head_dim=8), "v_head_dim=8 must be less than head_dim=8"),
        (dict(v_head_dim=0), "v_head_dim=0 must be"),
        (dict(v_head_dim="6"), "v_head_dim='6' must be"),
        (dict(kv_layout="2NHD"), "kv_layout='2NHD' has V of its own, so v_head_dim must be None"),
        (dict(kv_layout="NH2D"), "kv_layout='NH2D' has V of its own, so v_head_dim must be None"),
        (dict(dtype="int8", k_scales=[1, 1], v_scales=[1, 1]), "v_scales must be None with v_head"),
        (dict(dtype="int8", v_scales=[1, 1]), "v_scales must be None with v_head_dim=6: k_scales"),
        (dict(k_scales=[1, 1]), "must be None with pages of float32"),
        (dict(dtype="int8", k_scales=[1]), r"k_scales=\[1.0\] must be num_layers=2 numbers"),
    ],
)
def test_create_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        create(**changes)


def test_write_kv_refuses_v_and_tokens_of_another_size():
    [layer] = create(1).layers
    tokens = np.zeros((2, 1, LATENT + ROPE), np.float32)
    slots = i32(0, 1)
    for k, v, message in (
        (tokens, tokens, r"v must be None with v_head_dim=6: V is a part of k"),
        (tokens[..., :LATENT], None, r"k must be \[T, num_kv_heads=1, head_dim=8\].* \(2, 1, 6\)"),
        (tokens[:, 0], None, r"k must be .* got \(2, 8\)"),
        (tokens.astype(np.int32), None, "k must be floating, got int32"),
    ):
        with pytest.raises(ValueError, match=message):
            pp.write_kv(layer, k, v, slots)
    plain = pp.create_kv_pool(
        num_layers=1, num_pages=P, num_kv_heads=1, page_size=N, head_dim=8, dtype="float32"
    )
    with pytest.raises(ValueError, match=r"^v=None must be an array"):
        pp.write_kv(plain.layers[0], tokens, None, slots)


def of_random_tokens(kv_layout, stored):
    """A pool in which all slots are written, and what `[1, P, N, D]` each slot holds."""
    rng = np.random.default_rng(0)
    pool = create(**STORED[stored], kv_layout=kv_layout)
    tokens = rng.standard_normal((P * N, 1, LATENT + ROPE)).astype(np.float32)
    dtype = STORED[stored]["dtype"]
    layers = tuple(write_kv(layer, tokens, None, i32(*range(P * N))) for layer in pool.layers)
    if dtype not in LARGEST:
        held = tokens.astype(jnp.dtype(dtype)).astype(np.float32)
    elif "one scale" in stored:
        stored = np.clip(tokens / np.float32(0.01), -LARGEST[dtype], LARGEST[dtype])
        stored = np.rint(stored) if dtype == "int8" else stored
        held = stored.astype(jnp.dtype(dtype)).astype(np.float32) * np.float32(0.01)
    else:
        elements, scales = quantize(tokens, dtype)
        held = elements.astype(np.float32) * scales[..., None]
    return pp.KVPool(layers=layers), held.reshape(1, P, N, -1)


def values(layer):
    """What each slot of a layer holds `[1, P, N, D]`, dequantized."""
    order = [layer.layout.axes.index(letter) for letter in "HPND"]
    pages = np.asarray(layer.k_pages).transpose(order).astype(np.float32)
    if layer.k_scales is None:
        return pages
    scales = np.asarray(layer.k_scales)
    if scales.ndim:
        scales = scales.transpose([layer.layout.scale_axes.index(letter) for letter in "HPN"])
    return pages * scales[..., None]


ROWS = pairwise(kv_layout=LAYOUTS, stored=[*STORED])


@pytest.mark.parametrize("row", few_with_every_level(ROWS), ids=named)
def test_writes_and_copies_equal_numpy_and_touch_nothing_else(row):
    pool, held = of_random_tokens(**row)
    # XLA may round a tie of a quotient otherwise.
    near = dict(rtol=0.07, atol=0.02) if row["stored"].split()[0] in LARGEST else dict(rtol=0)
    for layer in pool.layers:
        np.testing.assert_allclose(values(layer), held, **near)
    # Page 1 is overwritten and read in the same call; the others are padding.
    copies = pp.PageCopies(src_pages=i32(0, 1, P, 2, -1), dst_pages=i32(1, 3, 0, P, 0))
    copied = copy_pages(pool, copies)
    for before, after in zip(pool.layers, copied.layers, strict=True):
        assert jax.tree.structure(before) == jax.tree.structure(after)
        wanted = values(before)
        wanted[:, [1, 3]] = wanted[:, [0, 1]]
        np.testing.assert_array_equal(values(after), wanted)
    token = np.full((3, 1, LATENT + ROPE), 0.5, np.float32)
    written = write_kv(pool.layers[0], token, None, i32(6, P * N, -1))
    wanted = values(pool.layers[0])
    np.testing.assert_allclose(values(written)[:, 1, 2], 0.5, rtol=0.07)
    wanted[:, 1, 2] = values(written)[:, 1, 2]
    np.testing.assert_array_equal(values(written), wanted)


BIG = dict(num_pages=4096, page_size=16, head_dim=72, v_head_dim=64)
IN_PLACE = [("NHD", "int8"), ("HND", "float16"), ("HPND", "float32")]


@pytest.mark.parametrize(
    ("kv_layout", "stored"),
    [*IN_PLACE, *slow([("NHD", "float32"), ("HND", "int8"), ("HPND", "int8"), ("NHD", "float16")])],
)
def test_donated_pools_are_written_and_copied_in_place(kv_layout, stored):
    pool = jax.eval_shape(lambda: create(**STORED[stored], kv_layout=kv_layout, **BIG))
    tokens = jax.ShapeDtypeStruct((8, 1, 72), jnp.float32)
    assert_written_and_copied_in_place(pool, tokens, None)


def test_a_layer_goes_through_loops_and_trees():
    [layer] = create(1).layers
    tokens = np.random.default_rng(0).standard_normal((8, 1, 1, LATENT + ROPE)).astype(np.float32)

    def step(carry, token):
        layer, i = carry
        return (pp.write_kv(layer, token, None, i[None]), i + 1), None

    (filled, _), _ = jax.jit(lambda x: jax.lax.scan(step, (x, jnp.int32(0)), tokens))(layer)
    slots = np.arange(8, dtype=np.int32)
    assert_same(filled, write_kv(layer, tokens[:, 0], None, slots))
    assert jax.tree.structure(filled) == jax.tree.structure(layer)
    # A layer of another v_head_dim is of another type.
    assert jax.tree.structure(layer) != jax.tree.structure(replace(layer, v_head_dim=5))
