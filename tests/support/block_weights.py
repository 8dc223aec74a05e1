"""Random weights of what a decoder does between two attentions."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def shapes_of(attended: int, size: int, hidden: int, out: int) -> dict[str, tuple[int, ...]]:
    return {
        "o": (size, attended),
        "gate_up": (hidden, 2, size),
        "down": (size, hidden),
        "qkv": (out, size),
        "mlp_norm": (size,),
        "out_norm": (size,),
    }


def draw(seed: int, *shape: int, dtype=jnp.bfloat16) -> jax.Array:
    scale = shape[-1] ** -0.5 if len(shape) > 1 and shape[0] > 1 else 1.0
    return (jax.random.normal(jax.random.key(seed), shape) * scale).astype(dtype)
