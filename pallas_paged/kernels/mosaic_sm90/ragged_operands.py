"""One-byte K/V in registers as 16-bit operands of the ragged kernel, by PTX.

A thread loads four bytes of a row at a time (the layout `BYTES`). As 16-bit numbers these are two
registers, which one instruction stores to shared memory together with other threads' registers, if
they count as neighbours in two 8-column tiles of `ops.WGMMA`. So of 16 columns, the stored order is

    0 1   4 5   8 9   12 13   2 3   6 7   10 11   14 15

K, V and the queries all have it (`store_permuted`), and the results get their own order back
in registers (`unpermute_columns`). Neither moves a value from a thread to another. Interpreted
kernels keep the order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_paged.kernels.mosaic import ops

BYTES = plgpu.Layout.WGMMA_8BIT
BYTES_ROW = BYTES.reduce(1)


def store_permuted(ref: Any, *, interpret: bool) -> None:
    """Bring the columns of a ref to 16-bit `[64, D]` in shared memory into stored order."""

    def halves(registers, utils):
        return [utils.vector_slice(r, slice(i, i + 2)) for r in registers for i in (0, 2)]

    if not interpret:
        ref[...] = _relabelled(ops.load_shared(ref, BYTES), BYTES, ops.WGMMA, halves)
        plgpu.commit_smem()


def unpermute_columns(x: jax.Array, *, interpret: bool) -> jax.Array:
    """Undo the stored column order of `[64, D]` in layout `ops.WGMMA`."""

    def joined(registers, utils):
        return [utils.vector_concat([a, b]) for a, b in registers.reshape(-1, 2)]

    return x if interpret else _relabelled(x, ops.WGMMA, BYTES, joined)


def _relabelled(x: jax.Array, source: Any, target: Any, change: Callable[..., Any]) -> jax.Array:
    """Return `x` with registers changed for rows 0 to 7 and rows 8 to 15 of each 16."""

    def relabel(_, x):
        from jax.experimental.mosaic.gpu import utils

        registers = x.registers.reshape(-1, 2)  # columns, halves of 16 rows
        layout = target.to_mgpu()
        changed = np.empty(layout.registers_shape(x.shape), dtype=object)
        flat = changed.reshape(-1, 2)  # a view
        for half in range(2):
            for i, register in enumerate(change(registers[:, half], utils)):
                flat[i, half] = register
        return ops.of_registers(changed, layout)

    result = plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=target)
    return plgpu.inline_mgpu(arg_types=(source,), return_type=result)(relabel)(x)


def converted(x: jax.Array, scales: jax.Array | None, dtype: Any, *, interpret: bool) -> jax.Array:
    """Return one-byte `x` `[64, D]` times `scales` f32`[64]` as `dtype`, rounded once.

    Every int8 and every float8_e4m3fn is a bf16 and an f16.

    Args:
        x: of layout `BYTES`.
        scales: of layout `BYTES_ROW`, or None for 1.

    Returns:
        Columns in stored order, of layout `ops.WGMMA`.
    """
    if interpret:
        x = x.astype(jnp.float32)
        return (x if scales is None else x * scales[:, None]).astype(dtype)
    source, given = x.dtype, (x,) if scales is None else (x, scales)

    def convert(_, x, *scales):
        from jax.experimental.mosaic.gpu import utils

        ir = utils.ir
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        pair_type = ir.VectorType.get((2,), utils.dtype_to_ir_type(jnp.dtype(dtype)))
        words = x.registers.reshape(-1, 2)  # 16 columns, halves of 16 rows
        result = np.empty((len(words), 2, 2), dtype=object)  # 16 columns, 8 of them, halves
        for (column, half), register in np.ndenumerate(words):
            args = [utils.bitcast(register, i32)]
            for scale in scales:
                args.append(
                    utils.bitcast(utils.bitcast(scale.registers.reshape(2)[half], i32), f32)
                )
            for pair in range(2):
                asm = pair_ptx(source, pair, dtype, scaled=bool(scales))
                bits = utils.inline_ptx(asm, *args, result_types=i32)
                result[column, pair, half] = utils.bitcast(bits, pair_type)
        return ops.of_registers(list(result.flat), ops.WGMMA, x.shape)

    return plgpu.inline_mgpu(
        arg_types=(BYTES, BYTES_ROW)[: len(given)],
        return_type=plgpu.ShapeDtypeStruct(x.shape, dtype, layout=ops.WGMMA),
    )(convert)(*given)


def _packed(dtype: Any) -> str:
    return "f16x2" if dtype == jnp.float16 else "bf16x2"


def pair_ptx(source: Any, pair: int, dtype: Any, *, scaled: bool) -> str:
    """Return PTX of a pair of `dtype`, see `_pair_of_int8`, from bytes of dtype `source`."""
    ptx = _pair_of_int8 if source == jnp.int8 else _pair_of_fp8
    return ptx(pair, dtype, scaled=scaled)


def _pair_of_int8(pair: int, dtype: Any, *, scaled: bool) -> str:
    """Return PTX that makes bytes 2 * pair and 2 * pair + 1 of $1, times $2, a pair $0 of `dtype`.

    A byte, its sign flipped, is the end of a significand: 1024 + 128 + x in f16, 2^23 + 128 + x in
    f32. bf16 has a shorter one, and takes a sum: 128 + the lower bits, and -128 or -256.
    """
    first, second = 2 * pair, 2 * pair + 1
    if scaled:
        return f"""{{ .reg .b32 t, x, y; .reg .f32 f, g; xor.b32 t, $1, 0x80808080;
prmt.b32 x, t, 0x4b000000, 0x744{first}; prmt.b32 y, t, 0x4b000000, 0x744{second};
mov.b32 f, x; mov.b32 g, y; add.rn.f32 f, f, 0fCB000080; add.rn.f32 g, g, 0fCB000080;
mul.rn.f32 f, f, $2; mul.rn.f32 g, g, $2; cvt.rn.{_packed(dtype)}.f32 $0, g, f; }}"""
    if dtype == jnp.float16:
        return f"""{{ .reg .b32 t, c; mov.b32 c, 0x64806480; xor.b32 t, $1, 0x80808080;
prmt.b32 t, t, 0x64646464, 0x4{second}4{first}; sub.rn.f16x2 $0, t, c; }}"""
    return f"""{{ .reg .b32 t, a, b; prmt.b32 t, $1, 0, 0x4{second}4{first};
lop3.b32 a, t, 0x007f007f, 0x43004300, 0xea; lop3.b32 b, t, 0x00800080, 0xc300c300, 0xea;
add.rn.bf16x2 $0, a, b; }}"""


def _pair_of_fp8(pair: int, dtype: Any, *, scaled: bool) -> str:
    """Return the same for float8_e4m3fn, which Hopper converts to f16 only."""
    convert = f"""{{ .reg .b16 h<2>, a, b; .reg .b32 t; .reg .f32 f, g; mov.b32 {{h0, h1}}, $1;
cvt.rn.f16x2.e4m3x2 t, h{pair}; """
    if not scaled and dtype == jnp.float16:
        return convert + "mov.b32 $0, t; }"
    scale = "mul.rn.f32 f, f, $2; mul.rn.f32 g, g, $2; " if scaled else ""
    return (
        f"{convert}mov.b32 {{a, b}}, t; cvt.f32.f16 f, a; cvt.f32.f16 g, b; {scale}"
        f"cvt.rn.{_packed(dtype)}.f32 $0, g, f; }}"
    )
