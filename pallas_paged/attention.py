"""The entries to attention over pages: validate, choose an implementation, call it."""

from __future__ import annotations

from typing import Any, SupportsFloat

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from pallas_paged import dispatch
from pallas_paged.kernels import xla
from pallas_paged.kernels.mosaic.config import MosaicDecodeConfig, MosaicRaggedConfig
from pallas_paged.kernels.triton.config import DecodeConfig, RaggedConfig
from pallas_paged.quantization import checked_scales
from pallas_paged.validation import (
    check_ends,
    check_one_query_each,
    check_pages,
    check_per_head,
    check_queries,
    check_states,
    check_tree_mask,
    logit_options,
    with_dtype,
)


def paged_attention(
    q: ArrayLike,
    k_pages: ArrayLike,
    v_pages: ArrayLike,
    block_tables: ArrayLike,
    seq_lens: ArrayLike,
    k_scales: ArrayLike | None = None,
    v_scales: ArrayLike | None = None,
    *,
    sm_scale: SupportsFloat | None = None,
    soft_cap: SupportsFloat | None = None,
    sliding_window: int | None = None,
    alibi_slopes: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
    config: DecodeConfig | MosaicDecodeConfig | None = None,
) -> Any:
    """Attention of one query token per sequence over its K/V pages, read in place.

    The K/V of the current token must be in the pages already and `seq_lens` counts it. Slots past
    a row's length, pages that no row owns and table entries past a row's blocks may hold anything.
    The pages' layout and the order of the positional arguments are those of
    `jax.experimental.pallas.ops.gpu.paged_attention`, which differs in one point: it expects `q`
    scaled already, so the same call here is `sm_scale=1.0`.

    A logit is `soft_cap(q.k * sm_scale) + alibi_slopes[h] * (key position - query position)`.
    What an option needs is in the kernel only where the option is given.

    Args:
      q: f32, bf16 or f16 `[B, num_q_heads, head_dim]`.
      k_pages, v_pages: `[num_kv_heads, num_pages, page_size, head_dim]`, the dtype of `q`, or
        int8 or float8_e4m3fn. Query head h reads KV head `h // (num_q_heads // num_kv_heads)`.
      block_tables: i32`[B, pages_per_seq]`, the page of each block of each row.
      seq_lens: i32`[B]`, tokens of each row. Lengths are taken as at least 0 and at most what
        `block_tables` can address.
      k_scales, v_scales: what an element of one-byte pages counts for, as `write_kv` has it:
        f32`[num_kv_heads, num_pages, page_size]` or f32`[]`; None with other pages. Under q of bf16
        or f16 the Triton kernels round weights to f16 under V's scales: from 2^-64 to 2^50 times a
        scale of 1, so V of 1e-17 to 1e17, is safe with them.
      sm_scale: factor of q.k; None means `head_dim ** -0.5`. Static.
      soft_cap: c of `c * tanh(x / c)`, at least 1e-30; None means no cap. Static.
      sliding_window: a query at p sees the keys j with `p - sliding_window < j <= p`; blocks left
        of the window are not read. None means all keys. Static.
      alibi_slopes: f32`[num_q_heads]` (Press et al. 2022), or None.
      sinks: f32`[num_q_heads]`, one more logit per head in the denominator, with no value, as in
        gpt-oss (after Xiao et al. 2024), or None. `lse` includes it.
      return_lse: also return the log-sum-exp of the logits. Static.
      implementation: `"triton"` and `"mosaic_gpu"`, kernels for GPUs; `"triton_interpret"` and
        `"mosaic_gpu_interpret"`, the same ones, interpreted on any device, which is slow; `"xla"`,
        for any device; or None for the fastest that can do the call here, which without a GPU is
        `"xla"`. A named one never falls back. `"mosaic_gpu"` needs a Hopper GPU, JAX 0.11, q and
        pages of bf16 or f16, head_dim 64, 128 or 256, pages of 8 tokens or more and, for decoding,
        at most 64 query heads per KV head.
      config: `DecodeConfig` of the Triton kernels or `MosaicDecodeConfig` of the Mosaic ones, which
        is also a choice of implementation where there is a GPU and none is named; `"xla"` has no
        use for either. None takes the tuned one.

    Returns:
      out `[B, num_q_heads, head_dim]` in the dtype of `q`, or `(out, lse)` with the natural-log
      `lse` f32`[B, num_q_heads]`. A row of length 0 gives `out = 0`, `lse = -inf`, with or without
      sinks.

    Raises:
      ValueError: if a shape, dtype, head count or option breaks a rule above.
      NotImplementedError: if the named implementation can't do this here, or one without gradients
        is differentiated (only `"xla"` has any); the message says why.

    Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with
    PagedAttention", SOSP 2023; the split over K/V is Flash-Decoding's, balanced.
    """
    arrays = [with_dtype(x) for x in (q, k_pages, v_pages, block_tables, seq_lens)]
    check_queries(arrays[0], "B")
    check_pages(*arrays)
    check_one_query_each(arrays[0], arrays[4])
    scales = checked_scales(arrays[1], k_scales, v_scales)
    _, num_q_heads, head_dim = arrays[0].shape
    queries, k, v, tables, lens = map(jnp.asarray, arrays)
    out, lse = dispatch.paged_decode(
        queries,
        k,
        v,
        tables,
        lens,
        check_per_head("alibi_slopes", alibi_slopes, num_q_heads),
        check_per_head("sinks", sinks, num_q_heads),
        *scales,
        options=logit_options(
            head_dim, sm_scale=sm_scale, soft_cap=soft_cap, sliding_window=sliding_window
        ),
        implementation=implementation,
        config=config,
    )
    return (out, lse) if return_lse else out


def ragged_paged_attention(
    q: ArrayLike,
    k_pages: ArrayLike,
    v_pages: ArrayLike,
    block_tables: ArrayLike,
    seq_lens: ArrayLike,
    cu_q_lens: ArrayLike,
    k_scales: ArrayLike | None = None,
    v_scales: ArrayLike | None = None,
    *,
    sm_scale: SupportsFloat | None = None,
    soft_cap: SupportsFloat | None = None,
    sliding_window: int | None = None,
    alibi_slopes: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    tree_mask: ArrayLike | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
    config: RaggedConfig | MosaicRaggedConfig | None = None,
) -> Any:
    """Attention of any number of newest tokens per sequence over its K/V pages, read in place.

    Whole prompts, chunks of prompts on a cached prefix, a few tokens to verify a speculation and
    single tokens, mixed as they come: row b's queries are `q[cu_q_lens[b]:cu_q_lens[b + 1]]`. Their
    K/V must be in the pages already and `seq_lens` counts them, so that query i of q_len stands at
    position `seq_lens[b] - q_len + i`, and sees the positions up to its own.

    Args:
      q: f32, bf16 or f16 `[T, num_q_heads, head_dim]`, the rows' queries one after another.
      k_pages, v_pages, block_tables, seq_lens: as in `paged_attention`, for B rows.
      cu_q_lens: i32`[B + 1]`, rising from 0: where the queries of each row begin and end. Rows may
        have none; tokens from `cu_q_lens[B]` on are nobody's. The values are taken as rising from
        0, and as at most T. A query left of position 0 sees nothing.
      k_scales, v_scales, sm_scale, soft_cap, sliding_window, alibi_slopes, sinks: as in
        `paged_attention`.
      tree_mask: bool`[B, max_q, max_q]`, or None: query i of row b sees its row's j-th newest-token
        key (of q_len) where `tree_mask[b, i, j]`, in place of causality; older keys are all seen.
        Positions, for the window and for ALiBi, stay those of the slots. Queries past max_q see
        only the older keys.
      return_lse, implementation: as in `paged_attention`;
        `"mosaic_gpu"` takes any number of query heads per KV head.
      config: `RaggedConfig` or `MosaicRaggedConfig`, as in `paged_attention`.

    Returns:
      out `[T, num_q_heads, head_dim]` in the dtype of `q`, or `(out, lse)` with the natural-log
      `lse` f32`[T, num_q_heads]`. Tokens of no row and queries that see no key give `out = 0`,
      `lse = -inf`.

    Raises:
      ValueError: if a shape, dtype, head count or option breaks a rule above.
      NotImplementedError: as in `paged_attention`.

    Source: Dao, "FlashAttention-2", 2023, over pages; heads packed into the tiles as in Ye et al.,
    "FlashInfer", 2025; tree masks as in Miao et al., "SpecInfer", 2024.
    """
    arrays = [with_dtype(x) for x in (q, k_pages, v_pages, block_tables, seq_lens)]
    check_queries(arrays[0], "T")
    check_pages(*arrays)
    scales = checked_scales(arrays[1], k_scales, v_scales)
    _, num_q_heads, head_dim = arrays[0].shape
    num_seqs = arrays[4].shape[0]
    queries, k, v, tables, lens = map(jnp.asarray, arrays)
    out, lse = dispatch.ragged_paged_attention(
        queries,
        k,
        v,
        tables,
        lens,
        check_ends("cu_q_lens", cu_q_lens, num_seqs),
        None,
        check_per_head("alibi_slopes", alibi_slopes, num_q_heads),
        check_per_head("sinks", sinks, num_q_heads),
        check_tree_mask(tree_mask, num_seqs),
        *scales,
        options=logit_options(
            head_dim, sm_scale=sm_scale, soft_cap=soft_cap, sliding_window=sliding_window
        ),
        implementation=implementation,
        config=config,
        with_lse=return_lse,
    )
    return (out, lse) if return_lse else out


def merge_attention_states(outs: ArrayLike, lses: ArrayLike) -> tuple[jax.Array, jax.Array]:
    """Merge attention over disjoint sets of keys into attention over their union.

    Args:
      outs: f32, bf16 or f16 `[S, ..., D]`, the S states' outputs.
      lses: f32`[S, ...]`, their natural-log log-sum-exps; -inf marks a state that saw no key,
        whose `outs` may then hold anything.

    Returns:
      `(out [..., D] in the dtype of outs, lse f32[...])`. Where no state saw a key, `out = 0` and
      `lse = -inf`.

    Raises:
      ValueError: if the shapes do not belong together or a dtype is not allowed.
    """
    outs, lses = with_dtype(outs), with_dtype(lses)
    check_states(outs, lses)
    return xla.merge_states(jnp.asarray(outs), jnp.asarray(lses))
