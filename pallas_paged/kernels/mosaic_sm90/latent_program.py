"""One program of the kernel of latent attention: it attends one work item.

A producer warpgroup streams blocks of 32 latents, which are K and V, through a ring of stages.
Two consumers have the same 64 query rows. Each makes the probabilities of every second block, and
owns half of the columns of the result. So no product is made twice, and the softmax of one runs
under the products of the other:

    consumer 0   q.k0  softmax  p0.v  q.k2  p1.v  softmax  p2.v  q.k4 ...       columns   0 to 255
    consumer 1   q.k1  p0.v  softmax  p1.v  q.k3  p2.v  softmax  p3.v ...       columns 256 to 511

A consumer leaves the probabilities of its block, the maxima of the rows and the factors of older
sums in shared memory for the other one.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_paged.kernels.logits import LogitOptions, split_scales
from pallas_paged.kernels.mosaic import ops
from pallas_paged.kernels.mosaic.ragged_work import RaggedOutputs, WorkDescriptor, unpack
from pallas_paged.kernels.mosaic.softmax_state import State, empty_state, finish
from pallas_paged.kernels.mosaic_sm80.ops import store_rows as store_partial_rows
from pallas_paged.kernels.mosaic_sm80.ragged_products import scale_changed_rows
from pallas_paged.kernels.mosaic_sm80.ragged_rows import RaggedRows, RowInputs, store_rows
from pallas_paged.kernels.mosaic_sm90.latent_producer import Producer
from pallas_paged.kernels.mosaic_sm90.latent_scratch import (
    BLOCK_K,
    CLUSTER,
    NUM_CONSUMERS,
    ROWS,
    LatentScratch,
)

_REGISTERS = dict(consumer=240, producer=24)
_REGISTERS_CONVERTING = dict(consumer=224, producer=56)
_SLACK = 8.0  # by which a logit, base 2, may be larger than the maximum that is subtracted


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """One program of the kernel; `run` runs it."""

    inputs: RowInputs
    outputs: RaggedOutputs  # partials [1, partials, R, ..]
    scratch: LatentScratch
    options: LogitOptions
    group: int  # query heads
    causal: bool  # whether a query sees no later key
    interpret: bool

    def run(self) -> None:
        """Attend one work item and store its result or, of a split tile, a partial state."""
        work = unpack(WorkDescriptor, self.inputs.items, lax.axis_index("program"))
        work = dataclasses.replace(work, offset=work.offset + self.first_row)
        rows = RaggedRows(
            count=ROWS,
            group=self.group,
            num_q_heads=self.group,
            kv_head=0,
            q_start=work.q_start,
            q_len=work.q_len,
            offset=work.offset,
        )
        wg = lax.axis_index("wg")
        registers = _REGISTERS if self.scratch.bytes is None else _REGISTERS_CONVERTING
        set_max = functools.partial(ops.set_max_registers, interpret=self.interpret)

        @pl.when(wg == NUM_CONSUMERS)
        def _():
            set_max(registers["producer"], action="decrease")
            producer = Producer(
                inputs=self.inputs,
                scratch=self.scratch,
                work=work,
                rows=rows,
                has_window=self.options.sliding_window is not None,
                interpret=self.interpret,
            )
            pl.when(work.lo < work.hi)(producer.run)

        for i in range(NUM_CONSUMERS):

            @pl.when((wg == i) & (work.q_len > 0))
            def _(i=i):
                set_max(registers["consumer"], action="increase")
                Consumer(**vars(self), wg=i).consume(work, rows)

    @property
    def first_row(self) -> jax.Array:
        """The first row of the program in the tile of its cluster."""
        return lax.axis_index(CLUSTER) * ROWS

    def stage_of(self, work: WorkDescriptor, block: jax.Array) -> jax.Array:
        """Return the stage of a block."""
        return lax.rem(block - work.lo, self.scratch.k.shape[0])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Consumer(Program):
    """A consumer warpgroup of a program."""

    wg: int

    @property
    def num_columns(self) -> int:
        """Columns of the result that the consumer has."""
        return self.inputs.q[0].shape[1] // NUM_CONSUMERS

    @property
    def columns(self) -> Any:
        return pl.ds(self.wg * self.num_columns, self.num_columns)

    def meet(self) -> None:
        """Wait for the other consumer."""
        plgpu.barrier_arrive(self.scratch.meeting)
        plgpu.barrier_wait(self.scratch.meeting)

    def consume(self, work: WorkDescriptor, rows: RaggedRows) -> None:
        """Attend, and store the result or the partial state."""
        inputs, outputs, scratch = self.inputs, self.outputs, self.scratch
        state, head_dim = self.attend(work, rows), inputs.q[0].shape[1]

        @pl.when(work.partial < 0)
        def _():
            sinks = inputs.of_rows.sinks
            sinks = None if sinks is None else rows.of_heads(sinks)
            # Both have read the queries, whose place these take.
            own_rows = scratch.rows.at[self.wg]
            own_rows[...] = rows.index()
            store_rows(
                outputs.out.at[:, self.columns],
                outputs.lse if self.wg == 0 else None,
                scratch.results[self.wg],
                own_rows,
                *finish(state, sinks),
                head_dim=head_dim,
                interpret=self.interpret,
            )

        @pl.when(work.partial >= 0)
        def _():
            out, lse = finish(state, None)
            own_rows = pl.ds(self.first_row, ROWS)
            store_partial_rows(
                outputs.partials.out.at[0, work.partial, own_rows, self.columns],
                out,
                work.q_len * self.group - work.offset,
                ops.WGMMA,
                pitch=head_dim,
                interpret=self.interpret,
            )
            if self.wg == 0:
                ops.store(outputs.partials.lse.at[0, work.partial, own_rows], lse)

        if scratch.cluster_done is not None:
            plgpu.barrier_arrive(scratch.cluster_done)
            plgpu.barrier_wait(scratch.cluster_done)

    def attend(self, work: WorkDescriptor, rows: RaggedRows) -> State:
        """Return the state of the rows and of the consumer's columns after a work item."""
        inputs, scratch, options, wg = self.inputs, self.scratch, self.options, self.wg
        head_dim, rope_dim = inputs.q[0].shape[1], inputs.q[1].shape[1]
        queries = rows.in_logits(work, inputs.of_rows, options, causal=self.causal)

        def multiply_qk(block):
            stage = self.stage_of(work, block)
            plgpu.barrier_wait(scratch.k_full.at[stage])

            def multiply(acc_ref):
                q_nope, q_pe = scratch.queries
                for q, first, size in ((q_nope, 0, head_dim), (q_pe, head_dim, rope_dim)):
                    k = scratch.k.at[stage, :, pl.ds(first, size)].transpose((1, 0))
                    plgpu.wgmma(acc_ref, q, k)
                return acc_ref[...]

            return pl.run_scoped(multiply, plgpu.ACC((ROWS, BLOCK_K), jnp.float32))

        def zero_unreadable(block, stage):
            """Zero V where the tile must not read it: it may be NaN, and 0 * NaN is NaN.

            The logits of the block are made already, and each consumer has columns of its own.
            """
            layout = plgpu.Layout.WGMMA_TRANSPOSED
            # Mosaic's iota of two dimensions is wrong in this layout, whose vectors are columns.
            keys = block * BLOCK_K + ops.iota((BLOCK_K,), 0, layout.reduce(0))
            for column in range(wg * self.num_columns, (wg + 1) * self.num_columns, ROWS):
                v_ref = scratch.k.at[stage, :, pl.ds(column, ROWS)].transpose((1, 0))
                v = plgpu.load(v_ref, layout=layout)
                key = ops.bcast(keys, v, 1)
                readable = (key >= work.first_key) & (key < work.kv_len)
                v_ref[...] = jnp.where(readable, v, jnp.zeros_like(v))
            plgpu.commit_smem()

        def add_values(block, owner, acc, factors):
            """Return the sums after a block, whose probabilities are those of `owner`."""
            stage, first = self.stage_of(work, block), block * BLOCK_K
            acc = scale_changed_rows(acc, factors, interpret=self.interpret)

            if scratch.bytes is None:  # the conversion leaves zeros
                has_unreadable = (first < work.first_key) | (first + BLOCK_K > work.kv_len)
                pl.when(has_unreadable)(lambda: zero_unreadable(block, stage))

            v = scratch.k.at[stage, :, self.columns]
            acc = ops.wgmma_accumulate(acc, scratch.p[owner], v, interpret=self.interpret)
            plgpu.barrier_arrive(scratch.k_free.at[stage])
            return acc

        def add_block_of_other(block, state):
            _, l_i, acc = state
            other = 1 - wg
            plgpu.barrier_wait(scratch.p_full.at[other])
            if scratch.k.shape[0] % NUM_CONSUMERS:
                # A barrier counts phases by parity. With an odd number of stages both have blocks
                # in each stage, so a consumer must not leave out those of the other.
                plgpu.barrier_wait(scratch.k_full.at[self.stage_of(work, block)])
            factors = ops.load(scratch.factors.at[other], ops.WGMMA_ROW)
            acc = add_values(block, other, acc, factors)
            return ops.load(scratch.maxima.at[other], ops.WGMMA_ROW), l_i * factors, acc

        def attend_own_block(block, s, state):
            m_i, l_i, acc = state
            keys = block * BLOCK_K + ops.iota(s.shape, 1, ops.WGMMA)
            scales = None
            if scratch.scales is not None:
                scales = scratch.scales.at[self.stage_of(work, block)]
                s = s * ops.bcast(ops.load(scales, ops.WGMMA_COL), s, 1)
            s, factor = queries.logits(s, keys)

            def masked(s):
                return jnp.where(queries.sees(block * BLOCK_K, keys), s, -jnp.inf)

            is_full = (block >= work.full_lo) & (block < work.full_hi)
            s = lax.cond(is_full, lambda s: s, masked, s)
            if scales is not None:
                # The maximum is taken over the weights of V, since f16 has a small range.
                exponents, _, _ = split_scales(ops.load(scales, ops.WGMMA_COL))
                s, factor = s * factor + ops.bcast(exponents, s, 1), 1.0
            m_new = jnp.maximum(m_i, s.max(axis=1) * factor)
            # A maximum that is less than 2 ** 8 too small does no harm, and sums stay as they are.
            m_new = jnp.where(m_new > m_i + _SLACK, m_new, m_i)
            m_safe = jnp.where(m_new == -jnp.inf, 0.0, m_new)
            alpha = jnp.exp2(m_i - m_safe)
            p = jnp.exp2(s * factor - ops.bcast(m_safe, s))
            scratch.maxima.at[wg][...] = m_new
            scratch.factors.at[wg][...] = alpha
            weights = p
            if scales is not None:  # loaded again, since registers are few
                _, significands, inverses = split_scales(ops.load(scales, ops.WGMMA_COL))
                weights = p * ops.bcast(significands, p, 1)
                p = p * ops.bcast(inverses, p, 1)
            scratch.p[wg][...] = weights.astype(scratch.p[wg].dtype)
            plgpu.commit_smem()
            plgpu.barrier_arrive(scratch.p_full.at[wg])
            return m_new, l_i * alpha + p.sum(axis=1), add_values(block, wg, acc, alpha)

        def attend_two_blocks(i, state):
            block = work.lo + NUM_CONSUMERS * i + wg
            s = multiply_qk(block)
            if wg == 0:
                state = lax.cond(
                    i > 0, functools.partial(add_block_of_other, block - 1), lambda x: x, state
                )
            else:
                state = add_block_of_other(block - 1, state)
            return attend_own_block(block, s, state)

        pl.when(work.lo < work.hi)(lambda: plgpu.barrier_wait(scratch.q_full))
        num_blocks = work.hi - work.lo
        own_blocks = lax.div(num_blocks - wg + 1, NUM_CONSUMERS)
        state = lax.fori_loop(0, own_blocks, attend_two_blocks, empty_state(ROWS, self.num_columns))
        last_is_of_other = (num_blocks > 0) & (lax.rem(num_blocks, NUM_CONSUMERS) == wg)
        add_last = functools.partial(add_block_of_other, work.hi - 1)
        state = lax.cond(last_is_of_other, add_last, lambda x: x, state)
        m_i, l_i, acc = state
        # Each has summed its own blocks. The other has read the maxima, whose place the sums take.
        self.meet()
        scratch.maxima.at[wg][...] = l_i
        self.meet()
        return m_i, l_i + ops.load(scratch.maxima.at[1 - wg], ops.WGMMA_ROW), acc
