"""Attention of decoding rows without its merge, and with the write of the newest tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_paged as pp
from pallas_paged.unmerged_attention import unmerged_attention, write_and_attend
from tests.support.marks import needs_triton
from tests.support.page_layouts import layer_in_layout

PAGE_SIZE, NUM_PAGES, BLOCKS = 16, 24, 12
needs_mosaic = pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="the Mosaic GPU kernels need JAX 0.11"
)
KERNELS = [
    pytest.param("triton_interpret", marks=needs_triton),
    pytest.param("mosaic_gpu_interpret", marks=needs_mosaic),
]


def a_call(lens, *, head_dim=64, num_kv_heads=2, group=3, dtype=jnp.bfloat16):
    """Pages, the fused product of the newest tokens, their slots, the table and the lengths."""
    rng = np.random.default_rng(sum(lens))
    shape = (num_kv_heads, NUM_PAGES, PAGE_SIZE, head_dim)
    k, v = (jnp.asarray(rng.standard_normal(shape), dtype) for _ in range(2))
    lens = np.array(lens, np.int32)
    table = rng.permutation(NUM_PAGES).reshape(-1, BLOCKS)[: len(lens)].astype(np.int32)
    last = np.maximum(lens - 1, 0)
    slots = table[np.arange(len(lens)), last // PAGE_SIZE] * PAGE_SIZE + last % PAGE_SIZE
    slots = np.where(lens > 0, slots, -1).astype(np.int32)
    qkv = rng.standard_normal((len(lens), num_kv_heads, group + 2, head_dim))
    angles = rng.uniform(0, 6, (len(lens), head_dim // 2)).astype(np.float32)
    layer = pp.LayerKV(k_pages=k, v_pages=v)
    return layer, jnp.asarray(qkv, dtype), slots, table, lens, (jnp.cos(angles), jnp.sin(angles))


@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("with_sinks", [False, True])
def test_its_merge_is_attention_bit_for_bit(implementation, with_sinks):
    layer, qkv, _, table, lens, _ = a_call([130])
    q = qkv[:, :, :-2].reshape(1, 6, 64)
    sinks = jnp.linspace(-1, 3, 6, dtype=jnp.float32) if with_sinks else None
    how = dict(sinks=sinks, implementation=implementation)
    attention = unmerged_attention(layer, q, table, lens, sliding_window=100, **how)
    pages = layer.k_pages, layer.v_pages
    want = pp.paged_attention(q, *pages, table, lens, sliding_window=100, **how)
    assert attention.shape == (1, 6 * 64) and attention.dtype == jnp.bfloat16
    assert (attention.merged() == want.reshape(1, -1)).all()


@needs_triton
@pytest.mark.parametrize(
    ("lens", "head_dim", "kv_layout", "options"),
    [
        ([0, 1], 64, "HPND", {}),
        ([64, 65], 64, "NHD", {"sliding_window": 40}),
        ([129, 33], 128, "HND", {"soft_cap": 20.0}),
        ([192, 17], 32, "HPND", {"alibi_slopes": jnp.linspace(-0.3, -0.1, 6)}),
    ],
)
def test_the_newest_tokens_are_attended_to_and_written(lens, head_dim, kv_layout, options):
    layer, qkv, slots, table, lens, rotation = a_call(lens, head_dim=head_dim)
    # Their slots may hold anything before.
    written = slots[slots >= 0]
    dirty = layer.k_pages.reshape(2, -1, head_dim).at[:, written].set(jnp.nan)
    layer = pp.LayerKV(k_pages=dirty.reshape(layer.k_pages.shape), v_pages=layer.v_pages)
    layer = pp.LayerKV(**layer_in_layout(kv_layout, layer), kv_layout=kv_layout)
    how = dict(rotation=rotation, implementation="triton_interpret")
    attention, got = write_and_attend(layer, qkv, slots, table, lens, **how, **options)
    q, want = pp.rotate_and_write_kv(layer, qkv, slots, rotation=rotation, implementation="xla")
    pages = want.k_pages, want.v_pages
    options |= dict(implementation="xla", kv_layout=kv_layout)
    out = pp.paged_attention(q, *pages, table, lens, **options)
    np.testing.assert_allclose(
        np.asarray(attention.merged(), np.float32),
        np.asarray(out.reshape(2, -1), np.float32),
        atol=0.02,
    )
    np.testing.assert_array_equal(got.k_pages, want.k_pages)
    np.testing.assert_array_equal(got.v_pages, want.v_pages)


@needs_triton
def test_slots_out_of_range_are_dropped():
    layer, qkv, _, table, lens, rotation = a_call([20])
    for slot in (-1, NUM_PAGES * PAGE_SIZE):
        slots, how = np.array([slot], np.int32), dict(implementation="triton_interpret")
        _, got = write_and_attend(layer, qkv, slots, table, lens, rotation=rotation, **how)
        assert (got.k_pages == layer.k_pages).all() and (got.v_pages == layer.v_pages).all()


@needs_triton
def test_where_there_are_no_states_there_is_none():
    layer, qkv, slots, table, lens, rotation = a_call([20])
    q, at = qkv[:, :, :-2].reshape(1, 6, 64), (slots, table, lens)
    assert unmerged_attention(layer, q, table, lens, implementation="xla") is None
    assert write_and_attend(layer, qkv, *at, rotation=rotation, implementation="xla") is None
    how = dict(implementation="triton_interpret")
    assert write_and_attend(layer, qkv, *at, rotation=None, **how) is None
    part = tuple(x[:, :8] for x in rotation)
    assert write_and_attend(layer, qkv, *at, rotation=part, **how) is None
    one_array = pp.LayerKV(**layer_in_layout("2NHD", layer), kv_layout="2NHD")
    assert write_and_attend(one_array, qkv, *at, rotation=rotation, **how) is None
    quantized = jax.tree.map(lambda x: x.astype(jnp.int8), layer)
    assert write_and_attend(quantized, qkv, *at, rotation=rotation, **how) is None
