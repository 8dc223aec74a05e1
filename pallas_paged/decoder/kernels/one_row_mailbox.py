"""A mailbox in device memory, where programs of a kernel publish results for one another.

The flag is in the data: an element is `EMPTY` until its program publishes a number there, once.
Programs that need it load until they find one. That takes one trip to the L2 cache, where a barrier
of all programs takes three (the stores arrive, the count goes up, the count is seen) and the loads
one more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_paged.kernels.mosaic import ops
from pallas_paged.kernels.mosaic.indexed import scatter
from pallas_paged.kernels.mosaic_sm90.config import LINEAR_TILE as TILE

EMPTY = -1  # not yet published: as f32 a NaN that `publish` avoids


def tile_indices(start: Any, count: Any) -> jax.Array:
    """Return i32`[64]`, the places of a tile's values from `start` on, -1 behind `count`."""
    row = ops.iota((TILE,), 0, ops.WGMMA_ROW)
    return jnp.where(row < count, start + row, -1)


def publish(
    mailbox: Any, start: Any, values: jax.Array, count: Any = TILE, *, interpret: bool
) -> None:
    """Publish sums of wgmma, f32`[64]` with one value per row, or the first `count` of them.

    Other programs of the kernel read them with `wait_for_mail`, in a mailbox i32`[W]` in device
    memory.
    """
    # Arithmetic does not make the NaN that means empty, but inputs may hold it.
    values = jnp.where(values == values, values, jnp.full_like(values, jnp.nan))
    if interpret:
        values = lax.bitcast_convert_type(values, jnp.int32)
    indices = tile_indices(start, count)
    scatter(mailbox, indices, values, ops.WGMMA_ROW, strong=True, interpret=interpret)


def wait_for_mail(
    mailbox: Any, starts: Sequence[Any], layout: Any, size: int, *, interpret: bool
) -> list[jax.Array]:
    """Wait until a mailbox has these elements; return f32`[size]` from each start on.

    All are loaded again until none is empty: this needs no flag beside the data, and no order
    among memory operations but that of each element.

    Args:
        layout: layout of the results, `WG_STRIDED`.
    """
    wheres = [mailbox.at[pl.ds(start, size)] for start in starts]
    if interpret:
        return [lax.bitcast_convert_type(where[...], jnp.float32) for where in wheres]
    vec_size = layout.to_mgpu().vec_size
    result = plgpu.ShapeDtypeStruct((size,), jnp.float32, layout=layout)

    @plgpu.inline_mgpu(
        arg_types=([plgpu.RefType()] * len(wheres),), return_type=[result] * len(wheres)
    )
    def load(_, wheres):
        from jax.experimental.mosaic.gpu import utils
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import arith, llvm, vector

        i32, i64, f32 = (
            ir.IntegerType.get_signless(32),
            ir.IntegerType.get_signless(64),
            ir.F32Type.get(),
        )
        thread = arith.remui(utils.thread_idx(), utils.c(128, i32))
        offset = arith.extui(i64, arith.muli(thread, utils.c(4 * vec_size, i32)))
        bases = [
            arith.addi(llvm.ptrtoint(i64, utils.memref_ptr(where)), offset) for where in wheres
        ]
        per_array = size // 128
        count = per_array * len(wheres)
        lines = ["{ .reg .pred p; again:"]
        for n in range(0, count, vec_size):
            base, at = count + n // per_array, n % per_array * 128 * 4
            names = ", ".join(f"${n + i}" for i in range(vec_size))
            to, kind = (
                ("$" + str(n), "b32") if vec_size == 1 else (f"{{{names}}}", f"v{vec_size}.b32")
            )
            lines.append(f"ld.relaxed.gpu.global.{kind} {to}, [${base}+{at}];")
        lines.append(f"setp.eq.b32 p, $0, {EMPTY};")
        lines += [f"setp.eq.or.b32 p, ${n}, {EMPTY}, p;" for n in range(1, count)]
        lines.append("@p bra again; }")
        out = llvm.inline_asm(
            llvm.StructType.get_literal([f32] * count),
            bases,
            "\n".join(lines),
            ",".join(["=f"] * count + ["l"] * len(bases)),
            has_side_effects=True,
        )
        values = [llvm.extractvalue(f32, out, [n]) for n in range(count)]
        kind = ir.VectorType.get((vec_size,), f32)
        vectors = [
            vector.from_elements(kind, values[n : n + vec_size]) for n in range(0, count, vec_size)
        ]
        each = len(vectors) // len(wheres)
        return [
            ops.of_registers(vectors[i : i + each], layout, (size,))
            for i in range(0, len(vectors), each)
        ]

    return load(wheres)
