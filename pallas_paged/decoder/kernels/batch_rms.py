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
        squares: ref f32 `[n]` to device memory, 64 sums of each program.
        sums: ref f32 `[SUMS]` to shared memory.
        at_once: loads of a thread.
    """
    (count,) = squares.shape
    if count == GROUP_ROWS:  # one program, interpreted
        layout = plgpu.Layout.WG_STRIDED((GROUP_ROWS,), vec_size=1)
        sums[...] = jnp.zeros(SUMS, jnp.float32)
        yield
        sums.at[pl.ds(0, GROUP_ROWS)][...] = ops.load(squares, layout)
        return
    layout = plgpu.Layout.WG_STRIDED((SUMS,), vec_size=2)
    starts = range(0, count, SUMS)
    total = ops.full((SUMS,), 0.0, layout)
    for i in range(0, len(starts), at_once):
        loaded = [ops.load(squares.at[pl.ds(j, SUMS)], layout) for j in starts[i : i + at_once]]
        yield
        total = functools.reduce(operator.add, loaded, total)
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
