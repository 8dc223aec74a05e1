"""The root mean squares of rows, from sums of all programs."""

from __future__ import annotations

import functools
import operator
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_paged.kernels.mosaic import ops
from pallas_paged.kernels.mosaic.row_refs import SUMS
from pallas_paged.kernels.mosaic.rows_config import GROUP_ROWS


def inverse_rms(squares: Any, sums: Any, *, group: Any, size: int, eps: float) -> jax.Array:
    """Return f32 `[64]`, what a norm multiplies 64 rows with, one value per row of wgmma.

    Args:
        squares: ref f32 `[n]` to device memory, 64 sums of each program.
        sums: ref f32 `[num_consumers, SUMS]` to shared memory, of which `group` is free.
        size: of a row.
        eps: of the norm.
    """
    (count,) = squares.shape
    if count == GROUP_ROWS:
        total = ops.load(squares, ops.WGMMA_ROW)
    else:
        layout = plgpu.Layout.WG_STRIDED((SUMS,), vec_size=2)
        loaded = [ops.load(squares.at[pl.ds(i, SUMS)], layout) for i in range(0, count, SUMS)]
        sums = sums.at[group]
        sums[...] = functools.reduce(operator.add, loaded)
        plgpu.commit_smem()
        totals = [
            ops.load_shared(sums.at[pl.ds(i, GROUP_ROWS)], ops.WGMMA_ROW)
            for i in range(0, SUMS, GROUP_ROWS)
        ]
        total = functools.reduce(operator.add, totals)
    return lax.rsqrt(total / size + eps)
