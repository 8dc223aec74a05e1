"""Latent attention with int8 and fp8 pages: the producer converts them.

    copies by TMA     blocks of bytes `[2, 32, D + R]`
    conversion        to q's dtype, exact, beside the scales of the tokens
    consumers         blocks of 16 bits `[3, 32, D + R]`

So every element is converted once for all 64 rows of a program. The scales multiply logits and
probabilities, which are fewer.

    consumer 0   q.k0  softmax  p0.v  q.k2  p1.v  softmax  p2.v  q.k4 ...       columns   0 to 255
    consumer 1   q.k1  p0.v  softmax  p1.v  q.k3  p2.v  softmax  p3.v ...       columns 256 to 511
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

from pallas_paged.checks import pytree
from pallas_paged.kernels.logits import split_scales
from pallas_paged.kernels.mosaic import ops
from pallas_paged.kernels.mosaic.indexed import gather
from pallas_paged.kernels.mosaic.ragged_work import WorkDescriptor
from pallas_paged.kernels.mosaic.softmax_state import State, empty_state
from pallas_paged.kernels.mosaic_sm80.emitter import CHUNK, THREADS, WARPGROUP, Emitter, Tile
from pallas_paged.kernels.mosaic_sm80.ragged_products import scale_changed_rows
from pallas_paged.kernels.mosaic_sm90 import latent_program
from pallas_paged.kernels.mosaic_sm90.latent_scratch import (
    NUM_CONSUMERS,
    ROWS,
    LatentScratch,
    ScratchShape,
)
from pallas_paged.kernels.mosaic_sm90.ragged_operands import pair_ptx
from pallas_paged.pages.layout import K

_BLOCK_K = 32
_SWIZZLE = 64  # bytes: the probabilities of a block are one tile wide
_NUM_STAGES, _NUM_BYTE_STAGES = 3, 2
_WARPS = WARPGROUP // _BLOCK_K  # a lane has a token, and a warp every fourth 16 bytes of it
_AT_ONCE = 5  # chunks of 16 bytes that a thread loads before it uses the first


@pytree
class _Scratch(LatentScratch):
    """Refs in shared memory of a program, or their types.

    Attributes:
        q: `[64, D]` and `[64, R]`, a union with `ending`.
        k: `[stages, 32, D + R]`, blocks of latents.
        p: of each consumer, `[64, 32]`, the probabilities of its last block.
        bytes: `[stages, 32, D + R]`, blocks of latents before their conversion.
        scales: f32`[stages, 32]`, of the tokens in `k`.
        k_full: barriers `[stages]`, complete when a block is there.
        k_free: barriers `[stages]`, complete when both consumers have used a block.
        bytes_full, bytes_free: the same of `bytes`, for the producers of all programs of the
            cluster.
    """

    k: Any
    p: Any
    bytes: Any
    scales: Any
    k_full: Any
    k_free: Any
    bytes_full: Any
    bytes_free: Any


def _types(shape: ScratchShape) -> _Scratch:
    dtype, head_dim, rope_dim = shape.dtype, shape.head_dim, shape.rope_dim

    def memory(shape, dtype):
        return plgpu.SMEM(shape, dtype, transforms=ops.swizzled_rows(dtype, _SWIZZLE))

    q = [memory((ROWS, dim), dtype) for dim in (head_dim, rope_dim)]
    num_copies = max(_BLOCK_K // shape.page_size, 1)
    return _Scratch(
        **shape.types_of_both(q, num_copies=len(q)),
        k=memory((_NUM_STAGES, _BLOCK_K, head_dim + rope_dim), dtype),
        p=[memory((ROWS, _BLOCK_K), dtype) for _ in range(NUM_CONSUMERS)],
        bytes=memory((_NUM_BYTE_STAGES, _BLOCK_K, head_dim + rope_dim), shape.kv_dtype),
        scales=plgpu.SMEM((_NUM_STAGES, _BLOCK_K), jnp.float32),
        k_full=plgpu.Barrier(num_barriers=_NUM_STAGES),
        k_free=plgpu.Barrier(num_arrivals=NUM_CONSUMERS, num_barriers=_NUM_STAGES),
        bytes_full=plgpu.Barrier(num_arrivals=num_copies, num_barriers=_NUM_BYTE_STAGES),
        bytes_free=shape.cluster_barrier(num_barriers=_NUM_BYTE_STAGES),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Producer(latent_program.Producer):
    def run(self) -> None:
        scratch, work = self.scratch, self.work
        for source, to in zip(self.queries, scratch.queries, strict=True):
            plgpu.copy_gmem_to_smem(source, to, scratch.q_full)
        sent = jnp.minimum(work.lo + _NUM_BYTE_STAGES, work.hi)
        pages = lax.fori_loop(work.lo, sent, self.send, self.pages_of(work.lo))

        def convert(block, carry):
            pages, scales, pages_of_tokens = carry
            # What a block needs is read a block ahead: no conversion waits for its scales, and no
            # read of scales for the page numbers.
            next_scales = self.scales_of(block + 1, pages_of_tokens)
            next_pages = self.pages_of_tokens(block + 2)
            number = block - work.lo
            source, stage = lax.rem(number, _NUM_BYTE_STAGES), lax.rem(number, _NUM_STAGES)
            plgpu.barrier_wait(scratch.bytes_full.at[source])
            ops.wait_if(number >= _NUM_STAGES, scratch.k_free.at[stage])
            self.convert(block, source, stage, scales)
            # The fence orders what threads read and wrote here, and copies and products.
            plgpu.commit_smem()
            plgpu.barrier_arrive(scratch.bytes_free.at[source])
            plgpu.barrier_arrive(scratch.k_full.at[stage])
            pages = lax.cond(
                block + _NUM_BYTE_STAGES < work.hi,
                functools.partial(self.send, block + _NUM_BYTE_STAGES),
                lambda pages: pages,
                pages,
            )
            return pages, next_scales, next_pages

        scales = self.scales_of(work.lo, self.pages_of_tokens(work.lo))
        carry = pages, scales, self.pages_of_tokens(work.lo + 1)
        lax.fori_loop(work.lo, work.hi, convert, carry)

    def send(self, block: jax.Array, pages: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """Copy a block to the ring of bytes; return the next block's pages."""
        scratch, work = self.scratch, self.work
        # The table is read one block ahead, so the copies need not wait for it.
        next_pages = self.pages_of(jnp.minimum(block + 1, work.hi - 1))
        stage = lax.rem(block - work.lo, _NUM_BYTE_STAGES)
        ops.wait_if(block - work.lo >= _NUM_BYTE_STAGES, scratch.bytes_free.at[stage])
        tokens = self.tokens_in_page(block)
        for i, page in enumerate(pages):
            plgpu.copy_gmem_to_smem(
                self.inputs.pages.box(K, page=page, tokens=tokens, kv_head=0),
                scratch.bytes.at[stage, pl.ds(i * tokens.size, tokens.size)],
                scratch.bytes_full.at[stage],
                collective_axes=scratch.shared_by,
            )
        return next_pages

    def tokens_of(self, block: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return each thread's token of a block, and the nearest one that may be read."""
        token = block * _BLOCK_K + lax.rem(ops.iota((WARPGROUP,), 0, THREADS), _BLOCK_K)
        return token, jnp.clip(token, self.work.first_key, self.work.kv_len - 1)

    def pages_of_tokens(self, block: jax.Array) -> jax.Array:
        """Return the pages of the threads' tokens, where tokens have scales of their own."""
        _, token = self.tokens_of(block)
        if self.inputs.pages.k_scales.shape == (1,):
            return token
        row = self.work.row * self.inputs.pages.block_tables.shape[1]
        return self.gather(
            self.inputs.pages.block_tables, row + token // self.inputs.pages.page_size
        )

    def scales_of(self, block: jax.Array, pages: jax.Array) -> jax.Array:
        """Return the scales f32 of the threads' tokens, which have these pages."""
        pool, scales = self.inputs.pages, self.inputs.pages.k_scales
        if scales.shape == (1,):
            return ops.full((WARPGROUP,), 1.0, THREADS) * scales[0]
        strides = pool.layout.strides(pool.layout.scale_axes, scales.shape)
        _, token = self.tokens_of(block)
        place = lax.rem(token, pool.page_size) * strides["N"]
        return self.gather(scales, pages * strides["P"] + place)

    def gather(self, ref: Any, index: jax.Array) -> jax.Array:
        """Return an element for each thread."""
        return gather(ref, index, THREADS, interpret=self.interpret)

    def convert(
        self, block: jax.Array, source: jax.Array, stage: jax.Array, scales: jax.Array
    ) -> None:
        """Convert a block and store its scales; tokens that may not be read become 0, not NaN."""
        refs = self.scratch.bytes.at[source], self.scratch.k.at[stage]
        scales_ref = self.scratch.scales.at[stage]
        (kv_dtype, dtype), columns = (ref.dtype for ref in refs), refs[0].shape[1]
        token, nearest = self.tokens_of(block)
        mask = jnp.where(token == nearest, -1, 0)
        if self.interpret:
            x = jnp.where(mask[:_BLOCK_K, None] < 0, refs[0][...].astype(dtype), 0)
            refs[1][...], scales_ref[...] = x.astype(dtype), scales[:_BLOCK_K]
            return
        types = [plgpu.RefType(ops.swizzled_rows(x, _SWIZZLE)) for x in (kv_dtype, dtype)]

        @plgpu.inline_mgpu(arg_types=(*types, plgpu.RefType(), THREADS, THREADS))
        def convert(_, source, target, scales_ref, scales, mask):
            emit = Emitter()
            token, warp = emit.rem(emit.thread(), _BLOCK_K), emit.div(emit.thread(), _BLOCK_K)
            # Warps store the same scales.
            at = emit.address(scales_ref, emit.mul(token, 4))
            emit.store_word(at, emit.value(scales))
            places = []
            for ref, of_type, chunk in (
                (source, kv_dtype, warp),
                (target, dtype, emit.mul(warp, 2)),
                (target, dtype, emit.add(emit.mul(warp, 2), 1)),
            ):
                tile = Tile(columns=columns, dtype=of_type, swizzle_bytes=_SWIZZLE)
                places.append(emit.address(ref, emit.byte_of(tile, token, chunk)))
            of_bytes, *halves = places
            tile_bytes, mask = 8 * _SWIZZLE, emit.value(mask)
            num_chunks = columns // (_WARPS * CHUNK)
            for start in range(0, num_chunks, _AT_ONCE):
                chunks = range(start, min(start + _AT_ONCE, num_chunks))
                loaded = [emit.load_chunk(of_bytes, offset=i * tile_bytes) for i in chunks]
                for i, words in zip(chunks, loaded, strict=True):
                    pairs = [
                        emit.ptx(pair_ptx(kv_dtype, pair, dtype, scaled=False), word)
                        for word in (emit.both(word, mask) for word in words)
                        for pair in range(2)
                    ]
                    for at, four in zip(halves, (pairs[:4], pairs[4:]), strict=True):
                        emit.store_chunk(at, four, offset=2 * i * tile_bytes)

        convert(*refs, scales_ref, scales, mask)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Consumer(latent_program.Consumer):
    def attend(self, work: WorkDescriptor, queries: Any) -> State:
        scratch, wg = self.scratch, self.wg

        def add_block_of_other(block, state):
            _, l_i, acc = state
            plgpu.barrier_wait(scratch.p_full.at[1 - wg])
            # A barrier counts phases by parity. With an odd number of stages both have blocks in
            # each stage, so a consumer must not leave out those of the other.
            plgpu.barrier_wait(scratch.k_full.at[self.stage_of(work, block)])
            m_i, factors = self.of_other()
            return m_i, l_i * factors, self.add_values(work, block, 1 - wg, acc, factors)

        def attend_own_block(block, s, state):
            m_i, l_i, acc = state
            scales_ref = scratch.scales.at[self.stage_of(work, block)]

            def scales():  # loaded anew for each use, since registers are few
                return ops.load(scales_ref, ops.WGMMA_COL)

            s = s * ops.bcast(scales(), s, 1)
            # The maximum is taken over the weights of V, since f16 has a small range.
            m_i, alpha, p = self.probabilities(
                work, queries, block, s, m_i, lambda: split_scales(scales())[0]
            )
            _, significands, inverses = split_scales(scales())
            weights = p * ops.bcast(significands, p, 1)
            p = p * ops.bcast(inverses, p, 1)
            scratch.p[wg][...] = weights.astype(scratch.p[wg].dtype)
            plgpu.commit_smem()
            plgpu.barrier_arrive(scratch.p_full.at[wg])
            return m_i, l_i * alpha + p.sum(axis=1), self.add_values(work, block, wg, acc, alpha)

        def attend_two_blocks(i, state):
            block = work.lo + NUM_CONSUMERS * i + wg
            s = self.multiply_qk(work, block)
            if wg == 0:
                state = lax.cond(
                    i > 0, functools.partial(add_block_of_other, block - 1), lambda x: x, state
                )
            else:
                state = add_block_of_other(block - 1, state)
            return attend_own_block(block, s, state)

        num_blocks = work.hi - work.lo
        own_blocks = lax.div(num_blocks - wg + 1, NUM_CONSUMERS)
        state = lax.fori_loop(0, own_blocks, attend_two_blocks, empty_state(ROWS, self.num_columns))
        last_is_of_other = (num_blocks > 0) & (lax.rem(num_blocks, NUM_CONSUMERS) == wg)
        add_last = functools.partial(add_block_of_other, work.hi - 1)
        return lax.cond(last_is_of_other, add_last, lambda x: x, state)

    def stage_of(self, work: WorkDescriptor, block: jax.Array) -> jax.Array:
        """Return the stage of a block."""
        return lax.rem(block - work.lo, _NUM_STAGES)

    def multiply_qk(self, work: WorkDescriptor, block: jax.Array) -> jax.Array:
        """Return q times the keys of a block."""
        scratch, stage = self.scratch, self.stage_of(work, block)
        plgpu.barrier_wait(scratch.k_full.at[stage])

        def multiply(acc_ref):
            first = 0
            for q in scratch.queries:
                k = scratch.k.at[stage, :, pl.ds(first, q.shape[1])]
                plgpu.wgmma(acc_ref, q, k.T)
                first += q.shape[1]
            return acc_ref[...]

        return pl.run_scoped(multiply, plgpu.ACC((ROWS, _BLOCK_K), jnp.float32))

    def add_values(
        self, work: WorkDescriptor, block: jax.Array, owner: int, acc: jax.Array, factors: jax.Array
    ) -> jax.Array:
        """Return the sums after a block, whose probabilities are those of `owner`."""
        scratch, stage = self.scratch, self.stage_of(work, block)
        acc = scale_changed_rows(acc, factors, interpret=self.interpret)
        v = scratch.k.at[stage, :, self.columns]
        acc = ops.wgmma_accumulate(acc, scratch.p[owner], v, interpret=self.interpret)
        plgpu.barrier_arrive(scratch.k_free.at[stage])
        return acc


ONE_BYTE = latent_program.Form(
    block_k=_BLOCK_K,
    registers=(224, 56),
    types=_types,
    producer=_Producer,
    consumer=_Consumer,
)
