"""Loads and stores at indices of a ref to device memory, one for each element of an array."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_paged.kernels.mosaic import ops


def gather(ref: Any, indices: jax.Array, layout: Any, *, interpret: bool) -> jax.Array:
    """Return the elements, of 2 or 4 bytes, of a ref to device memory at indices i32`[n]`, flat."""
    if interpret:
        return ref[...].reshape(-1)[indices]
    itemsize = jnp.dtype(ref.dtype).itemsize

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), layout),
        return_type=plgpu.ShapeDtypeStruct(indices.shape, ref.dtype, layout=layout),
    )
    def load_each(_, ref, indices):
        element = utils.ir.MemRefType(ref.type).element_type
        i32 = utils.ir.IntegerType.get_signless(32)
        integer = utils.ir.IntegerType.get_signless(8 * itemsize)
        loaded = np.empty_like(indices.registers)
        for place, register in np.ndenumerate(indices.registers):
            bits = utils.inline_ptx(
                f"{{ .reg .b64 a; mad.wide.s32 a, $1, {itemsize}, $2;"
                f" ld.global.nc.b{8 * itemsize} $0, [a]; }}",
                utils.bitcast(register, i32),
                utils.memref_ptr(ref),
                result_types=integer,
            )
            loaded[place] = utils.bitcast(bits, utils.ir.VectorType.get((1,), element))
        is_signed = indices.is_signed if element == i32 else None
        return ops.of_registers(loaded, indices.layout, is_signed=is_signed)

    return load_each(ref, indices)


def scatter(
    ref: Any,
    indices: jax.Array,
    values: jax.Array,
    layout: Any,
    *,
    strong: bool = False,
    interpret: bool,
) -> None:
    """Store values `[n]` to a ref to device memory at indices i32`[n]`, flat; not at negative ones.

    The ref has one or two axes, of elements of 2 or 4 bytes. With `strong`, other programs load
    them before the kernel ends.
    """
    if interpret:

        @pl.loop(0, indices.shape[0])
        def _(i):
            index = indices[i]

            @pl.when(index >= 0)
            def _():
                *row, columns = ref.shape
                ref[*([index // columns] if row else []), index % columns] = values[i]

        return
    itemsize = jnp.dtype(ref.dtype).itemsize
    instruction = f"st{'.relaxed.gpu' if strong else ''}.global.b{8 * itemsize}"

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout, layout))
    def store_each(_, ref, indices, values):
        i32 = utils.ir.IntegerType.get_signless(32)
        integer = utils.ir.IntegerType.get_signless(8 * itemsize)
        for index, value in zip(indices.registers.flat, values.registers.flat, strict=True):
            utils.inline_ptx(
                "{ .reg .pred p; .reg .b64 a; setp.ge.s32 p, $1, 0;"
                f" mad.wide.s32 a, $1, {itemsize}, $0; @p {instruction} [a], $2; }}",
                utils.memref_ptr(ref),
                utils.bitcast(index, i32),
                utils.bitcast(value, integer),
                has_side_effects=True,
            )

    store_each(ref, indices, values)
