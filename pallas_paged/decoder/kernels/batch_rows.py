"""Tiles of 64 rows in device memory: masked loads and stores, and root mean squares of the rows."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from pallas_paged.decoder.kernels.batch_config import GROUP_ROWS
from pallas_paged.decoder.kernels.batch_refs import SUMS
from pallas_paged.kernels.mosaic import ops


def store_rows(where: Any, values: jax.Array, *, group: Any, interpret: bool) -> None:
    """Store the tile number `group` of 64 rows of a product, without rows past the end.

    `where` is a ref `[R, n]` to device memory; `values` are `[64, n]`, laid out as wgmma does, f32
    or 16-bit elements.
    """
    num_rows = where.shape[0]
    if interpret:
        for i in range(0, 64, 8):

            @pl.when(group * 64 + i < num_rows)
            def _(i=i):
                where[pl.ds(group * 64 + i, 8)] = values[i : i + 8]

        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), ops.WGMMA, plgpu.Layout.WG_SPLAT))
    def store(_, where, values, group):
        i32 = ir.IntegerType.get_signless(32)
        row, start, row_bytes = _place(where, group)
        item_size = utils.bitwidth(ir.MemRefType(where.type).element_type) // 8
        registers = values.registers.reshape(-1, 2)
        words = item_size // 2  # of two elements
        vec = "v2." if words == 2 else ""
        kind = ir.VectorType.get((words,), i32)
        operands = []
        for register in registers.flat:
            pair = utils.bitcast(register, kind)
            operands += [vector.extract(pair, [], [i]) for i in range(words)]
        lines = ["{ .reg .pred p; .reg .b64 a;", "add.s64 a, $0, $1;"]
        for half in range(2):
            if num_rows % 64:  # a branch, which costs less than predicates of all stores
                lines.append(f"setp.ge.s32 p, $2, {num_rows - 8 * half}; @p bra end;")
            for i in range(len(registers)):
                first = 3 + (2 * i + half) * words
                names = ", ".join(f"${first + j}" for j in range(words))
                at = half * 8 * row_bytes + i * 8 * item_size
                lines.append(f"st.global.{vec}b32 [a+{at}], {{{names}}};")
        lines.append("end: }")
        utils.inline_ptx(
            "\n".join(lines),
            utils.memref_ptr(where),
            start,
            row,
            *operands,
            has_side_effects=True,
        )

    store(where, values, group)


def load_rows(where: Any, *, group: Any, interpret: bool) -> jax.Array:
    """Return the tile of 64 rows with index `group` of a ref `[R, n]` to device memory.

    It is 16-bit `[64, n]` in the layout of wgmma's results; rows from R on may hold anything.
    """
    num_rows, num_columns = where.shape
    if interpret:
        starts = [jnp.minimum(group * 64 + i, num_rows - 8) for i in range(0, 64, 8)]
        return jnp.concatenate([where[pl.ds(start, 8)] for start in starts])

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT),
        return_type=plgpu.ShapeDtypeStruct((64, num_columns), where.dtype, layout=ops.WGMMA),
    )
    def load(_, where, group):
        i32, element = ir.IntegerType.get_signless(32), ir.MemRefType(where.type).element_type
        row, start, row_bytes = _place(where, group)
        count = num_columns // 4
        lines = ["{ .reg .pred p; .reg .b64 a;", f"add.s64 a, ${count}, ${count + 1};"]
        for half in range(2):
            lines.append(f"setp.lt.s32 p, ${count + 2}, {num_rows - 8 * half};")
            for i in range(count // 2):
                n, at = 2 * i + half, half * 8 * row_bytes + i * 16
                lines.append(f"mov.b32 ${n}, 0; @p ld.global.b32 ${n}, [a+{at}];")
        lines.append("}")
        words = utils.inline_ptx(
            "\n".join(lines),
            utils.memref_ptr(where),
            start,
            row,
            result_types=[i32] * count,
            has_side_effects=True,
        )
        pairs = [utils.bitcast(x, ir.VectorType.get((2,), element)) for x in words]
        return ops.of_registers(pairs, ops.WGMMA, (64, num_columns))

    return load(where, group)


def _place(where: Any, group: Any) -> tuple[Any, Any, int]:
    """Return a thread's first row of a tile, the bytes to its first element, and those of a row.

    It has two columns of every 8, of rows `row` and `row + 8`, as do the three beside it.
    """
    i32, i64 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
    kind = ir.MemRefType(where.type)
    item_size = utils.bitwidth(kind.element_type) // 8
    row_bytes = kind.get_strides_and_offset()[0][0] * item_size
    thread = arith.remui(utils.thread_idx(), utils.c(128, i32))
    warp, lane = (f(thread, utils.c(32, i32)) for f in (arith.divui, arith.remui))
    row = arith.addi(arith.muli(warp, utils.c(16, i32)), arith.divui(lane, utils.c(4, i32)))
    row = arith.addi(row, arith.muli(group.registers.item(), utils.c(64, i32)))
    column = arith.muli(arith.remui(lane, utils.c(4, i32)), utils.c(2 * item_size, i32))
    start = arith.addi(
        arith.muli(arith.extui(i64, row), utils.c(row_bytes, i64)), arith.extui(i64, column)
    )
    return row, start, row_bytes


def sum_squares(squares: Any, sums: Any, *, at_once: int) -> Iterator[None]:
    """Add up the sums of all programs into 4 for each of 64 rows, in shared memory.

    This is a generator: whenever it yields, loads of `at_once` rows of `squares` are in flight.
    These are f32 `[n, SUMS]` in device memory, 64 of each program, and `sums` f32 `[SUMS]` in
    shared memory.
    """
    layout = plgpu.Layout.TILED(
        plgpu.Tiling(((1, SUMS), (SUMS // 4,), (2,))),
        warp_dims=(-3,),
        lane_dims=(-2,),
        vector_dim=-1,
    )
    total = ops.full((SUMS,), 0.0, layout.reduce(0))
    for first in range(0, squares.shape[0], at_once):
        rows = pl.ds(first, min(at_once, squares.shape[0] - first))
        loaded = ops.load(squares.at[rows], layout)  # one array: each costs time to compile
        yield
        total += jnp.sum(loaded, axis=0)
    sums[...] = total
    plgpu.commit_smem()


def inverse_rms(sums: Any, *, size: int, eps: float) -> jax.Array:
    """Return the inverse root mean squares f32`[64]` of 64 rows, one value per row of wgmma.

    The `sums` are those of `sum_squares`, of rows of `size` elements.
    """
    totals = [
        ops.load_shared(sums.at[pl.ds(i, GROUP_ROWS)], ops.WGMMA_ROW)
        for i in range(0, SUMS, GROUP_ROWS)
    ]
    return lax.rsqrt(functools.reduce(operator.add, totals) / size + eps)
