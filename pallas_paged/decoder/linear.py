"""The product with a weight, as the layers of a decoder need it."""

from __future__ import annotations

import functools
import math
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_paged.checks import default_promotion
from pallas_paged.kernels.device import Device
from pallas_paged.kernels.mosaic import support as mosaic_support
from pallas_paged.kernels.mosaic_sm90 import support
from pallas_paged.kernels.mosaic_sm90.config import LINEAR_BLOCK_K, LINEAR_TILE

LinearImplementation = Literal["mosaic_sm90", "mosaic_sm90_interpret", "xla"]

# (N, K, whether with SwiGLU) of products of one row that the kernel does faster than XLA. Measured
# on an H200, see docs/tuning.md; XLA was faster with more rows, and with smaller or larger weights.
_FASTER = {(128256, 2048, False), (8192, 2048, True)}


@default_promotion()
def linear(
    x: jax.Array,
    weight: jax.Array,
    *,
    preferred_element_type: DTypeLike | None = None,
    implementation: LinearImplementation | None = None,
) -> jax.Array:
    """Return `x @ weight.T`, or with SwiGLU `silu(x @ weight[:, 0].T) * (x @ weight[:, 1].T)`.

    The product of one row is one kernel on a Hopper GPU where that is faster than XLA. Gradients
    are those of XLA's product. Results differ by rounding: sums are in f32, in another order.

    Args:
        x: floating `[..., K]`.
        weight: `[N, K]`, or of gate and up `[N, 2, K]`.
        preferred_element_type: dtype of the product; None: that of x and weight.
        implementation: "mosaic_sm90", on a Hopper GPU; "mosaic_sm90_interpret", the same kernel on
            any device; "xla"; or None for the fastest.

    Returns:
        `[..., N]`.

    Raises:
        ValueError: shapes do not fit, or there is no such implementation.
        NotImplementedError: the implementation can't do this call; the message says why.
    """
    in_size = x.shape[-1]
    if weight.shape[1:] not in ((in_size,), (2, in_size)):
        raise ValueError(f"{weight.shape=} must be [N, K] or [N, 2, K], with the K of {x.shape=}")
    names = get_args(LinearImplementation)
    if implementation is not None and implementation not in names:
        raise ValueError(f"{implementation=} must be None or one of {names}")
    sizes = weight.shape[0], in_size, weight.ndim == 3
    if implementation == "xla" or (implementation is None and sizes not in _FASTER):
        return _product(preferred_element_type, x, weight)
    interpret = implementation == "mosaic_sm90_interpret"
    reason = _why_not(x, weight, interpret=interpret)
    if reason is None:
        return _kernel(preferred_element_type, interpret, x, weight)
    if implementation is None:
        return _product(preferred_element_type, x, weight)
    raise NotImplementedError(f"{implementation=} {reason}")


def _product(out_dtype: Any, x: jax.Array, weight: jax.Array) -> jax.Array:
    # A matrix: XLA would transpose, hence copy, a weight that has several output axes.
    matrix = weight.reshape(-1, weight.shape[-1])
    dims = (((x.ndim - 1,), (1,)), ((), ()))
    out = lax.dot_general(x, matrix, dims, preferred_element_type=out_dtype)
    if weight.ndim == 2:
        return out
    gate_up = out.reshape(*out.shape[:-1], -1, 2)
    return jax.nn.silu(gate_up[..., 0]) * gate_up[..., 1]


def _why_not(x: jax.Array, weight: jax.Array, *, interpret: bool) -> str | None:
    """Return why the kernel can't do a product, or None."""
    if x.dtype != weight.dtype or x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"needs bfloat16 or float16, not {x.dtype} and {weight.dtype}"
    if (num_rows := math.prod(x.shape[:-1])) != 1:
        return f"needs one row, not {num_rows}"
    if weight.shape[0] % LINEAR_TILE or weight.shape[-1] % LINEAR_BLOCK_K:
        sizes = f"{LINEAR_TILE} and {LINEAR_BLOCK_K}"
        return f"needs N and K that are multiples of {sizes}, not {weight.shape}"
    if jax.typeof(weight).sharding.mesh.size > 1:
        # XLA knows nothing of the kernel: it would gather the weight.
        return "needs a weight on one device"
    return mosaic_support.why_not_jax() or (
        None if interpret else support.why_not_device(Device.here())
    )


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _kernel(out_dtype: Any, interpret: bool, x: jax.Array, weight: jax.Array) -> jax.Array:
    from pallas_paged.decoder.kernels import linear as mosaic

    with jax.enable_x64(False):
        out = mosaic.linear(
            x.reshape(1, -1),
            weight,
            out_dtype=out_dtype or x.dtype,
            num_programs=Device.here().num_sms,
            interpret=interpret,
        )
    return out.reshape(*x.shape[:-1], -1)


@_kernel.defjvp
def _kernel_jvp(out_dtype: Any, interpret: bool, primals: Any, tangents: Any) -> Any:
    del interpret
    return jax.jvp(functools.partial(_product, out_dtype), primals, tangents)
