"""The entries to attention over pages: validate, choose an implementation, call it."""

from __future__ import annotations

from typing import Any, SupportsFloat, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from pallas_paged import dispatch
from pallas_paged.kernels import xla
from pallas_paged.kernels.logits import LogitOptions
from pallas_paged.kernels.tuning import DecodeConfig, RaggedConfig, decode_config, ragged_config
from pallas_paged.validation import (
    check_integers,
    check_pages,
    check_per_head,
    check_queries,
    check_states,
    check_tree_mask,
    static_number,
    static_window,
    with_dtype,
)

Config = TypeVar("Config", DecodeConfig, RaggedConfig)


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
    config: DecodeConfig | None = None,
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
      k_pages, v_pages: `[num_kv_heads, num_pages, page_size, head_dim]`, the dtype of `q`. Query
        head h reads KV head `h // (num_q_heads // num_kv_heads)`.
      block_tables: i32`[B, pages_per_seq]`, the page of each block of each row.
      seq_lens: i32`[B]`, tokens of each row. Lengths are taken as at least 0 and at most what
        `block_tables` can address.
      k_scales, v_scales: must be None; they hold the places that quantized pages take.
      sm_scale: factor of q.k; None means `head_dim ** -0.5`. Static.
      soft_cap: c of `c * tanh(x / c)`, positive; None means no cap. Static.
      sliding_window: a query at p sees the keys j with `p - sliding_window < j <= p`; blocks left
        of the window are not read. None means all keys. Static.
      alibi_slopes: f32`[num_q_heads]` (Press et al. 2022), or None.
      sinks: f32`[num_q_heads]`, one more logit per head in the denominator, with no value, as in
        gpt-oss (after Xiao et al. 2024), or None. `lse` includes it.
      return_lse: also return the log-sum-exp of the logits. Static.
      implementation: `"triton"`, `"triton_interpret"` (the same kernels, interpreted on any
        device), `"xla"`, or None for the best on this platform. A named one never falls back.
      config: `DecodeConfig` of the Triton kernels, which `"xla"` has no use for; None takes the
        tuned one.

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
    if arrays[0].shape[0] != arrays[4].shape[0]:
        raise ValueError(
            f"q.shape={arrays[0].shape} and seq_lens.shape={arrays[4].shape} must agree in B"
        )
    _check_scales(k_scales, v_scales)
    q, k_pages, v_pages, block_tables, seq_lens = map(jnp.asarray, arrays)
    num_seqs, num_q_heads, head_dim = q.shape
    options = _logit_options(head_dim, sm_scale, soft_cap, sliding_window)
    slopes = check_per_head("alibi_slopes", alibi_slopes, num_q_heads)
    sinks = check_per_head("sinks", sinks, num_q_heads)
    max_kv_len = block_tables.shape[1] * k_pages.shape[2]
    config = _config_or(
        config,
        decode_config(
            num_q_heads=num_q_heads,
            num_kv_heads=k_pages.shape[0],
            head_dim=head_dim,
            max_kv_len=max_kv_len,
            num_seqs=num_seqs,
            itemsize=k_pages.dtype.itemsize,
            num_sms=dispatch.device()[1],
        ),
    )
    decode = dispatch.find("paged_decode", implementation, config)
    with jax.enable_x64(False):  # the kernels count in i32 whatever the caller's integers are
        seq_lens = jnp.clip(seq_lens, 0, max_kv_len)
        out, lse = decode(
            q, k_pages, v_pages, block_tables, seq_lens, slopes, sinks, options=options
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
    config: RaggedConfig | None = None,
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
        have none; tokens from `cu_q_lens[B]` on are nobody's. Values are taken as rising and as at
        most T; a query left of position 0 sees nothing.
      k_scales, v_scales: must be None; they hold the places that quantized pages take.
      sm_scale, soft_cap, sliding_window, alibi_slopes, sinks: as in `paged_attention`.
      tree_mask: bool`[B, max_q, max_q]`, or None: query i of row b sees its row's j-th newest-token
        key (of q_len) where `tree_mask[b, i, j]`, in place of causality; older keys are all seen.
        Positions, for the window and for ALiBi, stay those of the slots. Queries past max_q see
        only the older keys.
      return_lse, implementation: as in `paged_attention`.
      config: `RaggedConfig` of the Triton kernels; None takes the tuned one.

    Returns:
      out `[T, num_q_heads, head_dim]` in the dtype of `q`, or `(out, lse)` with the natural-log
      `lse` f32`[T, num_q_heads]`. Tokens of no row and queries that see no key give `out = 0`,
      `lse = -inf`.

    Raises:
      ValueError: if a shape, dtype, head count or option breaks a rule above.
      NotImplementedError: as in `paged_attention`.

    Source: Dao, "FlashAttention-2", 2023, over pages; the balance is that of Osama et al.,
    "Stream-K", 2023; tree masks as in Miao et al., "SpecInfer", 2024.
    """
    arrays = [with_dtype(x) for x in (q, k_pages, v_pages, block_tables, seq_lens)]
    check_queries(arrays[0], "T")
    check_pages(*arrays)
    _check_scales(k_scales, v_scales)
    q, k_pages, v_pages, block_tables, seq_lens = map(jnp.asarray, arrays)
    _, num_q_heads, head_dim = q.shape
    num_seqs = seq_lens.shape[0]
    cu_q_lens = _checked_cu_q_lens(cu_q_lens, num_seqs)
    options = _logit_options(head_dim, sm_scale, soft_cap, sliding_window)
    slopes = check_per_head("alibi_slopes", alibi_slopes, num_q_heads)
    sinks = check_per_head("sinks", sinks, num_q_heads)
    tree_mask = check_tree_mask(tree_mask, num_seqs)
    return _ragged(
        q,
        k_pages,
        v_pages,
        block_tables,
        seq_lens,
        cu_q_lens,
        None,
        slopes,
        sinks,
        tree_mask,
        options=options,
        return_lse=return_lse,
        implementation=implementation,
        config=config,
    )


def _ragged(
    q,
    k_pages,
    v_pages,
    block_tables,
    seq_lens,
    cu_q_lens,
    q_positions,
    slopes,
    sinks,
    tree_mask,
    *,
    options,
    return_lse,
    implementation,
    config,
):
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads, _, page_size, _ = k_pages.shape
    max_kv_len = block_tables.shape[1] * page_size
    config = _config_or(
        config,
        ragged_config(
            num_tokens=num_tokens,
            num_q_heads=num_q_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_kv_len=max_kv_len,
            num_seqs=seq_lens.shape[0],
            itemsize=k_pages.dtype.itemsize,
            num_sms=dispatch.device()[1],
        ),
    )
    attend = dispatch.find("ragged_paged_attention", implementation, config)
    with jax.enable_x64(False):
        seq_lens = jnp.clip(seq_lens, 0, max_kv_len)
        cu_q_lens = jnp.clip(lax.cummax(cu_q_lens), 0, num_tokens)
        out, lse = attend(
            q,
            k_pages,
            v_pages,
            block_tables,
            seq_lens,
            cu_q_lens,
            q_positions,
            slopes,
            sinks,
            tree_mask,
            options=options,
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


def _check_scales(k_scales: ArrayLike | None, v_scales: ArrayLike | None) -> None:
    if k_scales is not None or v_scales is not None:
        raise NotImplementedError("k_scales and v_scales: quantized pages can't be read yet")


def _checked_cu_q_lens(cu_q_lens: ArrayLike, num_seqs: int) -> jax.Array:
    cu_q_lens = with_dtype(cu_q_lens)
    if cu_q_lens.shape != (num_seqs + 1,):
        raise ValueError(f"cu_q_lens.shape={cu_q_lens.shape} must be [B + 1] with B={num_seqs}")
    check_integers(cu_q_lens=cu_q_lens)
    return jnp.asarray(cu_q_lens)


def _logit_options(head_dim: int, sm_scale: Any, soft_cap: Any, window: Any) -> LogitOptions:
    scale = head_dim**-0.5 if sm_scale is None else static_number("sm_scale", sm_scale)
    cap = None if soft_cap is None else static_number("soft_cap", soft_cap)
    if cap is not None and cap <= 0:
        raise ValueError(f"{soft_cap=} must be positive")
    return LogitOptions(sm_scale=scale, soft_cap=cap, sliding_window=static_window(window))


def _config_or(config: Config | None, tuned: Config) -> Config:
    if config is not None and not isinstance(config, type(tuned)):
        raise ValueError(f"config={config!r} must be a {type(tuned).__name__}")
    return config or tuned
