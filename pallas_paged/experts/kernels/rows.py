"""Rows of tiles between memories: stores of some rows of a product, and copies of any rows."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_paged.experts.kernels.config import WG_ROWS
from pallas_paged.kernels.mosaic import ops
from pallas_paged.kernels.mosaic.indexed import gather
from pallas_paged.kernels.mosaic_sm80.emitter import CHUNK, WARPGROUP, Emitter
from pallas_paged.kernels.mosaic_sm90.ring import wgmma_transforms

_SPLAT = plgpu.Layout.WG_SPLAT
_ROW_BYTES = 128  # of a swizzled tile
_CHUNKS = _ROW_BYTES // CHUNK


def store_rows(
    out: Any,  # ref [M, N] to device memory, 16-bit, with N a multiple of 8
    values: jax.Array,  # [64, n], laid out as wgmma does
    *,
    row: Any,  # i32, where the tile begins
    column: Any,  # i32
    words: tuple[Any, Any],  # i32, whose bits say which rows are stored
    interpret: bool,
) -> None:
    """Store some rows of a tile of 64, and no column past the end."""
    num_columns = values.shape[1]
    if interpret:

        @pl.loop(0, WG_ROWS)
        def _(i):
            word = jnp.where(i < 32, *words)

            @pl.when((word >> (i % 32)) & 1 == 1)
            def _():
                out[row + i, pl.ds(column, num_columns)] = values[i]

        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), ops.WGMMA, *[_SPLAT] * 4))
    def store(_, out, values, *scalars):
        emit = Emitter()
        row, column, low, high = map(emit.scalar, scalars)
        out_columns = ir.MemRefType(out.type).shape[1]
        row_bytes = ir.MemRefType(out.type).get_strides_and_offset()[0][0] * 2
        of_tile, _ = emit.place_in_accumulator()
        quad = emit.rem(emit.thread(), 4)
        # A thread has two columns of every eight, of rows `of_tile` and `of_tile + 8`, as do the
        # three beside it. The four exchange them, so that each has all eight of every 32.
        zero = emit.constant(0)
        bits = [emit.less(zero, emit.both(quad, emit.constant(bit))) for bit in (1, 2)]
        blocks = emit.words(values)[0]
        exchanged = len(blocks) // 4 * 4
        for first in range(0, exchanged, 4):
            for distance, bit in zip((1, 2), bits, strict=True):
                for i, part in ((i, part) for i in range(4) for part in range(2)):
                    if i & distance:
                        continue
                    one, two = (first + i, part), (first + i + distance, part)
                    sent = arith.select(bit, blocks[one], blocks[two])
                    other = utils.shfl_bfly(sent, distance)
                    blocks[one] = arith.select(bit, other, blocks[one])
                    blocks[two] = arith.select(bit, blocks[two], other)
        of_row = emit.mul(emit.wide(emit.add(row, of_tile)), row_bytes)
        start = emit.address(out, emit.add(of_row, emit.wide(emit.mul(column, 2))))
        wide, narrow = (
            emit.add(start, emit.wide(emit.mul(quad, size))) for size in (CHUNK, CHUNK // 4)
        )
        word = arith.select(emit.less(of_tile, 32), low, high)
        shifted = arith.shrui(word, emit.rem(of_tile, 32))
        operands = [wide, narrow, shifted, column, emit.add(column, emit.mul(quad, 8))]
        lines = ["{ .reg .pred p, q; .reg .b32 r;"]
        has_end = out_columns % num_columns != 0
        where = "q" if has_end else "p"

        def unless_past_end(operand: int, block: int) -> None:
            if has_end:
                lines.append(f"setp.lt.and.s32 q, ${operand}, {out_columns - 8 * block}, p;")

        for part in range(2):
            lines += [f"and.b32 r, $2, {1 << (8 * part)}; setp.ne.u32 p, r, 0;"]
            rows = part * 8 * row_bytes
            for block in range(0, exchanged, 4):
                unless_past_end(4, block)
                names = ", ".join(f"${len(operands) + i}" for i in range(4))
                lines.append(f"@{where} st.global.v4.b32 [$0+{rows + 16 * block}], {{{names}}};")
                operands += list(blocks[block : block + 4, part])
            for block in range(exchanged, len(blocks)):
                unless_past_end(3, block)
                lines.append(f"@{where} st.global.b32 [$1+{rows + 16 * block}], ${len(operands)};")
                operands.append(blocks[block, part])
        emit.effect("\n".join([*lines, "}"]), *operands)

    store(out, values, row, column, *words)


def layout_of_rows(num_rows: int) -> Any:
    """Return the layout of i32`[8 * num_rows]`, the rows of the chunks that each thread copies."""
    return plgpu.Layout.WG_STRIDED((num_rows * _CHUNKS,), vec_size=1)


def rows_to_copy(rows: Any, first: Any, num_rows: int, *, interpret: bool) -> jax.Array:
    """Return the rows of x that a tile has, from `first` on in a ref `i32[R]`, for `copy_rows`.

    Those past the end are the last one again.
    """
    if interpret:
        return rows[...][jnp.minimum(first + jnp.arange(num_rows), rows.shape[0] - 1)]
    layout = layout_of_rows(num_rows)
    index = first + lax.div(ops.iota((num_rows * _CHUNKS,), 0, layout), _CHUNKS)
    index = jnp.minimum(index, rows.shape[0] - 1)
    return gather(rows, index, layout, interpret=interpret)


def copy_rows(x: Any, rows: jax.Array, first_column: Any, to: Any, *, interpret: bool) -> None:
    """Start the copies of 64 columns of some rows, one asynchronous group, by all threads.

    `x` is a ref `[T, K]` to device memory, 16-bit, and `to` a ref `[n, 64, 64]` to shared memory;
    the rows are from `rows_to_copy`.
    """
    num_rows = to.shape[0] * WG_ROWS
    if interpret:
        values = x[:, pl.ds(first_column, 64)][rows].reshape(to.shape)
        for i in range(to.shape[0]):
            to[i] = values[i]
        return
    transforms = wgmma_transforms(x.dtype)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), layout_of_rows(num_rows), _SPLAT, plgpu.RefType(transforms))
    )
    def copy(_, x, rows, first_column, to):
        emit = Emitter()
        row_bytes = ir.MemRefType(x.type).get_strides_and_offset()[0][0] * 2
        thread = emit.thread()
        chunk, row = emit.rem(thread, _CHUNKS), emit.div(thread, _CHUNKS)
        column = emit.wide(emit.mul(emit.scalar(first_column), 2))
        source = emit.address(x, emit.add(column, emit.wide(emit.mul(chunk, CHUNK))))
        # Rows of 128 bytes, in tiles of 8 whose chunks the swizzle exchanges.
        place = emit.mul(emit.xor(chunk, emit.rem(row, 8)), CHUNK)
        at = emit.address(to, emit.add(emit.mul(row, _ROW_BYTES), place))
        step = WARPGROUP // _CHUNKS * _ROW_BYTES
        for i, register in enumerate(rows.registers.flat):
            index = emit.word(register)
            emit.copy_chunk(at, source, index, row_bytes, offset=i * step)
        emit.effect("cp.async.commit_group;")

    copy(x, rows, first_column, to)


def wait_for_rows(num_pending: int, *, interpret: bool) -> None:
    """Wait until all but the newest groups of copies can be read by wgmma."""
    ops.inline_ptx(f"cp.async.wait_group {num_pending};", interpret=interpret)
    plgpu.commit_smem()
