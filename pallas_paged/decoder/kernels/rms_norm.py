"""The RMS norm of rows, a Pallas-Triton kernel."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_paged.kernels.call import result_shape
from pallas_paged.kernels.triton.specs import whole

_ELEMENTS_OF_A_WARP = 256  # 16 bytes of 16-bit numbers for each thread


def rms_norm_kernel(x_ref, weight_ref, out_ref, *, eps: float):
    """One program: one row of x and out `[T, E]`."""
    row, size = pl.program_id(0), x_ref.shape[1]
    columns = jnp.arange(pl.next_power_of_2(size))
    mask = columns < size
    x, weight = (
        plgpu.load(ref, mask=mask, other=0).astype(jnp.float32)
        for ref in (x_ref.at[row, columns], weight_ref.at[columns])
    )
    scale = lax.rsqrt(jnp.sum(x * x) / size + eps)
    plgpu.store(out_ref.at[row, columns], (x * scale * weight).astype(out_ref.dtype), mask=mask)


def rms_norm(x: jax.Array, weight: jax.Array, *, eps: float, interpret: bool) -> jax.Array:
    """Return x `[T, E]` over the root of each row's mean square, times the weight `[E]`."""
    num_rows, size = x.shape
    out_shape = result_shape(x.shape, x.dtype)
    num_warps = min(max(pl.next_power_of_2(size) // _ELEMENTS_OF_A_WARP, 1), 16)
    return pl.pallas_call(
        functools.partial(rms_norm_kernel, eps=eps),
        grid=(num_rows,),
        in_specs=whole([x, weight]),
        out_specs=whole(out_shape),
        out_shape=out_shape,
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=1),
        interpret=interpret,
        name="rms_norm",
    )(x, weight)
