"""Random weights of what a decoder does between two attentions."""

import jax.numpy as jnp
import numpy as np


def shapes_of(attended: int, size: int, hidden: int, out: int) -> dict[str, tuple[int, ...]]:
    shapes = {
        "o": (size, attended),
        "gate_up": (hidden, 2, size),
        "down": (size, hidden),
        "qkv": (out, size),
        "mlp_norm": (size,),
        "out_norm": (size,),
    }
    return {name: shape for name, shape in shapes.items() if out or name != "qkv"}


def draw(seed: int, *shape: int, scale: float | None = None, dtype=jnp.bfloat16) -> np.ndarray:
    """Normal numbers; by default the rows of a matrix have about the norm 1."""
    if scale is None:
        scale = shape[-1] ** -0.5 if len(shape) > 1 and shape[0] > 1 else 1.0
    x = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return (x * np.float32(scale)).astype(jnp.dtype(dtype))
