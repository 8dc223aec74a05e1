"""K/V of one byte an element as the Triton kernels read them: two elements in a 16-bit word.

Neighbours along head_dim make a word, for two reasons. Pallas computes 32-bit offsets into arrays
of at most 2^32 bytes, which overflow past 2^31 one-byte elements, but not past 2^31 words. And the
matrix unit takes 16-bit V from shared memory in the order that it wants, bytes only one by one.

So a tile of K or V is two here, of the even and of the odd elements, and so are q and the output.
The scales multiply logits and probabilities, which are fewer than the elements of K and V.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plgpu

Widen = Callable[[jax.Array], list[jax.Array]]


def token_rows(pages: jax.Array) -> jax.Array:
    """Pages `[Hkv, P, S, D]` as `[Hkv, P * S, D]` or, of one byte, as words i16`[.., D / 2]`."""
    num_kv_heads, num_pages, page_size, head_dim = pages.shape
    if pages.dtype.itemsize == 1:  # a bitcast to XLA, so no copy
        pairs = (num_kv_heads, num_pages * page_size, head_dim // 2, 2)
        return lax.bitcast_convert_type(pages.reshape(pairs), jnp.int16)
    return pages.reshape(num_kv_heads, num_pages * page_size, head_dim)


def token_scales(scales: jax.Array | None) -> jax.Array | None:
    """Scales f32`[Hkv, P, S]` as `[Hkv, P * S]`, the one of a whole layer as `[1]`."""
    if scales is None:
        return None
    return scales.reshape(1 if scales.ndim == 0 else (scales.shape[0], -1))


def elements(words: jax.Array, num_tiles: int) -> list[jax.Array]:
    """The elements of head_dim that each of `num_tiles` tiles holds for `words`."""
    return [words] if num_tiles == 1 else [2 * words, 2 * words + 1]


def widening(kv_dtype: jnp.dtype, dtype: jnp.dtype, *, interpret: bool) -> Widen:
    """Returns what makes tiles of `dtype` of what was loaded: itself, or even and odd elements.

    All int8 and all float8_e4m3fn are exact in bf16, f16 and f32.
    """
    if kv_dtype.itemsize > 1:
        return lambda loaded: [loaded]
    convert = _CONVERSIONS.get((kv_dtype.name, dtype.name))
    if convert is None or interpret:
        return functools.partial(_widen, kv_dtype, dtype)
    return functools.partial(_widen_pairs, convert, dtype)


def _widen(kv_dtype: jnp.dtype, dtype: jnp.dtype, words: jax.Array) -> list[jax.Array]:
    low, high = (words << 8) >> 8, words >> 8  # with their sign
    if kv_dtype == jnp.int8:
        return [x.astype(dtype) for x in (low, high)]
    return [
        lax.bitcast_convert_type(x.astype(jnp.int8), kv_dtype).astype(dtype) for x in (low, high)
    ]


def _widen_pairs(convert: str, dtype: jnp.dtype, words: jax.Array) -> list[jax.Array]:
    def half(shift: int, places: str) -> jax.Array:
        [tile] = plgpu.elementwise_inline_asm(
            _ASM.format(convert=convert.format(shift=shift, places=places)),
            args=[words],
            constraints="=r,r",
            pack=2,
            result_shape_dtypes=[jax.ShapeDtypeStruct(words.shape, dtype)],
        )
        return tile

    return [half(0, "0x4420"), half(8, "0x4431")]


# What Triton makes of `_widen` takes 3 to 4 instructions an element, so that decoding would not be
# bound by memory. These take two words at a time, and make two elements of their bytes 0 and 2 or,
# shifted, 1 and 3.
_ASM = """{{
.reg .b32 w, a, b, c;
.reg .b16 h, l;
.reg .f32 x, y;
{convert}
mov.b32 $0, a;
}}"""
_CONVERSIONS = {
    # 7 bits make a mantissa, 128 + bits; the sign makes 256 of 128. The difference is x.
    ("int8", "bfloat16"): """shr.b32 w, $1, {shift};
lop3.b32 a, w, 0x007f007f, 0x43004300, 0xea;
lop3.b32 b, w, 0x00800080, 0x43004300, 0xea;
mov.b32 c, 0xbf80bf80;
fma.rn.bf16x2 a, b, c, a;""",
    # The byte with its sign flipped makes a mantissa: 1024 + 128 + x.
    ("int8", "float16"): """shr.b32 w, $1, {shift};
lop3.b32 a, w, 0x00ff00ff, 0x64806480, 0x6a;
mov.b32 b, 0x64806480;
sub.f16x2 a, a, b;""",
    ("float8_e4m3fn", "float16"): """prmt.b32 b, $1, 0, {places};
mov.b32 {{l, h}}, b;
cvt.rn.f16x2.e4m3x2 a, l;""",
    ("float8_e4m3fn", "bfloat16"): """prmt.b32 b, $1, 0, {places};
mov.b32 {{l, h}}, b;
cvt.rn.f16x2.e4m3x2 a, l;
mov.b32 {{l, h}}, a;
cvt.f32.f16 x, l;
cvt.f32.f16 y, h;
cvt.rn.bf16x2.f32 a, y, x;""",
}
