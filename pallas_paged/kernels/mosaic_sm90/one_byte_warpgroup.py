"""Warpgroup reductions and stores through shared memory, for decoding int8 and fp8 K/V."""

from __future__ import annotations

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_paged.kernels.mosaic import ops
from pallas_paged.kernels.mosaic_sm90.one_byte import swizzle_bytes, swizzled


def reduce_columns(
    x: jax.Array, scratch: Any, *, how: Literal["max", "sum"], interpret: bool
) -> jax.Array:
    """Return the maximum or the sum of each column of f32`[M, N]`, without Mosaic's own scratch.

    That is one buffer for all warpgroups, and two that reduce at the same time get wrong numbers.

    Args:
        scratch: f32`[4, N]` in shared memory, of this warpgroup.
    """
    if interpret:
        return x.max(axis=0) if how == "max" else x.sum(axis=0)
    num_columns = x.shape[1]
    out = plgpu.ShapeDtypeStruct((num_columns,), jnp.float32, layout=ops.WGMMA_COL)

    @plgpu.inline_mgpu(arg_types=(ops.WGMMA, plgpu.RefType()), return_type=out)
    def reduced(_, x, scratch):
        from jax.experimental.mosaic.gpu import utils
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import arith, vector

        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        combine = arith.maximumf if how == "max" else arith.addf

        def c(x):
            return arith.constant(i32, x)

        thread = arith.remui(utils.thread_idx(), c(128))
        warp, lane = arith.divui(thread, c(32)), arith.remui(thread, c(32))
        at = arith.muli(arith.remui(lane, c(4)), c(8))  # of two columns
        own = arith.addi(at, arith.muli(warp, c(4 * num_columns)))
        first = arith.cmpi(arith.CmpIPredicate.ult, lane, c(4))
        registers = x.registers.reshape(-1, num_columns // 8, 2)
        for n in range(num_columns // 8):
            found = functools.reduce(combine, registers[:, n].flat)
            for distance in (4, 8, 16):
                found = combine(found, utils.shfl_bfly(found, distance))
            utils.inline_ptx(
                f"{{ .reg .pred p; .reg .b32 at; setp.ne.b32 p, $4, 0; add.u32 at, $0, $1;"
                f" @p st.shared.v2.f32 [at + {32 * n}], {{$2, $3}}; }}",
                utils.memref_ptr(scratch),
                own,
                *(_element(found, i) for i in range(2)),
                arith.extui(i32, first),
                has_side_effects=True,
            )
        utils.warpgroup_barrier()
        results = []
        for n in range(num_columns // 8):
            loaded = [
                utils.inline_ptx(
                    f"{{ .reg .b32 at; add.u32 at, $2, $3;"
                    f" ld.shared.v2.f32 {{$0, $1}}, [at + {4 * num_columns * i + 32 * n}]; }}",
                    utils.memref_ptr(scratch),
                    at,
                    result_types=(f32, f32),
                    has_side_effects=True,
                )
                for i in range(4)
            ]
            both = [functools.reduce(combine, column) for column in zip(*loaded, strict=True)]
            one = ir.VectorType.get((1,), f32)
            results.append(utils.vector_concat([vector.broadcast(one, x) for x in both]))
        if how == "sum":  # the next reduction may follow at once
            utils.warpgroup_barrier()
        layout = ops.WGMMA_COL.to_mgpu()
        results = np.array(results, dtype=object).reshape(layout.registers_shape((num_columns,)))
        return mgpu.FragmentedArray(_registers=results, _layout=layout, _is_signed=None)

    return reduced(x, scratch)


def zero_other_rows(ref: Any, lo: jax.Array, hi: jax.Array, *, interpret: bool) -> None:
    """Zero the rows of bytes `[T, D]` in shared memory outside `[lo, hi)`."""
    num_tokens, head_dim = ref.shape
    if interpret:
        row = ops.iota(ref.shape, 0, ops.WGMMA)
        ref[...] = jnp.where((row >= lo) & (row < hi), ref[...], 0)
        return
    size, scalar = swizzle_bytes(head_dim), plgpu.Layout.WG_SPLAT

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(swizzled(head_dim)), scalar, scalar))
    def zero(_, ref, lo, hi):
        from jax.experimental.mosaic.gpu import utils
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import arith

        i32 = ir.IntegerType.get_signless(32)

        def c(x):
            return arith.constant(i32, x)

        # A row has pieces of `size` bytes, in tiles of 8 rows. The swizzle keeps to the piece.
        thread = arith.remui(utils.thread_idx(), c(128))
        stores = " ".join(
            f"@p st.shared.v4.b32 [at + {tile * 8 * size + i}], {{z, z, z, z}};"
            for tile in range(head_dim // size)
            for i in range(0, size, 16)
        )
        for first in range(0, num_tokens, 128):
            row = arith.addi(thread, c(first))
            tile = arith.muli(arith.divui(row, c(8)), c(8 * head_dim))
            at = arith.addi(tile, arith.muli(arith.remui(row, c(8)), c(size)))
            utils.inline_ptx(
                "{ .reg .pred p; .reg .b32 at, z; mov.b32 z, 0; add.u32 at, $0, $1;"
                " setp.lt.s32 p, $2, $3; setp.ge.or.s32 p, $2, $4, p;"
                f" setp.lt.and.s32 p, $2, {num_tokens}, p; {stores} }}",
                utils.memref_ptr(ref),
                at,
                row,
                lo.registers.item(),
                hi.registers.item(),
                has_side_effects=True,
            )

    zero(ref, lo, hi)


def _element(x: Any, i: int) -> Any:
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import vector

    position = ir.DenseI64ArrayAttr.get([i])
    return vector.extract(x, dynamic_position=[], static_position=position)
