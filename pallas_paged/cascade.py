"""Decode attention of rows that share the pages of a prefix: the prefix is read once for all."""

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
    INT32_MAX,
    check_ends,
    check_integers,
    check_one_query_each,
    check_pages,
    check_per_head,
    check_queries,
    logit_options,
    with_dtype,
)


def cascade_attention(
    q: ArrayLike,
    k_pages: ArrayLike,
    v_pages: ArrayLike,
    block_tables: ArrayLike,
    seq_lens: ArrayLike,
    prefix_lens: ArrayLike,
    cu_group_sizes: ArrayLike,
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
    prefix_config: RaggedConfig | MosaicRaggedConfig | None = None,
) -> Any:
    """`paged_attention` of rows in groups that share their first pages, each read once a group.

    The result is that of `paged_attention` on the same arguments, up to rounding. It is faster
    where many rows share a long prefix, such as a system prompt: all queries of a group attend to
    it together, every row to the rest of its own, and the two are merged.

    Args:
      q, k_pages, v_pages, block_tables, seq_lens: as in `paged_attention`. The tables of a group's
        rows begin with the same pages.
      prefix_lens: i32`[num_groups]`, tokens that the rows of a group share. They are taken as
        rounded down to full pages, and as at most the shortest non-empty row of the group.
      cu_group_sizes: i32`[num_groups + 1]`, rising from 0: group g is the rows from
        `cu_group_sizes[g]` to `cu_group_sizes[g + 1]`. Rows from the last value on are in no group.
      k_scales, v_scales, sm_scale, soft_cap, sliding_window, alibi_slopes, sinks, return_lse,
        implementation: as in `paged_attention`.
      config: as in `paged_attention`, for the rows' own tokens.
      prefix_config: as in `ragged_paged_attention`, for the prefixes.

    Returns:
      As `paged_attention`.

    Raises:
      ValueError: if a shape, dtype, head count or option breaks a rule above.
      NotImplementedError: as in `paged_attention`.

    Source: Ye et al., "Cascade Inference", 2024; Juravsky et al., "Hydragen", 2024.
    """
    arrays = [with_dtype(x) for x in (q, k_pages, v_pages, block_tables, seq_lens)]
    check_queries(arrays[0], "B")
    check_pages(*arrays)
    num_seqs, num_q_heads, head_dim = arrays[0].shape
    check_one_query_each(arrays[0], arrays[4])
    scales = checked_scales(arrays[1], k_scales, v_scales)
    shared = with_dtype(prefix_lens)
    if shared.ndim != 1 or not shared.shape[0]:
        raise ValueError(f"prefix_lens.shape={shared.shape} must be [num_groups], at least one")
    check_integers(prefix_lens=shared)
    group_ends = check_ends("cu_group_sizes", cu_group_sizes, shared.shape[0])
    slopes = check_per_head("alibi_slopes", alibi_slopes, num_q_heads)
    sink_logits = check_per_head("sinks", sinks, num_q_heads)
    options = logit_options(
        head_dim, sm_scale=sm_scale, soft_cap=soft_cap, sliding_window=sliding_window
    )
    queries, k, v, tables, lens = map(jnp.asarray, arrays)

    page_size, pages_per_seq = k.shape[2], tables.shape[1]
    with jax.enable_x64(False):
        lens = jnp.clip(lens, 0, pages_per_seq * page_size)
        group_ends = dispatch.rising_ends(group_ends, num_seqs)
        prefixes, prefix_tables, own_prefix = _prefixes(
            jnp.asarray(shared), group_ends, tables, lens, page_size
        )
        columns = jnp.arange(pages_per_seq) + own_prefix[:, None] // page_size
        own_tables = jnp.take_along_axis(tables, jnp.minimum(columns, pages_per_seq - 1), axis=1)
        # Empty rows have a query like the others; what it finds is not merged.
        positions = jnp.where(lens > 0, lens - 1, INT32_MAX)

    prefix_out, prefix_lse = dispatch.ragged_paged_attention(
        queries,
        k,
        v,
        prefix_tables,
        prefixes,
        group_ends,
        positions,
        slopes,
        None,
        None,
        *scales,
        options=options,
        implementation=implementation,
        config=prefix_config,
        with_lse=True,
    )
    own_out, own_lse = dispatch.paged_decode(
        queries,
        k,
        v,
        own_tables,
        lens - own_prefix,
        slopes,
        None,
        *scales,
        options=options,
        implementation=implementation,
        config=config,
    )
    prefix_lse = jnp.where(lens[:, None] > 0, prefix_lse, -jnp.inf)
    out, lse = xla.merge_states(
        jnp.stack([prefix_out, own_out]), jnp.stack([prefix_lse, own_lse]), sinks=sink_logits
    )
    return (out, lse) if return_lse else out


def _prefixes(
    prefix_lens: jax.Array,  # i32[G]
    group_ends: jax.Array,  # i32[G + 1]
    block_tables: jax.Array,  # i32[B, N]
    seq_lens: jax.Array,  # i32[B]
    page_size: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Length and table of each group's prefix, i32[G] and i32[G, N], and each row's, i32[B]."""
    num_groups, num_seqs = prefix_lens.shape[0], seq_lens.shape[0]
    rows = jnp.arange(num_seqs)
    group = jnp.searchsorted(group_ends[1:], rows, side="right", method="compare_all")
    live = jnp.where(seq_lens > 0, group, num_groups)  # empty rows have no pages to share
    shortest = jnp.full(num_groups, INT32_MAX).at[live].min(seq_lens, mode="drop")
    first_row = jnp.full(num_groups, num_seqs).at[live].min(rows, mode="drop")
    prefixes = jnp.minimum(jnp.maximum(prefix_lens, 0), shortest) // page_size * page_size
    prefixes = jnp.where(first_row < num_seqs, prefixes, 0)
    tables = block_tables[jnp.minimum(first_row, num_seqs - 1)]
    return prefixes, tables, prefixes.at[live].get(mode="fill", fill_value=0)
