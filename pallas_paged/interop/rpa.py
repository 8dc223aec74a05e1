"""Ragged paged attention "v3": the signature of tpu-inference, tokamax, MaxText and sglang-jax."""

from __future__ import annotations

from typing import Any, SupportsFloat, TypedDict, Unpack

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from pallas_paged.attention.entries import ragged_paged_attention as attend
from pallas_paged.attention.options import Implementation
from pallas_paged.checks import (
    as_array,
    default_promotion,
    static_number,
    validate_pool_size,
    validate_positive,
)
from pallas_paged.interop.rpa_cache import (
    CacheSizes,
    check_floats,
    check_tuning,
    checked_rows,
    new_slots,
)
from pallas_paged.pages.layer import LayerKV
from pallas_paged.pages.pool import write_kv
from pallas_paged.pages.quantization import is_quantized


class Tuning(TypedDict, total=False):
    """Keywords that tune or debug the callers' own kernels, and change no result."""

    chunk_prefill_size: Any
    decode_block_sizes: Any
    prefill_block_sizes: Any
    d_block_sizes: Any
    p_block_sizes: Any
    m_block_sizes: Any
    num_kv_pages_per_block: Any
    num_queries_per_block: Any
    vmem_limit_bytes: Any
    decode_query_size: Any
    mask_value: Any
    skip_kv_mask: Any
    debug_mode: Any
    disable_bounds_checks: Any
    disable_semaphore_checks: Any


def get_kv_cache_shape(
    total_num_pages: int,
    page_size: int,
    actual_num_kv_heads: int,
    actual_head_dim: int,
    kv_dtype: DTypeLike,
) -> tuple[int, int, int, int, int]:
    """Return the shape of a cache: `[total_num_pages, page_size, num_kv_heads, 2, head_dim]`.

    Nothing is padded: lanes of 128 elements and words of 32 bits are needs of TPUs. `kv_dtype` is
    taken as callers give it, and changes nothing.

    Raises:
        ValueError: a size is not a positive integer, or pages of this size are not supported.
    """
    validate_pool_size(total_num_pages, page_size)
    validate_positive(actual_num_kv_heads=actual_num_kv_heads, actual_head_dim=actual_head_dim)
    return total_num_pages, page_size, actual_num_kv_heads, 2, actual_head_dim


@default_promotion()
def ragged_paged_attention(
    queries: ArrayLike,
    keys: ArrayLike,
    values: ArrayLike,
    kv_cache: ArrayLike,
    kv_lens: ArrayLike,
    page_indices: ArrayLike,
    cu_q_lens: ArrayLike,
    distribution: ArrayLike,
    attention_sink: ArrayLike | None = None,
    *,
    sinks: ArrayLike | None = None,
    sm_scale: SupportsFloat = 1.0,
    sliding_window: int | None = None,
    soft_cap: SupportsFloat | None = None,
    q_scale: SupportsFloat | None = None,
    k_scale: SupportsFloat | None = None,
    v_scale: SupportsFloat | None = None,
    use_causal_mask: bool = True,
    update_kv_cache: bool = True,
    skip_kv_update: bool = False,
    out_dtype: DTypeLike | None = None,
    return_lse: bool = False,
    implementation: Implementation | None = None,
    interpret: bool = False,
    **tuning: Unpack[Tuning],
) -> tuple[jax.Array, ...]:
    """Write the K/V of new tokens into a cache and attend with their queries to it.

    The cache is read in place, and written in place where it is donated. Row b of the batch has the
    tokens `cu_q_lens[b]:cu_q_lens[b + 1]`, and `kv_lens` counts them. Only the first
    `distribution[2]` rows are alive: what the arrays hold for others is not used.

    Args:
        queries: f32, bf16 or f16 `[T, num_q_heads, head_dim]`.
        keys: `[T, num_kv_heads, head_dim]`. Into a cache of one-byte elements, keys of its dtype go
            as they are and others as `keys / k_scale`, rounded and saturated.
        values: like `keys`, with `v_scale`.
        kv_cache: `[num_pages, page_size, 2 * num_kv_heads, head_dim]`, K and V of a head next to
            each other, of the dtype of `queries`, int8 or float8_e4m3fn; or of any other dtype of
            pages, to which `queries` are then rounded. The third axis may be split in two, as
            `get_kv_cache_shape` and the TPU kernels do, or K and V of a head may share the last
            one. Axes may be padded at their ends: heads and elements of padding are read like
            others, and new tokens write zeros there.
        kv_lens: i32`[S]`, tokens of each row, the new ones included.
        page_indices: i32`[S * pages_per_seq]` or `[S, pages_per_seq]`. Entries past a row's pages
            may hold any integer.
        cu_q_lens: i32`[S + 1]`.
        distribution: i32`[3]`. Only its last element, the number of rows, matters here: the kernels
            need no order of rows.
        attention_sink: f32`[num_q_heads]`, one more logit per head in the denominator, or None.
        sinks: another name of `attention_sink`.
        sm_scale: factor of q.k. Static, as all scales are.
        sliding_window: a query at p sees the keys j with `p - sliding_window < j`, or None.
        soft_cap: c of `c * tanh(x / c)`, or None.
        q_scale: not used. The TPU kernels divide queries by it, round them to the dtype of the
            cache and multiply logits by it; here queries are not rounded, so it cancels.
        k_scale: factor of q.k, the dequantization scale of K; None means 1.
        v_scale: factor of the result, the dequantization scale of V; None means 1.
        use_causal_mask: False lets a query see later keys of its row.
        update_kv_cache: False leaves the cache as it is; the new K/V must be there already.
        skip_kv_update: True is another way to say `update_kv_cache=False`.
        out_dtype: dtype of the result; None means that of `queries`.
        return_lse: also return the log-sum-exp of the logits.
        implementation, interpret: as in `pallas_paged.ragged_paged_attention`.
        **tuning: keywords of `Tuning`, not used.

    Returns:
        `(out [T, num_q_heads, head_dim], kv_cache)`, and lse f32`[T, num_q_heads]` if it is asked
        for. Tokens that no row owns have `out = 0` and `lse = -inf`.

    Raises:
        ValueError: a shape, dtype or option breaks a rule.
        TypeError: an unknown keyword.
    """
    check_tuning("ragged_paged_attention", tuning, Tuning)
    if attention_sink is not None and sinks is not None:
        raise TypeError("ragged_paged_attention() got attention_sink twice, once as sinks")
    given = dict(queries=queries, keys=keys, values=values, kv_cache=kv_cache)
    q, k, v, cache = (jnp.asarray(as_array(name, x)) for name, x in given.items())
    check_floats(cache, queries=q, keys=k, values=v)
    rows = checked_rows(kv_lens, page_indices, cu_q_lens, distribution)
    lens, tables, offsets, num_seqs = rows
    sizes = CacheSizes.of(q, k, v, cache)
    k_factor, v_factor = (
        1.0 if scale is None else static_number(name, scale)
        for name, scale in (("k_scale", k_scale), ("v_scale", v_scale))
    )
    pages = cache.reshape(sizes.pages_shape)
    quantized = is_quantized(cache)
    if update_kv_cache and not skip_kv_update:
        k_scale_of_new = v_scale_of_new = None
        if quantized:
            # Keys that come quantized are elements of the cache already: their scale is 1.
            k_scale_of_new, v_scale_of_new = (
                jnp.float32(1 if x.dtype == cache.dtype else factor)
                for x, factor in ((k, k_factor), (v, v_factor))
            )
            k, v = k.astype(jnp.float32), v.astype(jnp.float32)
        layer = LayerKV(pages, None, k_scale_of_new, v_scale_of_new, kv_layout="NH2D")
        num_pages, page_size, _, _ = sizes.pages_shape
        slots = new_slots(q.shape[0], num_pages, page_size, *rows)
        pages = write_kv(layer, sizes.padded(k), sizes.padded(v), slots).k_pages
    scale = static_number("sm_scale", sm_scale)
    scales = dict(k_scales=jnp.float32(k_factor), v_scales=jnp.float32(v_factor))
    layer = LayerKV(pages, None, kv_layout="NH2D", **(scales if quantized else {}))
    with_either_result: Any = attend
    result = with_either_result(
        sizes.padded(q if quantized else q.astype(cache.dtype)),
        layer,
        tables,
        lens,
        offsets,
        num_seqs=num_seqs,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        sinks=sizes.padded_heads(attention_sink if sinks is None else sinks),
        causal=use_causal_mask,
        return_lse=return_lse,
        implementation=implementation,
        interpret=interpret,
        sm_scale=scale if quantized else scale * k_factor,
    )
    out, *lse = result if return_lse else (result,)
    out = out[:, : sizes.num_q_heads, : sizes.head_dim]
    if not quantized and v_factor != 1:
        out = out * jnp.float32(v_factor)
    out = out.astype(q.dtype if out_dtype is None else out_dtype)
    return out, pages.reshape(cache.shape), *(x[:, : sizes.num_q_heads] for x in lse)
