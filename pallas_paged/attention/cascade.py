"""Decode attention of rows that share the pages of a prefix: the prefix is read once for all."""

from __future__ import annotations

import dataclasses
from typing import Literal, SupportsFloat, overload

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from pallas_paged.attention import dispatch
from pallas_paged.attention.arguments import (
    checked_arrays,
    checked_offsets,
    checked_prefix_lens,
    logit_options,
    of_first_rows,
)
from pallas_paged.attention.dispatch import Implementation
from pallas_paged.checks import INT32_MAX, default_promotion
from pallas_paged.kernels import xla
from pallas_paged.kernels.mosaic_sm80.config import MosaicSm80DecodeConfig, MosaicSm80RaggedConfig
from pallas_paged.kernels.mosaic_sm90.config import MosaicDecodeConfig, MosaicRaggedConfig
from pallas_paged.kernels.triton.config import DecodeConfig, RaggedConfig
from pallas_paged.pages.layout import KVLayout


@overload
def cascade_attention(
    q: ArrayLike,
    k_pages: ArrayLike,
    v_pages: ArrayLike | None,
    block_tables: ArrayLike,
    seq_lens: ArrayLike,
    prefix_lens: ArrayLike,
    cu_group_sizes: ArrayLike,
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
    kv_layout: KVLayout = ...,
    return_lse: Literal[False] = ...,
    implementation: Implementation | None = ...,
    config: DecodeConfig | MosaicDecodeConfig | MosaicSm80DecodeConfig | None = ...,
    prefix_config: RaggedConfig | MosaicRaggedConfig | MosaicSm80RaggedConfig | None = ...,
) -> jax.Array: ...


@overload
def cascade_attention(
    q: ArrayLike,
    k_pages: ArrayLike,
    v_pages: ArrayLike | None,
    block_tables: ArrayLike,
    seq_lens: ArrayLike,
    prefix_lens: ArrayLike,
    cu_group_sizes: ArrayLike,
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
    kv_layout: KVLayout = ...,
    return_lse: Literal[True],
    implementation: Implementation | None = ...,
    config: DecodeConfig | MosaicDecodeConfig | MosaicSm80DecodeConfig | None = ...,
    prefix_config: RaggedConfig | MosaicRaggedConfig | MosaicSm80RaggedConfig | None = ...,
) -> tuple[jax.Array, jax.Array]: ...


@default_promotion()
def cascade_attention(
    q: ArrayLike,
    k_pages: ArrayLike,
    v_pages: ArrayLike | None,
    block_tables: ArrayLike,
    seq_lens: ArrayLike,
    prefix_lens: ArrayLike,
    cu_group_sizes: ArrayLike,
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
    kv_layout: KVLayout = "HPND",
    return_lse: bool = False,
    implementation: Implementation | None = None,
    config: DecodeConfig | MosaicDecodeConfig | MosaicSm80DecodeConfig | None = None,
    prefix_config: RaggedConfig | MosaicRaggedConfig | MosaicSm80RaggedConfig | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Compute `paged_attention` of rows in groups that share their first pages, read once a group.

    The result is that of `paged_attention` on the same arguments, up to rounding. It is faster
    where many rows share a long prefix, such as a system prompt: all queries of a group attend to
    the prefix together, each row attends to the rest of its own tokens, and the two are merged.

    Args:
        q, k_pages, v_pages, block_tables, seq_lens: as in `paged_attention`. The tables of a
            group's rows begin with the same pages.
        prefix_lens: i32`[num_groups]`, tokens that the rows of a group share. They are rounded down
            to full pages and clipped to the shortest non-empty row of the group.
        cu_group_sizes: i32`[num_groups + 1]`, rising from 0: group g is the rows from
            `cu_group_sizes[g]` to `cu_group_sizes[g + 1]`. Rows from the last value on are in no
            group.
        k_scales, v_scales, num_seqs, sm_scale, q_scale, soft_cap, sliding_window, alibi_slopes,
            sinks, kv_layout, return_lse, implementation: as in `paged_attention`.
        config: as in `paged_attention`, for the rows' own tokens.
        prefix_config: as `config` of `ragged_paged_attention`, for the prefixes.

    Returns:
        As `paged_attention`.

    Raises:
        ValueError: a shape, dtype, head count or option breaks a rule above.
        NotImplementedError: as in `paged_attention`.

    Source: Ye et al., "Cascade Inference", 2024; Juravsky et al., "Hydragen", 2024.
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
        one_query_a_row=True,
    )
    shared = checked_prefix_lens(prefix_lens)
    group_offsets = checked_offsets("cu_group_sizes", cu_group_sizes, shared.shape[0])
    arrays = of_first_rows(arrays, num_seqs)
    options = logit_options(
        arrays.head_dim,
        sm_scale=sm_scale,
        q_scale=q_scale,
        soft_cap=soft_cap,
        sliding_window=sliding_window,
    )

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
        # Empty rows have a query like the others; its result is not merged.
        positions = jnp.where(lens > 0, lens - 1, INT32_MAX)

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
        options=options,
        implementation=implementation,
        config=prefix_config,
    )
    own_out, own_lse = dispatch.attend(
        "decode",
        dataclasses.replace(without_sinks, block_tables=own_tables, seq_lens=lens - own_prefix),
        options=options,
        implementation=implementation,
        config=config,
    )
    prefix_lse = jnp.where(lens[:, None] > 0, prefix_lse, -jnp.inf)
    out, lse = xla.merge_states(
        jnp.stack([prefix_out, own_out]), jnp.stack([prefix_lse, own_lse]), sinks=arrays.sinks
    )
    return (out, lse) if return_lse else out


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
