"""Latent attention with pages of q's dtype, as FlashMLA has it (DeepSeek-AI, 2025).

Blocks of 64 latents come by TMA to two stages, one of each consumer. A stage is two halves of the
columns and the rotary keys, which are sent, awaited and freed apart: a product begins when its
first half is there, and a consumer frees its half as soon as it has multiplied it. Both consumers
multiply the values of two blocks before the logits of the next two:

    consumer 0   q.k0  softmax 0  p0.v0  ........ p1.v1  q.k2 ...       columns   0 to 255
    consumer 1   q.k1  .........  p0.v0 & softmax 1  p1.v1  q.k3 ...    columns 256 to 511

So queries are read once for 64 keys. The probabilities of a block take the place of its rotary
keys.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_paged.checks import pytree
from pallas_paged.kernels.mosaic import ops
from pallas_paged.kernels.mosaic.ragged_work import WorkDescriptor
from pallas_paged.kernels.mosaic.softmax_state import State, empty_state
from pallas_paged.kernels.mosaic_sm80.ops import barrier
from pallas_paged.kernels.mosaic_sm80.ragged_products import scale_changed_rows
from pallas_paged.kernels.mosaic_sm90 import latent_program
from pallas_paged.kernels.mosaic_sm90.latent_scratch import (
    NUM_CONSUMERS,
    ROWS,
    LatentScratch,
    ScratchShape,
)
from pallas_paged.pages.layout import K

_BLOCK_K = 64
_NUM_STAGES = NUM_CONSUMERS  # stage i has the blocks of consumer i
_SWIZZLE = 128  # bytes


@pytree
class _Scratch(LatentScratch):
    """Refs in shared memory of a program, or their types.

    Attributes:
        q: `[2, 64, D / 2]` and `[1, 64, R]`, a union with `ending`.
        k: `[stages * 2, 64, D / 2]`, halves of latents.
        k_pe: `[stages, 64, R]`, rotary keys; once they are multiplied, probabilities.
        k_full, pe_full: barriers `[stages * 2]` and `[stages]`, complete when a block is there.
        k_free, pe_free: barriers, complete when it was used, in all programs of the cluster.
    """

    k: Any
    k_pe: Any
    k_full: Any
    pe_full: Any
    k_free: Any
    pe_free: Any


def _types(shape: ScratchShape) -> _Scratch:
    dtype = shape.dtype
    memory = functools.partial(
        plgpu.SMEM, dtype=dtype, transforms=ops.swizzled_rows(dtype, _SWIZZLE)
    )
    half = shape.head_dim // NUM_CONSUMERS
    q = [memory((NUM_CONSUMERS, ROWS, half)), memory((1, ROWS, shape.rope_dim))]
    full = functools.partial(plgpu.Barrier, num_arrivals=max(_BLOCK_K // shape.page_size, 1))
    free = shape.cluster_barrier
    num_halves = _NUM_STAGES * NUM_CONSUMERS
    return _Scratch(
        **shape.types_of_both(q, num_copies=NUM_CONSUMERS + 1),
        k=memory((num_halves, _BLOCK_K, half)),
        k_pe=memory((_NUM_STAGES, _BLOCK_K, shape.rope_dim)),
        k_full=full(num_barriers=num_halves),
        pe_full=full(num_barriers=_NUM_STAGES),
        k_free=free(num_barriers=num_halves),
        pe_free=free(num_barriers=_NUM_STAGES),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Producer(latent_program.Producer):
    def run(self) -> None:
        scratch, work = self.scratch, self.work
        (q, q_pe), (nope, pe) = self.queries, scratch.queries
        half = nope.shape[2]
        for i in range(NUM_CONSUMERS):
            source = q.at[:, pl.ds(i * half, half)]
            plgpu.copy_gmem_to_smem(source, nope.at[i], scratch.q_full)
        plgpu.copy_gmem_to_smem(q_pe, pe.at[0], scratch.q_full)

        def pages_from(block):
            blocks = [jnp.minimum(block + i, work.hi - 1) for i in range(_NUM_STAGES)]
            return [self.pages_of(block) for block in blocks]

        def send(i, pages):
            block = work.lo + _NUM_STAGES * i
            # The table is read ahead, so the copies need not wait for it.
            next_pages = pages_from(block + _NUM_STAGES)
            for stage in range(_NUM_STAGES):

                @pl.when(block + stage < work.hi)
                def _(stage=stage):
                    self.send(block + stage, stage, pages[stage], i > 0)

            return next_pages

        num_rounds = lax.div(work.hi - work.lo + _NUM_STAGES - 1, _NUM_STAGES)
        lax.fori_loop(0, num_rounds, send, pages_from(work.lo))

    def send(self, block: Any, stage: int, pages: tuple[jax.Array, ...], is_used: Any) -> None:
        """Copy a block to a stage, in the order in which its owner reads."""
        scratch, pool = self.scratch, self.inputs.pages
        head_dim, rope_dim = (x.shape[1] for x in self.inputs.q)
        half = head_dim // NUM_CONSUMERS
        copies = []
        for i in (stage, 1 - stage):  # that of the owner first, which is done with it first
            at, columns = NUM_CONSUMERS * stage + i, pl.ds(i * half, half)
            copies.append((columns, scratch.k.at[at], scratch.k_full.at[at], scratch.k_free.at[at]))
        rotary = (ref.at[stage] for ref in (scratch.k_pe, scratch.pe_full, scratch.pe_free))
        copies.append((pl.ds(head_dim, rope_dim), *rotary))
        tokens = self.tokens_in_page(block)
        for columns, to, full, free in copies:
            ops.wait_if(is_used, free)
            for i, page in enumerate(pages):
                box = pool.box(K, page=page, tokens=tokens, kv_head=0).at[:, columns]
                plgpu.copy_gmem_to_smem(
                    box,
                    to.at[pl.ds(i * tokens.size, tokens.size)],
                    full,
                    collective_axes=scratch.shared_by,
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Consumer(latent_program.Consumer):
    def attend(self, work: WorkDescriptor, queries: Any) -> State:
        scratch, wg = self.scratch, self.wg

        def softmax(block, s, m_i, l_i):
            """Leave the probabilities for the other; return `(m, l, factors, p)`."""
            m_i, alpha, p = self.probabilities(work, queries, block, s, m_i)
            weights = p.astype(scratch.k_pe.dtype)
            # A warp may still multiply the rotary keys, whose place the probabilities take.
            barrier(interpret=self.interpret)
            scratch.k_pe.at[wg][...] = weights
            plgpu.commit_smem()
            plgpu.barrier_arrive(scratch.p_full.at[wg])
            return m_i, l_i * alpha + p.sum(axis=1), alpha, weights

        def add_block_of_other(block, state):
            _, l_i, acc = state
            m_i, factors = self.of_other()
            (acc,) = self.add_values(work, block, 1 - wg, acc, factors)
            return m_i, l_i * factors, acc

        def add_own_block(block, state, beside=tuple):
            m_i, l_i, acc = state
            m_i, l_i, alpha, p = softmax(block, self.multiply_qk(block), m_i, l_i)
            (acc,) = self.add_values(work, block, wg, acc, alpha, p, beside)
            return m_i, l_i, acc

        def wait_for_other():
            plgpu.barrier_wait(scratch.p_full.at[1 - wg])
            return ()

        def two_blocks_of_0(i, state):
            block = work.lo + 2 * i
            return add_block_of_other(block + 1, add_own_block(block, state, wait_for_other))

        def two_blocks_of_1(i, state):
            _, l_i, acc = state
            block = work.lo + 2 * i + 1
            s = self.multiply_qk(block)
            wait_for_other()
            m_i, factors = self.of_other()
            p = ops.full(s.shape, 0, ops.WGMMA, scratch.k_pe.dtype)
            acc, m_i, l_i, alpha, p = self.add_values(
                work,
                block - 1,
                0,
                acc,
                factors,
                beside=lambda m_i, l_i, *_: softmax(block, s, m_i, l_i),
                carry=(m_i, l_i * factors, factors, p),
            )
            (acc,) = self.add_values(work, block, 1, acc, alpha, p)
            return m_i, l_i, acc

        def add_last(state):
            if wg == 0:
                return add_own_block(work.hi - 1, state)
            wait_for_other()
            return add_block_of_other(work.hi - 1, state)

        num_blocks = work.hi - work.lo
        state = empty_state(ROWS, self.num_columns)
        two_blocks = (two_blocks_of_0, two_blocks_of_1)[wg]
        state = lax.fori_loop(0, lax.div(num_blocks, 2), two_blocks, state)
        return lax.cond(lax.rem(num_blocks, 2) == 1, add_last, lambda state: state, state)

    def zero(self, block: jax.Array) -> jax.Array:
        """Return 0 in a form that compilers take for another number in each iteration.

        Otherwise they compute the descriptors of all matrices before the loop, and spill them.
        """
        return jnp.where(block < 0, 1, 0)

    def multiply_qk(self, block: jax.Array) -> jax.Array:
        """Return q times the keys in the consumer's stage."""
        scratch, wg, zero = self.scratch, self.wg, self.zero(block)
        nope, pe = scratch.queries

        def multiply(acc_ref):
            for half in (wg, 1 - wg):  # in the order in which they arrive
                at = NUM_CONSUMERS * wg + half
                plgpu.barrier_wait(scratch.k_full.at[at])
                plgpu.wgmma(acc_ref, nope.at[half + zero], scratch.k.at[at + zero].T)
            plgpu.barrier_wait(scratch.pe_full.at[wg])
            plgpu.wgmma(acc_ref, pe.at[zero], scratch.k_pe.at[wg + zero].T)
            return acc_ref[...]

        return pl.run_scoped(multiply, plgpu.ACC((ROWS, _BLOCK_K), jnp.float32))

    def add_values(
        self,
        work: WorkDescriptor,
        block: jax.Array,
        stage: int,
        acc: jax.Array,
        factors: jax.Array,
        p: jax.Array | None = None,
        beside: Callable[..., tuple[jax.Array, ...]] = tuple,
        carry: tuple[jax.Array, ...] = (),
    ) -> tuple[jax.Array, ...]:
        """Return the sums after a block, and behind them `beside(*carry)`, which runs meanwhile.

        Args:
            factors: of the sums before.
            p: the probabilities; None: those of the other consumer, in shared memory.
            beside: function that returns arrays like those of the carry.
        """
        scratch, at = self.scratch, NUM_CONSUMERS * stage + self.wg
        acc = scale_changed_rows(acc, factors, interpret=self.interpret)
        first = block * _BLOCK_K
        has_unreadable = (first < work.first_key) | (first + _BLOCK_K > work.kv_len)
        pl.when(has_unreadable)(lambda: self.zero_unreadable(work, first, scratch.k.at[at]))
        zero = self.zero(block)
        left, v = scratch.k_pe.at[stage + zero] if p is None else p, scratch.k.at[at + zero]
        if self.interpret:
            acc = ops.wgmma_accumulate(acc, left, v, interpret=True)
            results = (acc, *beside(*carry))
        else:

            def multiply(refs):
                acc_ref, *others = refs
                plgpu.wgmma(acc_ref, left, v)
                for ref, x in zip(others, beside(*(ref[...] for ref in others)), strict=True):
                    ref[...] = x

            results = pl.run_state(multiply)((plgpu.ACC.init(acc), *carry))
        plgpu.barrier_arrive(scratch.k_free.at[at])
        if stage != self.wg:  # the owner's probabilities are in its registers
            plgpu.barrier_arrive(scratch.pe_free.at[stage])
        return results

    def zero_unreadable(self, work: WorkDescriptor, first: jax.Array, v: Any) -> None:
        """Zero V where the tile must not read it: it may be NaN, and 0 * NaN is NaN.

        The logits of the block are made already, and each consumer has columns of its own.
        """
        layout = plgpu.Layout.WGMMA_TRANSPOSED
        # Mosaic's iota of two dimensions is wrong in this layout, whose vectors are columns.
        keys = first + ops.iota((_BLOCK_K,), 0, layout.reduce(0))
        for column in range(0, self.num_columns, ROWS):
            ref = v.at[:, pl.ds(column, ROWS)].T
            x = ops.load_shared(ref, layout)
            key = ops.bcast(keys, x, 1)
            readable = (key >= work.first_key) & (key < work.kv_len)
            ref[...] = jnp.where(readable, x, jnp.zeros_like(x))
        plgpu.commit_smem()


TWO_BYTE = latent_program.Form(
    block_k=_BLOCK_K,
    registers=(240, 24),
    types=_types,
    producer=_Producer,
    consumer=_Consumer,
)
