"""The entries to multi-head latent attention: over pages of latents, and of prompts by heads."""

from __future__ import annotations

from typing import Any, Literal, Unpack, overload

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from pallas_paged.attention import dispatch
from pallas_paged.attention.arguments import checked_arrays, checked_offsets
from pallas_paged.attention.entries import ragged_paged_attention
from pallas_paged.attention.options import RaggedAttentionOptions, check_names, static_options
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
    ragged_only = () if cu_q_lens is not None else ("causal", "tree_mask", "expected_seqs")
    check_names("mla_attention", options, RaggedAttentionOptions, *ragged_only, "config")
    check_flag("return_lse", return_lse)
    if options.get("sm_scale") is None:
        raise ValueError(
            "sm_scale must be given: it is that of the model's heads, such as 192 ** -0.5 with 128 "
            "elements and 64 rotary ones, and not that of the latents"
        )
    given = q_nope, layer, block_tables, seq_lens, options
    arrays = checked_arrays(*given, cu_q_lens=cu_q_lens, q_pe=as_array("q_pe", q_pe))
    how = static_options(arrays.head_dim, options)
    kernel: Any = "decode" if cu_q_lens is None else "ragged"
    out, lse = dispatch.attend(kernel, arrays, how, with_lse=return_lse or kernel == "decode")
    return (out, lse) if return_lse else out


@overload
def mla_prefill(
    q: ArrayLike,
    k_nope: ArrayLike,
    k_pe: ArrayLike,
    v: ArrayLike,
    cu_q_lens: ArrayLike,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[RaggedAttentionOptions],
) -> jax.Array: ...


@overload
def mla_prefill(
    q: ArrayLike,
    k_nope: ArrayLike,
    k_pe: ArrayLike,
    v: ArrayLike,
    cu_q_lens: ArrayLike,
    *,
    return_lse: Literal[True],
    **options: Unpack[RaggedAttentionOptions],
) -> tuple[jax.Array, jax.Array]: ...


@default_promotion()
def mla_prefill(
    q: ArrayLike,
    k_nope: ArrayLike,
    k_pe: ArrayLike,
    v: ArrayLike,
    cu_q_lens: ArrayLike,
    *,
    return_lse: bool = False,
    **options: Unpack[RaggedAttentionOptions],
) -> Any:
    """Attend with new tokens among themselves, by K and V of each head, as in DeepSeek V2 and V3.

    The queries are not absorbed, and no page is read: `k_nope` and `v` are the up-projections of
    the tokens' latents. For prompts that takes fewer operations than `mla_attention`. What the
    tokens see of a cached context comes by `mla_attention(..., causal=False, return_lse=True)`, and
    `merge_attention_states` joins both.

    It is `ragged_paged_attention` over pages that are made here. With one sequence the pages of V
    are `v` itself if they are full. Otherwise V is copied once, as K is in any case: each sequence
    begins a page. The tokens of all arguments are those of one sequence after another. On a mesh
    the heads may be sharded.

    Args:
        q: f32, bf16 or f16 `[T, num_heads, head_dim]`, the rotated elements last.
        k_nope: of the same dtype, `[T, num_heads, head_dim - rope_dim]`.
        k_pe: of the same dtype, `[T, rope_dim]`: rotated, of all heads.
        v: of the same dtype, `[T, num_heads, v_head_dim]`, with `v_head_dim` up to head_dim.
        cu_q_lens: as in `ragged_paged_attention`, for all tokens.
        return_lse: also return the log-sum-exp of the logits. Static.
        **options: of `RaggedAttentionOptions`.

    Returns:
        out `[T, num_heads, v_head_dim]` in the dtype of `q`, or `(out, lse)` with `lse`
        f32`[T, num_heads]`, as `ragged_paged_attention`.

    Raises:
        ValueError: a shape, dtype or option breaks a rule above.
        NotImplementedError: the named implementation can't do this call; the message says why.
        TypeError: an unknown keyword.

    Source: DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1.
    """
    check_names("mla_prefill", options, RaggedAttentionOptions)
    given = dict(q=q, k_nope=k_nope, k_pe=k_pe, v=v)
    arrays = {name: as_array(name, x) for name, x in given.items()}
    _check_heads(**arrays)
    arrays |= {name: jnp.asarray(arrays[name]) for name in ("k_nope", "k_pe", "v")}
    offsets = as_array("cu_q_lens", cu_q_lens)
    offsets = checked_offsets("cu_q_lens", offsets, max(offsets.size - 1, 1))
    with jax.enable_x64(False):
        lens, tables, tokens, page_size = _pages_of_tokens(offsets, len(arrays["q"]))

    def paged(x: jax.Array) -> jax.Array:
        if tokens is None:
            x = jnp.pad(x, ((0, -len(x) % page_size), *[(0, 0)] * (x.ndim - 1)))
            return x.reshape(-1, page_size, *x.shape[1:])
        return x.at[tokens].get(mode="clip")

    # Gathered before they are joined, so that XLA makes one pass of both.
    nope, rope = paged(arrays["k_nope"]), paged(arrays["k_pe"])[..., None, :]
    rope = jnp.where(True, rope, nope[..., :1])  # for all heads, and sharded as they are
    layer = LayerKV(jnp.concatenate([nope, rope], axis=-1), paged(arrays["v"]))
    call: Any = ragged_paged_attention
    return call(arrays["q"], layer, tables, lens, offsets, return_lse=return_lse, **options)


def _check_heads(q: jax.Array, k_nope: jax.Array, k_pe: jax.Array, v: jax.Array) -> None:
    num_tokens, num_heads, head_dim = q.shape if q.ndim == 3 else (0, 0, 0)
    rope_dim = k_pe.shape[-1] if k_pe.ndim == 2 else 0
    expected = dict(
        k_nope=(num_tokens, num_heads, head_dim - rope_dim),
        k_pe=(num_tokens, rope_dim),
        v=(num_tokens, num_heads, v.shape[-1] if v.ndim else 0),
    )
    given = dict(k_nope=k_nope, k_pe=k_pe, v=v)
    wrong = [name for name, x in given.items() if (x.shape, x.dtype) != (expected[name], q.dtype)]
    if q.ndim != 3 or 0 in (q.size, k_pe.size, v.size) or wrong:
        shapes = ", ".join(f"{name} {x.dtype.name}{list(x.shape)}" for name, x in given.items())
        raise ValueError(
            f"q {q.dtype.name}{list(q.shape)} must be [T, num_heads, head_dim], k_nope [T, "
            "num_heads, head_dim - rope_dim], k_pe [T, rope_dim] and v [T, num_heads, v_head_dim], "
            f"of one dtype and without a 0, got {shapes}"
        )


def _pages_of_tokens(
    cu_q_lens: jax.Array,  # i32[B + 1]
    num_tokens: int,
) -> tuple[jax.Array, jax.Array, jax.Array | None, int]:
    """Return where the tokens of each sequence are, if each begins a page.

    Returns:
        Tokens of each sequence i32`[B]`, tables i32`[B, N]`, the token of each slot of each page
        i32`[P, page_size]` or None where they follow one another, and the page size.
    """
    num_seqs = cu_q_lens.shape[0] - 1
    # Small pages waste few slots on a short sequence, and large ones take fewer copies.
    page_size = 64 if num_tokens >= 256 * num_seqs else 16
    offsets = dispatch.rising_offsets(cu_q_lens, num_tokens)
    pages_per_seq = -(-num_tokens // page_size)
    columns = jnp.arange(pages_per_seq, dtype=jnp.int32)
    lens = jnp.diff(offsets)
    if num_seqs == 1:
        return lens, columns[None], None, page_size
    ends = jnp.cumsum(-(-lens // page_size))  # of the pages of each sequence
    begins = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])
    # Each sequence wastes at most a page less a token.
    pages = jnp.arange((num_tokens + num_seqs * (page_size - 1)) // page_size, dtype=jnp.int32)
    row = jnp.searchsorted(ends, pages, side="right", method="compare_all")
    row = jnp.minimum(row, num_seqs - 1)  # pages of no sequence hold anything
    first = offsets[row] + (pages - begins[row]) * page_size
    tokens = first[:, None] + jnp.arange(page_size, dtype=jnp.int32)
    return lens, begins[:, None] + columns, tokens, page_size
