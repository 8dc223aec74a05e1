"""Merges of the partial states that the other Triton kernels leave, and their specs."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_paged.kernels.ragged_plan import Plan
from pallas_paged.kernels.triton.config import (
    DecodeConfig,
    MergeConfig,
    RaggedConfig,
    merge_config,
    tile_merge_config,
)
from pallas_paged.kernels.triton.specs import kv_head, whole

State = tuple[jax.Array, jax.Array, jax.Array]  # m f32[R], l f32[R], acc f32[R, D]


def _merge_slots(
    outs_ref,  # f32[slots, R, D], each normalised
    lses_ref,  # f32[slots, R]
    first: jax.Array,
    num_slots: jax.Array,
    rows: jax.Array,  # i32[block_r]
    dims: jax.Array,  # i32[block_d]
    block_s: int,
) -> State:
    """Unites the states in slots `first .. first + num_slots - 1`, `block_s` of them at a time."""
    _, num_rows, head_dim = outs_ref.shape
    row_mask = rows < num_rows
    mask = row_mask[:, None] & (dims < head_dim)[None, :]

    def merge_some(i, state):
        m_i, l_i, acc = state
        index = i * block_s + jnp.arange(block_s)
        slots, valid = first + index, index < num_slots
        lse = plgpu.load(
            lses_ref.at[slots[:, None], rows[None, :]],
            mask=valid[:, None] & row_mask[None, :],
            other=-jnp.inf,
        )  # [block_s, block_r]
        out = plgpu.load(
            outs_ref.at[slots[:, None, None], rows[None, :, None], dims[None, None, :]],
            mask=valid[:, None, None] & mask[None],
            other=0.0,
        )  # [block_s, block_r, block_d]
        m_new = jnp.maximum(m_i, lse.max(axis=0))
        m_safe = jnp.where(m_new == -jnp.inf, 0.0, m_new)  # rows that are off, or saw nothing yet
        alpha, w = jnp.exp(m_i - m_safe), jnp.exp(lse - m_safe[None, :])
        acc = acc * alpha[:, None] + (out * w[:, :, None]).sum(axis=0)
        return m_new, l_i * alpha + w.sum(axis=0), acc

    state = (
        jnp.full(rows.shape, -jnp.inf, jnp.float32),
        jnp.zeros(rows.shape, jnp.float32),
        jnp.zeros((rows.size, dims.size), jnp.float32),
    )
    return lax.fori_loop(0, pl.cdiv(num_slots, block_s), merge_some, state)


def finish(state: State, sinks: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """`(out, lse)` of a state; sinks f32[R] join the denominator of rows that saw any key."""
    m_i, l_i, acc = state
    empty = l_i == 0.0
    if sinks is not None:
        m_new = jnp.where(empty, 0.0, jnp.maximum(m_i, sinks))
        alpha = jnp.exp(m_i - m_new)
        l_i = jnp.where(empty, 0.0, l_i * alpha + jnp.exp(sinks - m_new))
        m_i, acc = m_new, acc * alpha[:, None]
    l_safe = jnp.where(empty, 1.0, l_i)
    return acc / l_safe[:, None], jnp.where(empty, -jnp.inf, m_i + jnp.log(l_safe))


def merge_shares_kernel(
    outs_ref,  # f32[slots, Hq, D]
    lses_ref,  # f32[slots, Hq]
    unit_ends_ref,  # i32[B]
    sinks_ref,  # f32[Hq] or None
    o_ref,  # [B, Hq, D]
    lse_ref,  # f32[B, Hq]
    *,
    config: DecodeConfig,
    tile: MergeConfig,
):
    row = pl.program_id(0)
    num_seqs, num_heads, head_dim = o_ref.shape
    end = unit_ends_ref[row]
    start = jnp.where(row > 0, unit_ends_ref[jnp.maximum(row - 1, 0)], 0)
    if config.fixed_split_size is None:
        # The shares of `triton_decode`; at least 1, since nobody may have any tokens.
        total = unit_ends_ref[num_seqs - 1]
        units_per_program = jnp.maximum(pl.cdiv(total, config.num_programs), 1)
        first = lax.div(start, units_per_program) + row
        last = lax.div(end - 1, units_per_program) + row
    else:
        first, last = start, end - 1
    num_slots = jnp.where(start < end, last + 1 - first, 0)  # a row without tokens has no slot

    heads = pl.program_id(1) * tile.block_h + jnp.arange(tile.block_h)
    dims = pl.program_id(2) * tile.block_d + jnp.arange(tile.block_d)
    head_mask = heads < num_heads
    state = _merge_slots(outs_ref, lses_ref, first, num_slots, heads, dims, tile.block_s)
    sinks = None
    if sinks_ref is not None:
        sinks = plgpu.load(sinks_ref.at[heads], mask=head_mask, other=0.0)
    out, lse = finish(state, sinks)
    plgpu.store(
        o_ref.at[row[None, None], heads[:, None], dims[None, :]],
        out.astype(o_ref.dtype),
        mask=head_mask[:, None] & (dims < head_dim)[None, :],
    )
    # The programs of a head's parts store the same lse, so no branch is needed.
    plgpu.store(lse_ref.at[row[None], heads], lse, mask=head_mask)


def merge_shares(
    outs: jax.Array,  # f32[slots, Hq, D]
    lses: jax.Array,  # f32[slots, Hq]
    unit_ends: jax.Array,  # i32[B]
    sinks: jax.Array | None,  # f32[Hq]
    *,
    dtype: jnp.dtype,
    config: DecodeConfig,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """Final `(out dtype[B, Hq, D], lse f32[B, Hq])` from the slots of the decode kernel."""
    num_seqs = unit_ends.shape[0]
    _, num_heads, head_dim = outs.shape
    tile = merge_config(
        num_seqs=num_seqs,
        num_heads=num_heads,
        head_dim=head_dim,
        num_programs=config.num_programs,
        batch_invariant=config.fixed_split_size is not None,
    )

    args = (outs, lses, unit_ends, sinks)
    out_shape = (
        jax.ShapeDtypeStruct((num_seqs, num_heads, head_dim), dtype),
        jax.ShapeDtypeStruct((num_seqs, num_heads), jnp.float32),
    )
    return pl.pallas_call(
        functools.partial(merge_shares_kernel, config=config, tile=tile),
        grid=(num_seqs, pl.cdiv(num_heads, tile.block_h), pl.cdiv(head_dim, tile.block_d)),
        in_specs=list(whole(args)),
        out_specs=list(whole(out_shape)),
        out_shape=out_shape,
        compiler_params=plgpu.CompilerParams(num_warps=tile.num_warps),
        interpret=interpret,
        name="paged_decode_merge",
    )(*args)


def merge_tiles_kernel(
    outs_ref,  # f32[slots, block_q, D]
    lses_ref,  # f32[slots, block_q]
    plan: Plan,  # of refs
    sinks_ref,  # f32[G] or None
    _o_in_ref,
    _lse_in_ref,
    o_ref,  # [T, G, D], with the tiles that were not split
    lse_ref,  # f32[T, G]
    *,
    config: RaggedConfig,
    tile: MergeConfig,
):
    _, group, head_dim = o_ref.shape
    piece = plan.split_pieces[pl.program_id(1)]
    num_slots = plan.num_splits[pl.program_id(1)]
    first = plan.slot[piece]
    rows = pl.program_id(2) * tile.block_h + jnp.arange(tile.block_h)
    dims = pl.program_id(3) * tile.block_d + jnp.arange(tile.block_d)
    packed = plan.pieces.offset[piece] + rows
    token, head = packed // group, packed % group
    row_mask = (num_slots > 0) & (rows < config.block_q) & (token < plan.pieces.q_len[piece])
    token = plan.pieces.q_start[piece] + token
    state = _merge_slots(outs_ref, lses_ref, first, num_slots, rows, dims, tile.block_s)
    sinks = None
    if sinks_ref is not None:
        sinks = plgpu.load(sinks_ref.at[head], mask=row_mask, other=0.0)
    out, lse = finish(state, sinks)
    plgpu.store(
        o_ref.at[token[:, None], head[:, None], dims[None, :]],
        out.astype(o_ref.dtype),
        mask=row_mask[:, None] & (dims < head_dim)[None, :],
    )
    plgpu.store(lse_ref.at[token, head], lse, mask=row_mask)


def merge_tiles(
    out: jax.Array,  # [T, Hkv, G, D]
    lse: jax.Array,  # f32[T, Hkv, G]
    outs: jax.Array,  # f32[Hkv, slots, block_q, D]
    lses: jax.Array,  # f32[Hkv, slots, block_q]
    plan: Plan,
    sinks: jax.Array | None,  # f32[Hkv, G]
    *,
    config: RaggedConfig,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """`(out, lse)` with the rows of tiles that several programs shared, from the slots."""
    num_kv_heads, _, block_q, head_dim = outs.shape
    num_merges = plan.num_splits.shape[0]
    tile = tile_merge_config(
        num_merges=num_merges,
        block_q=block_q,
        head_dim=head_dim,
        num_programs=config.num_programs,
        batch_invariant=config.fixed_split_size is not None,
    )

    specs = [kv_head(out, 1), kv_head(lse, 1)]
    args = (outs, lses, plan, sinks, out, lse)
    num_inputs = len(jax.tree.leaves(args))
    return pl.pallas_call(
        functools.partial(merge_tiles_kernel, config=config, tile=tile),
        grid=(
            num_kv_heads,
            num_merges,
            pl.cdiv(block_q, tile.block_h),
            pl.cdiv(head_dim, tile.block_d),
        ),
        in_specs=[
            kv_head(outs, 0),
            kv_head(lses, 0),
            whole(plan),
            kv_head(sinks, 0),
            *specs,
        ],
        out_specs=specs,
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (out, lse)],
        # Written in place: most tiles are in `out` already.
        input_output_aliases={num_inputs - 2: 0, num_inputs - 1: 1},
        compiler_params=plgpu.CompilerParams(num_warps=tile.num_warps),
        interpret=interpret,
        name="ragged_paged_attention_merge",
    )(*args)
