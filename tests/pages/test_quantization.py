"""Tokens as int8 and fp8: rounding, saturation, extreme scales, and pools of many of them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_paged as pp
from tests.support.marks import needs_large_gpu
from tests.support.page_tables import i32, write_kv
from tests.support.quantized_cases import LARGEST

TINY = np.finfo(np.float32).tiny


def written(rows, dtype, scale=None):
    """Elements and scales of rows written as K of one head; 2 rows of 6 elements at most."""
    padded = np.zeros((2, 1, 6), np.float32)
    padded[: len(rows), 0, : len(rows[0])] = rows
    pages = np.zeros((1, 2, 1, 6), jnp.dtype(dtype))
    scales = np.zeros((1, 2, 1), np.float32) if scale is None else np.float32(scale)
    layer = pp.LayerKV(pages, pages, scales, scales, kv_layout="HPND")
    layer = write_kv(layer, padded, padded, i32(0, 1))
    elements = layer.k_pages[0, : len(rows), 0, : len(rows[0])].astype(np.float32)
    return elements, layer.k_scales.ravel()[: len(rows)]


@pytest.mark.parametrize(
    ("dtype", "scale", "row", "expected"),
    [
        ("int8", 1, [0.5, 1.5, 2.5, -0.5, -1.5, 126.5], [0, 2, 2, 0, -2, 126]),
        ("int8", 1, [127.5, 1e30, -1e30, -128], [127, 127, -127, -127]),
        ("int8", 1, [np.nan, np.inf, -np.inf], [0, 127, -127]),
        ("int8", 0, [1, -5], [0, 0]),
        ("float8_e4m3fn", 1, [17, 19, 21, 465, 480, 447], [16, 20, 20, 448, 448, 448]),
        ("float8_e4m3fn", 1, [1e30, -1e30, 2**-10, 2**-9 * 1.5], [448, -448, 0, 2**-8]),
        ("float8_e4m3fn", 1, [np.nan, np.inf, -np.inf], [np.nan, 448, -448]),
    ],
)
def test_ties_go_to_even_and_values_saturate(dtype, scale, row, expected):
    elements, _ = written(np.float32([row]), dtype, scale=scale)
    np.testing.assert_array_equal(elements, [expected])


@pytest.mark.parametrize(
    ("row", "elements", "scale"),  # as multiples of the largest element, but for `elements`
    [
        ([0, -0.0], [0, 0], 0),
        ([TINY / 2, 0], [0, 0], 0),
        ([TINY / 300, -TINY / 300], [0, 0], 0),
        ([TINY, 0], [1, 0], TINY),  # the least scale that is not 0
        ([0, 7e35], [0, 1], 7e35),
        ([1, np.nan], [0, 0], np.nan),
        ([1, np.inf], [0, 0], np.nan),
        ([1, -np.inf], [0, 0], np.nan),
    ],
)
@pytest.mark.parametrize("dtype", LARGEST)
def test_scales_of_extreme_tokens(dtype, row, elements, scale):
    """Tiny tokens become zeros, and a token that is not finite becomes NaN, the next one not."""
    rows = np.float32([row, [1, 1]]) * np.float32(LARGEST[dtype])
    got, scales = written(rows, dtype)
    np.testing.assert_array_equal(got, np.float32([elements, [1, 1]]) * LARGEST[dtype])
    np.testing.assert_allclose(scales, [scale, 1], rtol=1e-6)


def test_tokens_of_zeros_are_written_without_a_nan_on_the_way():
    """So that `jax_debug_nans`, which looks at every value, can be on."""
    pages, scales = np.zeros((1, 2, 1, 6), np.int8), np.zeros((1, 2, 1), np.float32)
    layer = pp.LayerKV(pages, pages, scales, scales, kv_layout="HPND")
    zeros = np.zeros((2, 1, 6), np.float32)
    with jax.debug_nans(True):
        layer = pp.write_kv(layer, zeros, zeros, i32(0, 1))
    np.testing.assert_array_equal(layer.k_pages, pages)


# Pools around 2^31 and 2^32 elements, on a large GPU: written and copied at both ends. XLA's
# scatters and gathers index heads and slots with int32, which suffices. The offsets that XLA and
# the kernels compute from these indices must be wider. Attention that reads such pages is in
# tests/attention/test_attention.py.
NUM_HEADS, PAGE_SIZE, HEAD_DIM = 8, 16, 128
ELEMENTS = NUM_HEADS * PAGE_SIZE * HEAD_DIM  # of a page
NUM_PLACES = 30  # pages that are written, evenly from end to end


copy = jax.jit(pp.copy_pages, donate_argnums=0)


@partial(jax.jit, donate_argnums=0)
def write(pool, k, v, slots):
    return pp.KVPool(layers=(pp.write_kv(pool.layers[0], k, v, slots),))


def make_pool(num_pages, kv_dtype):
    sizes = dict(num_kv_heads=NUM_HEADS, page_size=PAGE_SIZE, head_dim=HEAD_DIM)
    sizes |= dict(num_layers=1, num_pages=num_pages, kv_layout="HPND")
    return pp.create_kv_pool(dtype=kv_dtype, **sizes)


def assert_holds(pool, places, wanted):
    """A pool has the pages of a small one at these places, and nothing elsewhere."""
    for x, y in zip(jax.tree.leaves(pool), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(x[:, places], y)
        assert jnp.count_nonzero(x) == jnp.count_nonzero(y)


@needs_large_gpu
@pytest.mark.parametrize(
    ("num_pages", "kv_dtype"),
    [
        (2**17 - 1, "int8"),  # just below 2^31 elements
        (2**17 + 1, "int8"),
        (2**17 + 1, "float8_e4m3fn"),
        (3 * 2**30 // ELEMENTS, "int8"),
        (2**18 + 1, "int8"),  # just beyond 2^32
        (2**18 + 1, "float8_e4m3fn"),
    ],
)
def test_pages_at_both_ends_are_written_and_copied(num_pages, kv_dtype):
    places = np.linspace(0, num_pages - 1, NUM_PLACES, dtype=np.int32)
    slots = (places[:, None] * PAGE_SIZE + np.arange(PAGE_SIZE, dtype=np.int32)).ravel()
    shape = (2, len(slots), NUM_HEADS, HEAD_DIM)
    tokens = np.random.default_rng(0).standard_normal(shape, np.float32)
    wanted = write(make_pool(NUM_PLACES, kv_dtype), *tokens, np.arange(len(slots), dtype=np.int32))
    pool = write(make_pool(num_pages, kv_dtype), *tokens, slots)
    assert_holds(pool, places, wanted)
    # Both ends are swapped, so all pages must be read before any is written.
    pool = copy(pool, pp.PageCopies(src_pages=places, dst_pages=places[::-1]))
    assert_holds(pool, places[::-1], wanted)
