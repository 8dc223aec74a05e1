"""What both forms of the kernel of latent attention do: a program attends one work item.

A producer warpgroup streams blocks of latents, which are K and V, through shared memory. Two
consumers have the same 64 query rows. Each makes the probabilities of every second block, and owns
half of the columns of the result. So no product is made twice, and the softmax of one runs under
the products of the other. A consumer leaves the probabilities of its block, the maxima of the rows
and the factors of older sums in shared memory for the other one.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_paged.kernels.logits import LogitOptions
from pallas_paged.kernels.mosaic import ops
from pallas_paged.kernels.mosaic.ragged_work import RaggedOutputs, WorkDescriptor, unpack
from pallas_paged.kernels.mosaic.softmax_state import State, finish
from pallas_paged.kernels.mosaic_sm80.ops import store_rows as store_partial_rows
from pallas_paged.kernels.mosaic_sm80.ragged_rows import RaggedRows, RowInputs, store_rows
from pallas_paged.kernels.mosaic_sm90.latent_scratch import (
    CLUSTER,
    HEADS_MULTIPLE,
    NUM_CONSUMERS,
    ROWS,
    ScratchShape,
)
from pallas_paged.kernels.mosaic_sm90.ring import page_to_read

_SLACK = 8.0  # by which a logit, base 2, may be larger than the maximum that is subtracted


class Form(NamedTuple):
    """A form of the kernel.

    Attributes:
        block_k: latents of a block.
        registers: of a thread of a consumer, and of the producer.
        types: function that returns the types of its `LatentScratch`.
        producer: its `Producer`.
        consumer: its `Consumer`.
    """

    block_k: int
    registers: tuple[int, int]
    types: Callable[[ScratchShape], Any]
    producer: type[Producer]
    consumer: type[Consumer]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """One program of the kernel; `run` runs it."""

    form: Form
    inputs: RowInputs
    outputs: RaggedOutputs  # partials [1, partials, R, ..]
    scratch: Any  # of the form
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
        wg, form = lax.axis_index("wg"), self.form
        set_max = functools.partial(ops.set_max_registers, interpret=self.interpret)

        @pl.when(wg == NUM_CONSUMERS)
        def _():
            set_max(form.registers[1], action="decrease")
            producer = form.producer(
                block_k=form.block_k,
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
                set_max(form.registers[0], action="increase")
                form.consumer(**vars(self), wg=i).consume(work, rows)

    @property
    def first_row(self) -> jax.Array:
        """The first row of the program in the tile of its cluster."""
        return lax.axis_index(CLUSTER) * ROWS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Producer(abc.ABC):
    """The producer warpgroup of a program that attends a work item."""

    block_k: int
    inputs: RowInputs
    scratch: Any
    work: WorkDescriptor
    rows: RaggedRows
    has_window: bool
    interpret: bool

    @abc.abstractmethod
    def run(self) -> None:
        """Send the queries and the blocks of the work item."""

    @property
    def queries(self) -> list[Any]:
        """Both parts of the program's 64 rows; the last rows may be of other sequences."""
        rows = self.rows
        first = pl.multiple_of(rows.q_start * rows.group + rows.offset, HEADS_MULTIPLE)
        return [x.at[pl.ds(first, ROWS)] for x in self.inputs.q]

    def pages_of(self, block: jax.Array) -> tuple[jax.Array, ...]:
        """Return the pages of a block: one for each of its copies."""
        work, page_size = self.work, self.inputs.pages.page_size
        first_page = work.first_key // page_size if self.has_window else None
        last_page = (work.kv_len - 1) // page_size
        return tuple(
            self.inputs.pages.block_tables[
                work.row,
                page_to_read((block * self.block_k + i) // page_size, first_page, last_page),
            ]
            for i in range(0, self.block_k, min(page_size, self.block_k))
        )

    def tokens_in_page(self, block: jax.Array) -> Any:
        """Return the tokens of a page that one copy of a block takes."""
        page_size = self.inputs.pages.page_size
        step = min(page_size, self.block_k)
        first = lax.rem(block * self.block_k, page_size) if page_size > step else 0
        return pl.ds(first, step)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Consumer(Program, abc.ABC):
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
        head_dim = inputs.q[0].shape[1]
        queries = rows.in_logits(work, inputs.of_rows, self.options, causal=self.causal)
        pl.when(work.lo < work.hi)(lambda: plgpu.barrier_wait(scratch.q_full))
        m_i, l_i, acc = self.attend(work, queries)
        # Each has summed its own blocks. The other has read the maxima, whose place the sums take.
        self.meet()
        scratch.maxima.at[self.wg][...] = l_i
        self.meet()
        state = m_i, l_i + ops.load(scratch.maxima.at[1 - self.wg], ops.WGMMA_ROW), acc

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

    @abc.abstractmethod
    def attend(self, work: WorkDescriptor, queries: Any) -> State:
        """Return the state of the rows and of the consumer's columns after a work item.

        The sums are those of the consumer's own blocks.
        """

    def probabilities(
        self,
        work: WorkDescriptor,
        queries: Any,
        block: jax.Array,
        s: jax.Array,
        m_i: jax.Array,
        exponents: Callable[[], jax.Array] | None = None,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return the maxima, the factors of older sums and the probabilities of a block.

        The first two are left for the other consumer.

        Args:
            s: products of queries and keys.
            m_i: the maxima before.
            exponents: function that returns what to add to the logits of each key, or None.
        """
        first = block * self.form.block_k
        keys = first + ops.iota(s.shape, 1, ops.WGMMA)
        s, factor = queries.logits(s, keys)

        def masked(s):
            return jnp.where(queries.sees(first, keys), s, -jnp.inf)

        is_full = (block >= work.full_lo) & (block < work.full_hi)
        s = lax.cond(is_full, lambda s: s, masked, s)
        if exponents is not None:
            s, factor = s * factor + ops.bcast(exponents(), s, 1), 1.0
        m_new = jnp.maximum(m_i, s.max(axis=1) * factor)
        # A maximum that is less than 2 ** 8 too small does no harm, and sums stay as they are.
        m_new = jnp.where(m_new > m_i + _SLACK, m_new, m_i)
        m_safe = jnp.where(m_new == -jnp.inf, 0.0, m_new)
        alpha = jnp.exp2(m_i - m_safe)
        p = jnp.exp2(s * factor - ops.bcast(m_safe, s))
        self.scratch.maxima.at[self.wg][...] = m_new
        self.scratch.factors.at[self.wg][...] = alpha
        return m_new, alpha, p

    def of_other(self) -> tuple[jax.Array, jax.Array]:
        """Return the maxima after the other consumer's last block, and its factors."""
        refs = self.scratch.maxima, self.scratch.factors
        maxima, factors = (ops.load(ref.at[1 - self.wg], ops.WGMMA_ROW) for ref in refs)
        return maxima, factors
