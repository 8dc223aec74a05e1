"""Reads weights of later products into the L2 cache while other kernels leave the memory idle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

_ROWS, _COLUMNS = 64, 256  # of a block: 32 KB


def prefetch(
    x: jax.Array, after: jax.Array, weights: Sequence[jax.Array], *, num_bytes: Sequence[int]
) -> jax.Array:
    """Return x; start to read weights into the L2 cache once `after` has been computed.

    What needs the result waits for the start of the reads only. Kernels that do not need it run
    side by side with this one.

    Args:
        x: of 16-bit elements, at least 2-D. It is passed on in place.
        after: an array.
        weights: `[N, K]`, N a multiple of 64 and K of 256, of 16-bit elements.
        num_bytes: to read of each weight, the first columns of all rows first.
    """
    counts = [
        min(n // (2 * _ROWS * _COLUMNS), w.size // (_ROWS * _COLUMNS))
        for n, w in zip(num_bytes, weights, strict=True)
    ]
    num_programs = 32

    def kernel(x_ref: Any, after_ref: Any, *weight_refs: Any) -> None:
        del after_ref
        program = lax.axis_index("program")
        for ref, count in zip(weight_refs, counts, strict=True):
            across = ref.shape[0] // _ROWS

            @pl.loop(0, pl.cdiv(count, num_programs))
            def _(i, ref=ref, count=count, across=across):
                block = i * num_programs + program

                @pl.when(block < count)
                def _():
                    rows, columns = lax.rem(block, across), lax.div(block, across)
                    rows, columns = pl.ds(rows * _ROWS, _ROWS), pl.ds(columns * _COLUMNS, _COLUMNS)
                    plgpu.async_prefetch(ref.at[rows, columns])

        @pl.when(program < 0)  # never, but the kernel must have an effect for XLA
        def _():
            x_ref[(0,) * x.ndim] = jnp.asarray(0, x.dtype)

    ref = jax.new_ref(x)
    plgpu.kernel(
        kernel, out_type=(), grid=(num_programs,), grid_names=("program",), kernel_name="prefetch"
    )(ref, after, *weights)
    return jax.freeze(ref)
