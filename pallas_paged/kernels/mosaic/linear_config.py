"""Configs of the matrix product of few rows: what is chosen, and when it is faster than XLA.

Importing this module does not import Mosaic.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

MAX_ROWS = 64
_MAX_NORMED_ROWS = 8  # each program norms all rows of x
_NORMED_COLUMNS = 1024  # that a warpgroup loads at once, 16 bytes a thread
_FEATURES = 64  # of a tile's results: the rows of a wgmma
AHEAD_ROWS, AHEAD_COLUMNS = 64, 256  # of a block that is read ahead
_AHEAD_BLOCK_BYTES = 2 * AHEAD_ROWS * AHEAD_COLUMNS
_AHEAD_BYTES = 28 * 2**20  # of an L2 cache of 50 MB
_MAX_ROWS_AHEAD = 8  # more rows of a batch have more K/V, which take the cache and the memory
_SHARED_BYTES = 227 * 1024
_MAX_SPLITS = 8  # programs of a cluster
_MAX_STAGES = 16
_OTHER_BYTES = 4096  # barriers, and the ends of buffers


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearConfig:
    """How the kernel runs. Results differ by rounding only.

    Attributes:
        tile_n: features of a tile, 64 or 128; with SwiGLU 128, 64 of gate and 64 of up.
        block_k: columns of the weight per loop step, a multiple of 64.
        num_stages: blocks in shared memory.
        num_splits: programs that divide K, a cluster, at most 8. Each has one tile then.
        num_programs: programs on the whole device, a multiple of num_splits.
        prefetch: blocks to read into the L2 cache, of each of the later weights.
    """

    tile_n: int
    block_k: int
    num_stages: int
    num_splits: int
    num_programs: int
    prefetch: tuple[int, ...] = ()


def linear_config(
    *,
    num_rows: int,
    out_size: int,
    in_size: int,
    swiglu: bool,
    normed: bool,
    out_itemsize: int,
    num_sms: int,
) -> LinearConfig | None:
    """Return the config of a product, or None if the kernel can't do it.

    Args:
        num_rows: of x, in [1, 64].
        out_size, in_size: N and K.
        swiglu: whether the weight is of gate and up.
        normed: whether the kernel norms x.
        out_itemsize: bytes of an element of the result.
        num_sms: streaming multiprocessors of the device.
    """
    block_k = 128 if swiglu else 256
    if out_size % _FEATURES or in_size % block_k:
        return None
    num_columns = -(-num_rows // 8) * 8
    tile_n = 2 * _FEATURES if swiglu else _FEATURES
    num_tiles = out_size // _FEATURES
    num_splits = 1
    while (
        10 * num_tiles * num_splits < 7 * num_sms
        and num_splits < _MAX_SPLITS
        and in_size % (2 * num_splits * block_k) == 0
    ):
        num_splits *= 2
    taken = 2 * num_columns * _FEATURES * out_itemsize  # by the results and a residual
    taken += (num_splits - 1) * tile_n * num_columns * 4 + _OTHER_BYTES
    stage = tile_n * block_k * 2
    if normed:
        taken += num_columns * in_size * 2
    else:
        stage += num_columns * block_k * 2
    num_stages = min(_MAX_STAGES, (_SHARED_BYTES - taken) // stage)
    if num_stages < 2:
        return None
    return LinearConfig(
        tile_n=tile_n,
        block_k=block_k,
        num_stages=num_stages,
        num_splits=num_splits,
        num_programs=num_tiles * num_splits if num_splits > 1 else min(num_tiles, num_sms),
    )


def can_norm(num_rows: int, in_size: int) -> bool:
    """Return whether the kernel can norm x itself."""
    return num_rows <= _MAX_NORMED_ROWS and in_size % _NORMED_COLUMNS == 0


def blocks_ahead(*, num_rows: int, sizes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Return how many blocks of each later weight are read into the L2 cache, in order.

    Args:
        num_rows: of x.
        sizes: of the weights, `[N, K]` each.
    """
    left = _AHEAD_BYTES if num_rows <= _MAX_ROWS_AHEAD else 0
    blocks = []
    for out_size, in_size in sizes:
        divisible = out_size % AHEAD_ROWS == 0 and in_size % AHEAD_COLUMNS == 0
        blocks.append(min(2 * out_size * in_size, left) // _AHEAD_BLOCK_BYTES if divisible else 0)
        left -= blocks[-1] * _AHEAD_BLOCK_BYTES
    return tuple(blocks)


def prefer_kernel(*, num_rows: int, out_size: int, in_size: int, swiglu: bool) -> bool:
    """Return whether the kernel is faster than XLA, for sizes as of `linear_config`."""
    del num_rows, out_size, in_size, swiglu
    return False
