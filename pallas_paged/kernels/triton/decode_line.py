"""Split-KV decode attention over paged K/V in one loop over the blocks of many rows.

The kernel of `decode` has a loop for each row, and the first loads of a row wait for nothing but
themselves: about 2 us for each row that a program has. Here a program has one loop over its range
of the line (`decode_plan`), and the loads of a row's first block are on their way while it attends
to the row before. What a block is, `blocks_of` writes down once for all layers of a step.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_paged.kernels.call import Arrays, result_shape
from pallas_paged.kernels.decode_plan import DecodePlan
from pallas_paged.kernels.decode_states import DecodeStates
from pallas_paged.kernels.logits import LN_2, LogitOptions, base2_logits, dot
from pallas_paged.kernels.triton import one_byte, pages, softmax
from pallas_paged.kernels.triton.config import DecodeConfig
from pallas_paged.kernels.triton.specs import kv_head, whole

_FIRST, _LAST, _FLAG_BITS = 1, 2, 2


def blocks_of(arrays: Arrays, plan: DecodePlan, unit_ends: jax.Array) -> list[jax.Array]:
    """Return what each block of the line is, in the same order for all layers of a step.

    Returns:
        i32`[L, 2]`, the row with whether the block is its first and its last, and the row's tokens
        from the block on; and i32`[L, N]`, the slot of the first key on each of the block's pages.
    """
    num_seqs, page_size, block_k = arrays.num_seqs, arrays.page_size, plan.block_k
    unit = jnp.arange(num_seqs * pl.cdiv(arrays.max_kv_len, block_k), dtype=jnp.int32)
    row = jnp.sum(unit_ends <= unit[:, None], axis=1, dtype=jnp.int32)
    row = jnp.minimum(row, num_seqs - 1)
    seq_len, row_end = arrays.seq_lens[row], unit_ends[row]
    first_block, end_block = plan.row_blocks(seq_len)
    block = unit - row_end + end_block
    flags = jnp.where(block == first_block, _FIRST, 0) | jnp.where(unit + 1 == row_end, _LAST, 0)
    words = jnp.stack([row << _FLAG_BITS | flags, seq_len - block * block_k], axis=1)
    size = min(page_size, block_k)
    first = (block * block_k)[:, None] + size * jnp.arange(block_k // size, dtype=jnp.int32)
    # Pages past the row's last may be any number; no load of theirs is on.
    bits = page_size.bit_length() - 1
    page = arrays.block_tables.at[row[:, None], first >> bits].get(mode="clip")
    return [words, (page << bits) + (first & (page_size - 1))]


def line_kernel(
    q_ref,  # [B, G, D]
    k_ref,  # [P * S, D] or [P, S, D]
    v_ref,  # like k_ref
    words_ref,  # i32[L, 2], from `blocks_of`
    slots_ref,  # i32[L, N], from `blocks_of`
    unit_ends_ref,  # i32[B], from `DecodePlan.unit_ends`
    alibi_slopes_ref,  # f32[G] or None
    o_ref,  # f32[num_partials, G, D]
    lse_ref,  # f32[num_partials, G]
    *,
    plan: DecodePlan,
    page_size: int,
    operands: one_byte.Operands,
    keeps_q: bool,
    branches: bool,
):
    """One program: attend to its blocks of the line, and leave a partial state for each row."""
    options, block_k = plan.options, plan.block_k
    num_seqs, group, head_dim = q_ref.shape
    program = pl.program_id(1)
    heads = jnp.arange(pl.next_power_of_2(max(group, 16)))[:, None]
    dims = jnp.arange(pl.next_power_of_2(max(head_dim, 16)))[None, :]
    head_mask, dim_mask = heads < group, dims < head_dim
    start, stop = plan.units_of_program(program, unit_ends_ref[num_seqs - 1])
    keys = jnp.arange(block_k)
    size = block_k // slots_ref.shape[1]
    size_bits, page_bits = size.bit_length() - 1, page_size.bit_length() - 1

    slopes = None
    if alibi_slopes_ref is not None:
        slopes = plgpu.load(alibi_slopes_ref.at[heads], mask=head_mask, other=0.0)  # [G, 1]

    def load_q(row):
        return plgpu.load(
            q_ref.at[row[None, None], heads, dims], mask=head_mask & dim_mask, other=0.0
        )

    def attend_block(unit, carry):
        (m_i, l_i, [acc]), q = carry
        word, num_left = words_ref[unit, 0], words_ref[unit, 1]
        row, is_first = word >> _FLAG_BITS, (word & _FIRST) > 0
        is_last = ((word & _LAST) > 0) | (unit + 1 == stop)
        valid = keys < num_left
        if options.sliding_window is not None:
            valid &= keys >= num_left - options.sliding_window
        slots = plgpu.load(
            slots_ref.at[unit[None], keys >> size_bits],
            mask=valid,
            other=0,
            eviction_policy="evict_last",
        )
        slots += keys & (size - 1)
        kv_mask = valid[:, None] & dim_mask

        def load(ref):
            if len(ref.shape) == 2:
                at = slots[:, None], dims
            else:
                at = (slots >> page_bits)[:, None], (slots & (page_size - 1))[:, None], dims
            return plgpu.load(ref.at[at], mask=kv_mask, other=0.0)

        q = lax.cond(is_first, lambda: load_q(row), lambda: q) if keeps_q else load_q(row)
        distances = (keys - (num_left - 1))[None, :]
        s, factor = base2_logits(dot(q, load(k_ref).T), options, slopes, distances)
        s = jnp.where(valid[None, :], s, -jnp.inf)
        # Selected, since what the row before has left may be NaN.
        state = (
            jnp.where(is_first, -jnp.inf, m_i),
            jnp.where(is_first, 0.0, l_i),
            [jnp.where(is_first, 0.0, acc)],
        )
        m_i, l_i, [acc] = softmax.attend(
            state,
            s,
            factor,
            None,
            lambda: [load(v_ref)],
            all_see=True,
            operands=operands,
        )

        def store(on):
            partial = plan.partial_index(program=program, row=row, unit=unit)
            plgpu.store(
                o_ref.at[partial[None, None], heads, dims],
                acc / l_i[:, None],
                mask=on & head_mask & dim_mask,
            )
            plgpu.store(
                lse_ref.at[partial[None], heads[:, 0]],
                m_i * LN_2 + jnp.log(l_i),
                mask=on & head_mask[:, 0],
            )

        if branches:
            pl.when(is_last)(lambda: store(True))
        else:
            store(is_last)
        return (m_i, l_i, [acc]), q if keeps_q else carry[1]

    state = softmax.empty(heads.size, dims.size, 1)
    q = load_q(words_ref[jnp.minimum(start, stop), 0] >> _FLAG_BITS) if keeps_q else jnp.int32(0)
    lax.fori_loop(start, jnp.maximum(start, stop), attend_block, (state, q))


def line_states(
    arrays: Arrays,
    *,
    options: LogitOptions,
    config: DecodeConfig,
    interpret: bool,
    keeps_q: bool = False,
    branches: bool = True,
) -> DecodeStates:
    """Attend with one query token per row, without the merge."""
    num_seqs, num_q_heads, head_dim = arrays.q.shape
    num_kv_heads, group = arrays.num_kv_heads, arrays.group
    plan = DecodePlan.of(
        config,
        options,
        num_seqs=num_seqs,
        num_kv_heads=num_kv_heads,
        max_kv_len=arrays.max_kv_len,
    )
    unit_ends = plan.unit_ends(arrays.seq_lens)
    with jax.named_scope("blocks_of_line"):
        line = blocks_of(arrays, plan, unit_ends)
    operands = one_byte.Operands(
        dtype=arrays.q.dtype, kv_dtype=arrays.k_pages.dtype, interpret=interpret
    )
    q = arrays.q.reshape(num_seqs, num_kv_heads, group, head_dim)
    slopes = arrays.alibi_slopes
    slopes = None if slopes is None else slopes.reshape(num_kv_heads, group)
    kv, kv_specs = pages.operands_of(arrays)
    out_shape = (
        result_shape((plan.num_partials, num_kv_heads, group, head_dim), jnp.float32),
        result_shape((plan.num_partials, num_kv_heads, group), jnp.float32),
    )
    outs, lses = pl.pallas_call(
        functools.partial(
            line_kernel,
            plan=plan,
            page_size=arrays.page_size,
            operands=operands,
            keeps_q=keeps_q,
            branches=branches,
        ),
        grid=(num_kv_heads, plan.num_programs),
        in_specs=[kv_head(q, 1), *kv_specs[:2], *whole([*line, unit_ends]), kv_head(slopes, 0)],
        out_specs=[kv_head(x, 1) for x in out_shape],
        out_shape=out_shape,
        compiler_params=plgpu.CompilerParams(
            num_warps=config.num_warps, num_stages=config.num_stages
        ),
        interpret=interpret,
        name="paged_decode",
    )(q, *kv[:2], *line, unit_ends, slopes)
    return DecodeStates(
        out=outs.reshape(plan.num_partials, num_q_heads, head_dim),
        lse=lses.reshape(plan.num_partials, num_q_heads),
        unit_ends=unit_ends,
        sinks=arrays.sinks,
        plan=plan,
        num_q_heads=num_q_heads,
    )
