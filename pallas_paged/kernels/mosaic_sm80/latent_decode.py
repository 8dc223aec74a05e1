"""Latent attention with one query token a sequence: equal shares of all keys for all programs.

A program attends to the keys of its share row after row, as in `decode`, so that its copies never
pause. All rows leave partial states for `decode_merge`. With 32 heads the tiles of a ragged call
are faster than shares, see bench/notes/mla.md.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_paged.kernels.call import Arrays, result_shape
from pallas_paged.kernels.decode_plan import DecodePlan
from pallas_paged.kernels.decode_states import DecodeStates
from pallas_paged.kernels.logits import LogitOptions
from pallas_paged.kernels.mosaic import ops as mosaic_ops
from pallas_paged.kernels.mosaic.decode_items import WorkItem, for_each_work_item
from pallas_paged.kernels.mosaic.decode_merge import merge_decode
from pallas_paged.kernels.mosaic.pages import Pages
from pallas_paged.kernels.mosaic.ragged_work import WorkDescriptor
from pallas_paged.kernels.mosaic_sm80 import ops
from pallas_paged.kernels.mosaic_sm80.config import CallTypes, LatentConfig
from pallas_paged.kernels.mosaic_sm80.latent_program import (
    LatentProgram,
    query_operands,
    scratch_types,
)
from pallas_paged.kernels.mosaic_sm80.ragged_rows import RaggedRows, RowInputs, RowOperands
from pallas_paged.kernels.mosaic_sm80.ring import can_prefetch

MOST_DECODE_HEADS = 16  # a program has all of them


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeProgram(LatentProgram):
    """One program of the kernel; `run` runs it."""

    seq_lens: Any  # i32`[B]`
    unit_ends: Any  # i32`[B]`, from `DecodePlan.unit_ends`
    partials: mosaic_ops.Partials  # [1, partials, head tiles * R, ..]
    plan: DecodePlan

    def run(self) -> None:
        """Attend to the share of the program, and leave its partial states."""
        for_each_work_item(self.attend_item, self.seq_lens, self.unit_ends, plan=self.plan)

    def attend_item(
        self, item: WorkItem, next_item: WorkItem, carry: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        """Attend to the keys of a work item and leave its state; return the carry of the loop."""
        place, started = carry
        (work, rows), following = self.work_of(item), self.work_of(next_item)
        span, next_span = self.span_of(work, rows), self.span_of(*following)
        prefetch_next = can_prefetch(span, next_span)

        @pl.when(item.lo < item.hi)
        def _():
            state = self.attend(
                work,
                rows,
                next_span,
                place=place,
                started=started,
                prefetch_next=prefetch_next,
            )
            self.store_partial(self.partials, (0, item.partial, pl.ds(0, self.num_rows)), state)

        return place + item.hi - item.lo, prefetch_next

    def work_of(self, item: WorkItem) -> tuple[WorkDescriptor, RaggedRows]:
        """Return a work item as one of a ragged call with one query of each row."""
        block_k, first_key = self.plan.block_k, jnp.int32(self.plan.first_key(item.seq_len))
        work = WorkDescriptor(
            row=item.row,
            q_start=item.row,
            q_len=jnp.int32(1),
            kv_len=item.seq_len,
            first_key=first_key,
            offset=jnp.int32(0),
            lo=item.lo,
            hi=item.hi,
            full_lo=pl.cdiv(first_key, block_k),
            full_hi=lax.div(item.seq_len, block_k),
            partial=item.partial,
        )
        rows = RaggedRows(
            count=self.num_rows,
            group=self.num_q_heads,
            num_q_heads=self.num_q_heads,
            kv_head=0,
            q_start=work.q_start,
            q_len=work.q_len,
            offset=work.offset,
            layout=self.layouts.acc,
        )
        return work, rows


def latent_decode(
    arrays: Arrays, *, options: LogitOptions, config: LatentConfig, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """Attend with one token a sequence; return `(out [B, Hq, D], lse f32[B, Hq])`."""
    num_seqs, num_q_heads, head_dim = arrays.q.shape
    plan = DecodePlan.of(
        config,
        options,
        num_seqs=num_seqs,
        num_kv_heads=1,
        max_kv_len=arrays.max_kv_len,
    )
    inputs = RowInputs(
        q=query_operands(arrays),
        pages=Pages.of(arrays, words=True),
        items=None,
        of_rows=RowOperands.of(arrays, options, num_tiles=1, count=config.block_q),
    )
    lens = arrays.seq_lens, plan.unit_ends(arrays.seq_lens)
    states = (1, plan.num_partials, config.block_q)
    partials = mosaic_ops.Partials(
        out=result_shape((*states, head_dim), jnp.float32),
        lse=result_shape(states, jnp.float32),
    )

    def body(given, partials, scratch):
        inputs, (seq_lens, unit_ends) = given
        DecodeProgram(
            inputs=inputs,
            seq_lens=seq_lens,
            unit_ends=unit_ends,
            partials=partials,
            scratch=scratch,
            options=options,
            num_q_heads=num_q_heads,
            q_dtype=arrays.q.dtype,
            kv_dtype=arrays.k_pages.dtype,
            causal=True,
            plan=plan,
            interpret=interpret,
        ).run()

    partials = mosaic_ops.run_kernel(
        body,
        (inputs, lens),
        partials,
        scratch_types(config, CallTypes.of(arrays)),
        name="mla_attention",
        params=ops.COMPILER_PARAMS,
        interpret=interpret,
        grid=(plan.num_programs,),
        grid_names=("program",),
    )
    decode_states = DecodeStates(
        out=partials.out,
        lse=partials.lse,
        unit_ends=lens[1],
        sinks=arrays.sinks,
        plan=plan,
        num_q_heads=num_q_heads,
        head_dim=head_dim,
    )
    return merge_decode(decode_states, dtype=arrays.q.dtype, interpret=interpret)
