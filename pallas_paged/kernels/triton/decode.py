"""Split-KV decode attention over paged K/V, a Pallas-Triton kernel and its specs.

`decode_plan` describes how the blocks of all rows are divided among programs. A program holds all
query heads of its KV head, so K/V are read once. It writes the results of unsplit rows.
`merge` merges the partial states of the others.

Split-KV as in Flash-Decoding, balanced as in stream-K; see also FlashAttention (Dao 2022).
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_paged.kernels.call import Arrays, result_shape
from pallas_paged.kernels.decode_plan import DecodePlan
from pallas_paged.kernels.decode_states import DecodeStates
from pallas_paged.kernels.logits import LN_2, LogitOptions, base2_logits, dot, visible
from pallas_paged.kernels.triton import new_token, one_byte, pages, softmax
from pallas_paged.kernels.triton.config import DecodeConfig
from pallas_paged.kernels.triton.new_token import NewTokens
from pallas_paged.kernels.triton.pages import Tokens
from pallas_paged.kernels.triton.specs import by_kv_head, full_specs, kv_head, loop_params
from pallas_paged.kernels.write_arrays import WriteArrays


def _decode_kernel(
    q_refs,  # of arrays [B, G, ..] from `Operands.pack`; or with new tokens [B, G + 2, D]
    k_ref,  # [P * S, D] or [P, S, D], of int8 and fp8 elements words [.., D / 2]
    v_ref,  # like k_ref
    k_scales_ref,  # f32[P * S] or [P, S], or [1] for all tokens, or None
    v_scales_ref,  # like k_scales_ref
    block_tables_ref,  # i32[B, N]
    seq_lens_ref,  # i32[B]
    unit_ends_ref,  # i32[B], from `DecodePlan.unit_ends`
    alibi_slopes_ref,  # f32[G] or None
    new_refs,  # of new tokens their slots, cosines and sines; or none
    outs_ref,  # f32[num_partials, G, D]
    lses_ref,  # f32[num_partials, G]
    result_refs,  # out [B, G, D] and lse f32[B, G] of the rows that are not split, or None
    *pages_refs,  # of new tokens, k_ref and v_ref to write
    plan: DecodePlan,
    page_size: int,
    operands: one_byte.Operands,
):
    """One program: attend to its range of work units, and leave a state for each row."""
    options, block_k = plan.options, plan.block_k
    num_seqs, group = q_refs[0].shape[0], outs_ref.shape[1]
    new = NewTokens(q_refs[0], *new_refs, *pages_refs) if new_refs else None
    program = pl.program_id(1)

    # Indices of loads and stores have power-of-two shapes; lanes past the real sizes are off.
    rows = jnp.arange(pl.next_power_of_2(num_seqs))
    # The matrix unit takes at least 16 rows, and products over at least 16 elements.
    heads = jnp.arange(pl.next_power_of_2(max(group, 16)))[:, None]
    num_words = k_ref.shape[-1]
    words = jnp.arange(pl.next_power_of_2(max(num_words, 16)))[None, :]
    dims = one_byte.elements(words, outs_ref.shape[2] // num_words)
    head_mask, dim_mask = heads < group, words < num_words
    page_bits = page_size.bit_length() - 1
    start, stop = plan.units_of_program(program, unit_ends_ref[num_seqs - 1])
    unit_ends = plgpu.load(
        unit_ends_ref.at[rows],
        mask=rows < num_seqs,
        other=jnp.iinfo(jnp.int32).max,
        eviction_policy="evict_last",
    )
    seq_lens = plgpu.load(
        seq_lens_ref.at[rows], mask=rows < num_seqs, other=0, eviction_policy="evict_last"
    )
    slopes = None
    if alibi_slopes_ref is not None:
        slopes = plgpu.load(alibi_slopes_ref.at[heads], mask=head_mask, other=0.0)  # [G, 1]

    def row_of(unit):
        return jnp.sum((unit_ends <= unit).astype(jnp.int32))

    def attend_item(item, carry):
        """Attend to the part of row `item` in the range; with fixed splits, to the split `item`."""
        row = item if plan.fixed_split_size is None else row_of(item)
        # Picked from registers: a load here would delay the first K once more.
        seq_len = jnp.sum(jnp.where(rows == row, seq_lens, 0))
        row_end = jnp.sum(jnp.where(rows == row, unit_ends, 0))
        first_block, end_block = plan.row_blocks(seq_len)
        row_start = row_end - plan.num_units(end_block - first_block)
        if plan.fixed_split_size is None:
            lo = first_block + jnp.maximum(start - row_start, 0)
            hi = first_block + jnp.minimum(stop, row_end) - row_start
        else:
            lo = first_block + (item - row_start) * plan.blocks_per_unit
            hi = jnp.minimum(lo + plan.blocks_per_unit, end_block)
        partial = plan.partial_index(program=program, row=row, unit=item)

        def positions_of(block):
            """Return the positions of a block's keys, and which of them the query sees."""
            positions = block * block_k + jnp.arange(block_k)
            num_keys = seq_len if new is None else seq_len - 1
            # The loads are masked, not only the logits: slots that the row does not own may hold
            # NaN. Masking every block, not just a row's last, measured no slower.
            return positions, visible(positions, seq_len - 1, options, end=num_keys)

        def pages_of(block):
            positions, valid = positions_of(block)
            # Every layer reads the table and the lengths again: they should stay in the L2.
            return plgpu.load(
                block_tables_ref.at[row[None], positions >> page_bits],
                mask=valid,
                other=0,
                eviction_policy="evict_last",
            )

        # int8 and fp8 K/V arrive in half the time, but the table takes as long: reading it one
        # block ahead saves 11 to 13%. With two-byte K/V that gained nothing and took registers.
        next_pages = pages_of(lo) if operands.quantized else None
        if new is None:
            q_mask = head_mask & dim_mask
            at = row[None, None], heads, words
            q = [plgpu.load(x.at[at], mask=q_mask, other=one_byte.zero(x)) for x in q_refs]
            q, q_scales = operands.of_queries(q)  # [G, D] in all
            state = softmax.empty(heads.size, words.size, len(dims))
        else:
            is_last = hi == end_block
            q, new_k, new_v = new.load(row, heads, words, head_mask, is_last)
            new.write(row, words, new_k, new_v, is_last)
            state = new_token.state_of(q, new_k, new_v, is_last, options)
            q, q_scales = [q], None

        def attend_block(block, carry):
            state, next_pages = carry
            page = pages_of(block) if next_pages is None else next_pages
            next_pages = None if next_pages is None else pages_of(block + 1)
            positions, valid = positions_of(block)
            tokens = Tokens.of(page, positions, page_size)
            kv_mask = valid[:, None] & dim_mask

            def load(ref):
                rows = tokens.rows_of(ref, words)
                return plgpu.load(rows, mask=kv_mask, other=one_byte.zero(ref))

            k = operands.of_pages(load(k_ref))
            distances = (positions - (seq_len - 1))[None, :]
            s = functools.reduce(operator.add, map(lambda q, k: dot(q, k.T), q, k))
            if k_scales_ref is not None:
                s *= tokens.load_scales(k_scales_ref, valid)[None, :]
            s, factor = base2_logits(s, options, slopes, distances, q_scales)  # [G, block_k]
            s = jnp.where(valid[None, :], s, -jnp.inf)
            state = softmax.attend(
                state,
                s,
                factor,
                tokens.load_scales(v_scales_ref, valid),
                lambda: operands.of_pages(load(v_ref)),
                all_see=True,
                operands=operands,
            )
            return state, next_pages

        (m_i, l_i, acc), _ = lax.fori_loop(lo, hi, attend_block, (state, next_pages))

        # An empty row inside the range ran no block, and nothing reads its partial state.
        outs, lse = [a / l_i[:, None] for a in acc], m_i * LN_2 + jnp.log(l_i)

        def store(out_ref, lse_ref, index, is_on):
            for d, out in zip(dims, outs, strict=True):
                plgpu.store(
                    out_ref.at[index[None, None], heads, d],
                    out.astype(out_ref.dtype),
                    mask=head_mask & dim_mask & is_on,
                )
            plgpu.store(lse_ref.at[index[None], heads[:, 0]], lse, mask=head_mask[:, 0] & is_on)

        if result_refs is None:
            store(outs_ref, lses_ref, partial, True)
        else:
            # Found from memory, not from lo and hi: those would stay in registers in the loop over
            # blocks. Masks and not a branch, which takes 150 registers with some versions of JAX:
            # beyond 128 only three programs fit on an SM.
            _, num_partials = plan.partials_of_row(row, unit_ends_ref)
            store(outs_ref, lses_ref, partial, num_partials != 1)
            store(*result_refs, row, num_partials == 1)
        return carry

    if plan.fixed_split_size is None:
        first = row_of(start)
        end = jnp.where(start < stop, jnp.sum((unit_ends < stop).astype(jnp.int32)) + 1, first)
    else:
        first, end = start, jnp.maximum(start, stop)
    lax.fori_loop(first, end, attend_item, jnp.int32(0))


def _writes_results(plan: DecodePlan, sinks: jax.Array | None) -> bool:
    """Return whether the kernel writes the results of rows that are not split.

    Few rows are split, all of them, and only the merge knows sinks. With a fixed split size the
    kernel must be the same for each number of rows.
    """
    if sinks is not None or plan.fixed_split_size is not None:
        return False
    # Measured on an H200, 2026-11-23: without need it costs 8 rows of 2048 tokens 1%.
    return max(2, plan.num_programs // 2) <= plan.num_seqs


def _has_short_programs(arrays: Arrays) -> bool:
    """Return whether short programs pay for a call of long rows."""
    # Measured on an H200, 2026-11-23: they gain 0.5 to 2.5%, and cost 1% with one-byte pages and
    # with 8 query heads for a KV head, where the merge then takes twice as long. The states of one
    # row may go to another kernel than the merge, which is for fewer of them.
    return arrays.num_seqs > 1 and arrays.k_pages.dtype.itemsize > 1 and arrays.group <= 4


def decode_states(
    arrays: Arrays,
    *,
    options: LogitOptions,
    config: DecodeConfig,
    interpret: bool,
    new: WriteArrays | None = None,
) -> Any:
    """Attend with one query token per row, without the merge; return `DecodeStates`.

    `new` are the newest tokens of the rows, not in the pages yet. `q` then counts only for its
    shape, and the pages of K and of V are returned too, in the same memory.
    """
    num_seqs, num_q_heads, head_dim = arrays.q.shape
    num_kv_heads, group = arrays.num_kv_heads, arrays.group
    plan = DecodePlan.of(
        config,
        options,
        num_seqs=num_seqs,
        num_kv_heads=num_kv_heads,
        max_kv_len=arrays.max_kv_len,
        with_whole_rows=True,
        with_short_programs=_has_short_programs(arrays),
    )
    unit_ends = plan.unit_ends(arrays.seq_lens)

    operands = one_byte.Operands.of(arrays, interpret=interpret)
    if new is None:
        qs = operands.pack(arrays.q.reshape(num_seqs, num_kv_heads, group, head_dim))
    else:
        qs = [new.qkv]
    of_new = [] if new is None else [new.slots, new.cos, new.sin]
    kv, kv_specs = pages.operands_of(arrays)
    of_rows = [arrays.block_tables, arrays.seq_lens, unit_ends]
    results = None
    if _writes_results(plan, arrays.sinks):
        results = (
            result_shape((num_seqs, num_kv_heads, group, head_dim), arrays.q.dtype),
            result_shape((num_seqs, num_kv_heads, group), jnp.float32),
        )
    out_shape = (
        result_shape((plan.num_partials, num_kv_heads, group, head_dim), jnp.float32),
        result_shape((plan.num_partials, num_kv_heads, group), jnp.float32),
        results,
    )
    num_outs = len(jax.tree.leaves(out_shape))
    slopes = by_kv_head(arrays.alibi_slopes, num_kv_heads)
    written = [] if new is None else [result_shape(x.shape, x.dtype) for x in kv[:2]]
    outs, lses, results, *pages_written = pl.pallas_call(
        functools.partial(_decode_kernel, plan=plan, page_size=arrays.page_size, operands=operands),
        grid=(num_kv_heads, plan.num_programs + plan.num_short_programs),
        in_specs=[
            kv_head(qs, 1),
            *kv_specs,
            *full_specs(of_rows),
            kv_head(slopes, 0),
            full_specs(of_new),
        ],
        out_specs=[*kv_head(out_shape, 1), *kv_specs[: len(written)]],
        out_shape=[*out_shape, *written],
        input_output_aliases={len(qs) + i: num_outs + i for i in range(len(written))},
        compiler_params=loop_params(config),
        interpret=interpret,
        name="paged_decode",
    )(qs, *kv, *of_rows, slopes, of_new)
    if results is not None:
        out, lse = results
        results = out.reshape(arrays.q.shape), lse.reshape(num_seqs, num_q_heads)
    states = DecodeStates(
        out=outs.reshape(plan.num_partials, num_q_heads, head_dim),
        lse=lses.reshape(plan.num_partials, num_q_heads),
        results=results,
        unit_ends=unit_ends,
        sinks=arrays.sinks,
        plan=plan,
        num_q_heads=num_q_heads,
        head_dim=head_dim,
    )
    if new is None:
        return states
    return states, *(x.reshape(arrays.k_pages.shape) for x in pages_written)
