"""The RMS norm over the last axis."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from pallas_paged.attention.partition import explicit_mesh
from pallas_paged.kernels.device import Device
from pallas_paged.kernels.triton.family import TRITON


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Return x over the root of its mean square along the last axis, times `weight`, in f32.

    One row on a GPU takes a kernel of its own, as a whole on each device of a mesh.

    Args:
        x: floating `[..., E]`; so is the result.
        weight: floating `[E]`.
        eps: added to the mean square.
    """
    # XLA makes one kernel of the norm of several rows, but two of that of one row: 16 us of a
    # decode step of Llama 3.2 1B on an H200, which has 33 norms.
    if math.prod(x.shape[:-1]) != 1 or explicit_mesh([x, weight]) is not None:
        return _steps(x, weight, eps)
    reason = TRITON.why_not_device(Device.here()) or TRITON.why_not_jax()
    return _kernel(eps, x, weight) if reason is None else _steps(x, weight, eps)


def _steps(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    x32 = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * scale * weight.astype(jnp.float32)).astype(x.dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _kernel(eps: float, x: jax.Array, weight: jax.Array) -> jax.Array:
    from pallas_paged.decoder.kernels import rms_norm as kernel

    rows = x.reshape(-1, x.shape[-1])
    return kernel.rms_norm(rows, weight, eps=eps, interpret=False).reshape(x.shape)


@_kernel.defjvp
def _kernel_jvp(
    eps: float, primals: tuple[jax.Array, ...], tangents: tuple[jax.Array, ...]
) -> tuple[jax.Array, jax.Array]:
    return jax.jvp(functools.partial(_steps, eps=eps), primals, tangents)
