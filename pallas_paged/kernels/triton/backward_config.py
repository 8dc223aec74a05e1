"""Sizes of the Triton kernels of the backward pass."""

from __future__ import annotations

import dataclasses

from jax.experimental.pallas import next_power_of_2


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackwardConfig:
    """Config of one kernel of the backward pass; every size is a power of two.

    Attributes:
        block_q: query rows of a tile, as in `RaggedConfig`.
        block_k: keys of a tile.
        num_warps, num_stages: as in `RaggedConfig`.
    """

    block_q: int
    block_k: int
    num_warps: int
    num_stages: int


def queries_config(*, head_dim: int, itemsize: int, rows: int) -> BackwardConfig:
    """Return the config of the kernel that makes the gradient of the queries.

    Args:
        head_dim, itemsize: of the queries.
        rows: query rows of an average sequence, for each KV head.
    """
    padded = next_power_of_2(max(head_dim, 16))
    if itemsize == 4:  # f32 products run without the matrix unit
        return BackwardConfig(block_q=16, block_k=16, num_warps=4, num_stages=1)
    rows = max(next_power_of_2(rows), 16)
    # Measured on an H200, 2026-11, on 4x4096: smaller tiles in two programs on an SM take 16% less
    # with head_dim 128, and with head_dim 64 as many warps as here 36% less than twice as many.
    block_q = min(rows, 128 if padded <= 64 else 64)
    block_k = min(64, 8192 // padded)
    num_warps = max(2, min(4 if padded <= 128 else 8, block_q * padded // 2048))
    num_stages = 3 if padded <= 128 else 2
    return BackwardConfig(
        block_q=block_q, block_k=block_k, num_warps=num_warps, num_stages=num_stages
    )


def keys_config(*, head_dim: int, itemsize: int, rows: int) -> BackwardConfig:
    """Return the config of the kernel that makes the gradients of keys and values.

    Args:
        head_dim, itemsize, rows: as in `queries_config`.
    """
    padded = next_power_of_2(max(head_dim, 16))
    if itemsize == 4:
        return BackwardConfig(block_q=16, block_k=16, num_warps=4, num_stages=1)
    # Measured on an H200, 2026-11, on 4x4096: with head_dim 128 tiles of 64 queries take 14% less
    # than those of 32, though some registers are spilled; with head_dim 64 four warps take 39% less
    # than eight.
    most = 32 if padded <= 64 else min(64, 8192 // padded)
    return BackwardConfig(
        block_q=min(max(next_power_of_2(rows), 16), most),
        block_k=min(128, 16384 // padded),
        num_warps=4 if padded <= 64 else 8,
        num_stages=2,
    )
