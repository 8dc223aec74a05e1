"""JAX's deprecated op, `jax.experimental.pallas.ops.gpu.paged_attention`, on this library."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from pallas_paged.attention.entries import paged_attention as attend
from pallas_paged.checks import as_array
from pallas_paged.pages.layer import LayerKV

__all__ = ["paged_attention"]


def paged_attention(
    q: ArrayLike,
    k_pages: ArrayLike,
    v_pages: ArrayLike,
    block_tables: ArrayLike,
    lengths: ArrayLike | None,
    k_scales_pages: ArrayLike | None = None,
    v_scales_pages: ArrayLike | None = None,
    *,
    block_h: int = 16,
    pages_per_compute_block: int = 8,
    k_splits: int = 16,
    num_warps: int = 8,
    num_stages: int = 2,
    interpret: bool = False,
    debug: bool = False,
    mask_value: float = 0.0,
    attn_logits_soft_cap: float | None = None,
) -> jax.Array:
    """Attend with the arguments of JAX's op: same positions, same keywords, `q` already scaled.

    Args:
        q: f32, bf16 or f16 `[B, num_q_heads, head_dim]`, multiplied by the scale of the logits.
        k_pages: `[num_kv_heads, num_pages, page_size, head_dim]`.
        v_pages: same shape and dtype.
        block_tables: i32`[B, pages_per_seq]`.
        lengths: i32`[B]`, tokens of each sequence; None means all that `block_tables` can address.
        k_scales_pages: of int8 and float8_e4m3fn pages, f32`[num_kv_heads, num_pages, page_size]`.
        v_scales_pages: like `k_scales_pages`.
        interpret: run without a GPU.
        attn_logits_soft_cap: `soft_cap` of `pallas_paged.paged_attention`.
        block_h, pages_per_compute_block, k_splits, num_warps, num_stages, debug, mask_value: not
            used; they tune JAX's kernel.

    Returns:
        `[B, num_q_heads, head_dim]` in the dtype of `q`.

    Raises:
        ValueError: as `pallas_paged.paged_attention`.
    """
    del block_h, pages_per_compute_block, k_splits, num_warps, num_stages, debug, mask_value
    layer = LayerKV(k_pages, v_pages, k_scales_pages, v_scales_pages, kv_layout="HPND")  # type: ignore[arg-type]
    if lengths is None:
        shape = as_array("block_tables", block_tables).shape
        if len(shape) != 2:
            raise ValueError(f"block_tables.shape={shape} must be [B, pages_per_seq]")
        lengths = jnp.full(shape[0], shape[1] * layer.page_size, jnp.int32)
    return attend(
        q,
        layer,
        block_tables,
        lengths,
        sm_scale=1.0,
        soft_cap=attn_logits_soft_cap,
        implementation="xla" if interpret else None,
    )
