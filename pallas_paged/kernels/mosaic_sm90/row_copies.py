"""Copies of K/V from pages of 1, 2 and 4 tokens, which TMA can't put into swizzled rows.

Every thread of the producer copies pieces of 16 bytes by cp.async. A block is complete when the
thread has waited for its copies, so the producer requests the next block before it announces one.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_paged.kernels.mosaic_sm90.ring import MIN_TMA_TOKENS, Pool, Ring, page_to_read
from pallas_paged.pages.layout import K, V

_THREADS = 128  # of a warpgroup
_PIECE = 16  # bytes of a copy


def needs_row_copies(page_size: int) -> bool:
    """Return whether pages are too small for TMA."""
    return page_size < MIN_TMA_TOKENS


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RowCopies:
    """Copies of the blocks of one sequence to the stages of a ring.

    Attributes:
        swizzle: bytes of the swizzled rows of a tile in shared memory.
        first_page, last_page: of the keys that any query sees; other entries of the block table
            may hold anything. The first is None where there is no window.
    """

    ring: Ring
    pool: Pool
    block_table: Any  # i32[N], of the sequence
    kv_head: jax.Array
    first_page: jax.Array | None
    last_page: jax.Array
    swizzle: int
    interpret: bool

    @property
    def row_bytes(self) -> int:
        return self.ring.k.shape[-1] * self.ring.k.dtype.itemsize

    @property
    def num_pieces(self) -> int:
        """Pieces of K that a thread copies of a block."""
        return self.ring.k.shape[1] * self.row_bytes // (_PIECE * _THREADS)

    def pages_of(self, block: jax.Array) -> Any:
        """Return the argument of `start`: the pages of a thread's pieces."""
        if self.interpret:
            return block
        layout = plgpu.Layout.WG_STRIDED((_THREADS * self.num_pieces,), 1)
        out = plgpu.ShapeDtypeStruct((_THREADS * self.num_pieces,), jnp.int32, layout=layout)
        block_k, page_size = self.ring.k.shape[1], self.pool.page_size
        per_row = self.row_bytes // _PIECE
        scalars = [block, self.last_page]
        if self.first_page is not None:
            scalars.append(self.first_page)
        scalar_types = (plgpu.Layout.WG_SPLAT,) * len(scalars)

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *scalar_types), return_type=out)
        def load(_, table, block, last_page, first_page=None):
            from jax.experimental.mosaic import gpu as mgpu
            from jax.experimental.mosaic.gpu import utils
            from jaxlib.mlir import ir
            from jaxlib.mlir.dialects import arith, vector

            i32 = ir.IntegerType.get_signless(32)

            def c(x):
                return arith.constant(i32, x)

            first = arith.muli(block.registers.item(), c(block_k))
            registers = []
            for i in range(self.num_pieces):
                row = arith.divui(_piece(i), c(per_row))
                page = arith.divui(arith.addi(first, row), c(page_size))
                if first_page is not None:
                    page = arith.maxsi(page, first_page.registers.item())
                entry = utils.inline_ptx(
                    "{ .reg .b64 at; mad.wide.s32 at, $2, 4, $1; ld.global.nc.b32 $0, [at]; }",
                    utils.memref_ptr(table),
                    arith.minsi(page, last_page.registers.item()),
                    result_types=i32,
                    has_side_effects=True,
                )
                registers.append(vector.broadcast(ir.VectorType.get((1,), i32), entry))
            return mgpu.FragmentedArray(
                _registers=np.array(registers, dtype=object),
                _layout=layout.to_mgpu(),
                _is_signed=True,
            )

        return load(self.block_table, *scalars)

    def start(self, kv: int, pages: Any, block: jax.Array, stage: jax.Array) -> None:
        """Start the copies of K or V of a block."""
        to = (self.ring.k, self.ring.v)[kv].at[stage]
        if self.interpret:
            page_size = self.pool.page_size

            @pl.loop(0, to.shape[0])
            def _(i):
                token = pages * to.shape[0] + i
                page = page_to_read(token // page_size, self.first_page, self.last_page)
                place = pl.ds(lax.rem(token, page_size), 1)
                page = self.block_table[page]
                box = self.pool.box(kv, page=page, tokens=place, kv_head=self.kv_head)
                to[pl.ds(i, 1)] = box[...]

            return
        pages_ref = (self.pool.k, self.pool.v)[kv]
        axes = self.pool.layout.axes
        itemsize = pages_ref.dtype.itemsize
        stride = {
            axis: math.prod(pages_ref.shape[i + 1 :]) * itemsize for i, axis in enumerate(axes)
        }
        page_size, per_row, swizzle = self.pool.page_size, self.row_bytes // _PIECE, self.swizzle
        transforms = (
            plgpu.TilingTransform((8, swizzle // itemsize)),
            plgpu.SwizzleTransform(swizzle),
        )
        layout = plgpu.Layout.WG_STRIDED((_THREADS * self.num_pieces,), 1)

        @plgpu.inline_mgpu(
            arg_types=(
                plgpu.RefType(),
                plgpu.RefType(transforms),
                layout,
                plgpu.Layout.WG_SPLAT,
            )
        )
        def copy(_, pool, to, pages, kv_head):
            from jax.experimental.mosaic.gpu import utils
            from jaxlib.mlir import ir
            from jaxlib.mlir.dialects import arith

            i32, i64 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)

            def c(x):
                return arith.constant(i32, x)

            head = arith.extui(i64, kv_head.registers.item())
            head = arith.muli(head, arith.constant(i64, stride["H"]))
            head = arith.addi(head, arith.constant(i64, kv * stride.get("2", 0)))
            for i, page in enumerate(pages.registers.flat):
                piece = _piece(i)
                row, column = arith.divui(piece, c(per_row)), arith.remui(piece, c(per_row))
                tile = arith.divui(column, c(swizzle // _PIECE))
                in_tile = arith.remui(row, c(8))
                place = arith.xori(
                    arith.remui(column, c(swizzle // _PIECE)),
                    arith.divui(in_tile, c(128 // swizzle)),
                )
                at = _sum(
                    arith.muli(arith.divui(row, c(8)), c(8 * self.row_bytes)),
                    arith.muli(tile, c(8 * swizzle)),
                    arith.muli(in_tile, c(swizzle)),
                    arith.muli(place, c(_PIECE)),
                )
                # Blocks begin where pages begin.
                token = arith.muli(arith.remui(row, c(page_size)), c(stride["N"]))
                source = arith.addi(token, arith.muli(column, c(_PIECE)))
                utils.inline_ptx(
                    "{ .reg .b32 d; .reg .b64 a, b;"
                    f" mad.wide.s32 a, $2, {stride['P']}, $0; add.s64 a, a, $3;"
                    " cvt.u64.u32 b, $4; add.s64 a, a, b; add.u32 d, $1, $5;"
                    f" cp.async.cg.shared.global [d], [a], {_PIECE}; }}",
                    utils.memref_ptr(pool),
                    utils.memref_ptr(to),
                    utils.bitcast(page, i32),
                    head,
                    source,
                    at,
                    has_side_effects=True,
                )

        copy(pages_ref, to, pages, self.kv_head)

    def commit(self) -> None:
        """End a group of copies."""
        if not self.interpret:

            @plgpu.inline_mgpu()
            def group(_):
                from jaxlib.mlir.dialects import nvvm

                nvvm.cp_async_commit_group()

            group()

    def announce(self, stage: jax.Array, *, in_flight: int) -> None:
        """Wait for all groups but the last `in_flight` ones and say that a stage is full."""
        if not self.interpret:

            @plgpu.inline_mgpu()
            def wait(_):
                from jaxlib.mlir.dialects import nvvm

                nvvm.cp_async_wait_group(in_flight)

            wait()
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.ring.k_full.at[stage])
        plgpu.barrier_arrive(self.ring.v_full.at[stage])


def stream_rows(
    copies: RowCopies, *, lo: jax.Array, hi: jax.Array, kv_iter: jax.Array, scales: Any = None
) -> jax.Array:
    """Send the blocks `[lo, hi)` of a sequence through the ring, as `ring.stream`."""
    ring = copies.ring

    def send(block, carry):
        kv_iter, pages, loaded = carry
        stage = ring.stage_of(kv_iter)

        @pl.when(kv_iter >= ring.num_stages)
        def _():
            plgpu.barrier_wait(ring.k_free.at[stage])
            plgpu.barrier_wait(ring.v_free.at[stage])

        for kv in (K, V):
            copies.start(kv, pages, block, stage)
        copies.commit()
        next_block = jnp.minimum(block + 1, hi - 1)
        pages = copies.pages_of(next_block)
        if scales is not None:
            scales.store(loaded, stage)
            plgpu.commit_smem()
            plgpu.barrier_arrive(ring.k_full.at[stage])
            loaded = scales.load(next_block)

        @pl.when(block > lo)
        def _():
            copies.announce(ring.stage_of(kv_iter - 1), in_flight=1)

        return kv_iter + 1, pages, loaded

    loaded = None if scales is None else scales.load(lo)
    kv_iter = lax.fori_loop(lo, hi, send, (kv_iter, copies.pages_of(lo), loaded))[0]

    @pl.when(lo < hi)
    def _():
        copies.announce(ring.stage_of(kv_iter - 1), in_flight=0)

    return kv_iter


def _piece(i: int) -> Any:
    """Return the index of a thread's piece `i` in a block."""
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith

    i32, constant = ir.IntegerType.get_signless(32), cast(Any, arith.constant)
    thread = arith.remui(utils.thread_idx(), constant(i32, _THREADS))
    return arith.addi(thread, constant(i32, i * _THREADS))


def _sum(*terms: Any) -> Any:
    from jaxlib.mlir.dialects import arith

    total, *rest = terms
    for term in rest:
        total = arith.addi(total, term)
    return total
