"""One program of the ragged kernel for Ampere and later: it attends one work item."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_paged.checks import pytree
from pallas_paged.kernels.logits import LogitOptions, split_scales
from pallas_paged.kernels.mosaic import ops as wgmma_ops
from pallas_paged.kernels.mosaic.ragged_work import RaggedOutputs, WorkDescriptor, unpack
from pallas_paged.kernels.mosaic.softmax_state import State, empty_state, finish
from pallas_paged.kernels.mosaic_sm80 import ops
from pallas_paged.kernels.mosaic_sm80.config import (
    CallTypes,
    MosaicSm80RaggedConfig,
    result_columns,
)
from pallas_paged.kernels.mosaic_sm80.ragged_blocks import Buffers, Stream
from pallas_paged.kernels.mosaic_sm80.ragged_copies import (
    gather_rows,
    init_turns,
    program_barrier,
    take_turns,
    wait_for_own_copies,
)
from pallas_paged.kernels.mosaic_sm80.ragged_products import multiply_pv, multiply_qk, padded
from pallas_paged.kernels.mosaic_sm80.ragged_rows import (
    ROWS,
    RaggedRows,
    RowInputs,
    columns_of_part,
    store_rows,
)
from pallas_paged.kernels.ragged_tiles import for_each_block
from pallas_paged.pages.layout import K, V

_COLUMN = ROWS.reduce(0)
_SLACK = 8.0  # by which a logit, base 2, may be larger than the maximum that is subtracted


@pytree
class RaggedScratch:
    """Refs in shared memory of a program, or their types."""

    q: Any  # [warpgroups, R, D + pad], then the results
    rows: Any  # i32[warpgroups, R], index of each row in [T * Hq]
    buffers: Buffers
    turns: Any  # barrier at which two warpgroups meet, or None


def scratch_types(
    config: MosaicSm80RaggedConfig, types: CallTypes, *, interpret: bool
) -> RaggedScratch:
    """Return the types of the shared memory of a program."""
    rows = config.num_warpgroups, config.rows_per_warpgroup
    turns: Any = None
    if config.num_warpgroups == 2:
        turns = plgpu.Barrier(num_arrivals=2) if interpret else plgpu.SMEM((2,), jnp.int32)
    return RaggedScratch(
        q=plgpu.SMEM((*rows, padded(types.head_dim, types.dtype)), types.dtype),
        rows=plgpu.SMEM(rows, jnp.int32),
        buffers=Buffers.types(config.block_k, types),
        turns=turns,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """One program of the kernel; `run` runs it."""

    inputs: RowInputs
    outputs: RaggedOutputs  # partials [Hkv, partials, R, ..]
    scratch: RaggedScratch
    options: LogitOptions
    config: MosaicSm80RaggedConfig
    group: int
    causal: bool  # whether a query sees no later key
    wg: Any  # index of the warpgroup
    interpret: bool

    def run(self) -> None:
        """Attend one work item and store its result or, of a split tile, a partial state."""
        inputs, outputs, scratch, interpret = (
            self.inputs,
            self.outputs,
            self.scratch,
            self.interpret,
        )
        num_kv_heads, v_head_dim = inputs.pages.num_kv_heads, outputs.out.shape[-1]
        num_parts = result_columns(v_head_dim)[0]
        program: Any = lax.axis_index("program")
        part: Any = 0
        if num_parts > 1:
            program, part = lax.div(program, num_parts), lax.rem(program, num_parts)
        columns = columns_of_part(part, v_head_dim)
        kv_head = lax.rem(program, num_kv_heads)
        work = unpack(WorkDescriptor, inputs.items, lax.div(program, num_kv_heads))
        rows = RaggedRows(
            count=self.config.rows_per_warpgroup,
            group=self.group,
            num_q_heads=self.group * num_kv_heads,
            kv_head=kv_head,
            q_start=work.q_start,
            q_len=work.q_len,
            offset=work.offset + self.wg * self.config.rows_per_warpgroup,
        )

        @pl.when(work.q_len > 0)
        def _():
            state = self.attend(work, rows, columns)

            @pl.when(work.partial < 0)
            def _():
                sinks = inputs.of_rows.sinks
                sinks = None if sinks is None else rows.of_heads(sinks)
                scratch.rows[self.wg] = rows.index()
                store_rows(
                    outputs.out.at[:, columns],
                    outputs.lse,  # all parts have the same
                    scratch.q.at[self.wg],
                    scratch.rows.at[self.wg],
                    *finish(state, sinks),
                    head_dim=v_head_dim,
                    interpret=interpret,
                )

            @pl.when(work.partial >= 0)
            def _():
                out, lse = finish(state, None)
                index = kv_head, work.partial, pl.ds(self.wg * rows.count, rows.count)
                wgmma_ops.store(outputs.partials.out.at[(*index, columns)], out)
                wgmma_ops.store(outputs.partials.lse.at[index], lse)

    def attend(self, work: WorkDescriptor, rows: RaggedRows, columns: Any) -> State:
        """Return the state of the rows and of columns of V after the blocks of a work item."""
        inputs, scratch, config, options = self.inputs, self.scratch, self.config, self.options
        head_dim, block_k = inputs.q.shape[-1], config.block_k
        stream = Stream(
            pool=inputs.pages,
            buffers=scratch.buffers,
            row=work.row,
            kv_head=rows.kv_head,
            first_key=work.first_key,
            last_key=work.kv_len - 1,
            lo=work.lo,
            hi=work.hi,
            columns=(pl.ds(0, head_dim), columns),
            interpret=self.interpret,
        )

        @pl.when(work.lo < work.hi)
        def _():
            scratch.rows[self.wg] = jnp.maximum(rows.index(), 0)
            ops.barrier(interpret=self.interpret)
            row_bytes = head_dim * jnp.dtype(inputs.q.dtype).itemsize
            gather_rows(
                scratch.q.at[self.wg],
                inputs.q,
                scratch.rows.at[self.wg],
                0,
                unit=row_bytes,
                row_bytes=row_bytes,
                interpret=self.interpret,
            )
            if scratch.turns is not None:
                init_turns(scratch.turns, self.wg, interpret=self.interpret)
            self.if_copying(stream.start)
            wait_for_own_copies(interpret=self.interpret)
            self.barrier()

        queries = rows.in_logits(work, inputs.of_rows, options, causal=self.causal)
        k_scale = v_scale = None
        by_token = inputs.pages.scales_by_token
        if inputs.pages.k_scales is not None and not by_token:
            k_scale, v_scale = inputs.pages.k_scales[0], inputs.pages.v_scales[0]
        only_factor = None if inputs.pages.k_scales is None else options.only_factor(queries.slopes)
        k_factor = 1.0 if only_factor is None else only_factor

        def of_tokens(kv, block, like, factor=1.0):
            scales = wgmma_ops.load(stream.scales(kv, block), _COLUMN) * factor
            return wgmma_ops.bcast(scales, like, axis=1)

        def multiply(block):
            return multiply_qk(
                scratch.q.at[self.wg], stream.k(block), head_dim=head_dim, interpret=self.interpret
            )

        def no_logits():
            return wgmma_ops.full((rows.count, block_k), 0.0, ROWS)

        def attend_block(masked, block, state):
            m_i, l_i, acc, s = state
            self.if_copying(lambda: stream.advance(block))
            if by_token:
                s = s * of_tokens(K, block, s, k_factor)
            elif k_scale is not None:
                s = s * (k_scale * k_factor)
            keys = block * block_k + wgmma_ops.iota(s.shape, 1, ROWS)
            if only_factor is not None:
                factor = 1.0
            else:
                s, factor = queries.logits(s, keys)
            v_scales = of_tokens(V, block, s) if by_token else None
            inverses = None
            if by_token and scratch.q.dtype == jnp.float16:
                # f16 has a small range: powers of two of the scales go to the exponent.
                exponents, v_scales, inverses = split_scales(v_scales)
                s, factor = s * factor + exponents, 1.0
            if masked:
                s = jnp.where(queries.sees(block * block_k, keys), s, -jnp.inf)
            m_new = jnp.maximum(m_i, s.max(axis=1) * factor)
            # A maximum that is less than 2 ** 8 too small does no harm, and acc stays as it is.
            m_new = jnp.where(m_new > m_i + _SLACK, m_new, m_i)
            m_safe = jnp.where(m_new == -jnp.inf, 0.0, m_new) if masked else m_new
            alpha = jnp.exp2(m_i - m_safe)
            maxima = wgmma_ops.bcast(m_safe, s)
            if only_factor is None:
                p = jnp.exp2(s * factor - maxima)
            else:
                p = jnp.exp2(wgmma_ops.difference(s, maxima, ROWS, interpret=self.interpret))
            l_new = l_i * alpha + (p if inverses is None else p * inverses).sum(axis=1)
            if by_token:
                p = p * v_scales
            p = p.astype(scratch.q.dtype)
            # All of the softmax stays before the barrier.
            acc, l_new, m_new, alpha, p = lax.optimization_barrier((acc, l_new, m_new, alpha, p))
            self.turn(1 - self.wg)
            acc = multiply_pv(acc, alpha, p, stream.v(block), interpret=self.interpret)
            s = lax.cond(block + 1 < work.hi, lambda: multiply(block + 1), no_logits)
            self.if_copying(stream.arrive)
            self.turn(self.wg)
            return m_new, l_new, acc, s

        def first_logits():
            # The second warpgroup starts, and the first one ends, with one more turn.
            if scratch.turns is not None:
                pl.when(self.wg == 1)(lambda: self.turn(0))
            s = multiply(work.lo)
            self.turn(self.wg)
            return s

        s = lax.cond(work.lo < work.hi, first_logits, no_logits)
        state = (*empty_state(rows.count, columns.size), s)
        m_i, l_i, acc, _ = for_each_block(attend_block, work, state, options)
        if scratch.turns is not None:
            pl.when((self.wg == 0) & (work.lo < work.hi))(lambda: self.turn(1))

        return m_i, l_i, acc if v_scale is None else acc * v_scale

    def barrier(self) -> None:
        """Wait for all threads of the program."""
        if not self.interpret:
            program_barrier(self.config.num_warpgroups)
        elif self.scratch.turns is not None:
            take_turns(self.scratch.turns, 0, interpret=True)

    def turn(self, parity: Any) -> None:
        """Wait for the other warpgroup, as `take_turns` does, or for threads of the only one."""
        if self.scratch.turns is None:
            self.barrier()
        else:
            take_turns(self.scratch.turns, parity, interpret=self.interpret)

    def if_copying(self, body: Callable[[], None]) -> None:
        """Run `body` in the warpgroup that copies K and V, the last one."""
        if self.config.num_warpgroups == 1:
            body()
        else:
            pl.when(self.wg == 1)(body)
