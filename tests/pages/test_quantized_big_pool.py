"""Quantized pools around 2^31 and 2^32 elements, on a large GPU: written and copied at both ends.

XLA's scatters and gathers index heads and slots with int32, which suffices. The offsets that XLA
and the kernels compute from these indices must be wider. Attention that reads such pools is in
tests/attention/test_attention.py.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_paged as pp
from tests.support.marks import needs_large_gpu

NUM_HEADS, PAGE_SIZE, HEAD_DIM = 8, 16, 128
ELEMENTS = NUM_HEADS * PAGE_SIZE * HEAD_DIM  # of a page
NUM_PLACES = 30  # pages that are written, evenly from end to end


pytestmark = needs_large_gpu
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
