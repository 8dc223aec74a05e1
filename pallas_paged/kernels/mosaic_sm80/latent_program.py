"""What programs of the kernels that read latents share: they attend one work item of some heads."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_paged.checks import pytree
from pallas_paged.kernels.call import Arrays
from pallas_paged.kernels.logits import LogitOptions, split_scales
from pallas_paged.kernels.mosaic import ops as mosaic_ops
from pallas_paged.kernels.mosaic.ops import Partials, bcast, full, iota, load_shared
from pallas_paged.kernels.mosaic.ragged_work import RaggedOutputs, WorkDescriptor, unpack
from pallas_paged.kernels.mosaic.softmax_state import finish
from pallas_paged.kernels.mosaic_sm80 import one_byte, ops
from pallas_paged.kernels.mosaic_sm80.config import (
    LATENT_COLUMNS,
    CallTypes,
    LatentConfig,
    latent_columns,
)
from pallas_paged.kernels.mosaic_sm80.pages import Blocks, Copier
from pallas_paged.kernels.mosaic_sm80.ragged_rows import RaggedRows, RowInputs
from pallas_paged.kernels.mosaic_sm80.ring import Span, for_each_block


@pytree
class LatentScratch:
    """Refs in shared memory of a program, or their types."""

    # With one-byte pages the queries as pairs i32`[R, W]`, of latents and rotary; else None.
    arrived: Any
    # Of latents and rotary, the queries `[R, W]`, or their even and their odd elements.
    q: list[list[Any]]
    p: Any  # `[R, block_k]`, the probabilities of a block
    blocks: Blocks  # `[stages, block_k, D + rope_dim]`, padded; of one-byte pages words


def scratch_types(config: LatentConfig, types: CallTypes) -> LatentScratch:
    """Return the types of the shared memory of a program."""
    rows, is_one_byte = config.block_q, types.itemsize == 1
    operand = jnp.float16 if is_one_byte else types.dtype
    widths = latent_columns(types.head_dim, types.rope_dim, types.itemsize)
    num_forms = 2 if is_one_byte else 1
    return LatentScratch(
        arrived=[plgpu.SMEM((rows, width), jnp.int32) for width in widths] if is_one_byte else None,
        q=[[ops.swizzled((rows, width), operand)] * num_forms for width in widths],
        p=ops.swizzled((rows, config.block_k), operand),
        blocks=Blocks.types(config, types, columns=sum(widths)),
    )


def query_operands(arrays: Arrays) -> list[jax.Array]:
    """Return `RowInputs.q` of a call. Nothing is copied."""
    found = [x.reshape(-1, x.shape[-1]) for x in (arrays.q, arrays.q_pe) if x is not None]
    if arrays.k_pages.dtype.itemsize > 1:
        return found
    return [lax.bitcast_convert_type(x.reshape(len(x), -1, 2), jnp.int32) for x in found]


# m f32[R], l f32[R], and acc f32[R, D] in parts of columns; with one-byte pages the even columns of
# a part and then the odd ones
LatentState = tuple[jax.Array, jax.Array, list[jax.Array]]


def parts_of(num_columns: int) -> list[Any]:
    """Return slices of columns whose operands are in registers at a time."""
    return [pl.ds(i, LATENT_COLUMNS) for i in range(0, num_columns, LATENT_COLUMNS)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentProgram:
    """A program that attends to latents."""

    inputs: RowInputs
    scratch: LatentScratch
    options: LogitOptions
    num_q_heads: int  # of a token
    q_dtype: Any  # of the queries
    kv_dtype: Any  # of the pages
    causal: bool  # whether a query sees no later key
    interpret: bool

    @property
    def num_rows(self) -> int:
        return self.scratch.p.shape[0]

    @property
    def layouts(self) -> ops.MmaLayouts:
        return ops.MmaLayouts(m_warps=self.num_rows // 16)

    def span_of(self, work: WorkDescriptor, rows: RaggedRows) -> Span:
        """Return the blocks of a work item, with their copies."""
        interpret = self.interpret

        def copy_queries():
            first, count = rows.first_of_neighbours(), rows.num_neighbours()
            plain = self.scratch.arrived is not None
            buffers = self.scratch.arrived if plain else [ref for (ref,) in self.scratch.q]
            for source, to in zip(self.inputs.q, buffers, strict=True):
                ops.copy_rows(source, to, first, count, plain=plain, interpret=interpret)

        copier = Copier(
            pages=self.inputs.pages,
            blocks=self.scratch.blocks,
            row=work.row,
            kv_head=jnp.int32(0),
            first_key=work.first_key,
            end_key=work.kv_len,
            interpret=interpret,
        )
        return Span(copier=copier, lo=work.lo, hi=work.hi, copy_queries=copy_queries)

    def attend(
        self,
        work: WorkDescriptor,
        rows: RaggedRows,
        following: Span | None = None,
        *,
        place: Any = 0,
        started: Any = False,
        prefetch_next: Any = False,
    ) -> LatentState:
        """Return the state of the rows after the blocks of a work item.

        Where another item follows, its blocks and the other arguments are those of
        `for_each_block`.
        """
        inputs, options, interpret = self.inputs, self.options, self.interpret
        scratch, blocks, layouts = self.scratch, self.scratch.blocks, self.layouts
        block_k, pages = blocks.k.shape[1], inputs.pages
        mma = functools.partial(ops.mma, interpret=interpret)
        span = self.span_of(work, rows)
        queries = rows.in_logits(work, inputs.of_rows, options, causal=self.causal)
        of_values = parts_of(scratch.q[0][0].shape[1])
        of_queries = [(i, part) for i in range(2) for part in parts_of(scratch.q[i][0].shape[1])]

        def operands(ref):
            """Return keys or values as the right side of a product: one matrix or two."""
            x = load_shared(ref, layouts.rhs)
            if scratch.arrived is None:
                return [x]
            return one_byte.to_f16(x, self.kv_dtype, layouts.rhs, interpret=interpret)

        def masked(block, keys, s):
            return jnp.where(queries.sees(block * block_k, keys), s, -jnp.inf)

        def logits(block, stage, q_scales):
            """Return logits in base 2, without their factor."""
            s = full((rows.count, block_k), 0.0, layouts.acc)
            for (i, of_q), of_k in zip(of_queries, parts_of(blocks.k.shape[2]), strict=True):
                k = operands(blocks.k.at[stage, :, of_k].transpose((1, 0)))
                for ref, x in zip(scratch.q[i], k, strict=True):
                    s = mma(s, load_shared(ref.at[:, of_q], layouts.lhs), x)
            keys = block * block_k + iota(s.shape, 1, layouts.acc)
            if q_scales is not None:
                s = s * bcast(q_scales, s)
            if blocks.k_scales is not None:
                s = s * bcast(load_shared(blocks.k_scales.at[stage], layouts.col), s, 1)
            s, factor = queries.logits(s, keys)
            all_seen = (block >= work.full_lo) & (block < work.full_hi)
            return lax.cond(
                all_seen, lambda s: s, functools.partial(masked, block, keys), s
            ), factor

        def attend_block(block, stage, state):
            q_scales, m_i, l_i, acc = state
            s, factor = logits(block, stage, q_scales)
            significands = inverses = None
            if blocks.k_scales is not None:
                # The maximum is taken over the weights of V, since f16 has a small range.
                scales = load_shared(blocks.k_scales.at[stage], layouts.col)
                exponents, significands, inverses = split_scales(scales)
                s, factor = s * factor + bcast(exponents, s, 1), 1.0
            m_new = jnp.maximum(m_i, s.max(axis=1) * factor)
            m_safe = jnp.where(m_new == -jnp.inf, 0.0, m_new)  # rows that have seen no key yet
            alpha = jnp.exp2(m_i - m_safe)
            p = jnp.exp2(s * factor - bcast(m_safe, s))
            weights = p if significands is None else p * bcast(significands, p, 1)
            p = p if inverses is None else p * bcast(inverses, p, 1)
            # Each thread sums its own keys. The sum across threads is taken once, at the end.
            l_new = l_i * bcast(alpha, l_i) + p
            scratch.p[...] = weights.astype(scratch.p.dtype)
            ops.barrier(interpret=interpret)
            weights, sums = load_shared(scratch.p, layouts.lhs), iter(acc)
            acc = [
                mma(x * bcast(alpha, x), weights, v)
                for part in of_values
                for v, x in zip(operands(blocks.k.at[stage, :, part]), sums, strict=False)
            ]
            return q_scales, m_new, l_new, acc

        def start():
            q_scales = None
            if scratch.arrived is not None:
                parts = [
                    (scratch.arrived[i].at[:, part], [x.at[:, part] for x in scratch.q[i]])
                    for i, part in of_queries
                ]
                q_scales = one_byte.load_queries(parts, self.q_dtype, layouts, interpret=interpret)
                if blocks.k_scales is None:
                    q_scales = q_scales * pages.k_scales[0]
            shapes = [(rows.count, part.size) for part in of_values for _ in scratch.q[0]]
            return (
                q_scales,
                full((rows.count,), -jnp.inf, layouts.row),
                full((rows.count, block_k), 0.0, layouts.acc),
                [full(shape, 0.0, layouts.acc) for shape in shapes],
            )

        _, m_i, l_i, acc = for_each_block(
            span,
            span if following is None else following,
            attend_block,
            start,
            place=jnp.int32(place),
            started=jnp.bool_(started),
            prefetch_next=jnp.bool_(prefetch_next),
            queries_prefetched=scratch.arrived is not None,
        )
        if scratch.arrived is not None and blocks.k_scales is None:
            acc = [x * pages.k_scales[0] for x in acc]
        return m_i, l_i.sum(axis=1), acc

    def results(
        self, state: LatentState, sinks: jax.Array | None
    ) -> tuple[list[tuple[Any, jax.Array, Any]], jax.Array]:
        """Return columns, out f32 and its layout for parts of a state, and lse f32`[R]`."""
        m_i, l_i, acc = state
        found = [finish((m_i, l_i, x), sinks) for x in acc]
        outs = [(out, self.layouts.acc) for out, _ in found]
        if self.scratch.arrived is not None:
            outs = [
                one_byte.interleave(even, odd, self.layouts, interpret=self.interpret)
                for (even, _), (odd, _) in zip(found[::2], found[1::2], strict=True)
            ]
        width = outs[0][0].shape[1]
        return [(pl.ds(i * width, width), *x) for i, x in enumerate(outs)], found[0][1]

    def store_partial(self, partials: Partials, index: tuple[Any, ...], state: LatentState) -> None:
        """Store the state of the rows at an index of `partials.lse`."""
        parts, lse = self.results(state, None)
        for columns, out, _ in parts:
            mosaic_ops.store(partials.out.at[(*index, columns)], out)
        mosaic_ops.store(partials.lse.at[index], lse)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RaggedProgram(LatentProgram):
    """One program of the ragged kernel; `run` runs it."""

    outputs: RaggedOutputs  # partials [head tiles, partials, R, ..]
    num_tiles: int  # from `head_tiles`

    def run(self) -> None:
        """Attend one work item and store its result or, of a split tile, a partial state."""
        inputs, outputs, interpret = self.inputs, self.outputs, self.interpret
        program = lax.axis_index("program")
        work = unpack(WorkDescriptor, inputs.items, lax.div(program, self.num_tiles))
        rows = RaggedRows(
            count=self.num_rows,
            group=self.num_q_heads // self.num_tiles,
            num_q_heads=self.num_q_heads,
            kv_head=lax.rem(program, self.num_tiles),
            q_start=work.q_start,
            q_len=work.q_len,
            offset=work.offset,
            layout=self.layouts.acc,
        )

        @pl.when(work.q_len > 0)
        def _():
            state = self.attend(work, rows)

            @pl.when(work.partial < 0)
            def _():
                sinks = inputs.of_rows.sinks
                sinks = None if sinks is None else rows.of_heads(sinks)
                store = functools.partial(
                    ops.store_words,
                    first=rows.first_of_neighbours(),
                    count=rows.num_neighbours(),
                    interpret=interpret,
                )
                parts, lse = self.results(state, sinks)
                for columns, out, layout in parts:
                    out = out.astype(outputs.out.dtype)
                    store(outputs.out, out, layout=layout, column=columns.start)
                if outputs.lse is not None:
                    store(outputs.lse, lse, layout=self.layouts.row)

            @pl.when(work.partial >= 0)
            def _():
                index = rows.kv_head, work.partial, pl.ds(0, self.num_rows)
                self.store_partial(outputs.partials, index, state)
