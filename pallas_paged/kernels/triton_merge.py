"""Merge of the partial states that `triton_decode` leaves, a Pallas-Triton kernel and its specs."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_paged.kernels.tuning import DecodeConfig, MergeConfig, merge_config


def merge_kernel(
    outs_ref,  # f32[C + B, Hq, D]
    lses_ref,  # f32[C + B, Hq]
    seq_lens_ref,  # i32[B]
    block_ends_ref,  # i32[B]
    o_ref,  # [B, Hq, D]
    lse_ref,  # f32[B, Hq]
    *,
    config: DecodeConfig,
    tile: MergeConfig,
):
    row = pl.program_id(0)
    num_seqs, num_heads, head_dim = o_ref.shape
    total = block_ends_ref[num_seqs - 1]
    end = block_ends_ref[row]
    start = end - pl.cdiv(seq_lens_ref[row], config.block_k)
    # The shares of `triton_decode`; at least 1, since nobody may have any tokens.
    blocks_per_program = jnp.maximum(pl.cdiv(total, config.num_programs), 1)
    first = lax.div(start, blocks_per_program) + row
    last = lax.div(end - 1, blocks_per_program) + row
    stop = jnp.where(start < end, last + 1, first)  # a row without tokens has no slot

    heads = pl.program_id(1) * tile.block_h + jnp.arange(tile.block_h)
    dims = pl.program_id(2) * tile.block_d + jnp.arange(tile.block_d)
    head_mask = heads < num_heads
    mask = head_mask[:, None] & (dims < head_dim)[None, :]  # [block_h, block_d]

    def merge_slots(i, state):
        m_i, l_i, acc = state
        slots = first + i * tile.block_s + jnp.arange(tile.block_s)
        valid = slots < stop
        lse = plgpu.load(
            lses_ref.at[slots[:, None], heads[None, :]],
            mask=valid[:, None] & head_mask[None, :],
            other=-jnp.inf,
        )  # [block_s, block_h]
        out = plgpu.load(
            outs_ref.at[slots[:, None, None], heads[None, :, None], dims[None, None, :]],
            mask=valid[:, None, None] & mask[None],
            other=0.0,
        )  # [block_s, block_h, block_d]
        m_new = jnp.maximum(m_i, lse.max(axis=0))
        m_safe = jnp.where(m_new == -jnp.inf, 0.0, m_new)  # heads that are off
        alpha, w = jnp.exp(m_i - m_safe), jnp.exp(lse - m_safe[None, :])
        acc = acc * alpha[:, None] + (out * w[:, :, None]).sum(axis=0)
        return m_new, l_i * alpha + w.sum(axis=0), acc

    state = (
        jnp.full((tile.block_h,), -jnp.inf, jnp.float32),
        jnp.zeros((tile.block_h,), jnp.float32),
        jnp.zeros((tile.block_h, tile.block_d), jnp.float32),
    )
    m_i, l_i, acc = lax.fori_loop(0, pl.cdiv(stop - first, tile.block_s), merge_slots, state)
    empty = l_i == 0.0
    l_safe = jnp.where(empty, 1.0, l_i)
    plgpu.store(
        o_ref.at[row[None, None], heads[:, None], dims[None, :]],
        (acc / l_safe[:, None]).astype(o_ref.dtype),
        mask=mask,
    )
    # The programs of a head's parts store the same lse, so no branch is needed.
    plgpu.store(
        lse_ref.at[row[None], heads],
        jnp.where(empty, -jnp.inf, m_i + jnp.log(l_safe)),
        mask=head_mask,
    )


def merge_shares(
    outs: jax.Array,  # f32[C + B, Hq, D]
    lses: jax.Array,  # f32[C + B, Hq]
    seq_lens: jax.Array,  # i32[B]
    block_ends: jax.Array,  # i32[B]
    *,
    dtype: jnp.dtype,
    config: DecodeConfig,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """Final `(out dtype[B, Hq, D], lse f32[B, Hq])` from the slots of the decode kernel."""
    num_seqs = seq_lens.shape[0]
    _, num_heads, head_dim = outs.shape
    tile = merge_config(
        num_seqs=num_seqs,
        num_heads=num_heads,
        head_dim=head_dim,
        num_programs=config.num_programs,
    )

    def whole(shape):
        return pl.BlockSpec(shape, lambda b, h, d: (0,) * len(shape))

    out_shape = (
        jax.ShapeDtypeStruct((num_seqs, num_heads, head_dim), dtype),
        jax.ShapeDtypeStruct((num_seqs, num_heads), jnp.float32),
    )
    return pl.pallas_call(
        functools.partial(merge_kernel, config=config, tile=tile),
        grid=(num_seqs, pl.cdiv(num_heads, tile.block_h), pl.cdiv(head_dim, tile.block_d)),
        in_specs=[whole(x.shape) for x in (outs, lses, seq_lens, block_ends)],
        out_specs=[whole(s.shape) for s in out_shape],
        out_shape=out_shape,
        compiler_params=plgpu.CompilerParams(num_warps=tile.num_warps),
        interpret=interpret,
        name="paged_decode_merge",
    )(outs, lses, seq_lens, block_ends)
