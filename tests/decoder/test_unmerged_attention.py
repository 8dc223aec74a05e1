"""Attention of decoding rows without its merge, and with the write of the newest tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_paged as pp
from pallas_paged.decoder.unmerged_attention import unmerged_attention, write_and_attend
from tests.support import raw
from tests.support.kernel_calls import decode_and_write_arrays as a_call
from tests.support.marks import needs_mosaic, needs_triton, slow
from tests.support.page_layouts import layer_in_layout
from tests.support.promotion import strict_promotion

SLOPES = np.linspace(0.1, 0.3, 6, dtype=np.float32)
KERNELS = [
    pytest.param("triton_interpret", marks=needs_triton),
    pytest.param("mosaic_sm90_interpret", marks=needs_mosaic),
]


@pytest.fixture(autouse=True)
def _strict_promotion():
    with strict_promotion():
        yield


@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("with_sinks", [True, *slow([False])])
def test_its_merge_is_attention_bit_for_bit(implementation, with_sinks):
    layer, qkv, _, table, lens, _ = a_call(130)
    q = qkv[:, :, :-2].reshape(1, 6, 64)
    sinks = np.linspace(-1, 3, 6, dtype=np.float32) if with_sinks else None
    how = dict(sinks=sinks, implementation=implementation, sliding_window=100)
    options = how | raw.by(implementation)

    @jax.jit
    def both(layer, q, table, lens):
        attention = unmerged_attention(q, layer, table, lens, **options)
        assert attention.shape == (1, 6 * 64) and attention.dtype == jnp.bfloat16
        out = raw.paged_attention(q, layer.k_pages, layer.v_pages, table, lens, **how)
        return attention.merged(), out

    merged, out = map(np.asarray, both(layer, q, table, lens))
    np.testing.assert_array_equal(merged, out.reshape(1, -1))


@needs_triton
@pytest.mark.parametrize(
    ("lens", "head_dim", "kv_layout", "options"),
    [
        ([64, 65], 64, "NHD", {"sliding_window": 40}),
        # Empty rows, and slots out of range.
        ([192, 17, 0, 129, 1, 33, 20, 40], 32, "HPND", {"alibi_slopes": -SLOPES}),
        *slow([([0, 1], 64, "HPND", {}), ([129, 33], 128, "HND", {"soft_cap": 20.0})]),
    ],
)
def test_the_newest_tokens_are_attended_to_and_written(lens, head_dim, kv_layout, options):
    layer, qkv, slots, table, lens, rotation = a_call(*lens, head_dim=head_dim)
    if len(lens) == 8:
        slots[-2:] = -1, layer.k_pages[0, ..., 0].size
    # Their slots may hold anything before.
    is_written = (slots >= 0) & (slots < layer.k_pages[0, ..., 0].size)
    layer.k_pages.reshape(2, -1, head_dim)[:, slots[is_written]] = np.nan
    layer = pp.LayerKV(**layer_in_layout(kv_layout, layer), kv_layout=kv_layout)

    @jax.jit
    def ours(layer, qkv, slots, table, lens):
        how = dict(rotation=rotation, implementation="triton", interpret=True)
        attention, got = write_and_attend(qkv, layer, table, lens, slots, **how, **options)
        return attention.merged(), got

    @jax.jit
    def wanted(layer, qkv, slots, table, lens):
        how = dict(implementation="xla")
        q, layer = pp.rotate_and_write_kv(layer, qkv, slots, rotation=rotation, **how)
        return pp.paged_attention(q, layer, table, lens, **how, **options), layer

    arrays = layer, qkv, slots, table, lens
    (out, got), (expected, layer) = ours(*arrays), wanted(*arrays)
    out, expected = (np.asarray(x, np.float32).reshape(len(lens), -1) for x in (out, expected))
    compared = is_written | (lens == 0)
    np.testing.assert_allclose(out[compared], expected[compared], atol=0.02)
    np.testing.assert_array_equal(got.k_pages, layer.k_pages)
    np.testing.assert_array_equal(got.v_pages, layer.v_pages)


@needs_triton
def test_unmerged_returns_none_without_partials():
    layer, qkv, slots, table, lens, rotation = a_call(20)
    q, how = qkv[:, :, :-2].reshape(1, 6, 64), dict(implementation="triton", interpret=True)
    at = table, lens, slots
    assert unmerged_attention(q, layer, table, lens, implementation="xla") is None
    assert write_and_attend(qkv, layer, *at, rotation=rotation, implementation="xla") is None
    for other in (None, tuple(x[:, :8] for x in rotation)):
        assert write_and_attend(qkv, layer, *at, rotation=other, **how) is None
    small, new, *_, turn = a_call(20, head_dim=8)
    assert write_and_attend(new, small, *at, rotation=turn, **how) is None
    one_array = pp.LayerKV(**layer_in_layout("2NHD", layer), kv_layout="2NHD")
    quantized = jax.tree.map(lambda x: x.astype(jnp.int8), layer)
    for pages in (one_array, quantized):
        assert write_and_attend(qkv, pages, *at, rotation=rotation, **how) is None
