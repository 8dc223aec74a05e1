"""K/V of one byte an element as the Triton kernels read them: two elements in a 16-bit word.

Neighbours along head_dim make a word, for two reasons. Pallas computes 32-bit offsets into arrays
of at most 2^32 bytes, which overflow past 2^31 one-byte elements, but not past 2^31 words. And the
matrix unit takes 16-bit V from shared memory in the order that it wants, bytes only one by one.

So a tile of K or V is two here, of the even and of the odd elements, and so are q and the output.
They become f16, in which all int8 and all float8_e4m3fn are exact and to which both are converted
in fewer instructions than to bf16; or f32, if that is what q is. The scales go to logits and
probabilities, which are fewer than the elements of K and V.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plgpu


def token_rows(pages: jax.Array) -> jax.Array:
    """Pages `[Hkv, P, S, D]` as `[Hkv, P * S, D]` or, of one byte, as words i16`[.., D / 2]`."""
    num_kv_heads, num_pages, page_size, head_dim = pages.shape
    if pages.dtype.itemsize == 1:  # a bitcast to XLA, so no copy
        pairs = (num_kv_heads, num_pages * page_size, head_dim // 2, 2)
        return lax.bitcast_convert_type(pages.reshape(pairs), jnp.int16)
    return pages.reshape(num_kv_heads, num_pages * page_size, head_dim)


def scale_rows(scales: jax.Array | None) -> jax.Array | None:
    """Scales f32`[Hkv, P, S]` as `[Hkv, P * S]`, the one of a whole layer as `[1]`."""
    if scales is None:
        return None
    return scales.reshape(1 if scales.ndim == 0 else (scales.shape[0], -1))


def zero(ref: Any) -> float:
    """What a masked load of words or of floats gives where it is off."""
    return 0.0 if jnp.issubdtype(ref.dtype, jnp.floating) else 0


def elements(words: jax.Array, num_tiles: int) -> list[jax.Array]:
    """The elements of head_dim that each of `num_tiles` tiles holds for `words`."""
    return [words] if num_tiles == 1 else [2 * words, 2 * words + 1]


def split_scales(scales: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """f32 `(exponents, significands, 2 ** -exponents)`: scales = significands * 2 ** exponents.

    Significands are in [1, 2) but for scales below 2 ** -64, whose exponent is -64, and those of
    2 ** 127 and more, infinite or NaN, whose exponent is 0.
    """
    exponents = jnp.maximum(_exponents(jnp.abs(scales)), -64)
    exponents = jnp.where(exponents < 127, exponents, 0)
    inverses = _power_of_2(-exponents)
    return exponents.astype(jnp.float32), scales * inverses, inverses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operands:
    """How loaded queries, keys and values become operands of the matrix unit.

    Attributes:
      dtype, kv_dtype: of the queries and of the pages.
      interpret: without PTX.
    """

    dtype: Any
    kv_dtype: Any
    interpret: bool

    @property
    def narrow(self) -> bool:
        """Whether pages are of one byte."""
        return self.kv_dtype.itemsize == 1

    @property
    def in_f16(self) -> bool:
        """Whether they are made f16."""
        return self.narrow and self.dtype != jnp.float32

    def split(self, q: jax.Array) -> list[jax.Array]:
        """q `[.., D]`, or its even and its odd elements."""
        return [q[..., 0::2], q[..., 1::2]] if self.narrow else [q]

    def pack(self, q: jax.Array) -> list[jax.Array]:
        """What a kernel loads to have what `split` has: 16-bit pairs as words i32`[.., D / 2]`."""
        if not self.narrow or q.dtype.itemsize != 2:
            return self.split(q)
        pairs = q.reshape(*q.shape[:-1], -1, 2)
        return [lax.bitcast_convert_type(pairs, jnp.int32)]

    def of_queries(self, loaded: list[jax.Array]) -> tuple[list[jax.Array], jax.Array | None]:
        """Tiles `[.., W]` of q and, if they had to be divided by them, powers of two f32`[..]`.

        Args:
          loaded: what `pack` or `split` made.
        """
        tiles = loaded
        if loaded[0].dtype == jnp.int32:
            halves = loaded[0].astype(jnp.int16), (loaded[0] >> 16).astype(jnp.int16)
            tiles = [lax.bitcast_convert_type(half, self.dtype) for half in halves]
        if not self.narrow or tiles[0].dtype != jnp.bfloat16:
            return tiles, None
        # bf16 is of any size, f16 is not: the largest element of a row comes to [1, 2).
        tiles = [tile.astype(jnp.float32) for tile in tiles]
        largest = functools.reduce(jnp.maximum, map(jnp.abs, tiles)).max(axis=-1)
        exponents = jnp.clip(_exponents(largest), -126, 126)
        inverses = _power_of_2(-exponents)[..., None]
        return [(tile * inverses).astype(jnp.float16) for tile in tiles], _power_of_2(exponents)

    def of_pages(self, loaded: jax.Array) -> list[jax.Array]:
        """Tiles of what was loaded: itself, or its even and its odd elements."""
        if not self.narrow:
            return [loaded]
        if self.interpret or not self.in_f16:
            return self._converted(loaded)
        convert = _TO_F16[self.kv_dtype.name]
        return [_two_words(convert.format(**half), loaded) for half in _HALVES]

    def _converted(self, words: jax.Array) -> list[jax.Array]:
        dtype = jnp.float16 if self.in_f16 else jnp.float32
        halves = [(words << 8) >> 8, words >> 8]  # with their sign
        if self.kv_dtype != jnp.int8:
            bytes_ = [half.astype(jnp.int8) for half in halves]
            halves = [lax.bitcast_convert_type(x, self.kv_dtype) for x in bytes_]
        return [half.astype(dtype) for half in halves]


def _exponents(x: jax.Array) -> jax.Array:
    """i32, of x >= 0."""
    return (lax.bitcast_convert_type(x, jnp.int32) >> 23) - 127


def _power_of_2(exponents: jax.Array) -> jax.Array:
    """f32, of i32 in [-126, 127]."""
    return lax.bitcast_convert_type((exponents + 127) << 23, jnp.float32)


def _two_words(asm: str, words: jax.Array) -> jax.Array:
    [tile] = plgpu.elementwise_inline_asm(
        f"{{\n.reg .b32 w, b;\n.reg .b16 x, y;\n{asm}\n}}",
        args=[words],
        constraints="=r,r",
        pack=2,
        result_shape_dtypes=[jax.ShapeDtypeStruct(words.shape, jnp.float16)],
    )
    return tile


# What Triton makes of `_converted` takes 3 to 4 instructions an element, so that decoding would not
# be bound by memory. These take two words at a time, and of their bytes 0 and 2 or 1 and 3.
_HALVES = {"shift": 0, "pair": "x"}, {"shift": 8, "pair": "y"}
_TO_F16 = {
    # The byte with its sign flipped makes a mantissa: 1024 + 128 + x.
    "int8": """shr.b32 w, $1, {shift};
mov.b32 b, 0x64806480;
lop3.b32 w, w, 0x00ff00ff, b, 0x6a;
sub.f16x2 $0, w, b;""",
    "float8_e4m3fn": """prmt.b32 w, $1, 0, 0x3120;
mov.b32 {{x, y}}, w;
cvt.rn.f16x2.e4m3x2 $0, {pair};""",
}
