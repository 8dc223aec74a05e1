"""Root mean squares of rows, from sums of squares of all programs."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_paged.decoder.kernels.batch_config import GROUP_ROWS
from pallas_paged.decoder.kernels.batch_refs import SUMS
from pallas_paged.kernels.mosaic import ops


def sum_squares(squares: Any, sums: Any, *, at_once: int) -> Iterator[None]:
    """Add up the sums of all programs into 4 for each of 64 rows, in shared memory.

    This is a generator: whenever it yields, loads are in flight.

    Args:
        squares: ref f32 `[n, SUMS]` to device memory, 64 sums of each program.
        sums: ref f32 `[SUMS]` to shared memory.
        at_once: rows of `squares` that are in flight.
    """
    layout = plgpu.Layout.TILED(
        plgpu.Tiling(((1, SUMS), (SUMS // 4,), (2,))),
        warp_dims=(-3,),
        lane_dims=(-2,),
        vector_dim=-1,
    )
    total = ops.full((SUMS,), 0.0, layout.reduce(0))
    for first in range(0, squares.shape[0], at_once):
        rows = pl.ds(first, min(at_once, squares.shape[0] - first))
        loaded = ops.load(squares.at[rows], layout)  # one array: each costs time to compile
        yield
        total += jnp.sum(loaded, axis=0)
    sums[...] = total
    plgpu.commit_smem()


def inverse_rms(sums: Any, *, size: int, eps: float) -> jax.Array:
    """Return the inverse root mean squares f32`[64]` of 64 rows, one value per row of wgmma.

    Args:
        sums: ref f32 `[SUMS]` to shared memory, of `sum_squares`.
        size: of a row.
        eps: of the norm.
    """
    totals = [
        ops.load_shared(sums.at[pl.ds(i, GROUP_ROWS)], ops.WGMMA_ROW)
        for i in range(0, SUMS, GROUP_ROWS)
    ]
    return lax.rsqrt(functools.reduce(operator.add, totals) / size + eps)
