"""Configs of the matrix product of few rows: what is chosen, and when it is faster than XLA.

Importing this module does not import Mosaic.
"""

from __future__ import annotations

import dataclasses

MAX_ROWS = 64
_MAX_NORMED_ROWS = 8  # each program norms all rows of x
_NORMED_COLUMNS = 1024  # that a warpgroup loads at once, 16 bytes a thread
_TILE_N = 64  # features: the rows of a wgmma
_SHARED_BYTES = 227 * 1024
_MAX_SPLITS = 8  # programs of a cluster
_MAX_STAGES = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearConfig:
    """How the kernel runs. Results differ by rounding only.

    Attributes:
        tile_n: features of a tile, 64 or 128; with SwiGLU 128, 64 of gate and 64 of up.
        block_k: columns of the weight per loop step, a multiple of 64.
        num_stages: blocks in shared memory.
        num_splits: programs that divide K, a cluster, at most 8. Each has one tile then.
        num_programs: programs on the whole device, a multiple of num_splits.
        prefetch: blocks of 32 KB to read into the L2 cache, of each of the later weights.
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
    out_itemsize: int,
    num_sms: int,
) -> LinearConfig | None:
    """Return the config of a product, or None where XLA is faster or the kernel can't do it.

    Args:
        num_rows: of x, in [1, 64].
        out_size, in_size: N and K.
        swiglu: whether the weight is of gate and up.
        out_itemsize: bytes of an element of the result.
        num_sms: streaming multiprocessors of the device.
    """
    if out_size % _TILE_N or in_size % 256:
        return None
    num_columns = -(-num_rows // 8) * 8
    tile_n = 2 * _TILE_N if swiglu else _TILE_N
    block_k = 128 if swiglu else 256
    num_tiles = out_size // _TILE_N
    num_splits = 1
    while (
        num_tiles * num_splits * 4 < num_sms * 3
        and num_splits < _MAX_SPLITS
        and in_size % (2 * num_splits * block_k) == 0
    ):
        num_splits *= 2
    fixed = 2 * num_columns * _TILE_N * out_itemsize + 4096  # the results, a residual, barriers
    fixed += (num_splits - 1) * tile_n * num_columns * 4
    if num_rows <= _MAX_NORMED_ROWS:
        fixed += num_columns * in_size * 2
    stage = (tile_n + num_columns) * block_k * 2
    num_stages = min(_MAX_STAGES, (_SHARED_BYTES - fixed) // stage)
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


def prefer_kernel(*, num_rows: int, out_size: int, in_size: int, swiglu: bool) -> bool:
    """Return whether the kernel is faster than XLA, for sizes as of `linear_config`."""
    return True
