"""ejkernel, and with it EasyDeL: implementations for `ejkernel.kernel_registry`."""

from __future__ import annotations

from typing import Any

import jax

from pallas_paged.attention.entries import ragged_paged_attention as attend
from pallas_paged.interop import rpa
from pallas_paged.pages.layer import LayerKV

__all__ = ["ragged_page_attention_v3", "register", "unified_attention"]


def register(priority: int = 100) -> None:
    """Register the functions of this module, on GPUs and in place of ejkernel's `xla` elsewhere.

    Args:
        priority: ejkernel's own have 0, and the highest is chosen.
    """
    from ejkernel.kernels import Backend, Platform, kernel_registry

    for function in (unified_attention, ragged_page_attention_v3):
        for platform in Platform:
            backend = Backend.ANY if platform == Platform.XLA else Backend.GPU
            kernel_registry.register(function.__name__, platform, backend, priority)(function)


# ejkernel compares names, order and defaults of parameters, and reads the `del` statements: what is
# deleted and does not tune is refused where it is given.


def unified_attention(
    queries: jax.Array,
    key_cache: jax.Array,
    value_cache: jax.Array,
    kv_lens: jax.Array,
    block_tables: jax.Array,
    query_start_loc: jax.Array,
    alibi_slopes: jax.Array | None = None,
    qq_bias: jax.Array | None = None,
    softmax_aux: jax.Array | None = None,
    *,
    softmax_scale: float | None = None,
    causal: bool = True,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    seq_threshold_3d: int | None = None,
    num_par_softmax_segments: int | None = None,
    block_dim: int = 128,
    num_warps: int | None = None,
    num_stages: int | None = None,
) -> jax.Array:
    """Attend to caches `[blocks, block_size, num_kv_heads, head_dim]`, read in place.

    Args:
        queries, kv_lens, block_tables, query_start_loc, alibi_slopes, causal, sliding_window: as
            `q`, `seq_lens`, `block_tables`, `cu_q_lens` and so on in
            `pallas_paged.ragged_paged_attention`.
        key_cache: K, of the dtype of `queries`.
        value_cache: V.
        qq_bias: refused.
        softmax_aux: f32`[num_q_heads]`, sinks, or None.
        softmax_scale: None means `head_dim ** -0.5`.
        logits_soft_cap: `soft_cap`.
        seq_threshold_3d, num_par_softmax_segments, block_dim, num_warps, num_stages: not used; they
            tune ejkernel's own kernels.

    Returns:
        `[total_tokens, num_q_heads, head_dim]`.
    """
    del qq_bias, seq_threshold_3d, num_par_softmax_segments, block_dim, num_warps, num_stages
    return attend(
        queries,
        LayerKV(key_cache, value_cache),
        block_tables,
        kv_lens,
        query_start_loc,
        sm_scale=softmax_scale,
        soft_cap=logits_soft_cap,
        sliding_window=sliding_window,
        alibi_slopes=alibi_slopes,
        sinks=softmax_aux,
        causal=causal,
    )


def ragged_page_attention_v3(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    kv_cache: jax.Array,
    kv_lens: jax.Array,
    block_tables: jax.Array,
    query_start_loc: jax.Array,
    distribution: jax.Array,
    softmax_aux: jax.Array | None = None,
    *,
    softmax_scale: float = 1.0,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    chunk_prefill_size: int | None = None,
    num_kv_pages_per_block: int | None = None,
    num_queries_per_block: int | None = None,
    vmem_limit_bytes: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Write new K/V and attend, as `pallas_paged.interop.ragged_paged_attention`.

    Args:
        queries, keys, values, kv_cache, kv_lens, distribution: as there.
        block_tables: `page_indices`.
        query_start_loc: `cu_q_lens`.
        softmax_aux: `attention_sink`.
        softmax_scale: `sm_scale`.
        logits_soft_cap: `soft_cap`.
        sliding_window, q_scale, k_scale, v_scale: as there.
        chunk_prefill_size, num_kv_pages_per_block, num_queries_per_block, vmem_limit_bytes: not
            used; they tune ejkernel's own kernels.

    Returns:
        The output and the cache.
    """
    result: Any = rpa.ragged_paged_attention(
        queries,
        keys,
        values,
        kv_cache,
        kv_lens,
        block_tables,
        query_start_loc,
        distribution,
        softmax_aux,
        sm_scale=softmax_scale,
        sliding_window=sliding_window,
        soft_cap=logits_soft_cap,
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
        chunk_prefill_size=chunk_prefill_size,
        num_kv_pages_per_block=num_kv_pages_per_block,
        num_queries_per_block=num_queries_per_block,
        vmem_limit_bytes=vmem_limit_bytes,
    )
    return result
