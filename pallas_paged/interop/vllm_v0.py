"""Conversion to and from the paged K/V cache of vLLM's first kernels ("v0").

    key_cache    [num_blocks, num_kv_heads, head_size / x, block_size, x]    x = 16 / itemsize
    value_cache  [num_blocks, num_kv_heads, head_size, block_size]

In `key_cache` 16 bytes of a token are neighbours, in `value_cache` a page's tokens of one element.
vLLM has it in `csrc/attention` and as views in `vllm/attention/ops/paged_attn.py`. Its newer caches
are the layouts `"NHD"` and `"2NHD"`, which need no conversion.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from pallas_paged.checks import as_array
from pallas_paged.pages.layout import K, KVLayout, V, checked_layout, checked_pages

_K_AXES, _V_AXES = "PHDNx", "PHDN"


def from_vllm_v0(
    key_cache: ArrayLike, value_cache: ArrayLike, *, kv_layout: KVLayout = "HPND"
) -> tuple[jax.Array, jax.Array | None]:
    """Return the pages of a cache in a layout of this library, with the same bits.

    Both caches are copied, also inside `jit`.

    Args:
        key_cache: `[num_blocks, num_kv_heads, head_size / x, block_size, x]` of any dtype, with
            x = 16 / itemsize.
        value_cache: `[num_blocks, num_kv_heads, head_size, block_size]` of the same dtype.
        kv_layout: the layout of the result, as in `pallas_paged.paged_attention`.

    Returns:
        `(k_pages, v_pages)`; `v_pages` is None in layouts of one array.

    Raises:
        ValueError: a shape or dtype is wrong, or there is no such layout.
    """
    layout = checked_layout(kv_layout)
    keys, values = as_array("key_cache", key_cache), as_array("value_cache", value_cache)
    dtype, shape = jnp.dtype(keys.dtype), tuple(keys.shape)
    x = 16 // dtype.itemsize
    if len(shape) != 5 or shape[4] != x:
        raise ValueError(
            f"key_cache.shape={shape} must be [num_blocks, num_kv_heads, head_size / x, block_size,"
            f" x] with {x=}, which is 16 bytes of {dtype.name}"
        )
    num_pages, num_kv_heads, parts, page_size, _ = shape
    wanted = (num_pages, num_kv_heads, parts * x, page_size)
    if values.shape != wanted or values.dtype != dtype:
        raise ValueError(
            f"value_cache {values.dtype.name}{list(values.shape)} must be"
            f" {dtype.name}{list(wanted)}, [num_blocks, num_kv_heads, head_size,"
            " block_size]"
        )
    axes = layout.axes.replace("2", "")
    order = axes.replace("D", "Dx")
    k = jnp.transpose(_bits(keys), [_K_AXES.index(axis) for axis in order])
    v = jnp.transpose(_bits(values), [_V_AXES.index(axis) for axis in axes])
    k = k.reshape(v.shape)
    if not layout.one_array:
        return lax.bitcast_convert_type(k, dtype), lax.bitcast_convert_type(v, dtype)
    both = jnp.stack([k, v], axis=layout.axes.index("2"))
    given = layout.shape(H=num_kv_heads, P=num_pages, N=page_size, D=parts * x)
    return lax.bitcast_convert_type(both.reshape(given), dtype), None


def to_vllm_v0(
    k_pages: ArrayLike, v_pages: ArrayLike | None = None, *, kv_layout: KVLayout = "HPND"
) -> tuple[jax.Array, jax.Array]:
    """Return the cache `(key_cache, value_cache)` of pages, with the same bits.

    The inverse of `from_vllm_v0`. The pages are copied, also inside `jit`.

    Args:
        k_pages: pages in the order of `kv_layout`. 16 bytes must be a divisor of those of a head.
        v_pages: same shape and dtype; None where `k_pages` hold K and V.
        kv_layout: the layout of the pages, as in `pallas_paged.paged_attention`.

    Raises:
        ValueError: a shape or dtype is wrong, or there is no such layout.
    """
    layout = checked_layout(kv_layout)
    pages = checked_pages(layout, k_pages, v_pages)
    shape = layout.full_shape(tuple(pages[0].shape))
    if pages[-1].shape != pages[0].shape or pages[-1].dtype != pages[0].dtype:
        raise ValueError(
            f"v_pages {pages[-1].dtype.name}{list(pages[-1].shape)} must be like k_pages"
            f" {pages[0].dtype.name}{list(pages[0].shape)}"
        )
    x = 16 // pages[0].dtype.itemsize
    head_dim = layout.size(shape, "D")
    if head_dim % x:
        raise ValueError(f"{head_dim=} must be a multiple of {x}, 16 bytes of {pages[0].dtype}")
    given = [layout.with_all_axes(_bits(array)) for array in pages]
    axes = layout.axes.replace("2", "")
    k, v = (array[layout.index(kv)] for kv, array in ((K, given[0]), (V, given[-1])))
    k = k.reshape(*k.shape[:-1], head_dim // x, x)
    order = axes.replace("D", "Dx")
    k = jnp.transpose(k, [order.index(axis) for axis in _K_AXES])
    v = jnp.transpose(v, [axes.index(axis) for axis in _V_AXES])
    dtype = pages[0].dtype
    return lax.bitcast_convert_type(k, dtype), lax.bitcast_convert_type(v, dtype)


def _bits(x: Any) -> jax.Array:
    """Return elements as integers: XLA's CPU compiler widens bf16, which changes NaNs."""
    return lax.bitcast_convert_type(jnp.asarray(x), f"uint{8 * x.dtype.itemsize}")
