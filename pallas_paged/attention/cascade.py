"""Attention over parts of the keys, merged: of a prefix that sequences share, and of any parts."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, Unpack, overload

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from pallas_paged.attention import dispatch
from pallas_paged.attention.arguments import (
    check_states,
    checked_arrays,
    checked_offsets,
    checked_prefix_lens,
)
from pallas_paged.attention.options import AttentionOptions, check_names, static_options
from pallas_paged.checks import INT32_MAX, as_array, check_flag, default_promotion
from pallas_paged.kernels import xla
from pallas_paged.pages.layer import LayerKV


@overload
def cascade_attention(
    q: ArrayLike,
    layer: LayerKV,
    block_tables: ArrayLike,
    seq_lens: ArrayLike,
    prefix_lens: ArrayLike,
    cu_group_sizes: ArrayLike,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[AttentionOptions],
) -> jax.Array: ...


@overload
def cascade_attention(
    q: ArrayLike,
    layer: LayerKV,
    block_tables: ArrayLike,
    seq_lens: ArrayLike,
    prefix_lens: ArrayLike,
    cu_group_sizes: ArrayLike,
    *,
    return_lse: Literal[True],
    **options: Unpack[AttentionOptions],
) -> tuple[jax.Array, jax.Array]: ...


@default_promotion()
def cascade_attention(
    q: ArrayLike,
    layer: LayerKV,
    block_tables: ArrayLike,
    seq_lens: ArrayLike,
    prefix_lens: ArrayLike,
    cu_group_sizes: ArrayLike,
    *,
    return_lse: bool = False,
    **options: Unpack[AttentionOptions],
) -> Any:
    """Compute `paged_attention` of sequences in groups that share pages, read once for a group.

    The result is that of `paged_attention` on the same arguments, up to rounding. It is faster
    where many sequences share a long prefix, such as a system prompt: all queries of a group attend
    to the prefix together, each sequence attends to the rest of its own tokens, and the two are
    merged.

    Args:
        q, layer, block_tables, seq_lens, return_lse: as in `paged_attention`. The tables of a
            group's sequences begin with the same pages.
        prefix_lens: i32`[num_groups]`, tokens that the sequences of a group share. They are rounded
            down to full pages and clipped to the shortest non-empty sequence of the group.
        cu_group_sizes: i32`[num_groups + 1]`, rising from 0: group g is the sequences from
            `cu_group_sizes[g]` to `cu_group_sizes[g + 1]`. Sequences from the last value on are in
            no group.
        **options: of `AttentionOptions`, without `fixed_split_size`. `config` is for the sequences'
            own tokens.

    Returns:
        As `paged_attention`.

    Raises:
        ValueError, NotImplementedError, TypeError: as `paged_attention`.

    Source: Ye et al., "Cascade Inference", 2024; Juravsky et al., "Hydragen", 2024.
    """
    check_names("cascade_attention", options, AttentionOptions, "fixed_split_size")
    check_flag("return_lse", return_lse)
    arrays = checked_arrays(q, layer, block_tables, seq_lens, options)
    how = static_options(arrays.head_dim, options)
    shared = checked_prefix_lens(prefix_lens)
    group_offsets = checked_offsets("cu_group_sizes", cu_group_sizes, shared.shape[0])

    page_size, tables = arrays.page_size, arrays.block_tables
    pages_per_seq = tables.shape[1]
    with jax.enable_x64(False):
        lens = jnp.clip(arrays.seq_lens, 0, arrays.max_kv_len)
        group_offsets = dispatch.rising_offsets(group_offsets, arrays.num_seqs)
        prefixes, prefix_tables, own_prefix = _prefixes(
            shared, group_offsets, tables, lens, page_size
        )
        columns = jnp.arange(pages_per_seq) + own_prefix[:, None] // page_size
        own_tables = jnp.take_along_axis(tables, jnp.minimum(columns, pages_per_seq - 1), axis=1)
        # Empty rows have a query like the others; its result is not merged. It may be NaN, as
        # padding may: no gradient of a key may be 0 * NaN.
        positions = jnp.where(lens > 0, lens - 1, INT32_MAX)
        arrays = dataclasses.replace(arrays, q=jnp.where(lens[:, None, None] > 0, arrays.q, 0))

    without_sinks = dataclasses.replace(arrays, sinks=None)  # they join once, in the merge
    prefix_out, prefix_lse = dispatch.attend(
        "ragged",
        dataclasses.replace(
            without_sinks,
            block_tables=prefix_tables,
            seq_lens=prefixes,
            cu_q_lens=group_offsets,
            q_positions=positions,
        ),
        dataclasses.replace(how, config=None),
    )
    own_out, own_lse = dispatch.attend(
        "decode",
        dataclasses.replace(without_sinks, block_tables=own_tables, seq_lens=lens - own_prefix),
        how,
    )
    prefix_lse = jnp.where(lens[:, None] > 0, prefix_lse, -jnp.inf)
    out, lse = xla.merge_states(
        jnp.stack([prefix_out, own_out]), jnp.stack([prefix_lse, own_lse]), sinks=arrays.sinks
    )
    return (out, lse) if return_lse else out


@default_promotion()
def merge_attention_states(outs: ArrayLike, lses: ArrayLike) -> tuple[jax.Array, jax.Array]:
    """Merge attention over disjoint sets of keys into attention over their union.

    Args:
        outs: f32, bf16 or f16 `[S, ..., D]`, the outputs of the S states.
        lses: f32`[S, ...]`, their natural-log log-sum-exps; -inf marks a state that saw no key,
            whose `outs` may then hold anything.

    Returns:
        `(out [..., D] in the dtype of outs, lse f32[...])`. Where no state saw a key, `out = 0` and
        `lse = -inf`.

    Raises:
        ValueError: the shapes do not belong together or a dtype is not allowed.
    """
    outs, lses = as_array("outs", outs), as_array("lses", lses)
    check_states(outs, lses)
    return xla.merge_states(jnp.asarray(outs), jnp.asarray(lses))


def _prefixes(
    prefix_lens: jax.Array,  # i32[G]
    group_offsets: jax.Array,  # i32[G + 1]
    block_tables: jax.Array,  # i32[B, N]
    seq_lens: jax.Array,  # i32[B]
    page_size: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return i32[G] lengths and i32[G, N] tables of the prefixes, and i32[B] lengths by row."""
    num_groups, num_seqs = prefix_lens.shape[0], seq_lens.shape[0]
    rows = jnp.arange(num_seqs)
    group = jnp.searchsorted(group_offsets[1:], rows, side="right", method="compare_all")
    live = jnp.where(seq_lens > 0, group, num_groups)  # empty rows have no pages to share
    shortest = jnp.full(num_groups, INT32_MAX).at[live].min(seq_lens, mode="drop")
    first_row = jnp.full(num_groups, num_seqs).at[live].min(rows, mode="drop")
    prefixes = jnp.minimum(jnp.maximum(prefix_lens, 0), shortest) // page_size * page_size
    prefixes = jnp.where(first_row < num_seqs, prefixes, 0)
    tables = block_tables[jnp.minimum(first_row, num_seqs - 1)]
    return prefixes, tables, prefixes.at[live].get(mode="fill", fill_value=0)
