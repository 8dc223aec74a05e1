"""The product with a weight, and what a decoder does just before and after it."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_paged.checks import default_promotion
from pallas_paged.kernels.call import Device
from pallas_paged.kernels.mosaic import support
from pallas_paged.kernels.mosaic.linear_config import (
    MAX_NORMED_ROWS,
    MAX_ROWS,
    NORM_MULTIPLE,
    LinearConfig,
    linear_config,
)
from pallas_paged.rotary_write import rms_norm


@default_promotion()
def linear(
    x: jax.Array,
    weight: jax.Array,
    *,
    norm: jax.Array | None = None,
    eps: float = 1e-6,
    residual: jax.Array | None = None,
    preferred_element_type: DTypeLike | None = None,
) -> jax.Array:
    """Return `residual + rms_norm(x, norm, eps) @ weight.T`, or with SwiGLU.

    Few rows on a Hopper GPU take one kernel, where that is faster than XLA: it reads the weight at
    the rate of the memory. Otherwise, and for gradients, XLA does the steps. Results differ by
    rounding: sums are in f32, in another order.

    Args:
        x: floating `[..., K]`.
        weight: `[N, K]`, or `[N, 2, K]`: then the product is `silu(x @ weight[:, 0].T) * (x @
            weight[:, 1].T)`.
        norm: `[K]`, weight of the RMS norm of x; None: x is not normed.
        eps: of the norm.
        residual: `[..., N]`, added at the end, or None.
        preferred_element_type: dtype of the product; None: that of x and weight.

    Returns:
        `[..., N]`.

    Raises:
        ValueError: shapes do not fit.
    """
    *batch, in_size = x.shape
    out_size = weight.shape[0]
    if weight.shape[1:] not in ((in_size,), (2, in_size)):
        raise ValueError(f"{weight.shape=} must be [N, K] or [N, 2, K], with K of {x.shape=}")
    if norm is not None and norm.shape != (in_size,):
        raise ValueError(f"{norm.shape=} must be {(in_size,)}")
    if residual is not None and residual.shape != (*batch, out_size):
        raise ValueError(f"{residual.shape=} must be {(*batch, out_size)}")
    product = Product(eps=eps, preferred_element_type=preferred_element_type)
    config = _config(x, weight, product)
    if config is None:
        return product(x, weight, norm, residual)
    return _kernel(product, config, x, weight, norm, residual)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Product:
    """What `linear` computes, in XLA's steps."""

    eps: float
    preferred_element_type: Any

    def __call__(
        self,
        x: jax.Array,
        weight: jax.Array,
        norm: jax.Array | None,
        residual: jax.Array | None,
    ) -> jax.Array:
        x = x if norm is None else rms_norm(x, norm, self.eps)
        # A matrix: XLA would transpose, hence copy, a weight that has several output axes.
        matrix = weight.reshape(-1, weight.shape[-1])
        dims = (((x.ndim - 1,), (1,)), ((), ()))
        out = lax.dot_general(x, matrix, dims, preferred_element_type=self.preferred_element_type)
        if weight.ndim == 3:
            gate_up = out.reshape(*out.shape[:-1], -1, 2)
            out = jax.nn.silu(gate_up[..., 0]) * gate_up[..., 1]
        return out if residual is None else residual + out


def _config(x: jax.Array, weight: jax.Array, product: Product) -> LinearConfig | None:
    """Return how the kernel runs where it is faster than XLA, and None elsewhere."""
    if x.dtype != weight.dtype or x.dtype not in (jnp.bfloat16, jnp.float16):
        return None
    mesh = jax.typeof(weight).sharding.mesh
    if mesh.size > 1 and not mesh.are_all_axes_manual:
        return None  # XLA would gather the weight for a kernel of which it knows nothing
    num_rows = math.prod(x.shape[:-1])
    if not 0 < num_rows <= MAX_ROWS:
        return None
    device = Device.here()
    if support.why_not_jax() or support.why_not_device(device):
        return None
    return linear_config(
        num_rows=num_rows,
        out_size=weight.shape[0],
        in_size=weight.shape[-1],
        swiglu=weight.ndim == 3,
        out_itemsize=jnp.dtype(product.preferred_element_type or x.dtype).itemsize,
        num_sms=device.num_sms,
    )


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _kernel(
    product: Product,
    config: LinearConfig,
    x: jax.Array,
    weight: jax.Array,
    norm: jax.Array | None,
    residual: jax.Array | None,
) -> jax.Array:
    from pallas_paged.kernels.mosaic import linear as mosaic

    *batch, in_size = x.shape
    rows = x.reshape(-1, in_size)
    num_rows = len(rows)
    if norm is not None and (num_rows > MAX_NORMED_ROWS or in_size % NORM_MULTIPLE):
        rows, norm = rms_norm(rows, norm, product.eps), None
    padding = -num_rows % 8 if num_rows > 8 else 0
    added = None if residual is None else residual.reshape(num_rows, -1)
    if padding:
        rows = jnp.pad(rows, ((0, padding), (0, 0)))
        added = None if added is None else jnp.pad(added, ((0, padding), (0, 0)))
    out = mosaic.linear(
        rows,
        weight,
        norm_weight=norm,
        eps=product.eps,
        residual=added,
        out_dtype=product.preferred_element_type or x.dtype,
        config=config,
        interpret=False,
    )
    return out[:num_rows].reshape(*batch, -1)


@_kernel.defjvp
def _kernel_jvp(product: Product, config: LinearConfig, primals: Any, tangents: Any) -> Any:
    del config
    return jax.jvp(product, primals, tangents)
