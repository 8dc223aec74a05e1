"""sglang-jax: the function under its attention backend `FlashAttention`."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_paged.checks import as_array, checked_array, validate_positive
from pallas_paged.interop import rpa

__all__ = ["install", "ragged_paged_attention"]


def install(max_pages_per_seq: int) -> None:
    """Make the backend `fa` of sglang-jax attend by this library.

    Args:
        max_pages_per_seq: pages of the longest sequence, `ceil(context length / page_size)`.

    Raises:
        ValueError: it is not a positive integer.
    """
    from sgl_jax.srt.layers.attention import flashattention_backend

    validate_positive(max_pages_per_seq=max_pages_per_seq)
    flashattention_backend.ragged_paged_attention_v3 = functools.partial(
        ragged_paged_attention, max_pages_per_seq=max_pages_per_seq
    )


def ragged_paged_attention(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    kv_cache_fused: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    cu_kv_lens: jax.Array,
    distribution: jax.Array,
    custom_mask: jax.Array | None = None,
    attention_sink: jax.Array | None = None,
    *,
    causal: int = 1,
    sm_scale: Any = 1.0,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    xai_temperature_len: float | None = None,
    softmax_dtype: Any = None,
    mask_aligned_to_cu_kv: bool = False,
    max_pages_per_seq: int | None = None,
    **options: Any,
) -> tuple[jax.Array, jax.Array]:
    """Write new K/V and attend, as `pallas_paged.interop.ragged_paged_attention`.

    Args:
        queries, keys, values, kv_lens, cu_q_lens, distribution, attention_sink: as there.
        kv_cache_fused: `kv_cache` there.
        page_indices: i32 of any length; the pages of row b begin at `cu_kv_lens[b] // page_size`.
        cu_kv_lens: i32`[S + 1]`, sums of the lengths, each rounded up to full pages.
        custom_mask: only None.
        causal: 0 lets a query see later keys of its row.
        sm_scale: a number or, as where a layer has no scaling of its own, a traced f32`[]`.
        sliding_window, soft_cap: None or 0 for none.
        xai_temperature_len: only None.
        softmax_dtype: not used: the softmax is in f32.
        mask_aligned_to_cu_kv: not used without a mask.
        max_pages_per_seq: pages of the longest row; None takes the length of `page_indices`, which
            makes a large table.
        **options: other keywords of either function.

    Returns:
        The output and the cache.

    Raises:
        NotImplementedError: `custom_mask` or `xai_temperature_len` is given.
    """
    del softmax_dtype, mask_aligned_to_cu_kv
    for name, value in (("custom_mask", custom_mask), ("xai_temperature_len", xai_temperature_len)):
        if value is not None:
            raise NotImplementedError(f"{name} must be None")
    page_indices = checked_array("page_indices", page_indices, jnp.int32)
    lens = checked_array("kv_lens", kv_lens, jnp.int32)
    cu_kv_lens = checked_array("cu_kv_lens", cu_kv_lens, jnp.int32)
    cache_shape = as_array("kv_cache_fused", kv_cache_fused).shape
    if len(cache_shape) not in (4, 5):
        raise ValueError(f"kv_cache_fused.shape={cache_shape} must have 4 or 5 axes")
    if max_pages_per_seq is not None:
        validate_positive(max_pages_per_seq=max_pages_per_seq)
    page_size = cache_shape[1]
    size = min(max_pages_per_seq or page_indices.size, page_indices.size)
    starts = cu_kv_lens[: lens.size, None] // page_size
    tables = page_indices.at[starts + jnp.arange(size)].get(mode="clip")
    if isinstance(sm_scale, jax.Array):
        queries, sm_scale = (queries * sm_scale).astype(queries.dtype), 1.0
    result: Any = rpa.ragged_paged_attention(
        queries,
        keys,
        values,
        kv_cache_fused,
        kv_lens,
        tables,
        cu_q_lens,
        distribution,
        attention_sink,
        sm_scale=sm_scale,
        sliding_window=sliding_window or None,
        soft_cap=soft_cap or None,
        use_causal_mask=bool(causal),
        **options,
    )
    return result
