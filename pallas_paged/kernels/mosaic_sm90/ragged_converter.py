"""The converter of the ragged kernel: a warpgroup that makes 16-bit K/V of int8 and fp8 pages.

It is between the producer and the consumers, which read a ring as they do without it:

    producer      bytes of pages            a ring of bytes, one block of K and one of V
    converter     element * scale           rounded once, to q's dtype
    consumers     q.k, softmax, p.v         the ring of 16-bit blocks

So every element is converted once for all query rows of a tile. Blocks that were converted before
the kernel (`converted_rows`) do not pass through the first ring: the same warpgroup copies them to
the second one.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_paged.kernels.mosaic import ops
from pallas_paged.kernels.mosaic.indexed import gather
from pallas_paged.kernels.mosaic.pages import Pages
from pallas_paged.kernels.mosaic.ragged_work import WorkDescriptor
from pallas_paged.kernels.mosaic_sm90.config import MosaicSm90RaggedConfig
from pallas_paged.kernels.mosaic_sm90.converted_rows import ConvertedRows
from pallas_paged.kernels.mosaic_sm90.ragged_operands import BYTES, BYTES_ROW, converted
from pallas_paged.kernels.mosaic_sm90.ring import Ring, zero_unreadable

_NUM_STAGES = 1  # blocks of bytes of K and of V; the 16-bit blocks behind them are stages too
_ROWS = 64  # tokens that are converted at a time


def byte_ring(config: MosaicSm90RaggedConfig, *, head_dim: int, page_size: int, dtype: Any) -> Ring:
    """Return the types of the ring of bytes."""
    return Ring.types(
        num_stages=_NUM_STAGES,
        block_k=config.block_k,
        head_dim=head_dim,
        v_head_dim=head_dim,
        page_size=page_size,
        dtype=dtype,
        num_consumers=1,  # the converter
        swizzle=min(head_dim, 128),
    )


def end_of_pages(work: WorkDescriptor, converted: ConvertedRows | None) -> jax.Array:
    """Return the end of the blocks of a work item that come from pages: `lo` or `hi`."""
    if converted is None:
        return work.hi
    return jnp.where(converted.holds(work.row), work.lo, work.hi)


def k_arrivals(k_scales: Any, converted: Any) -> int:
    """Return the arrivals that complete a block of K: a copy of converted ones, one of scales."""
    return 1 if k_scales is None or converted is None else 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Converter:
    """Converts the blocks of a work item, or copies blocks that are converted.

    Attributes:
        source: the ring of bytes.
        target: the ring of q's dtype. One arrival completes a block of V, `k_arrivals` one of K.
        k_scales: f32[num_stages, block_k] in shared memory: the scales of K in `target`, times
            `k_factor`. None where all tokens have one scale.
        converted: rows that were converted before and have no blocks in `source`, or None.
    """

    source: Ring
    target: Ring
    k_scales: Any
    k_factor: float
    pages: Pages
    converted: ConvertedRows | None
    interpret: bool

    def send(
        self, work: WorkDescriptor, kv_head: jax.Array, kv_iter: jax.Array, taken: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Send the blocks of a work item to `target`; return the next `(kv_iter, taken)`.

        Before, `kv_iter` blocks were sent, and `taken` blocks came from `source`.
        """
        hi = end_of_pages(work, self.converted)
        self.convert(work, kv_head, hi, kv_iter, taken)
        taken, kv_iter = taken + hi - work.lo, kv_iter + hi - work.lo
        if self.converted is not None:
            kv_iter = self.converted.stream(
                self.target,
                self.k_scales,
                work.row,
                kv_head,
                lo=hi,
                hi=work.hi,
                kv_iter=kv_iter,
            )
        return kv_iter, taken

    def convert(
        self,
        work: WorkDescriptor,
        kv_head: jax.Array,
        hi: jax.Array,
        kv_iter: jax.Array,
        taken: jax.Array,
    ) -> None:
        """Convert the blocks `[work.lo, hi)` of a work item."""

        @pl.when(work.lo < hi)  # otherwise the row may own no page
        def _():
            # What a block needs is loaded one block ahead: no conversion waits for its scales, and
            # no load of scales for the page numbers.
            pages = self.load_pages(work, work.lo)
            scales = self.load_scales(work, kv_head, work.lo, pages)

            def convert_block(block, loaded):
                scales, pages = loaded
                next_scales = self.load_scales(work, kv_head, block + 1, pages)
                next_pages = self.load_pages(work, block + 2)
                now = [first + (block - work.lo) for first in (taken, kv_iter)]
                self.convert_keys(*now, scales[0])
                self.convert_values(*now, scales[1], work, block)
                return next_scales, next_pages

            loaded = scales, self.load_pages(work, work.lo + 1)
            lax.fori_loop(work.lo, hi, convert_block, loaded)

    def convert_keys(self, taken: jax.Array, now: jax.Array, scales: list[jax.Array]) -> None:
        """Convert the keys of block number `taken` to number `now`; logits take their scales."""
        source, target = self.source, self.target
        parts = self.load(source.k, source.k_full, source.k_free, taken)
        stage = ops.free_stage(target.k_free, now)
        if self.k_scales is not None:
            for i, values in enumerate(scales):
                self.k_scales[stage, pl.ds(i * _ROWS, _ROWS)] = values * self.k_factor
        self.store(target.k.at[stage], parts)
        plgpu.commit_smem()
        for _ in range(k_arrivals(self.k_scales, self.converted)):
            plgpu.barrier_arrive(target.k_full.at[stage])

    def convert_values(
        self,
        taken: jax.Array,
        now: jax.Array,
        scales: list[jax.Array],
        work: WorkDescriptor,
        block: jax.Array,
    ) -> None:
        """Convert the values of block number `taken` to number `now`, times their scales."""
        source, target = self.source, self.target
        parts = self.load(source.v, source.v_full, source.v_free, taken)
        stage = ops.free_stage(target.v_free, now)
        self.store(target.v.at[stage], parts, scales)
        readable = dict(first_key=work.first_key, kv_len=work.kv_len)
        zero_unreadable(target, stage, block, **readable, commit=False)
        plgpu.commit_smem()
        plgpu.barrier_arrive(target.v_full.at[stage])

    def load(self, blocks: Any, full: Any, free: Any, now: jax.Array) -> list[jax.Array]:
        """Return block number `now` of the ring of bytes, 64 tokens at a time; free its stage."""
        stage = lax.rem(now, _NUM_STAGES)
        plgpu.barrier_wait(full.at[stage])
        parts = [
            ops.load_shared(blocks.at[stage, pl.ds(first, _ROWS)], BYTES)
            for first in range(0, blocks.shape[1], _ROWS)
        ]
        # The barrier alone does not order reads of threads and the next copy by TMA: a fence does.
        plgpu.commit_smem()
        plgpu.barrier_arrive(free.at[stage])
        return parts

    def store(
        self, block: Any, parts: list[jax.Array], scales: list[jax.Array] | None = None
    ) -> None:
        """Store bytes as 16-bit numbers."""
        for i, part in enumerate(parts):
            block[pl.ds(i * _ROWS, _ROWS)] = converted(
                part,
                None if scales is None else scales[i],
                block.dtype,
                interpret=self.interpret,
            )

    def tokens(self, work: WorkDescriptor, block: jax.Array) -> list[jax.Array]:
        """Return readable tokens of a block; they stand in for tokens that may not be read."""
        block_k = self.target.k.shape[1]
        return [
            jnp.clip(
                block * block_k + first + ops.iota((_ROWS,), 0, BYTES_ROW),
                work.first_key,
                work.kv_len - 1,
            )
            for first in range(0, block_k, _ROWS)
        ]

    def load_pages(self, work: WorkDescriptor, block: jax.Array) -> list[jax.Array]:
        """Return the page of each token of a block."""
        if not self.pages.scales_by_token:
            return []
        row = work.row * self.pages.block_tables.shape[1]
        return [
            self.gather(self.pages.block_tables, row + tokens // self.pages.page_size)
            for tokens in self.tokens(work, block)
        ]

    def load_scales(
        self, work: WorkDescriptor, kv_head: jax.Array, block: jax.Array, pages: list[jax.Array]
    ) -> tuple[list[jax.Array], ...]:
        """Return the scales of K and of V of a block, whose tokens have these pages."""
        refs = self.pages.k_scales, self.pages.v_scales
        if not self.pages.scales_by_token:
            num_parts = self.target.k.shape[1] // _ROWS
            one = ops.full((_ROWS,), 1.0, BYTES_ROW)
            return tuple([one * ref[0]] * num_parts for ref in refs)
        layout, page_size = self.pages.layout, self.pages.page_size
        strides = layout.strides(layout.scale_axes, refs[0].shape)
        places = [
            page * strides["P"] + tokens % page_size * strides["N"] + kv_head * strides["H"]
            for page, tokens in zip(pages, self.tokens(work, block), strict=True)
        ]
        return tuple([self.gather(ref, place) for place in places] for ref in refs)

    def gather(self, ref: Any, indices: jax.Array) -> jax.Array:
        """Return elements of a ref by flat index."""
        return gather(ref, indices, BYTES_ROW, interpret=self.interpret)
