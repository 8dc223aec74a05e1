"""One program of the kernel that reads latents: it attends one work item of its heads."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_paged.checks import pytree
from pallas_paged.kernels.logits import LogitOptions, base2_logits
from pallas_paged.kernels.mosaic import ops as mosaic_ops
from pallas_paged.kernels.mosaic.ops import Partials, bcast, full, iota
from pallas_paged.kernels.mosaic.ragged_work import WorkDescriptor, unpack
from pallas_paged.kernels.mosaic.softmax_state import finish
from pallas_paged.kernels.mosaic_sm80 import ops
from pallas_paged.kernels.mosaic_sm80.latent_config import (
    LATENT_COLUMNS,
    LatentConfig,
    padded_rope_dim,
)
from pallas_paged.kernels.mosaic_sm80.pages import Blocks, Copier, Pages
from pallas_paged.kernels.mosaic_sm80.ragged_rows import RaggedRows
from pallas_paged.kernels.mosaic_sm80.ring import Span, for_each_block


@pytree
class LatentInputs:
    """Operands of the kernel, or refs to them.

    Attributes:
        q: `[T * Hq, D]`, and `[T * Hq, rope_dim]`.
        pages: the latents and the block tables.
        items: i32`[num_items, 16]`, packed descriptors of the work items.
        alibi_slopes, sinks: f32`[head tiles, ..]` from `repeat_heads`, or None.
        positions: i32`[T * G + R]` from `repeat_tokens`; None where queries are the newest tokens
            of their sequence, or where positions do not matter.
        tree_words: i32`[B, words, M * G + R]`, the bits of each row's tree mask, or None.
    """

    q: list[Any]
    pages: Pages
    items: Any
    alibi_slopes: Any
    sinks: Any
    positions: Any
    tree_words: Any


@pytree
class LatentOutputs:
    """Results of the kernel: arrays, refs or types."""

    out: Any  # [T * Hq, D]
    partials: Partials  # [head tiles, partials, R, ..]
    lse: Any  # f32[T * Hq], or None where it is not wanted


@pytree
class LatentScratch:
    """Refs in shared memory of a program, or their types."""

    q: list[Any]  # [R, D] and [R, rope_dim], padded
    p: Any  # [R, block_k], the probabilities of a block
    blocks: Blocks  # [stages, block_k, D + rope_dim], padded


def scratch_types(
    config: LatentConfig, *, head_dim: int, rope_dim: int, dtype: DTypeLike
) -> LatentScratch:
    """Return the types of the shared memory of a program."""
    rope_dim = padded_rope_dim(rope_dim)
    return LatentScratch(
        q=[ops.swizzled((config.block_q, columns), dtype) for columns in (head_dim, rope_dim)],
        p=ops.swizzled((config.block_q, config.block_k), dtype),
        blocks=Blocks.types(
            num_stages=config.num_stages,
            block_k=config.block_k,
            columns=head_dim + rope_dim,
            dtype=dtype,
            latent=True,
        ),
    )


def _parts(num_columns: int) -> list[Any]:
    """Return slices of columns whose operands are in registers at a time."""
    return [pl.ds(i, LATENT_COLUMNS) for i in range(0, num_columns, LATENT_COLUMNS)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """One program of the kernel; `run` runs it.

    Attributes:
        num_q_heads: of a token.
        num_tiles: from `head_tiles`.
        causal: whether a query sees no later key.
        Others: as in the kernel's call.
    """

    inputs: LatentInputs
    outputs: LatentOutputs
    scratch: LatentScratch
    options: LogitOptions
    num_q_heads: int
    num_tiles: int
    causal: bool
    interpret: bool

    @property
    def num_rows(self) -> int:
        return self.scratch.p.shape[0]

    @property
    def layouts(self) -> ops.MmaLayouts:
        return ops.MmaLayouts(m_warps=self.num_rows // 16)

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
            m_i, l_i, acc = self.attend(work, rows)

            @pl.when(work.partial < 0)
            def _():
                sinks = None if inputs.sinks is None else rows.of_heads(inputs.sinks)
                store = functools.partial(
                    ops.store_words,
                    first=rows.first_of_neighbours(),
                    count=rows.num_neighbours(),
                    interpret=interpret,
                )
                for part, x in zip(_parts(outputs.out.shape[1]), acc, strict=True):
                    out, lse = finish((m_i, l_i, x), sinks)
                    out = out.astype(outputs.out.dtype)
                    store(outputs.out, out, layout=self.layouts.acc, column=part.start)
                if outputs.lse is not None:
                    store(outputs.lse, lse, layout=self.layouts.row)

            @pl.when(work.partial >= 0)
            def _():
                partials, index = outputs.partials, (rows.kv_head, work.partial)
                for part, x in zip(_parts(outputs.out.shape[1]), acc, strict=True):
                    out, lse = finish((m_i, l_i, x), None)
                    mosaic_ops.store(partials.out.at[(*index, slice(None), part)], out)
                mosaic_ops.store(partials.lse.at[index], lse)

    def attend(
        self, work: WorkDescriptor, rows: RaggedRows
    ) -> tuple[jax.Array, jax.Array, list[jax.Array]]:
        """Return the state of the rows after the blocks of a work item, in parts of columns."""
        inputs, options, interpret = self.inputs, self.options, self.interpret
        blocks, p_ref, layouts = self.scratch.blocks, self.scratch.p, self.layouts
        block_k, head_dim = p_ref.shape[1], self.outputs.out.shape[1]
        mma = functools.partial(ops.mma, interpret=interpret)

        def copy_queries():
            first, count = rows.first_of_neighbours(), rows.num_neighbours()
            for source, to in zip(inputs.q, self.scratch.q, strict=True):
                ops.copy_rows(source, to, first, count, interpret=interpret)

        copier = Copier(
            pages=inputs.pages,
            blocks=blocks,
            row=work.row,
            kv_head=jnp.int32(0),
            first_key=work.first_key,
            end_key=work.kv_len,
            interpret=interpret,
        )
        span = Span(copier=copier, lo=work.lo, hi=work.hi, copy_queries=copy_queries)

        positions, slopes, visible = rows.logit_operands(work, inputs, options, causal=self.causal)

        def masked(block, keys, s):
            return jnp.where(visible(block * block_k, keys), s, -jnp.inf)

        def logits(block, stage):
            """Return logits in base 2, without their factor."""
            s = full((rows.count, block_k), 0.0, layouts.acc)
            q = [ref.at[:, part] for ref in self.scratch.q for part in _parts(ref.shape[1])]
            for ref, part in zip(q, _parts(blocks.k.shape[2]), strict=True):
                k = blocks.k.at[stage, :, part].transpose((1, 0))
                s = mma(s, ops.load(ref, layouts.lhs), ops.load(k, layouts.rhs))
            keys = block * block_k + iota(s.shape, 1, layouts.acc)
            if slopes is None:
                s, factor = base2_logits(s, options, None, keys)
            else:
                distances = keys - bcast(positions, s)
                s, factor = base2_logits(s, options, bcast(slopes, s), distances)
            all_seen = (block >= work.full_lo) & (block < work.full_hi)
            return lax.cond(
                all_seen, lambda s: s, functools.partial(masked, block, keys), s
            ), factor

        def attend_block(block, stage, state):
            m_i, l_i, acc = state
            s, factor = logits(block, stage)
            m_new = jnp.maximum(m_i, s.max(axis=1) * factor)
            m_safe = jnp.where(m_new == -jnp.inf, 0.0, m_new)  # rows that have seen no key yet
            alpha = jnp.exp2(m_i - m_safe)
            p = jnp.exp2(s * factor - bcast(m_safe, s))
            # Each thread sums its own keys. The sum across threads is taken once, at the end.
            l_new = l_i * bcast(alpha, l_i) + p
            p_ref[...] = p.astype(p_ref.dtype)
            ops.barrier(interpret=interpret)
            weights = ops.load(p_ref, layouts.lhs)
            acc = [
                mma(
                    x * bcast(alpha, x), weights, ops.load(blocks.k.at[stage, :, part], layouts.rhs)
                )
                for part, x in zip(_parts(head_dim), acc, strict=True)
            ]
            return m_new, l_new, acc

        def start():
            return (
                full((rows.count,), -jnp.inf, layouts.row),
                full((rows.count, block_k), 0.0, layouts.acc),
                [full((rows.count, part.size), 0.0, layouts.acc) for part in _parts(head_dim)],
            )

        m_i, l_i, acc = for_each_block(
            span,
            span,
            attend_block,
            start,
            place=jnp.int32(0),
            started=jnp.bool_(False),
            prefetch_next=jnp.bool_(False),
            queries_prefetched=False,
        )
        return m_i, l_i.sum(axis=1), acc
