"""Where K/V bytes live: create, write, copy pages.

Each layer has its own pair of arrays: slices of one stacked [num_layers, ...] array would be copied
in every step of a compiled loop.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from pallas_paged.page_table import (
    PageCopies,
    checked_array,
    validate_pool_size,
    validate_positive,
)

POOL_DTYPES = ("float32", "bfloat16", "float16")


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, eq=False)
class KVPool:
    """The pages of all layers; which page holds what is in the `PageTable`.

    Attributes:
        k_pages: per layer, [num_kv_heads, num_pages, page_size, head_dim].
        v_pages: per layer, the same shape.
        k_scales: None, or per layer float32[num_kv_heads, num_pages, page_size] (quantized pools).
        v_scales: like k_scales.
    """

    k_pages: tuple[jax.Array, ...]
    v_pages: tuple[jax.Array, ...]
    k_scales: tuple[jax.Array, ...] | None = None
    v_scales: tuple[jax.Array, ...] | None = None


def create_kv_pool(
    *,
    num_layers: int,
    num_pages: int,
    num_kv_heads: int,
    page_size: int,
    head_dim: int,
    dtype: DTypeLike,
) -> KVPool:
    """Returns a pool of zeros.

    Args:
        num_layers: layers, each with its own arrays.
        num_pages: pages per layer, as in the page table.
        num_kv_heads: K/V heads.
        page_size: tokens per page, a power of two from 1 to 256.
        head_dim: elements per head.
        dtype: float32, bfloat16 or float16.

    Raises:
        ValueError: a size is not a positive integer, or the page size, number of slots or dtype is
            not allowed.
    """
    validate_pool_size(num_pages, page_size)
    validate_positive(num_layers=num_layers, num_kv_heads=num_kv_heads, head_dim=head_dim)
    if jnp.dtype(dtype).name not in POOL_DTYPES:
        raise ValueError(f"dtype={jnp.dtype(dtype).name} must be one of {', '.join(POOL_DTYPES)}")
    shape = (num_kv_heads, num_pages, page_size, head_dim)
    return KVPool(
        k_pages=tuple(jnp.zeros(shape, dtype) for _ in range(num_layers)),
        v_pages=tuple(jnp.zeros(shape, dtype) for _ in range(num_layers)),
    )


def write_kv(
    k_pages: ArrayLike, v_pages: ArrayLike, k: ArrayLike, v: ArrayLike, slots: ArrayLike
) -> tuple[jax.Array, jax.Array]:
    """Writes the K/V of new tokens into one layer's pages, in place where those are donated.

    Args:
        k_pages: floating [num_kv_heads, num_pages, page_size, head_dim].
        v_pages: the same shape and dtype.
        k: floating [T, num_kv_heads, head_dim], cast to the dtype of the pages.
        v: floating, the same shape.
        slots: int32[T] from `slot_mapping`. Slots outside [0, num_pages * page_size) are dropped; a
            slot that is named twice holds one of its tokens, undefined which.

    Returns:
        k_pages and v_pages.

    Raises:
        ValueError: wrong shape or dtype.
    """
    k_pages, v_pages, k, v = map(jnp.asarray, (k_pages, v_pages, k, v))
    for name, array in dict(k_pages=k_pages, v_pages=v_pages, k=k, v=v).items():
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{name} must be floating, got {array.dtype}")
    if k_pages.ndim != 4 or v_pages.shape != k_pages.shape or v_pages.dtype != k_pages.dtype:
        raise ValueError(
            "k_pages and v_pages must be [num_kv_heads, num_pages, page_size, head_dim], alike, "
            f"got {k_pages.dtype}{k_pages.shape} and {v_pages.dtype}{v_pages.shape}"
        )
    num_kv_heads, _, _, head_dim = k_pages.shape
    if k.ndim != 3 or k.shape[1:] != (num_kv_heads, head_dim) or v.shape != k.shape:
        raise ValueError(
            f"k and v must be [T, {num_kv_heads=}, {head_dim=}] like the pages, "
            f"got {k.shape} and {v.shape}"
        )
    slots = checked_array("slots", slots, jnp.int32, (k.shape[0],))
    return _write(k_pages, k, slots), _write(v_pages, v, slots)


def copy_pages(pool: KVPool, copies: PageCopies) -> KVPool:
    """Copies pages within every layer as `fork` and `truncate` ask, in place if pool is donated.

    All pages are read before any is written.

    Args:
        pool: the pool.
        copies: pages to copy; an entry with a source or destination that is no page is dropped.

    Raises:
        ValueError: wrong dtype, or sources and destinations differ in shape.
    """
    shape = jnp.shape(copies.src_pages)
    src = checked_array("copies.src_pages", copies.src_pages, jnp.int32, shape).ravel()
    dst = checked_array("copies.dst_pages", copies.dst_pages, jnp.int32, shape).ravel()

    def copy(pages: jax.Array) -> jax.Array:  # [num_kv_heads, num_pages, ...]
        num_pages = pages.shape[1]
        heads = jnp.arange(pages.shape[0], dtype=jnp.int32)[:, None]
        to = jnp.where((src >= 0) & (src < num_pages), dst, num_pages)
        # The barrier keeps XLA from fusing the gather into the scatter: one kernel that reads and
        # writes the pool can't work in place, and copies all of it.
        copied = lax.optimization_barrier(pages.at[heads, src].get(mode="clip"))
        return pages.at[heads, to].set(copied, mode="drop", wrap_negative_indices=False)

    return jax.tree.map(copy, pool)


def _write(pages: jax.Array, tokens: jax.Array, slots: jax.Array) -> jax.Array:
    num_kv_heads, num_pages, page_size, head_dim = pages.shape
    # Heads are indexed too: XLA's GPU compiler moves the scattered axes to the front, so that a
    # scatter along the slots alone would transpose the pool.
    heads = jnp.arange(num_kv_heads, dtype=jnp.int32)[:, None]
    flat = pages.reshape(num_kv_heads, num_pages * page_size, head_dim)
    flat = flat.at[heads, slots].set(
        tokens.swapaxes(0, 1).astype(pages.dtype), mode="drop", wrap_negative_indices=False
    )
    return flat.reshape(pages.shape)
