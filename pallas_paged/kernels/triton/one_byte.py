"""Int8 and fp8 K/V as the Triton kernels read them: two elements in a 16-bit word.

Neighbours along head_dim make a word, for two reasons. Pallas computes 32-bit offsets into arrays
of at most 2^32 bytes; they overflow past 2^31 one-byte elements, but not past 2^31 words. And the
matrix unit reads 16-bit V from shared memory transposed, which it can't do with bytes.

So a tile of K or V is two tiles here, one of the even and one of the odd elements, and so are q and
the output. They become f16, which holds every int8 and every float8_e4m3fn exactly and takes fewer
instructions to convert to than bf16; or f32, if q is f32. The scales multiply logits and
probabilities, which are fewer than the elements of K and V.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plgpu

from pallas_paged.kernels.call import Arrays
from pallas_paged.kernels.logits import exponents_of, power_of_2


def zero(ref: Any) -> float:
    """Return the value of masked loads of words or of floats where they are off."""
    return 0.0 if jnp.issubdtype(ref.dtype, jnp.floating) else 0


def elements(words: jax.Array, num_tiles: int) -> list[jax.Array]:
    """Return the elements of head_dim that each of `num_tiles` tiles holds for `words`."""
    return [words] if num_tiles == 1 else [2 * words, 2 * words + 1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operands:
    """Conversion of loaded queries, keys and values to operands of the matrix unit."""

    dtype: Any  # of the queries
    kv_dtype: Any  # of the pages
    interpret: bool  # the kernel is interpreted, without PTX

    @classmethod
    def of(cls, arrays: Arrays, *, interpret: bool) -> Self:
        """Return the conversion in a call."""
        return cls(dtype=arrays.q.dtype, kv_dtype=arrays.k_pages.dtype, interpret=interpret)

    @property
    def quantized(self) -> bool:
        """Whether pages are int8 or fp8."""
        return self.kv_dtype.itemsize == 1

    @property
    def in_f16(self) -> bool:
        """Whether operands are converted to f16."""
        return self.quantized and self.dtype != jnp.float32

    def split(self, q: jax.Array) -> list[jax.Array]:
        """Return q `[.., D]`, with quantized pages its even and its odd elements."""
        return [q[..., 0::2], q[..., 1::2]] if self.quantized else [q]

    def pack(self, q: jax.Array) -> list[jax.Array]:
        """Return q as a kernel loads it: `split`, or 16-bit pairs as words i32`[.., D / 2]`."""
        if not self.quantized or q.dtype.itemsize != 2:
            return self.split(q)
        pairs = q.reshape(*q.shape[:-1], -1, 2)
        return [lax.bitcast_convert_type(pairs, jnp.int32)]

    def of_queries(self, loaded: list[jax.Array]) -> tuple[list[jax.Array], jax.Array | None]:
        """Return tiles `[.., W]` of q, and the powers of two f32`[..]` that divide them, or None.

        Args:
            loaded: from `pack` or `split`.
        """
        tiles = loaded
        if loaded[0].dtype == jnp.int32:
            halves = loaded[0].astype(jnp.int16), (loaded[0] >> 16).astype(jnp.int16)
            tiles = [lax.bitcast_convert_type(half, self.dtype) for half in halves]
        if not self.quantized or tiles[0].dtype != jnp.bfloat16:
            return tiles, None
        # f16 has a smaller range than bf16: scale the largest element of each row to [1, 2).
        tiles = [tile.astype(jnp.float32) for tile in tiles]
        largest = functools.reduce(jnp.maximum, map(jnp.abs, tiles)).max(axis=-1)
        exponents = jnp.clip(exponents_of(largest), -126, 126)
        inverses = power_of_2(-exponents)[..., None]
        return [(tile * inverses).astype(jnp.float16) for tile in tiles], power_of_2(exponents)

    def of_pages(self, loaded: jax.Array) -> list[jax.Array]:
        """Return tiles of loaded K or V: itself, or its even and its odd elements."""
        if not self.quantized:
            return [loaded]
        if self.interpret or not self.in_f16:
            return self._converted(loaded)
        convert = _TO_F16[self.kv_dtype.name]
        return [_two_words(convert.format(**half), loaded) for half in _HALVES]

    def _converted(self, words: jax.Array) -> list[jax.Array]:
        dtype = jnp.float16 if self.in_f16 else jnp.float32
        halves = [(words << 8) >> 8, words >> 8]  # sign-extended
        if self.kv_dtype != jnp.int8:
            bytes_ = [half.astype(jnp.int8) for half in halves]
            halves = [lax.bitcast_convert_type(x, self.kv_dtype) for x in bytes_]
        return [half.astype(dtype) for half in halves]


def _two_words(asm: str, words: jax.Array) -> jax.Array:
    [tile] = plgpu.elementwise_inline_asm(
        f"{{\n.reg .b32 w, b;\n.reg .b16 x, y;\n{asm}\n}}",
        args=[words],
        constraints="=r,r",
        pack=2,
        result_shape_dtypes=[jax.ShapeDtypeStruct(words.shape, jnp.float16)],
    )
    return tile


# Triton compiles `_converted` to 3 to 4 instructions an element, and decoding would no longer be
# bound by memory. This PTX converts two words at a time, either bytes 0 and 2 or bytes 1 and 3.
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
