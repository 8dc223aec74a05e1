"""The producer of the kernel of latent attention: it fills the ring of blocks that consumers read.

Pages of q's dtype are copied to the ring by TMA. Pages of int8 and fp8 are copied to a ring of
bytes, and the warpgroup that waits for them there converts them:

    copies by TMA     blocks of bytes `[2, 32, D + R]`
    conversion        to q's dtype, exact, beside the scales of the tokens
    consumers         blocks of 16 bits `[3, 32, D + R]`

So every element is converted once for all 64 rows of a program. The scales multiply logits and
probabilities, which are fewer.
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

from pallas_paged.kernels.mosaic import ops
from pallas_paged.kernels.mosaic.indexed import gather
from pallas_paged.kernels.mosaic.ragged_work import WorkDescriptor
from pallas_paged.kernels.mosaic_sm80.emitter import CHUNK, THREADS, WARPGROUP, Emitter, Tile
from pallas_paged.kernels.mosaic_sm80.ragged_rows import RaggedRows, RowInputs
from pallas_paged.kernels.mosaic_sm90.latent_scratch import (
    BLOCK_K,
    CLUSTER,
    HEADS_MULTIPLE,
    ROWS,
    SWIZZLE,
    LatentScratch,
)
from pallas_paged.kernels.mosaic_sm90.ragged_operands import pair_ptx
from pallas_paged.kernels.mosaic_sm90.ring import page_to_read
from pallas_paged.pages.layout import K

_WARPS = WARPGROUP // BLOCK_K  # a lane has a token, and a warp every fourth 16 bytes of it
_AT_ONCE = 5  # chunks of 16 bytes that a thread loads before it uses the first


@dataclasses.dataclass(frozen=True, kw_only=True)
class Producer:
    """The producer warpgroup of a program that attends a work item."""

    inputs: RowInputs
    scratch: LatentScratch
    work: WorkDescriptor
    rows: RaggedRows
    has_window: bool
    interpret: bool

    def run(self) -> None:
        """Send the queries and the blocks of the work item."""
        scratch, rows = self.scratch, self.rows
        # 64 rows from the tile's first on; the last ones may be of other sequences.
        first_row = pl.multiple_of(rows.q_start * rows.group + rows.offset, HEADS_MULTIPLE)
        for source, to in zip(self.inputs.q, scratch.queries, strict=True):
            plgpu.copy_gmem_to_smem(source.at[pl.ds(first_row, ROWS)], to, scratch.q_full)
        if scratch.bytes is None:
            self.send_blocks()
        else:
            self.convert_blocks()

    def send_blocks(self) -> None:
        """Copy all blocks to the ring that the consumers read."""
        scratch, work = self.scratch, self.work
        send = self.copies(scratch.k, scratch.k_full, scratch.k_free)
        lax.fori_loop(work.lo, work.hi, send, self.pages_of(work.lo))

    def convert_blocks(self) -> None:
        """Copy all blocks to the ring of bytes, and convert them."""
        scratch, work = self.scratch, self.work
        num_stages, ahead = scratch.k.shape[0], scratch.bytes.shape[0]
        send = self.copies(scratch.bytes, scratch.bytes_full, scratch.bytes_free)
        sent = jnp.minimum(work.lo + ahead, work.hi)
        pages = lax.fori_loop(work.lo, sent, send, self.pages_of(work.lo))

        def convert(block, carry):
            pages, scales, pages_of_tokens = carry
            # What a block needs is read a block ahead: no conversion waits for its scales, and no
            # read of scales for the page numbers.
            next_scales = self.scales_of(block + 1, pages_of_tokens)
            next_pages = self.pages_of_tokens(block + 2)
            number = block - work.lo
            source, stage = lax.rem(number, ahead), lax.rem(number, num_stages)
            plgpu.barrier_wait(scratch.bytes_full.at[source])
            ops.wait_if(number >= num_stages, scratch.k_free.at[stage])
            self.convert(block, source, stage, scales)
            # The fence orders what threads read and wrote here, and copies and products.
            plgpu.commit_smem()
            plgpu.barrier_arrive(scratch.bytes_free.at[source])
            plgpu.barrier_arrive(scratch.k_full.at[stage])
            pages = lax.cond(
                block + ahead < work.hi,
                functools.partial(send, block + ahead),
                lambda pages: pages,
                pages,
            )
            return pages, next_scales, next_pages

        scales = self.scales_of(work.lo, self.pages_of_tokens(work.lo))
        carry = pages, scales, self.pages_of_tokens(work.lo + 1)
        lax.fori_loop(work.lo, work.hi, convert, carry)

    def pages_of(self, block: jax.Array) -> tuple[jax.Array, ...]:
        """Return the pages of a block: one for each of its copies."""
        work, page_size = self.work, self.inputs.pages.page_size
        first_page = work.first_key // page_size if self.has_window else None
        last_page = (work.kv_len - 1) // page_size
        return tuple(
            self.inputs.pages.block_tables[
                work.row, page_to_read((block * BLOCK_K + i) // page_size, first_page, last_page)
            ]
            for i in range(0, BLOCK_K, min(page_size, BLOCK_K))
        )

    def copies(self, ring: Any, full: Any, free: Any) -> Callable[..., tuple[jax.Array, ...]]:
        """Return a function that copies a block to a ring and returns the next block's pages."""
        work, pool = self.work, self.inputs.pages
        page_size, num_stages = pool.page_size, ring.shape[0]
        step = min(page_size, BLOCK_K)
        shared = self.scratch.cluster_done is not None

        def send(block, pages):
            # The table is read one block ahead, so the copies need not wait for it.
            next_pages = self.pages_of(jnp.minimum(block + 1, work.hi - 1))
            stage = lax.rem(block - work.lo, num_stages)
            ops.wait_if(block - work.lo >= num_stages, free.at[stage])
            for i, page in enumerate(pages):
                first = lax.rem(block * BLOCK_K, page_size) if page_size > step else 0
                plgpu.copy_gmem_to_smem(
                    pool.box(K, page=page, tokens=pl.ds(first, step), kv_head=0),
                    ring.at[stage, pl.ds(i * step, step)],
                    full.at[stage],
                    collective_axes=CLUSTER if shared else None,
                )
            return next_pages

        return send

    def tokens_of(self, block: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return each thread's token of a block, and the nearest one that may be read."""
        token = block * BLOCK_K + lax.rem(ops.iota((WARPGROUP,), 0, THREADS), BLOCK_K)
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
            x = jnp.where(mask[:BLOCK_K, None] < 0, refs[0][...].astype(dtype), 0)
            refs[1][...], scales_ref[...] = x.astype(dtype), scales[:BLOCK_K]
            return
        types = [plgpu.RefType(ops.swizzled_rows(x, SWIZZLE)) for x in (kv_dtype, dtype)]

        @plgpu.inline_mgpu(arg_types=(*types, plgpu.RefType(), THREADS, THREADS))
        def convert(_, source, target, scales_ref, scales, mask):
            emit = Emitter()
            token, warp = emit.rem(emit.thread(), BLOCK_K), emit.div(emit.thread(), BLOCK_K)
            # Warps store the same scales.
            at = emit.address(scales_ref, emit.mul(token, 4))
            emit.store_word(at, emit.value(scales))
            places = []
            for ref, of_type, chunk in (
                (source, kv_dtype, warp),
                (target, dtype, emit.mul(warp, 2)),
                (target, dtype, emit.add(emit.mul(warp, 2), 1)),
            ):
                tile = Tile(columns=columns, dtype=of_type, swizzle_bytes=SWIZZLE)
                places.append(emit.address(ref, emit.byte_of(tile, token, chunk)))
            of_bytes, *halves = places
            tile_bytes, mask = 8 * SWIZZLE, emit.value(mask)
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
