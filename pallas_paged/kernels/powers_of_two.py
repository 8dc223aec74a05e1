"""Powers of two of f32, by their bits. The kernels of all families take exponents out of scales."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def exponents_of(x: jax.Array) -> jax.Array:
    """Return the exponents, i32, of x >= 0."""
    return (lax.bitcast_convert_type(x, jnp.int32) >> 23) - 127


def power_of_2(exponents: jax.Array) -> jax.Array:
    """Return 2 ** exponents, f32, of i32 in [-126, 127]."""
    return lax.bitcast_convert_type((exponents + 127) << 23, jnp.float32)


def split_scales(scales: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return f32 `(exponents, significands, 2 ** -exponents)` of scales.

    `scales = significands * 2 ** exponents`. Significands are in [1, 2), except for scales below
    2 ** -64, whose exponent is -64, and for those of 2 ** 127 and more, infinite or NaN, whose
    exponent is 0.
    """
    exponents = jnp.maximum(exponents_of(jnp.abs(scales)), -64)
    exponents = jnp.where(exponents < 127, exponents, 0)
    inverses = power_of_2(-exponents)
    return exponents.astype(jnp.float32), scales * inverses, inverses
