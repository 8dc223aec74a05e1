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
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_paged.kernels.mosaic import ops
from pallas_paged.kernels.mosaic.indexed import scatter
from pallas_paged.kernels.mosaic_sm90.config import LINEAR_TILE as TILE

EMPTY = 0  # not yet published: `published` makes -0 of it


def tile_indices(start: Any, count: Any) -> jax.Array:
    """Return i32`[64]`, the places of a tile's values from `start` on, -1 behind `count`."""
    row = ops.iota((TILE,), 0, ops.WGMMA_ROW)
    return jnp.where(row < count, start + row, -1)


def published(values: jax.Array) -> jax.Array:
    """Return f32 values as they are published: no bits of them are `EMPTY`."""
    return jnp.where(values == 0, -0.0, values)


def publish(
    mailbox: Any, start: Any, values: jax.Array, count: Any = TILE, *, interpret: bool
) -> None:
    """Publish sums of wgmma, f32`[64]` with one value per row, or the first `count` of them.

    Other programs of the kernel read them with `wait_for_mail`, in a mailbox i32`[W]` in device
    memory.
    """
    values = published(values)
    if interpret:
        values = lax.bitcast_convert_type(values, jnp.int32)
    indices = tile_indices(start, count)
    scatter(mailbox, indices, values, ops.WGMMA_ROW, strong=True, interpret=interpret)


def wait_for_mail(
    mailbox: Any, starts: Sequence[Any], layout: Any, size: int, *, interpret: bool
) -> list[jax.Array]:
    """Wait until a mailbox has these elements; return f32`[size]`, `WG_STRIDED`, from each start.

    All are loaded again until none is empty: this needs no flag beside the data, and no order among
    memory operations but that of each element.
    """
    wheres = [mailbox.at[pl.ds(start, size)] for start in starts]
    if interpret:
        return [lax.bitcast_convert_type(where[...], jnp.float32) for where in wheres]
    result = plgpu.ShapeDtypeStruct((size,), jnp.float32, layout=layout)

    @plgpu.inline_mgpu(
        arg_types=([plgpu.RefType()] * len(wheres),), return_type=[result] * len(wheres)
    )
    def load(_, wheres):
        i64 = ir.IntegerType.get_signless(64)
        bases = [llvm.ptrtoint(i64, utils.memref_ptr(where)) for where in wheres]
        return poll(bases, layout, size, scope="gpu")

    return load(wheres)


def poll(starts: Sequence[Any], layout: Any, size: int, *, scope: str) -> list[Any]:
    """Load f32`[size]` from each address on until none is empty, inside of `plgpu.inline_mgpu`."""
    vec_size = layout.to_mgpu().vec_size
    i32, i64, f32 = (
        ir.IntegerType.get_signless(32),
        ir.IntegerType.get_signless(64),
        ir.F32Type.get(),
    )
    thread = arith.remui(utils.thread_idx(), utils.c(128, i32))
    offset = arith.extui(i64, arith.muli(thread, utils.c(4 * vec_size, i32)))
    bases = [arith.addi(start, offset) for start in starts]
    per_array = size // 128
    count = per_array * len(starts)
    lines = ["{ .reg .pred p; again:"]
    for n in range(0, count, vec_size):
        base, at = count + n // per_array, n % per_array * 128 * 4
        names = ", ".join(f"${n + i}" for i in range(vec_size))
        to = f"b32 ${n}" if vec_size == 1 else f"v{vec_size}.b32 {{{names}}}"
        lines.append(f"ld.relaxed.{scope}.global.{to}, [${base}+{at}];")
    lines.append(f"setp.eq.b32 p, $0, {EMPTY};")
    lines += [f"setp.eq.or.b32 p, ${n}, {EMPTY}, p;" for n in range(1, count)]
    lines.append("@p bra again; }")
    out: Any = llvm.inline_asm(
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
    each = len(vectors) // len(starts)
    return [
        ops.of_registers(vectors[i : i + each], layout, (size,))
        for i in range(0, len(vectors), each)
    ]
