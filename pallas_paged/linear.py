"""The product with a weight, and what a decoder does just before and after it."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_paged.checks import default_promotion
from pallas_paged.kernels.call import Device
from pallas_paged.kernels.mosaic import support
from pallas_paged.kernels.mosaic.linear_config import (
    MAX_ROWS,
    LinearConfig,
    blocks_ahead,
    can_norm,
    linear_config,
    prefer_kernel,
)
from pallas_paged.rms_norm import rms_norm

LinearImplementation = Literal["mosaic_gpu", "mosaic_gpu_interpret", "xla"]


@default_promotion()
def linear(
    x: jax.Array,
    weight: jax.Array,
    *,
    norm: jax.Array | None = None,
    eps: float = 1e-6,
    residual: jax.Array | None = None,
    ahead: Sequence[jax.Array] = (),
    preferred_element_type: DTypeLike | None = None,
    implementation: LinearImplementation | None = None,
) -> jax.Array:
    """Return `residual + rms_norm(x, norm, eps) @ weight.T`, or the same with SwiGLU.

    Few rows take one kernel on a Hopper GPU where that is faster than XLA: it reads the weight at
    the rate of the memory. Otherwise, and for gradients, XLA takes the steps one by one. Results
    differ by rounding: sums are in f32, in another order.

    Args:
        x: floating `[..., K]`.
        weight: `[N, K]`, or of gate and up `[N, 2, K]`: then the product is
            `silu(x @ weight[:, 0].T) * (x @ weight[:, 1].T)`.
        norm: `[K]`, weight of an RMS norm of x; None: x is not normed.
        eps: of the norm.
        residual: `[..., N]`, added at the end, or None.
        ahead: weights of the next products, `[..., K]`. While other kernels leave the memory idle,
            the kernel's last reads bring what fits of them into the L2 cache.
        preferred_element_type: dtype of the product; None: that of x and weight.
        implementation: "mosaic_gpu", on a Hopper GPU; "mosaic_gpu_interpret", the same kernel on
            any device; "xla"; or None for the fastest.

    Returns:
        `[..., N]`.

    Raises:
        ValueError: shapes do not fit, or there is no such implementation.
        NotImplementedError: the implementation can't do this call; the message says why.
    """
    *batch, in_size = x.shape
    out_shape = (*batch, *weight.shape[:1])
    if weight.shape[1:] not in ((in_size,), (2, in_size)):
        raise ValueError(f"{weight.shape=} must be [N, K] or [N, 2, K], with the K of {x.shape=}")
    for name, array, shape in (("norm", norm, (in_size,)), ("residual", residual, out_shape)):
        if array is not None and array.shape != shape:
            raise ValueError(f"{name} must be {shape}, got {array.shape}")
    product = Product(eps=eps, out_dtype=preferred_element_type)
    config = _choose(x, weight, norm, product, implementation)
    if config is None:
        return product(x, weight, norm, residual)
    interpret = implementation == "mosaic_gpu_interpret"
    later = tuple(w.reshape(-1, w.shape[-1]) for w in ahead)
    blocks = blocks_ahead(num_rows=math.prod(batch), sizes=[w.shape for w in later])
    config = dataclasses.replace(config, prefetch=blocks)
    return _kernel((product, config, interpret), x, weight, norm, residual, later)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Product:
    """What `linear` computes, in XLA's steps."""

    eps: float
    out_dtype: Any

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
        out = lax.dot_general(x, matrix, dims, preferred_element_type=self.out_dtype)
        if weight.ndim == 3:
            gate_up = out.reshape(*out.shape[:-1], -1, 2)
            out = jax.nn.silu(gate_up[..., 0]) * gate_up[..., 1]
        return out if residual is None else residual + out


def _choose(
    x: jax.Array,
    weight: jax.Array,
    norm: jax.Array | None,
    product: Product,
    implementation: Any,
) -> LinearConfig | None:
    """Return how the kernel runs, or None where XLA does the product."""
    names = get_args(LinearImplementation)
    if implementation is not None and implementation not in names:
        raise ValueError(f"{implementation=} must be None or one of {names}")
    if implementation == "xla":
        return None
    device, num_rows = Device.here(), math.prod(x.shape[:-1])
    interpret = implementation == "mosaic_gpu_interpret"
    sizes: dict[str, Any] = dict(
        num_rows=num_rows,
        out_size=weight.shape[0],
        in_size=weight.shape[-1],
        swiglu=weight.ndim == 3,
    )
    config = None
    reason = _why_not(x, weight, device, interpret=interpret)
    if reason is None:
        config = linear_config(
            **sizes,
            normed=norm is not None and can_norm(num_rows, x.shape[-1]),
            out_itemsize=jnp.dtype(product.out_dtype or x.dtype).itemsize,
            num_sms=1 if interpret else device.num_sms,  # the interpreter knows no clusters
        )
        reason = f"can't divide the weight {weight.shape} into blocks"
    if implementation is None:
        return config if config is not None and prefer_kernel(**sizes) else None
    if config is None:
        raise NotImplementedError(f"{implementation=} {reason}")
    return config


def _why_not(x: jax.Array, weight: jax.Array, device: Device, *, interpret: bool) -> str | None:
    """Return why the kernel can't do a product, or None."""
    if x.dtype != weight.dtype or x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"needs bfloat16 or float16, not {x.dtype} and {weight.dtype}"
    num_rows = math.prod(x.shape[:-1])
    if not 0 < num_rows <= MAX_ROWS:
        return f"needs 1 to {MAX_ROWS} rows, not {num_rows}"
    mesh = jax.typeof(weight).sharding.mesh
    if mesh.size > 1 and not mesh.are_all_axes_manual:
        # XLA knows nothing of the kernel: it would gather the weight.
        return "needs a weight on one device; use jax.shard_map"
    return support.why_not_jax() or (None if interpret else support.why_not_device(device))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _kernel(
    how: tuple[Product, LinearConfig, bool],
    x: jax.Array,
    weight: jax.Array,
    norm: jax.Array | None,
    residual: jax.Array | None,
    ahead: tuple[jax.Array, ...],
) -> jax.Array:
    from pallas_paged.kernels.mosaic import linear as mosaic

    product, config, interpret = how
    *batch, in_size = x.shape
    rows = x.reshape(-1, in_size)
    num_rows = rows.shape[0]
    if norm is not None and not can_norm(num_rows, in_size):
        rows, norm = rms_norm(rows, norm, product.eps), None
    added = None if residual is None else residual.reshape(num_rows, -1)
    # More rows than 8 must be a multiple of 8, to be copied as they lie.
    padding = ((0, -num_rows % 8 if num_rows > 8 else 0), (0, 0))
    rows, added = jax.tree.map(lambda a: jnp.pad(a, padding), (rows, added))
    with jax.enable_x64(False):
        out = mosaic.linear(
            rows,
            weight,
            norm_weight=norm,
            eps=product.eps,
            residual=added,
            prefetch=ahead,
            out_dtype=product.out_dtype or x.dtype,
            config=config,
            interpret=interpret,
        )
    return out[:num_rows].reshape(*batch, -1)


@_kernel.defjvp
def _kernel_jvp(how: tuple[Product, LinearConfig, bool], primals: Any, tangents: Any) -> Any:
    return jax.jvp(how[0], primals[:-1], tangents[:-1])  # without what is only read ahead
