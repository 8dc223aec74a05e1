"""From q.k to the logits of a softmax: scale, soft cap, ALiBi and the mask of visible keys."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogitOptions:
    """Static options of the logits; kernels contain no code for an option that is off."""

    sm_scale: float  # factor of q.k
    soft_cap: float | None = None  # c of `c * tanh(x / c)`, or None
    sliding_window: int | None = None  # keys that a query sees, itself included, or None for all
    # Whether a query sees no later key. Without it ALiBi falls off on both sides.
    causal: bool = True

    def first_key(self, positions: jax.Array) -> jax.Array:
        """Return the first key that a query at each of `positions` sees."""
        if self.sliding_window is None:
            return jnp.zeros_like(positions)
        before = self.sliding_window - 1  # subtracted last, so that nothing wraps around
        return jnp.maximum(positions, before) - before

    def only_factor(self, slopes: Any) -> float | None:
        """Return the factor that makes base-2 logits of q.k, or None where there is more to do.

        Kernels with scales of keys take both in one product: then no product is fused with the
        subtraction of the maximum, whose rounding error overflows `exp2` with huge queries.
        """
        return self.sm_scale * LOG2_E if self.soft_cap is None and slopes is None else None


def visible(
    keys: jax.Array,  # i32[...], positions of keys
    positions: Any,  # i32, positions of queries, used by a sliding window only
    options: LogitOptions,
    *,
    end: Any = None,
    last: Any = None,
    tree: Callable[[], jax.Array] | None = None,
    bcast: Callable[[Any], Any] = lambda x: x,
) -> jax.Array:
    """Return which keys each query sees: the one mask of all kernels.

    Args:
        end: i32, tokens of the sequence: no query sees a key from there on. None where `last` is
            less, or the caller masks those keys.
        last: i32, the last key that each query sees, which is its position if it is causal; None
            where queries see later keys too, or the tree mask decides.
        tree: loads the tree mask as bool, like `keys`; it lets through all keys older than the
            tree.
        bcast: broadcasts values of queries to the shape of `keys`, where NumPy's rules do not.
    """
    masks = []
    if end is not None:
        masks.append(keys < end)
    if last is not None:
        masks.append(keys <= bcast(last))
    if tree is not None:
        masks.append(tree())
    if options.sliding_window is not None:
        masks.append(keys >= bcast(options.first_key(positions)))
    return functools.reduce(operator.and_, masks) if masks else jnp.full(keys.shape, True)


def natural_logits(
    s: jax.Array,  # f32[...] q.k
    options: LogitOptions,
    slopes: jax.Array | None,  # f32, broadcasts against s
    distances: jax.Array,  # i32 key position - query position, broadcasts against s
) -> jax.Array:
    """Return logits before masks: `soft_cap(s * sm_scale) + slopes * distances`.

    If not causal, it uses `-abs(distances)`.
    """
    s = s * options.sm_scale
    if options.soft_cap is not None:
        s = options.soft_cap * jnp.tanh(s / options.soft_cap)
    return s if slopes is None else s + slopes * signed_distances(distances, options)


def base2_logits(
    s: jax.Array,
    options: LogitOptions,
    slopes: jax.Array | None,
    distances: jax.Array,
    row_scales: jax.Array | None = None,
) -> tuple[jax.Array, Any]:
    """Return `(x, factor)` with factor > 0, where `x * factor` are the logits of `exp2`.

    Where logits are only scaled, the factor is left to the caller, who needs it once a row for the
    maximum. With positive `row_scales` f32`[R]`, further factors of s `[R, K]`, it is f32`[R]`.
    """
    scale, cap = options.sm_scale, options.soft_cap
    if cap is None and slopes is None and scale > 0:
        if row_scales is None:
            return s, scale * LOG2_E
        # Must not be 0 or flush to 0: 0 * -inf (a masked logit) is NaN.
        return s, jnp.maximum(scale * LOG2_E * row_scales, jnp.finfo(jnp.float32).tiny)
    if row_scales is not None:
        s = s * row_scales[:, None]
    if cap is None:
        x, factor = s * (scale * LOG2_E), 1.0
    else:
        # tanh(y) / 2 = 1 / 2 - 1 / (exp(2y) + 1), and 1 / z = rsqrt(z * z) where z is positive: few
        # instructions, while that of tanh has only 11 bits.
        e = jnp.exp2(s * (2 * LOG2_E * scale / cap))
        x, factor = 0.5 - lax.rsqrt(e * (e + 2.0) + 1.0), 2 * LOG2_E * cap
        if cap > 100:  # cancellation near 0 would show: use the power series there
            y = s * (scale / cap)
            y2 = y * y
            series = y * (0.5 + y2 * (-1 / 6 + y2 * (1 / 15 + y2 * (-17 / 630))))
            x = jnp.where(y2 < 0.04, series, x)
    if slopes is not None:
        x, factor = x * factor + slopes * LOG2_E * signed_distances(distances, options), 1.0
    return x, factor


def signed_distances(distances: jax.Array, options: LogitOptions) -> jax.Array:
    """Return f32 distances as ALiBi takes them: later keys are as far as older ones."""
    return (distances if options.causal else -jnp.abs(distances)).astype(jnp.float32)


def dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return the product in the input dtype with f32 accumulation; f32 does not become TF32."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot(a, b, precision=precision, preferred_element_type=jnp.float32)


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
