"""vLLM's first K/V cache: converted there and back, bit for bit."""

from __future__ import annotations

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_paged.interop.vllm_v0 import from_vllm_v0, to_vllm_v0
from tests.support.marks import slow
from tests.support.page_layouts import LAYOUTS, in_layout

P, H, N, D = 5, 3, 4, 32


def caches(dtype):
    """(key_cache, value_cache), and the same tokens as `[H, P, N, D]`, of random bits."""
    itemsize = jnp.dtype(dtype).itemsize
    x = 16 // itemsize
    rng = np.random.default_rng(0)
    k, v = rng.integers(0, 256, (2, H, P, N, D * itemsize), np.uint8).view(jnp.dtype(dtype))
    key_cache = np.empty((P, H, D // x, N, x), k.dtype)
    value_cache = np.empty((P, H, D, N), v.dtype)
    for page, head, token, element in np.ndindex(P, H, N, D):
        key_cache[page, head, element // x, token, element % x] = k[head, page, token, element]
        value_cache[page, head, element, token] = v[head, page, token, element]
    return (key_cache, value_cache), (k, v)


def assert_same_bits(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        a, b = (np.ascontiguousarray(x).view(np.uint8) for x in (a, b))
        np.testing.assert_array_equal(a, b)


DTYPES = ("float32", "bfloat16", "int8", "float16", "float8_e4m3fn")
PAIRS = [(layout, DTYPES[index % 3]) for index, layout in enumerate(LAYOUTS)]
SLOW = slow(x for x in itertools.product(LAYOUTS, DTYPES) if x not in PAIRS)


@pytest.mark.parametrize(("kv_layout", "dtype"), [*PAIRS, *SLOW])
def test_converted_there_and_back_inside_jit(kv_layout, dtype):
    old, tokens = caches(dtype)
    pages = jax.jit(partial(from_vllm_v0, kv_layout=kv_layout))(*old)
    assert_same_bits(pages, in_layout(kv_layout, *tokens))
    assert_same_bits(jax.jit(partial(to_vllm_v0, kv_layout=kv_layout))(*pages), old)


def test_other_caches_are_refused():
    (k, v), (k_pages, v_pages) = caches("bfloat16")
    with pytest.raises(ValueError, match=r"key_cache.shape=.* must be \[num_blocks, .* with x=8"):
        from_vllm_v0(k.reshape(P, H, D // 4, N, 4), v)
    with pytest.raises(ValueError, match=r"value_cache bfloat16\[5, 3, 4, 32\] must be bfloat16\["):
        from_vllm_v0(k, v.swapaxes(2, 3))
    with pytest.raises(ValueError, match=r"v_pages float32\[.* must be like k_pages bfloat16\["):
        to_vllm_v0(k_pages, v_pages.astype(np.float32))
    with pytest.raises(ValueError, match="head_dim=4 must be a multiple of 8, 16 bytes of bfloat1"):
        to_vllm_v0(k_pages[..., :4], v_pages[..., :4])
    with pytest.raises(ValueError, match="kv_layout='v0' must be one of"):
        from_vllm_v0(k, v, kv_layout="v0")
