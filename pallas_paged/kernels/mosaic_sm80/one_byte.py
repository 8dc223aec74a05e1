"""Int8 and fp8 K/V: two elements in a 16-bit word, which become two f16 operands.

Neighbours along head_dim make a word, since ldmatrix moves 16-bit elements, V's transposed too. A
block of words is two matrices, one of the even and one of the odd elements, and so are q and the
output. f16 holds every int8 and every float8_e4m3fn exactly. The scales multiply logits and
probabilities, which are fewer than the elements of K and V.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import vector

from pallas_paged.kernels.logits import exponents_of, power_of_2
from pallas_paged.kernels.mosaic import ops
from pallas_paged.kernels.mosaic_sm80.emitter import elements_of
from pallas_paged.kernels.mosaic_sm80.ops import MmaLayouts


def load_queries(
    parts: list[tuple[Any, list[Any]]], dtype: Any, layouts: MmaLayouts, *, interpret: bool
) -> jax.Array:
    """Store the even and the odd elements of q as f16; return f32`[R]`, the factors of all.

    The largest element of a row is in [1, 2), since f16 has a smaller range than bf16. Threads need
    a barrier before they load what is stored.

    Args:
        parts: of the columns. Of each, q in shared memory as pairs of elements of `dtype`,
            i32`[R, W]`, not swizzled, and the two refs f16`[R, W]` to shared memory.
    """

    def halves_of(words):
        loaded = ops.load(words, layouts.lhs)
        found = _halves(loaded, dtype, layouts, interpret=interpret)
        return [x.astype(jnp.float32) for x in found]

    largest: Any = None
    only = None
    for words, _ in parts:
        halves = halves_of(words)
        largest_here = jnp.maximum(*map(jnp.abs, halves)).max(axis=1)
        largest = largest_here if largest is None else jnp.maximum(largest, largest_here)
        # Several parts are loaded again: all of them would take too many registers.
        only = halves if len(parts) == 1 else None
    exponents = jnp.minimum(jnp.maximum(exponents_of(largest), -126), 126)
    inverses = power_of_2(-exponents)
    for words, to in parts:
        for ref, half in zip(to, only or halves_of(words), strict=True):
            ref[...] = (half * lax.broadcast_in_dim(inverses, half.shape, (0,))).astype(jnp.float16)
    return plgpu.layout_cast(power_of_2(exponents), layouts.row)


def _halves(
    words: jax.Array, dtype: Any, layouts: MmaLayouts, *, interpret: bool
) -> list[jax.Array]:
    """Return the lower and the upper 16 bits of words i32 as elements of `dtype`."""
    if interpret:
        halves = words.astype(jnp.int16), (words >> 16).astype(jnp.int16)
        return [lax.bitcast_convert_type(half, dtype) for half in halves]
    result = plgpu.ShapeDtypeStruct(words.shape, dtype, layout=layouts.lhs)

    @plgpu.inline_mgpu(arg_types=(layouts.lhs,), return_type=(result, result))
    def split(_, words):
        i32 = ir.IntegerType.get_signless(32)
        pair = ir.VectorType.get((2,), utils.dtype_to_ir_type(dtype))
        results = []
        for selector in ("0x5410", "0x7632"):
            out = np.empty_like(words.registers)
            for i, register in np.ndenumerate(words.registers):
                ptx, both = f"prmt.b32 $0, $1, $2, {selector};", elements_of(register)
                out[i] = utils.bitcast(utils.inline_ptx(ptx, *both, result_types=i32), pair)
            results.append(ops.of_registers(out, words.layout))
        return tuple(results)

    return list(split(words))


def to_f16(words: jax.Array, kv_dtype: Any, layout: Any, *, interpret: bool) -> list[jax.Array]:
    """Return the even and the odd elements, f16, of words i16 in registers of `layout`."""
    if interpret:
        return _to_f16_now(words, kv_dtype)
    half = plgpu.ShapeDtypeStruct(words.shape, jnp.float16, layout=layout)

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=(half, half))
    def convert(_, words):
        i32 = ir.IntegerType.get_signless(32)
        pair = ir.VectorType.get((2,), ir.F16Type.get())
        arch = utils.get_arch()
        native = (arch.major, arch.minor) >= (8, 9)
        code = _PTX["int8" if kv_dtype == jnp.int8 else "fp8" if native else "fp8 by bits"]
        results = []
        for half in ("even", "odd"):
            out = np.empty_like(words.registers)
            for i, register in np.ndenumerate(words.registers):
                ptx = f"{{ .reg .b32 w, b, m; .reg .b16 x, y; {code[half]} }}"
                word = utils.bitcast(register, i32)
                out[i] = utils.bitcast(utils.inline_ptx(ptx, word, result_types=i32), pair)
            results.append(ops.of_registers(out, words.layout))
        return tuple(results)

    return list(convert(words))


def interleave(
    even: jax.Array, odd: jax.Array, layouts: MmaLayouts, *, interpret: bool
) -> tuple[jax.Array, Any]:
    """Return f32`[R, 2 W]` of the even and the odd columns of accumulators, and its layout."""
    rows, columns = even.shape
    shape = rows, 2 * columns
    layout = _interleaved(layouts.m_warps)
    if interpret:
        return jnp.stack([even, odd], axis=-1).reshape(shape), layout

    @plgpu.inline_mgpu(
        arg_types=(layouts.acc, layouts.acc),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=layout),
    )
    def zip_columns(_, even, odd):
        of_both = layout.to_mgpu()
        out = np.empty(of_both.registers_shape(shape), dtype=object)
        for i, pair in enumerate(zip(even.registers.flat, odd.registers.flat, strict=True)):
            out.flat[i] = vector.shuffle(*pair, [0, 2, 1, 3])
        return ops.of_registers(out, of_both)

    return zip_columns(even, odd), layout


def _interleaved(m_warps: int) -> Any:
    """Return the layout of accumulators with twice the columns: four of a thread, not two."""
    layout = fa.TiledLayout(
        fa.Tiling(((m_warps * 16, 64 // m_warps), (16, 16), (8, 16), (4,))),
        warp_dims=(-7, -6),
        lane_dims=(-3, -2),
        vector_dim=-1,
        _check_canonical=False,
    ).canonicalize()
    return plgpu.Layout.TILED(layout.tiling, layout.warp_dims, layout.lane_dims, layout.vector_dim)


def _to_f16_now(words: jax.Array, kv_dtype: Any) -> list[jax.Array]:
    halves = [(words << 8) >> 8, words >> 8]  # sign-extended
    if kv_dtype != jnp.int8:
        halves = [lax.bitcast_convert_type(x.astype(jnp.int8), kv_dtype) for x in halves]
    return [half.astype(jnp.float16) for half in halves]


# Two words at a time: bytes 0 and 2 are the even elements, bytes 1 and 3 the odd ones.
_INT8 = """mov.b32 b, 0x64806480; {word}
lop3.b32 w, w, 0x00ff00ff, b, 0x6a;
sub.f16x2 $0, w, b;"""  # the byte with its sign flipped makes a mantissa: 1024 + 128 + x
_FP8 = """prmt.b32 w, $1, 0, {bytes}; mov.b32 {{x, y}}, w; cvt.rn.f16x2.e4m3x2 $0, x;"""
# Sign and magnitude move to their places in f16, whose exponent has one bit more. The product with
# 2 ** 8 accounts for the other bias. NaN becomes 480.
_FP8_BITS = """{word} mov.b32 b, 0x5c005c00;
and.b32 m, w, 0x7f007f00; shr.b32 m, m, 1; and.b32 w, w, 0x80008000; or.b32 w, w, m;
mul.f16x2 $0, w, b;"""
_PTX = {
    "int8": {
        "even": _INT8.format(word="mov.b32 w, $1;"),
        "odd": _INT8.format(word="shr.b32 w, $1, 8;"),
    },
    "fp8": {"even": _FP8.format(bytes="0x3120"), "odd": _FP8.format(bytes="0x2031")},
    "fp8 by bits": {
        "even": _FP8_BITS.format(word="shl.b32 w, $1, 8;"),
        "odd": _FP8_BITS.format(word="mov.b32 w, $1;"),
    },
}
