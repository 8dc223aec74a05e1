"""Stores of a tile's rows that belong to its group."""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_paged.kernels.mosaic import ops


def store_rows(
    out: Any,
    values: jax.Array,
    *,
    row: Any,
    column: Any,
    lo: Any,
    hi: Any,
    interpret: bool,
) -> None:
    """Store the rows `lo..hi-1` of a tile of 64 rows, and no column past the end.

    Args:
        out: ref `[M, N]` to device memory, 16-bit, with N a multiple of 8.
        values: `[64, n]`, laid out as wgmma does.
        row, column: i32, where the tile begins.
        lo, hi: i32, which may be outside of the tile.
    """
    num_columns = values.shape[1]
    if interpret:

        @pl.loop(0, 64)
        def _(i):
            @pl.when((i >= lo) & (i < hi))
            def _():
                out[row + i, pl.ds(column, num_columns)] = values[i]

        return

    splat = plgpu.Layout.WG_SPLAT

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), ops.WGMMA, splat, splat, splat, splat))
    def store(_, out, values, row, column, lo, hi):
        from jax.experimental.mosaic.gpu import utils
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import arith

        i32, i64 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
        row, column, lo, hi = (x.registers.item() for x in (row, column, lo, hi))
        out_columns = ir.MemRefType(out.type).shape[1]
        row_bytes = ir.MemRefType(out.type).get_strides_and_offset()[0][0] * 2
        thread = arith.remui(utils.thread_idx(), utils.c(128, i32))
        warp, lane = (f(thread, utils.c(32, i32)) for f in (arith.divui, arith.remui))
        quad = arith.remui(lane, utils.c(4, i32))
        of_tile = arith.addi(arith.muli(warp, utils.c(16, i32)), arith.divui(lane, utils.c(4, i32)))
        # A thread has two columns of every eight, of rows `of_tile` and `of_tile + 8`, as do the
        # three beside it. The four exchange them, so that each has all eight of every 32.
        bits = [
            arith.cmpi(arith.CmpIPredicate.ne, arith.andi(quad, utils.c(bit, i32)), utils.c(0, i32))
            for bit in (1, 2)
        ]
        words = [
            [utils.bitcast(x, i32) for x in half] for half in values.registers.reshape(-1, 2).T
        ]
        num_blocks = num_columns // 8
        for half in words:
            for first in range(0, num_blocks - 3, 4):
                for distance, bit in zip((1, 2), bits, strict=True):
                    for i in range(4):
                        if i & distance:
                            continue
                        a, b = half[first + i], half[first + i + distance]
                        other = utils.shfl_bfly(arith.select(bit, a, b), distance)
                        half[first + i] = arith.select(bit, other, a)
                        half[first + i + distance] = arith.select(bit, b, other)
        first_byte = arith.addi(
            arith.muli(arith.extsi(i64, arith.addi(row, of_tile)), utils.c(row_bytes, i64)),
            arith.extsi(i64, arith.muli(column, utils.c(2, i32))),
        )
        operands = [
            utils.memref_ptr(out),
            first_byte,
            quad,
            arith.subi(of_tile, lo),
            arith.subi(hi, lo),
            column,
        ]
        lines = [
            "{ .reg .pred p, q; .reg .b64 a, b, c; .reg .b32 r, n;",
            "add.s64 a, $0, $1; mul.wide.u32 b, $2, 16; mul.wide.u32 c, $2, 4;",
            "add.s64 b, a, b; add.s64 c, a, c; mad.lo.s32 n, $2, 8, $5;",
        ]
        for part, half in enumerate(words):
            # As unsigned, so that a row before the first is past the end.
            lines += [f"add.s32 r, $3, {8 * part}; setp.lt.u32 p, r, $4;"]
            lines += ["setp.gt.and.s32 p, $4, 0, p;"]
            rows = part * 8 * row_bytes
            for first in range(0, num_blocks - 3, 4):
                names = ", ".join(f"${len(operands) + i}" for i in range(4))
                operands += half[first : first + 4]
                if out_columns % num_columns:
                    lines.append(f"setp.lt.and.s32 q, n, {out_columns - 8 * first}, p;")
                where = "q" if out_columns % num_columns else "p"
                lines.append(f"@{where} st.global.v4.b32 [b+{rows + 16 * first}], {{{names}}};")
            for block in range(num_blocks // 4 * 4, num_blocks):
                if out_columns % num_columns:
                    lines.append(f"setp.lt.and.s32 q, $5, {out_columns - 8 * block}, p;")
                where = "q" if out_columns % num_columns else "p"
                lines.append(f"@{where} st.global.b32 [c+{rows + 16 * block}], ${len(operands)};")
                operands.append(half[block])
        lines.append("}")
        utils.inline_ptx("\n".join(lines), *operands, has_side_effects=True)

    store(out, values, row, column, lo, hi)
