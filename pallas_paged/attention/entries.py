"""The entries to attention over pages: check the arguments, choose an implementation, call it."""

from __future__ import annotations

from typing import Any, Literal, Unpack, overload

import jax
from jax.typing import ArrayLike

from pallas_paged.attention import dispatch
from pallas_paged.attention.arguments import checked_arrays
from pallas_paged.attention.options import (
    AttentionOptions,
    RaggedAttentionOptions,
    check_names,
    static_options,
)
from pallas_paged.checks import as_array, check_flag, default_promotion
from pallas_paged.pages.layer import LayerKV


@overload
def paged_attention(
    q: ArrayLike,
    layer: LayerKV,
    block_tables: ArrayLike,
    seq_lens: ArrayLike,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[AttentionOptions],
) -> jax.Array: ...


@overload
def paged_attention(
    q: ArrayLike,
    layer: LayerKV,
    block_tables: ArrayLike,
    seq_lens: ArrayLike,
    *,
    return_lse: Literal[True],
    **options: Unpack[AttentionOptions],
) -> tuple[jax.Array, jax.Array]: ...


@default_promotion()
def paged_attention(
    q: ArrayLike,
    layer: LayerKV,
    block_tables: ArrayLike,
    seq_lens: ArrayLike,
    *,
    return_lse: bool = False,
    **options: Unpack[AttentionOptions],
) -> Any:
    """Attend with one query token per sequence to its K/V pages, read in place.

    The K/V of the current token must be in the pages already, and `seq_lens` counts it. Slots past
    the tokens of a sequence, pages that no sequence owns and table entries past its blocks may hold
    anything.

    A logit is `soft_cap(q.k * sm_scale) + alibi_slopes[h] * (key position - query position)`.
    Kernels contain code only for the options that are given.

    On a mesh each device attends with its own heads: shard the pages, and scales of tokens, over
    their KV heads alone, and `q`, `alibi_slopes` and `sinks` over theirs. Sequences may be sharded
    over another axis of the mesh. Pages that are sharded in another way are refused while
    compiling.

    Under `jax.grad` every implementation has gradients in `q`, the pages, `alibi_slopes` and
    `sinks`, of `out` and of `lse`; with int8 or fp8 pages kernels have those in `q`, `alibi_slopes`
    and `sinks`. The forward pass has the same bits as without. The gradient of pages has their
    shape, and is 0 where no query sees a token. The kernels sum over sequences that share a page in
    a fixed order. Forward mode (`jax.jvp`) and gradients of gradients are those of `"xla"` alone.

    Args:
        q: f32, bf16 or f16 `[B, num_q_heads, head_dim]`, with a head_dim of up to 512. Query head h
            reads KV head `h // (num_q_heads // num_kv_heads)`.
        layer: pages of the dtype of `q`, int8 or float8_e4m3fn. Raw arrays become a layer by
            `LayerKV(k_pages, v_pages)`.
        block_tables: i32`[B, pages_per_seq]`, the page of each block of each sequence, or the same
            flat, i32`[B * pages_per_seq]`. Entries past a sequence's blocks may hold any integer.
        seq_lens: i32`[B]`, tokens of each sequence. Lengths are clipped to the range from 0 to what
            `block_tables` can address.
        return_lse: also return the log-sum-exp of the logits. Static.
        **options: of `AttentionOptions`.

    Returns:
        out `[B, num_q_heads, head_dim]`, with the head_dim of V, in the dtype of `q`; or
        `(out, lse)` with the natural-log `lse` f32`[B, num_q_heads]`. A sequence of length 0 gives
        `out = 0`, `lse = -inf`, with or without sinks.

    Raises:
        ValueError: a shape, dtype, head count or option breaks a rule above.
        NotImplementedError: the named implementation can't do this call here, or its gradient is
            asked for in int8 or fp8 pages, in scales, or twice, which only `"xla"` has; the message
            says why.
        TypeError: an unknown keyword.

    Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with
    PagedAttention", SOSP 2023; split-KV as in Flash-Decoding, balanced over the lengths.
    """
    check_names("paged_attention", options, AttentionOptions)
    check_flag("return_lse", return_lse)
    arrays = checked_arrays(q, layer, block_tables, seq_lens, options)
    how = static_options(arrays.head_dim, options)
    out, lse = dispatch.attend("decode", arrays, how)
    return (out, lse) if return_lse else out


@overload
def ragged_paged_attention(
    q: ArrayLike,
    layer: LayerKV,
    block_tables: ArrayLike,
    seq_lens: ArrayLike,
    cu_q_lens: ArrayLike,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[RaggedAttentionOptions],
) -> jax.Array: ...


@overload
def ragged_paged_attention(
    q: ArrayLike,
    layer: LayerKV,
    block_tables: ArrayLike,
    seq_lens: ArrayLike,
    cu_q_lens: ArrayLike,
    *,
    return_lse: Literal[True],
    **options: Unpack[RaggedAttentionOptions],
) -> tuple[jax.Array, jax.Array]: ...


@default_promotion()
def ragged_paged_attention(
    q: ArrayLike,
    layer: LayerKV,
    block_tables: ArrayLike,
    seq_lens: ArrayLike,
    cu_q_lens: ArrayLike,
    *,
    return_lse: bool = False,
    **options: Unpack[RaggedAttentionOptions],
) -> Any:
    """Attend with any number of newest tokens per sequence to its K/V pages, read in place.

    Prompts, chunks of prompts on a cached prefix, a few tokens that verify a speculation and single
    tokens can be mixed in one call: the queries of sequence b are
    `q[cu_q_lens[b]:cu_q_lens[b + 1]]`. Their K/V must be in the pages already and `seq_lens` counts
    them. Query i of q_len is at position `seq_lens[b] - q_len + i`, and sees the positions up to
    its own, or with `causal=False` all of them. On a mesh as `paged_attention`, with tokens and
    sequences replicated.

    Args:
        q: f32, bf16 or f16 `[T, num_q_heads, head_dim]`, queries of one sequence after another.
        layer, block_tables, seq_lens, return_lse: as in `paged_attention`, for B sequences.
        cu_q_lens: i32`[B + 1]`, rising from 0: where the queries of each sequence begin and end. A
            sequence may have none; tokens from `cu_q_lens[B]` on are padding. Values are made to
            rise from 0 and clipped to T. A causal query left of position 0 sees no key.
        **options: of `RaggedAttentionOptions`. Sequences whose queries fit one tile are split by
            `fixed_split_size`.

    Returns:
        out `[T, num_q_heads, head_dim]`, with the head_dim of V, in the dtype of `q`; or
        `(out, lse)` with the natural-log `lse` f32`[T, num_q_heads]`. Padding tokens and queries
        that see no key give `out = 0`, `lse = -inf`.

    Raises:
        ValueError, NotImplementedError, TypeError: as `paged_attention`.

    Source: Dao, "FlashAttention-2", 2023, over pages; heads packed into the tiles as in Ye et al.,
    "FlashInfer", 2025; tree masks as in Miao et al., "SpecInfer", 2024.
    """
    check_names("ragged_paged_attention", options, RaggedAttentionOptions)
    check_flag("return_lse", return_lse)
    offsets = as_array("cu_q_lens", cu_q_lens)
    arrays = checked_arrays(q, layer, block_tables, seq_lens, options, cu_q_lens=offsets)
    how = static_options(arrays.head_dim, options)
    out, lse = dispatch.attend("ragged", arrays, how, with_lse=return_lse)
    return (out, lse) if return_lse else out
