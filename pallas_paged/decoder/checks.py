"""Checks of the arguments of norms and rotations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from pallas_paged.checks import as_array, static_number

Rotation = tuple[ArrayLike, ArrayLike]


def checked_norms(head_dim: int, **norms: Any) -> dict[str, Any]:
    """Return the weights `[head_dim]` of the norms that are given."""
    found = {name: checked_floats(name, norm) for name, norm in norms.items() if norm is not None}
    for name, norm in found.items():
        if norm.shape != (head_dim,):
            raise ValueError(f"{name} must be [{head_dim=}], got {norm.shape}")
    return found


def checked_eps(eps: Any) -> float:
    eps = static_number("eps", eps)
    if eps < 0:
        raise ValueError(f"{eps=} must be at least 0")
    return eps


def checked_floats(name: str, value: Any) -> jax.Array:
    x = as_array(name, value)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"{name} must be floating, got {x.dtype}")
    return jnp.asarray(x)


def checked_rotation(rotation: Any, num_tokens: int, head_dim: int) -> dict[str, jax.Array]:
    """Return cos and sin as f32`[T, R / 2]`, or nothing."""
    if rotation is None:
        return {}
    of_tokens = (num_tokens,), (num_tokens, 1)
    angles = checked_angles(rotation, lambda x: x[:-1] in of_tokens, [num_tokens], head_dim)
    return {name: x.reshape(num_tokens, x.shape[-1]) for name, x in angles.items()}


def checked_angles(
    rotation: Any, fits: Callable[[tuple[int, ...]], bool], axes: list[int], head_dim: int
) -> dict[str, jax.Array]:
    """Return cos and sin, whose shapes fit and are `[*axes, R / 2]` in messages."""
    if not isinstance(rotation, tuple | list) or len(rotation) != 2:
        raise ValueError(f"rotation must be None or (cos, sin), got {type(rotation).__name__}")
    angles = {}
    for name, value in zip(("cos", "sin"), rotation, strict=True):
        x = as_array(f"rotation {name}", value)
        half = x.shape[-1] if x.ndim else 0
        if not fits(x.shape) or not 0 < 2 * half <= head_dim or x.dtype != jnp.float32:
            sizes = ", ".join(map(str, axes))
            raise ValueError(
                f"rotation {name} must be float32 [{sizes}, R / 2], with R from 2 to "
                f"{head_dim=}, got {x.dtype}{x.shape}"
            )
        angles[name] = jnp.asarray(x)
    if angles["cos"].shape[-1] != angles["sin"].shape[-1]:
        shapes = tuple(x.shape for x in angles.values())
        raise ValueError(f"rotation must be two arrays of one shape, got {shapes}")
    return angles
