"""The RMS norm over the last axis, in plain JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

__all__ = ["rms_norm"]


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Return x over the root of its mean square along the last axis, times `weight`, in f32.

    Args:
        x: floating `[..., E]`; so is the result.
        weight: floating `[E]`.
        eps: added to the mean square.
    """
    x32 = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * scale * weight.astype(jnp.float32)).astype(x.dtype)
