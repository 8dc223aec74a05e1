"""The entries to attention over pages: check the arguments, choose an implementation, call it."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, SupportsFloat, Unpack, overload

import jax
from jax.typing import ArrayLike

from pallas_paged.attention import dispatch
from pallas_paged.attention.arguments import (
    check_causal,
    checked_arrays,
    checked_fixed_split_size,
    checked_offsets,
    checked_tree_mask,
    logit_options,
    of_first_rows,
)
from pallas_paged.attention.dispatch import Implementation
from pallas_paged.attention.jax_keywords import JaxKeywords, with_jax_keywords
from pallas_paged.checks import default_promotion, static_integer
from pallas_paged.kernels.mosaic_sm80.config import MosaicSm80DecodeConfig, MosaicSm80RaggedConfig
from pallas_paged.kernels.mosaic_sm90.config import MosaicDecodeConfig, MosaicRaggedConfig
from pallas_paged.kernels.triton.config import DecodeConfig, RaggedConfig
from pallas_paged.pages.layout import KVLayout


@overload
def paged_attention(
    q: ArrayLike,
    k_pages: ArrayLike,
    v_pages: ArrayLike | None,
    block_tables: ArrayLike,
    seq_lens: ArrayLike | None = ...,
    k_scales: ArrayLike | None = ...,
    v_scales: ArrayLike | None = ...,
    *,
    num_seqs: ArrayLike | None = ...,
    sm_scale: SupportsFloat | None = ...,
    q_scale: SupportsFloat | None = ...,
    soft_cap: SupportsFloat | None = ...,
    sliding_window: int | None = ...,
    alibi_slopes: ArrayLike | None = ...,
    sinks: ArrayLike | None = ...,
    kv_layout: KVLayout = ...,
    return_lse: Literal[False] = ...,
    implementation: Implementation | None = ...,
    config: DecodeConfig | MosaicDecodeConfig | MosaicSm80DecodeConfig | None = ...,
    fixed_split_size: int | None = ...,
    **jax_keywords: Unpack[JaxKeywords],
) -> jax.Array: ...


@overload
def paged_attention(
    q: ArrayLike,
    k_pages: ArrayLike,
    v_pages: ArrayLike | None,
    block_tables: ArrayLike,
    seq_lens: ArrayLike | None = ...,
    k_scales: ArrayLike | None = ...,
    v_scales: ArrayLike | None = ...,
    *,
    num_seqs: ArrayLike | None = ...,
    sm_scale: SupportsFloat | None = ...,
    q_scale: SupportsFloat | None = ...,
    soft_cap: SupportsFloat | None = ...,
    sliding_window: int | None = ...,
    alibi_slopes: ArrayLike | None = ...,
    sinks: ArrayLike | None = ...,
    kv_layout: KVLayout = ...,
    return_lse: Literal[True],
    implementation: Implementation | None = ...,
    config: DecodeConfig | MosaicDecodeConfig | MosaicSm80DecodeConfig | None = ...,
    fixed_split_size: int | None = ...,
    **jax_keywords: Unpack[JaxKeywords],
) -> tuple[jax.Array, jax.Array]: ...


@default_promotion()
def paged_attention(
    q: ArrayLike,
    k_pages: ArrayLike,
    v_pages: ArrayLike | None,
    block_tables: ArrayLike,
    seq_lens: ArrayLike | None = None,
    k_scales: ArrayLike | None = None,
    v_scales: ArrayLike | None = None,
    *,
    num_seqs: ArrayLike | None = None,
    sm_scale: SupportsFloat | None = None,
    q_scale: SupportsFloat | None = None,
    soft_cap: SupportsFloat | None = None,
    sliding_window: int | None = None,
    alibi_slopes: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    kv_layout: KVLayout = "HPND",
    return_lse: bool = False,
    implementation: Implementation | None = None,
    config: DecodeConfig | MosaicDecodeConfig | MosaicSm80DecodeConfig | None = None,
    fixed_split_size: int | None = None,
    **jax_keywords: Unpack[JaxKeywords],
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attend with one query token per sequence to its K/V pages, read in place.

    The K/V of the current token must be in the pages already, and `seq_lens` counts it. Slots past
    a row's length, pages that no row owns and table entries past a row's blocks may hold anything.

    A logit is `soft_cap(q.k * sm_scale) + alibi_slopes[h] * (key position - query position)`.
    Kernels contain code only for the options that are given.

    On a mesh each device attends with its own heads: cut the pages, and scales of tokens, over
    their KV heads alone, and `q`, `alibi_slopes` and `sinks` over theirs. Rows may be cut over
    another axis of the mesh. Pages that are cut in another way are refused while compiling.

    `jax.experimental.pallas.ops.gpu.paged_attention` has the same page layout and the same order of
    positional arguments, and its keywords `lengths`, `k_scales_pages`, `v_scales_pages` and
    `attn_logits_soft_cap` are accepted too. It expects `q` already scaled: pass `sm_scale=1.0`.

    Under `jax.grad` every implementation has gradients in `q`, the pages, `alibi_slopes` and
    `sinks`, of `out` and of `lse`; the kernels with int8 or fp8 pages in all but the pages. The
    forward pass has the same bits as without. The gradient of pages has their shape, and is 0 where
    no query sees a token. The kernels sum over rows that share a page in a fixed order.

    Args:
        q: f32, bf16 or f16 `[B, num_q_heads, head_dim]`, with a head_dim of up to 512.
        k_pages: `[num_kv_heads, num_pages, page_size, head_dim]`, the dtype of `q`, or int8 or
            float8_e4m3fn. Query head h reads KV head `h // (num_q_heads // num_kv_heads)`. Other
            orders of the axes: see `kv_layout`.
        v_pages: same shape and dtype as `k_pages`; None in layouts of one array for K and V.
        block_tables: i32`[B, pages_per_seq]`, the page of each block of each row, or the same flat,
            i32`[B * pages_per_seq]`. Entries past a row's blocks may hold any integer.
        seq_lens: i32`[B]`, tokens of each row. Lengths are clipped to the range from 0 to what
            `block_tables` can address.
        k_scales: dequantization scales of int8 and float8_e4m3fn pages (value = element * scale),
            as `write_kv` writes them: f32`[num_kv_heads, num_pages, page_size]`, in the order of
            axes of `kv_layout` without K and V, or f32`[]`. None with other pages. The Triton
            kernels with bf16 or f16 `q` multiply weights by V's scales in f16: scales from 2**-64
            to 2**50 are safe, so V from 1e-17 to 1e17.
        v_scales: like `k_scales`.
        num_seqs: i32`[]`: rows from there on count as empty, whatever `seq_lens`, `block_tables`
            and `cu_q_lens` hold for them. None means all rows.
        sm_scale: factor of q.k; None means `head_dim ** -0.5`. Static.
        q_scale: dequantization scale of `q` (value = element * q_scale), one more factor of q.k, or
            None. In ragged paged attention "v3" it cancels, since the kernel divides `q` by it
            first: leave it out here for such a `q`. Static.
        soft_cap: c of `c * tanh(x / c)`, at least 1e-30; None means no cap. Static.
        sliding_window: a query at p sees the keys j with `p - sliding_window < j <= p`; blocks left
            of the window are not read. None means all keys. Static.
        alibi_slopes: f32`[num_q_heads]` (Press et al. 2022), or None.
        sinks: f32`[num_q_heads]`, one more logit per head in the denominator, without a value, as
            in gpt-oss (after Xiao et al. 2024), or None. `lse` includes it.
        kv_layout: the order of the axes of the pages. N are tokens of a page, H KV heads, P pages:

            - `"HPND"`: `[num_kv_heads, num_pages, page_size, head_dim]`.
            - `"NHD"`: `[num_pages, page_size, num_kv_heads, head_dim]`, as vLLM, FlashInfer and
              EasyDeL have it.
            - `"HND"`: `[num_pages, num_kv_heads, page_size, head_dim]`, FlashInfer, TensorRT-LLM.
            - `"2NHD"`: one array of K and V, `[num_pages, 2, page_size, num_kv_heads, head_dim]`,
              vLLM, FlashInfer.
            - `"NH2D"`: one array, `[num_pages, page_size, 2 * num_kv_heads, head_dim]`, of heads
              K0 V0 K1 V1 and so on: ragged paged attention "v3", Levanter.
            - `"N2HD"`: one array of the same shape, of all heads of K, then all heads of V. It
              can't be cut over the devices of a mesh.

            Each is read in place. One array is given as `k_pages`. Its scales are two arrays all
            the same. Static.
        return_lse: also return the log-sum-exp of the logits. Static.
        implementation: `"triton"`, `"mosaic_sm90"` and `"mosaic_sm80"`, kernels for GPUs; the same
            with `"_interpret"` at the end, interpreted on any device, slowly; `"xla"`, for any
            device; or None for the fastest that can do the call on the device, which is
            `"xla"` without a GPU. A named implementation never falls back. `"mosaic_sm90"` needs a
            Hopper GPU, JAX 0.11, q and pages of bf16 or f16, head_dim 64, 128 or 256, pages of 8
            tokens or more and at most 64 query heads per KV head. `"mosaic_sm80"` needs compute
            capability 8.0, JAX 0.11, q of bf16 or f16, and rows of K and V of whole 16 bytes.
        config: `DecodeConfig` of the Triton kernels, `MosaicDecodeConfig` or
            `MosaicSm80DecodeConfig` of the Mosaic ones. On a GPU its type also chooses the
            implementation, unless one is named. `"xla"` ignores it. None means the heuristic's
            choice.
        fixed_split_size: tokens after which every row is split, a multiple of 64. The bits of a row
            then do not depend on the other rows of the batch nor on their number (batch
            invariance), at the cost of memory for an f32 partial result for every
            `fixed_split_size` tokens that the table has room for. Excludes `config`. Static.
        **jax_keywords: the keywords of JAX's op named above.

    Returns:
        out `[B, num_q_heads, head_dim]` in the dtype of `q`, or `(out, lse)` with the natural-log
        `lse` f32`[B, num_q_heads]`. A row of length 0 gives `out = 0`, `lse = -inf`, with or
        without sinks.

    Raises:
        ValueError: a shape, dtype, head count or option breaks a rule above.
        NotImplementedError: the named implementation can't do this call here, or its gradient is
            asked for in int8 or fp8 pages, in scales, or twice, which only `"xla"` has; the message
            says why.
        TypeError: an unknown keyword.

    Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with
    PagedAttention", SOSP 2023; split-KV as in Flash-Decoding, balanced over the lengths.
    """
    given: dict[str, Any] = with_jax_keywords(
        dict(seq_lens=seq_lens, k_scales=k_scales, v_scales=v_scales, soft_cap=soft_cap),
        jax_keywords,
    )
    arrays = checked_arrays(
        q=q,
        k_pages=k_pages,
        v_pages=v_pages,
        block_tables=block_tables,
        seq_lens=given["seq_lens"],
        k_scales=given["k_scales"],
        v_scales=given["v_scales"],
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        kv_layout=kv_layout,
        one_query_a_row=True,
    )
    out, lse = dispatch.attend(
        "decode",
        of_first_rows(arrays, num_seqs),
        options=logit_options(
            arrays.head_dim,
            sm_scale=sm_scale,
            q_scale=q_scale,
            soft_cap=given["soft_cap"],
            sliding_window=sliding_window,
        ),
        implementation=implementation,
        config=config,
        fixed_split_size=checked_fixed_split_size(fixed_split_size),
    )
    return (out, lse) if return_lse else out


@overload
def ragged_paged_attention(
    q: ArrayLike,
    k_pages: ArrayLike,
    v_pages: ArrayLike | None,
    block_tables: ArrayLike,
    seq_lens: ArrayLike,
    cu_q_lens: ArrayLike,
    *,
    k_scales: ArrayLike | None = ...,
    v_scales: ArrayLike | None = ...,
    num_seqs: ArrayLike | None = ...,
    sm_scale: SupportsFloat | None = ...,
    q_scale: SupportsFloat | None = ...,
    soft_cap: SupportsFloat | None = ...,
    sliding_window: int | None = ...,
    alibi_slopes: ArrayLike | None = ...,
    sinks: ArrayLike | None = ...,
    causal: bool = ...,
    tree_mask: ArrayLike | None = ...,
    kv_layout: KVLayout = ...,
    return_lse: Literal[False] = ...,
    implementation: Implementation | None = ...,
    config: RaggedConfig | MosaicRaggedConfig | MosaicSm80RaggedConfig | None = ...,
    fixed_split_size: int | None = ...,
    expected_seqs: int | None = ...,
) -> jax.Array: ...


@overload
def ragged_paged_attention(
    q: ArrayLike,
    k_pages: ArrayLike,
    v_pages: ArrayLike | None,
    block_tables: ArrayLike,
    seq_lens: ArrayLike,
    cu_q_lens: ArrayLike,
    *,
    k_scales: ArrayLike | None = ...,
    v_scales: ArrayLike | None = ...,
    num_seqs: ArrayLike | None = ...,
    sm_scale: SupportsFloat | None = ...,
    q_scale: SupportsFloat | None = ...,
    soft_cap: SupportsFloat | None = ...,
    sliding_window: int | None = ...,
    alibi_slopes: ArrayLike | None = ...,
    sinks: ArrayLike | None = ...,
    causal: bool = ...,
    tree_mask: ArrayLike | None = ...,
    kv_layout: KVLayout = ...,
    return_lse: Literal[True],
    implementation: Implementation | None = ...,
    config: RaggedConfig | MosaicRaggedConfig | MosaicSm80RaggedConfig | None = ...,
    fixed_split_size: int | None = ...,
    expected_seqs: int | None = ...,
) -> tuple[jax.Array, jax.Array]: ...


@default_promotion()
def ragged_paged_attention(
    q: ArrayLike,
    k_pages: ArrayLike,
    v_pages: ArrayLike | None,
    block_tables: ArrayLike,
    seq_lens: ArrayLike,
    cu_q_lens: ArrayLike,
    *,
    k_scales: ArrayLike | None = None,
    v_scales: ArrayLike | None = None,
    num_seqs: ArrayLike | None = None,
    sm_scale: SupportsFloat | None = None,
    q_scale: SupportsFloat | None = None,
    soft_cap: SupportsFloat | None = None,
    sliding_window: int | None = None,
    alibi_slopes: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    causal: bool = True,
    tree_mask: ArrayLike | None = None,
    kv_layout: KVLayout = "HPND",
    return_lse: bool = False,
    implementation: Implementation | None = None,
    config: RaggedConfig | MosaicRaggedConfig | MosaicSm80RaggedConfig | None = None,
    fixed_split_size: int | None = None,
    expected_seqs: int | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attend with any number of newest tokens per sequence to its K/V pages, read in place.

    Whole prompts, chunks of prompts on a cached prefix, a few tokens that verify a speculation and
    single tokens can be mixed in one call: row b's queries are `q[cu_q_lens[b]:cu_q_lens[b + 1]]`.
    Their K/V must be in the pages already and `seq_lens` counts them. Query i of q_len is at
    position `seq_lens[b] - q_len + i`, and sees the positions up to its own, or with `causal=False`
    all of them. On a mesh as `paged_attention`, with tokens and rows whole on every device.

    Args:
        q: f32, bf16 or f16 `[T, num_q_heads, head_dim]`, the rows' queries one after another.
        k_pages, v_pages, block_tables, seq_lens: as in `paged_attention`, for B rows.
        cu_q_lens: i32`[B + 1]`, rising from 0: where the queries of each row begin and end. Rows
            may have none; tokens from `cu_q_lens[B]` on are padding. Values are made to rise from 0
            and clipped to T. A causal query left of position 0 sees no key.
        k_scales, v_scales, num_seqs, sm_scale, q_scale, soft_cap, sliding_window, alibi_slopes,
            sinks: as in `paged_attention`.
        causal: False lets every query of a row see all of the row's keys, as in encoders, and in
            attention to the keys of another text, which may be fewer than the queries. A window
            then still hides the keys left of it, and none to the right. ALiBi takes distances as
            `-abs(key position - query position)`, as FlashAttention does. Static.
        tree_mask: bool`[B, max_q, max_q]`, or None: query i of row b sees the key of its row's
            newest token j (of q_len) where `tree_mask[b, i, j]`, in place of causality; it sees all
            older keys. Positions, for the window and for ALiBi, stay those of the slots. Queries
            past max_q see only the older keys.
        kv_layout, return_lse, implementation: as in `paged_attention`; `"mosaic_sm90"` takes any
            number of query heads per KV head.
        config: `RaggedConfig`, `MosaicRaggedConfig` or `MosaicSm80RaggedConfig`, as in
            `paged_attention`.
        fixed_split_size: as in `paged_attention`; rows are split whose queries fit one tile.
        expected_seqs: rows that are likely to have queries, where most of the B are empty. The
            Mosaic kernel and its config are chosen for that number. None means all. Static.

    Returns:
        out `[T, num_q_heads, head_dim]` in the dtype of `q`, or `(out, lse)` with the natural-log
        `lse` f32`[T, num_q_heads]`. Padding tokens and queries that see no key give `out = 0`,
        `lse = -inf`.

    Raises:
        ValueError: a shape, dtype, head count or option breaks a rule above.
        NotImplementedError: as in `paged_attention`.

    Source: Dao, "FlashAttention-2", 2023, over pages; heads packed into the tiles as in Ye et al.,
    "FlashInfer", 2025; tree masks as in Miao et al., "SpecInfer", 2024.
    """
    arrays = checked_arrays(
        q=q,
        k_pages=k_pages,
        v_pages=v_pages,
        block_tables=block_tables,
        seq_lens=seq_lens,
        k_scales=k_scales,
        v_scales=v_scales,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        kv_layout=kv_layout,
        one_query_a_row=False,
    )
    arrays = dataclasses.replace(
        arrays,
        cu_q_lens=checked_offsets("cu_q_lens", cu_q_lens, arrays.num_seqs),
        tree_mask=checked_tree_mask(tree_mask, arrays.num_seqs),
    )
    check_causal(causal, has_tree=tree_mask is not None)
    out, lse = dispatch.attend(
        "ragged",
        of_first_rows(arrays, num_seqs),
        options=logit_options(
            arrays.head_dim,
            sm_scale=sm_scale,
            q_scale=q_scale,
            soft_cap=soft_cap,
            sliding_window=sliding_window,
            causal=causal,
        ),
        implementation=implementation,
        config=config,
        fixed_split_size=checked_fixed_split_size(fixed_split_size),
        expected_seqs=(
            None if expected_seqs is None else static_integer("expected_seqs", expected_seqs)
        ),
        with_lse=return_lse,
    )
    return (out, lse) if return_lse else out
