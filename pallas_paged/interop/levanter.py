"""Levanter: `levanter.layers.attention` and `levanter.layers.kv_cache` on this library."""

from __future__ import annotations

from typing import Any, SupportsFloat

import jax
import jax.numpy as jnp

from pallas_paged.attention.entries import ragged_paged_attention as attend
from pallas_paged.checks import as_array
from pallas_paged.pages.layer import LayerKV
from pallas_paged.pages.pool import write_kv

__all__ = ["install", "kv_update_unified_prefix", "ragged_paged_attention"]


def install() -> None:
    """Make Levanter attend and write its pages by this library, in all models and its engine.

    Programs that JAX has traced before keep what they had: call it first, or `jax.clear_caches()`.
    """
    from levanter.layers import attention, kv_cache

    attention.ragged_paged_attention = ragged_paged_attention
    kv_cache.kv_update_unified_prefix = kv_update_unified_prefix


def ragged_paged_attention(
    q: Any,
    kv_pages: Any,
    kv_lens: Any,
    page_indices: Any,
    cu_q_lens: Any,
    num_seqs: jax.Array,
    sm_scale: SupportsFloat = 1.0,
    soft_cap: SupportsFloat | None = None,
) -> Any:
    """Attend as `levanter.layers.attention.ragged_paged_attention`, over pages read in place.

    Args:
        q: NamedArray of the axes position, kv_head, q_heads_per_group and head_size.
        kv_pages: NamedArray `[page, slot, 2 * kv_head, head_size]`, K and V of a head next to each
            other, of the dtype of `q` or any other dtype of pages, to which `q` is then rounded.
        kv_lens: NamedArray i32`[seq]`; rows that Levanter marks as invalid are at the end.
        page_indices: NamedArray i32`[seq, page]`; marks of invalid pages may be any integer.
        cu_q_lens: i32`[seq + 1]`, a NamedArray or an array.
        num_seqs: i32`[]`, the valid rows.
        sm_scale, soft_cap: as in `pallas_paged.ragged_paged_attention`.

    Returns:
        NamedArray with the axes of `q`, in their order.
    """
    import haliax as hax

    ordered = q.rearrange(("position", "kv_head", "q_heads_per_group", "head_size"))
    num_tokens, num_kv_heads, group, head_dim = ordered.array.shape
    flat = ordered.array.reshape(num_tokens, num_kv_heads * group, head_dim)
    pages = kv_pages.array
    out = attend(
        flat.astype(pages.dtype),
        LayerKV(pages, kv_layout="NH2D"),
        page_indices.array,
        kv_lens.array,
        getattr(cu_q_lens, "array", cu_q_lens),
        num_seqs=jnp.reshape(num_seqs, ()),
        sm_scale=sm_scale,
        soft_cap=soft_cap,
    )
    out = out.astype(flat.dtype).reshape(ordered.array.shape)
    return hax.named(out, ordered.axes).rearrange(q.axes)


def kv_update_unified_prefix(
    kv_pages: jax.Array,
    t_pages: jax.Array,
    t_slots: jax.Array,
    new_k: jax.Array,
    new_v: jax.Array,
    K: jax.Array,
) -> jax.Array:
    """Write new tokens as `levanter.layers.kv_cache.kv_update_unified_prefix`, in one scatter.

    Args:
        kv_pages: `[num_pages, page_size, 2 * num_kv_heads, head_dim]`.
        t_pages: i32`[T]`, the page of each token.
        t_slots: i32`[T]`, its place in the page; tokens outside of a page are not written.
        new_k: `[T, num_kv_heads, head_dim]`.
        new_v: the same shape.
        K: i32`[]`; tokens from there on are not written.

    Returns:
        The pages with the tokens.
    """
    layer = LayerKV(kv_pages, kv_layout="NH2D")
    t_pages, t_slots = as_array("t_pages", t_pages), as_array("t_slots", t_slots)
    if t_pages.shape != new_k.shape[:1] or t_slots.shape != t_pages.shape:
        raise ValueError(f"{t_pages.shape=} and {t_slots.shape=} must be [T] with {new_k.shape=}")
    valid = (jnp.arange(t_pages.shape[0]) < K) & (t_pages >= 0) & (t_pages < layer.num_pages)
    valid &= (t_slots >= 0) & (t_slots < layer.page_size)
    slots = jnp.where(valid, t_pages * layer.page_size + t_slots, -1)
    return write_kv(layer, new_k, new_v, slots.astype(jnp.int32)).k_pages
