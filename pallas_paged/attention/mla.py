"""The entry to multi-head latent attention over pages of latents."""

from __future__ import annotations

from typing import Any, Literal, Unpack, overload

import jax
from jax.typing import ArrayLike

from pallas_paged.attention import dispatch
from pallas_paged.attention.arguments import checked_arrays
from pallas_paged.attention.options import (
    RaggedAttentionOptions,
    check_names,
    static_options,
)
from pallas_paged.checks import as_array, check_flag, default_promotion
from pallas_paged.pages.layer import LayerKV


@overload
def mla_attention(
    q_nope: ArrayLike,
    q_pe: ArrayLike,
    layer: LayerKV,
    block_tables: ArrayLike,
    seq_lens: ArrayLike,
    cu_q_lens: ArrayLike | None = ...,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[RaggedAttentionOptions],
) -> jax.Array: ...


@overload
def mla_attention(
    q_nope: ArrayLike,
    q_pe: ArrayLike,
    layer: LayerKV,
    block_tables: ArrayLike,
    seq_lens: ArrayLike,
    cu_q_lens: ArrayLike | None = ...,
    *,
    return_lse: Literal[True],
    **options: Unpack[RaggedAttentionOptions],
) -> tuple[jax.Array, jax.Array]: ...


@default_promotion()
def mla_attention(
    q_nope: ArrayLike,
    q_pe: ArrayLike,
    layer: LayerKV,
    block_tables: ArrayLike,
    seq_lens: ArrayLike,
    cu_q_lens: ArrayLike | None = None,
    *,
    return_lse: bool = False,
    **options: Unpack[RaggedAttentionOptions],
) -> Any:
    """Attend to pages of latents, as in DeepSeek V2 and V3, with absorbed queries.

    A token has one latent of `v_head_dim` elements, which is V of all heads, and one rotary key
    behind it. With absorbed queries, `q_nope @ W_UK` of each head, a logit is
    `(q_nope . latent + q_pe . rotary key) * sm_scale`, and the result is the weighted sum of
    latents, which `W_UV` of each head then takes to its values. A latent is read once for both.

    Otherwise as `paged_attention`, or with `cu_q_lens` as `ragged_paged_attention`. On a mesh the
    query heads may be sharded, and the pages, which have one head, are replicated. Gradients are
    those of `"xla"` alone.

    Args:
        q_nope: f32, bf16 or f16 `[B, num_q_heads, v_head_dim]`, one query for each sequence, or
            with `cu_q_lens` `[T, num_q_heads, v_head_dim]`.
        q_pe: of the same dtype, `[.., num_q_heads, head_dim - v_head_dim]`, rotated.
        layer: pages of latents, `LayerKV(k_pages, v_head_dim=512)`, from `create_kv_pool` with
            `num_kv_heads=1, head_dim=576, v_head_dim=512`; of the dtype of the queries, int8 or
            float8_e4m3fn.
        block_tables, seq_lens: as in `paged_attention`.
        cu_q_lens: as in `ragged_paged_attention`; None for one query a sequence.
        return_lse: also return the log-sum-exp of the logits. Static.
        **options: of `RaggedAttentionOptions`, without `config`; of `AttentionOptions` without
            `cu_q_lens`. `sm_scale` must be given: it follows from the head_dim of the model, such
            as `192 ** -0.5`, and not from that of the pages.

    Returns:
        out `[.., num_q_heads, v_head_dim]` in the dtype of the queries, or `(out, lse)` with `lse`
        f32`[.., num_q_heads]`, as those functions.

    Raises:
        ValueError: `sm_scale` is missing, the layer is not of latents, or a shape, dtype, head
            count or option breaks a rule above.
        NotImplementedError: the named implementation can't do this call here, or its gradient is
            asked for, which only `"xla"` has; the message says why.
        TypeError: an unknown keyword.

    Source: DeepSeek-AI, "DeepSeek-V2", 2024; absorbed as there in section 2.1.2.
    """
    allowed = RaggedAttentionOptions
    ragged_only = () if cu_q_lens is not None else ("causal", "tree_mask", "expected_seqs")
    check_names("mla_attention", options, allowed, *ragged_only, "config")
    check_flag("return_lse", return_lse)
    if options.get("sm_scale") is None:
        raise ValueError(
            "sm_scale must be given: it is that of the model's heads, such as 192 ** -0.5 with 128 "
            "elements and 64 rotary ones, and not that of the latents"
        )
    offsets = None if cu_q_lens is None else as_array("cu_q_lens", cu_q_lens)
    arrays = checked_arrays(
        *(q_nope, layer, block_tables, seq_lens, options),
        cu_q_lens=offsets,
        q_pe=as_array("q_pe", q_pe),
    )
    how = static_options(arrays.head_dim, options)
    kernel: Any = "decode" if cu_q_lens is None else "ragged"
    out, lse = dispatch.attend(kernel, arrays, how, with_lse=return_lse or kernel == "decode")
    return (out, lse) if return_lse else out
