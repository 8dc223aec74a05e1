"""Merges of the partial states that the attention kernels of this family leave, and their specs."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_paged.kernels.call import result_shape
from pallas_paged.kernels.decode_plan import DecodePlan, programs_per_kv_head
from pallas_paged.kernels.decode_states import DecodeStates
from pallas_paged.kernels.ragged_plan import Plan
from pallas_paged.kernels.triton.config import (
    MergeConfig,
    RaggedConfig,
    decode_merge_config,
    ragged_merge_config,
)
from pallas_paged.kernels.triton.specs import full_specs, kv_head

State = tuple[jax.Array, jax.Array, jax.Array]  # m f32[R], l f32[R], acc f32[R, D]


def _merge_partials(
    outs_ref,  # f32[num_partials, R, D], each normalised
    lses_ref,  # f32[num_partials, R]
    first: jax.Array,
    num_partials: jax.Array,
    rows: jax.Array,  # i32[block_h]
    dims: jax.Array,  # i32[block_d]
    block_s: int,
) -> State:
    """Merge `num_partials` states from `first` on, `block_s` of them per loop step."""
    _, num_rows, head_dim = outs_ref.shape
    row_mask = rows < num_rows
    mask = row_mask[:, None] & (dims < head_dim)[None, :]

    def merge_some(i, state):
        m_i, l_i, acc = state
        index = i * block_s + jnp.arange(block_s)
        partials, valid = first + index, index < num_partials
        lse = plgpu.load(
            lses_ref.at[partials[:, None], rows[None, :]],
            mask=valid[:, None] & row_mask[None, :],
            other=-jnp.inf,
        )  # [block_s, block_h]
        out = plgpu.load(
            outs_ref.at[partials[:, None, None], rows[None, :, None], dims[None, None, :]],
            mask=valid[:, None, None] & mask[None],
            other=0.0,
        )  # [block_s, block_h, block_d]
        m_new = jnp.maximum(m_i, lse.max(axis=0))
        m_safe = jnp.where(m_new == -jnp.inf, 0.0, m_new)  # rows that are off, or saw no key yet
        alpha, w = jnp.exp(m_i - m_safe), jnp.exp(lse - m_safe[None, :])
        acc = acc * alpha[:, None] + (out * w[:, :, None]).sum(axis=0)
        return m_new, l_i * alpha + w.sum(axis=0), acc

    state = (
        jnp.full(rows.shape, -jnp.inf, jnp.float32),
        jnp.zeros(rows.shape, jnp.float32),
        jnp.zeros((rows.size, dims.size), jnp.float32),
    )
    return lax.fori_loop(0, pl.cdiv(num_partials, block_s), merge_some, state)


def finish(state: State, sinks: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Return `(out, lse)` of a state; sinks f32[R] join the denominator of rows that saw a key."""
    m_i, l_i, acc = state
    empty = l_i == 0.0
    if sinks is not None:
        m_new = jnp.where(empty, 0.0, jnp.maximum(m_i, sinks))
        alpha = jnp.exp(m_i - m_new)
        l_i = jnp.where(empty, 0.0, l_i * alpha + jnp.exp(sinks - m_new))
        m_i, acc = m_new, acc * alpha[:, None]
    l_safe = jnp.where(empty, 1.0, l_i)
    return acc / l_safe[:, None], jnp.where(empty, -jnp.inf, m_i + jnp.log(l_safe))


def _merge_decode_kernel(
    outs_ref,  # f32[num_partials, Hq, D]
    lses_ref,  # f32[num_partials, Hq]
    unit_ends_ref,  # i32[B]
    sinks_ref,  # f32[Hq] or None
    result_refs,  # o_ref and lse_ref with the rows that have one partial state; or None
    o_ref,  # [B, Hq, D]
    lse_ref,  # f32[B, Hq]
    *,
    plan: DecodePlan,
    tile: MergeConfig,
):
    """One program: merge the partial states of some heads and elements of one row."""
    row = pl.program_id(0)
    _, num_heads, head_dim = o_ref.shape
    first, num_partials = plan.partials_of_row(row, unit_ends_ref)

    heads = pl.program_id(1) * tile.block_h + jnp.arange(tile.block_h)
    dims = pl.program_id(2) * tile.block_d + jnp.arange(tile.block_d)
    head_mask = heads < num_heads

    def merge_row():
        state = _merge_partials(outs_ref, lses_ref, first, num_partials, heads, dims, tile.block_s)
        sinks = None
        if sinks_ref is not None:
            sinks = plgpu.load(sinks_ref.at[heads], mask=head_mask, other=0.0)
        out, lse = finish(state, sinks)
        plgpu.store(
            o_ref.at[row[None, None], heads[:, None], dims[None, :]],
            out.astype(o_ref.dtype),
            mask=head_mask[:, None] & (dims < head_dim)[None, :],
        )
        # Programs that hold other elements of the head store the same lse: no branch is needed.
        plgpu.store(lse_ref.at[row[None], heads], lse, mask=head_mask)

    if result_refs is None:
        merge_row()
    else:
        pl.when(num_partials != 1)(merge_row)


def merge_decode(
    states: DecodeStates, *, dtype: jnp.dtype, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """Return `(out dtype[B, Hq, D], lse f32[B, Hq])` from the decode kernel's partial states."""
    plan, results, num_seqs = states.plan, states.results, states.unit_ends.shape[0]
    _, num_heads, head_dim = states.out.shape
    tile = decode_merge_config(
        num_seqs=num_seqs,
        num_heads=num_heads,
        head_dim=head_dim,
        num_programs=plan.num_programs,
        has_short=plan.num_short_programs > 0,
        fixed_split=plan.fixed_split_size is not None,
    )

    args = (states.out, states.lse, states.unit_ends, states.sinks, results)
    num_inputs = len(jax.tree.leaves(args))
    out_shape = (
        result_shape((num_seqs, num_heads, head_dim), dtype),
        result_shape((num_seqs, num_heads), jnp.float32),
    )
    return pl.pallas_call(
        functools.partial(_merge_decode_kernel, plan=plan, tile=tile),
        grid=(num_seqs, pl.cdiv(num_heads, tile.block_h), pl.cdiv(head_dim, tile.block_d)),
        in_specs=list(full_specs(args)),
        out_specs=list(full_specs(out_shape)),
        out_shape=out_shape,
        # Written in place: `results` already hold the rows that are not split.
        input_output_aliases={} if results is None else {num_inputs - 2: 0, num_inputs - 1: 1},
        compiler_params=plgpu.CompilerParams(num_warps=tile.num_warps),
        interpret=interpret,
        name="paged_decode_merge",
    )(*args)


def _merge_ragged_kernel(
    outs_ref,  # f32[num_partials, block_q, D]
    lses_ref,  # f32[num_partials, block_q]
    plan: Plan,  # of refs
    sinks_ref,  # f32[G] or None
    _o_in_ref,
    _lse_in_ref,
    o_ref,  # [T, G, D], already holds the tiles that were not split
    lse_ref,  # f32[T, G]
    *,
    config: RaggedConfig,
    tile: MergeConfig,
):
    """One program: merge the partial states of some query rows and elements of one split tile."""
    _, group, head_dim = o_ref.shape
    item = plan.first_item[pl.program_id(1)]
    num_partials = plan.num_items[pl.program_id(1)]
    first = plan.partial[item]
    rows = pl.program_id(2) * tile.block_h + jnp.arange(tile.block_h)
    dims = pl.program_id(3) * tile.block_d + jnp.arange(tile.block_d)
    packed = plan.items.offset[item] + rows
    token, head = packed // group, packed % group
    row_mask = (num_partials > 0) & (rows < config.block_q) & (token < plan.items.q_len[item])
    token = plan.items.q_start[item] + token
    state = _merge_partials(outs_ref, lses_ref, first, num_partials, rows, dims, tile.block_s)
    sinks = None if sinks_ref is None else plgpu.load(sinks_ref.at[head], mask=row_mask, other=0.0)
    out, lse = finish(state, sinks)
    plgpu.store(
        o_ref.at[token[:, None], head[:, None], dims[None, :]],
        out.astype(o_ref.dtype),
        mask=row_mask[:, None] & (dims < head_dim)[None, :],
    )
    plgpu.store(lse_ref.at[token, head], lse, mask=row_mask)


def merge_ragged(
    out: jax.Array,  # [T, Hkv, G, D]
    lse: jax.Array,  # f32[T, Hkv, G]
    outs: jax.Array,  # f32[Hkv, num_partials, block_q, D]
    lses: jax.Array,  # f32[Hkv, num_partials, block_q]
    plan: Plan,
    sinks: jax.Array | None,  # f32[Hkv, G]
    *,
    config: RaggedConfig,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """Return `(out, lse)` with the rows of split tiles, from their partial states."""
    num_kv_heads, _, block_q, head_dim = outs.shape
    num_merges = plan.num_items.shape[0]
    tile = ragged_merge_config(
        num_merges=num_merges,
        block_q=block_q,
        head_dim=head_dim,
        num_programs=programs_per_kv_head(config.num_programs, num_kv_heads),
        fixed_split=config.fixed_split_size is not None,
    )

    num_parts = pl.cdiv(block_q, tile.block_h), pl.cdiv(head_dim, tile.block_d)
    specs = kv_head([out, lse], 1)
    args = (outs, lses, plan, sinks, out, lse)
    num_inputs = len(jax.tree.leaves(args))
    return pl.pallas_call(
        functools.partial(_merge_ragged_kernel, config=config, tile=tile),
        grid=(num_kv_heads, num_merges, *num_parts),
        in_specs=[*kv_head((outs, lses), 0), full_specs(plan), kv_head(sinks, 0), *specs],
        out_specs=specs,
        out_shape=[result_shape(x.shape, x.dtype) for x in (out, lse)],
        # Written in place: `out` already holds the tiles that were not split.
        input_output_aliases={num_inputs - 2: 0, num_inputs - 1: 1},
        compiler_params=plgpu.CompilerParams(num_warps=tile.num_warps),
        interpret=interpret,
        name="ragged_paged_attention_merge",
    )(*args)
