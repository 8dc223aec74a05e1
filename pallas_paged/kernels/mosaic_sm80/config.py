"""Configs of the kernels for Ampere and later: what is allowed, what is chosen.

Importing this module does not import Mosaic.
"""

from __future__ import annotations

import dataclasses
import itertools

from pallas_paged.checks import (
    check_fixed_split_size,
    check_integer,
    check_num_programs,
)
from pallas_paged.kernels.device import HOPPER_SHARED_MEMORY

_MMA_ROWS = 16
_WARPGROUP_ROWS = 64  # the least of a warpgroup of the ragged kernel
_WARP_COLUMNS = 32  # of the four warps, 8 each
_RESULT_COLUMNS = 256  # of a program of the ragged kernel: 128 f32 of a thread, for 64 rows
_REDUCTION_BYTES = 2048  # of the compiler, for reductions across warps
# Programs per SM, keys of a block and stages of the decode kernel, the first that fit.
_LOOPS = (
    (3, 128, 2),
    (3, 64, 3),
    (3, 64, 2),
    (2, 64, 2),
    (2, 32, 3),
    (2, 32, 2),
    (1, 64, 3),
    (1, 64, 2),
    (1, 32, 3),
    (1, 32, 2),
    (1, 32, 1),
)
# Tried before those with one-byte pages: their conversions want long blocks. With many short rows
# what a program does between two rows counts for more, and a third program hides it.
_ONE_BYTE_LOOPS = ((3, 128, 2), (2, 128, 2))
_SHORT_ONE_BYTE_LOOPS = ((3, 128, 2), (3, 64, 3), (2, 128, 2))
_SHORT_ROW = 2048  # tokens, at most
_MANY_BLOCKS = 128  # of 64 keys for each SM, at least
# Where this kernel is preferred. All are for each SM: an H100 and an H200, on which they were
# measured, have as many SMs and the same limits, though one reads 1.5 times as fast as the other.
_MANY_TOKENS = 32768 / 132  # of a batch, at least
_FAST_READS = 4000 / 132  # GB/s
_LEAST_BYTES = 40e6 / 132  # of K and V
# Blocks of 64 keys for each SM, above which it gets one, two or three programs: with fewer, the
# merge and a program's start cost more than another program hides. Conversions are more to hide.
_LEAST_BLOCKS = (0, 16, 32)
_LEAST_ONE_BYTE_BLOCKS = (0, 6, 32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MosaicSm80DecodeConfig:
    """How the decode kernel for Ampere and its merge run. Results differ by rounding only.

    Attributes:
        block_k: tokens of K/V per loop step; 32, 64 or 128.
        num_stages: blocks of K and of V in shared memory, in [1, 8].
        num_programs: programs on the device, in [1, 65535]. Each KV head gets an equal number
            of them, at least one, and divides the blocks of all rows evenly among them.
        fixed_split_size: None, or tokens after which every row is split, a multiple of `block_k`,
            as in `DecodeConfig`. The bits of a row then depend on that row alone.

    Raises:
        ValueError: a value is outside its range.
    """

    block_k: int
    num_stages: int
    num_programs: int
    fixed_split_size: int | None = None

    def __post_init__(self) -> None:
        check_integer("block_k", self.block_k, 32, 128, power_of_2=True)
        check_integer("num_stages", self.num_stages, 1, 8)
        check_num_programs(self.num_programs)
        check_fixed_split_size(self.fixed_split_size, self.block_k)


def decode_rows(group: int, head_dim: int) -> int:
    """Return the query heads of a program, padding included."""
    most = 32 if head_dim <= 128 else 16  # more would take too many registers
    return min(-(-group // _MMA_ROWS) * _MMA_ROWS, most)


def decode_columns(head_dim: int, itemsize: int) -> int:
    """Return the 16-bit elements of a row of K or V in shared memory, padding included."""
    width = head_dim * itemsize // 2
    return -(-width // _WARP_COLUMNS) * _WARP_COLUMNS


def decode_shared_memory(
    config: MosaicSm80DecodeConfig, *, group: int, head_dim: int, itemsize: int
) -> int:
    """Return the bytes of shared memory that a program of the decode kernel needs at most.

    Args:
        group: query heads of a KV head.
        head_dim, itemsize: of K and V.
    """
    rows, columns = decode_rows(group, head_dim), decode_columns(head_dim, itemsize)
    tokens = config.num_stages * config.block_k
    buffers = [
        2 * rows * columns,  # the queries
        *([2 * rows * columns, 4 * rows * columns] if itemsize == 1 else []),  # in three forms
        2 * rows * config.block_k,  # the probabilities of a block
        *[2 * tokens * columns] * 2,  # K and V
        *[4 * tokens] * (2 if itemsize == 1 else 0),  # their scales
        8 * tokens,  # entries of the block table
        _REDUCTION_BYTES,
    ]
    return sum(-(-size // 1024) * 1024 for size in buffers)  # the compiler aligns each to 1 KB


def decode_config(
    *,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    max_kv_len: int,
    num_seqs: int,
    itemsize: int,
    num_sms: int,
    shared_memory: int = HOPPER_SHARED_MEMORY,
    **_: int,
) -> MosaicSm80DecodeConfig:
    """Return the heuristic config of a decode call, from `Call.sizes`.

    Args:
        shared_memory: bytes that a program can have, all but 1 KB of those of an SM.
    """
    group = num_q_heads // num_kv_heads
    tiles = num_kv_heads * -(-group // decode_rows(group, head_dim))
    blocks_per_sm = tiles * num_seqs * -(-max_kv_len // 64) / num_sms
    first: tuple[tuple[int, int, int], ...] = ()
    least_blocks = _LEAST_BLOCKS
    if itemsize == 1:
        many_short_rows = max_kv_len <= _SHORT_ROW and blocks_per_sm >= _MANY_BLOCKS
        first = _SHORT_ONE_BYTE_LOOPS if many_short_rows else _ONE_BYTE_LOOPS
        least_blocks = _LEAST_ONE_BYTE_BLOCKS
    for programs_per_sm, block_k, num_stages in first + _LOOPS:
        if blocks_per_sm <= least_blocks[programs_per_sm - 1]:
            continue
        config = MosaicSm80DecodeConfig(block_k=block_k, num_stages=num_stages, num_programs=1)
        needed = decode_shared_memory(config, group=group, head_dim=head_dim, itemsize=itemsize)
        if needed + 1024 <= (shared_memory + 1024) // programs_per_sm:
            break
    # More programs than blocks would only write empty partial states.
    num_blocks = num_seqs * -(-max_kv_len // block_k)
    per_tile = max(1, min(programs_per_sm * num_sms // tiles, num_blocks))
    return dataclasses.replace(config, num_programs=per_tile * tiles)


def prefer_decode(
    *,
    num_kv_heads: int,
    head_dim: int,
    max_kv_len: int,
    num_seqs: int,
    itemsize: int,
    num_sms: int,
    read_gbps: float,
    **_: int,
) -> bool:
    """Return whether this kernel is faster than the Triton kernel on a Hopper GPU.

    Args:
        read_gbps: GB/s that kernels read of the device's memory.
        Others: of `Call.sizes`.
    """
    # Measured on an H100 and an H200, 2026-11: up to 3% faster, and up to 6% with one-byte pages.
    # Up to 5% slower with small heads, with many short rows, and with many one-byte tokens where
    # reads are so fast that conversions count for more. Short calls lose more to a later start.
    num_tokens = num_seqs * max_kv_len
    num_bytes = 2 * num_tokens * num_kv_heads * head_dim * itemsize
    if not 128 <= head_dim <= 256 or num_bytes / num_sms < _LEAST_BYTES:
        return False
    if num_tokens / num_sms < _MANY_TOKENS:
        return True
    if itemsize == 1:
        return max_kv_len > _SHORT_ROW and read_gbps / num_sms < _FAST_READS
    return max_kv_len > _SHORT_ROW // 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class MosaicSm80RaggedConfig:
    """How the ragged kernel for Ampere and its merge run. Results differ by rounding only.

    Attributes:
        block_q: query rows of a tile, one for each token and query head of a KV head's group: 64 or
            128 for each warpgroup, 64 where head_dim is above 128.
        block_k: tokens of K/V per loop step; 16, 32, 64 or 128.
        num_warpgroups: warpgroups of a program, in [1, 2]. Two share K and V, and the softmax of
            one runs under the products of the other.
        num_programs: programs of the device that run at the same time, in [1, 65535]. K/V are
            split where that lets them end earlier.
        fixed_split_size: None, or tokens after which the K/V are split of every row whose queries
            fit one tile, a multiple of `block_k`, as in `RaggedConfig`.

    Raises:
        ValueError: a value is outside its range.
    """

    block_q: int
    block_k: int
    num_warpgroups: int
    num_programs: int
    fixed_split_size: int | None = None

    def __post_init__(self) -> None:
        check_integer("num_warpgroups", self.num_warpgroups, 1, 2)
        rows = self.num_warpgroups * _WARPGROUP_ROWS
        check_integer("block_q", self.block_q, rows, 2 * rows, power_of_2=True)
        check_integer("block_k", self.block_k, 16, 128, power_of_2=True)
        check_num_programs(self.num_programs)
        check_fixed_split_size(self.fixed_split_size, self.block_k)

    @property
    def rows_per_warpgroup(self) -> int:
        """Query rows of a warpgroup."""
        return self.block_q // self.num_warpgroups


def result_columns(head_dim: int) -> tuple[int, int]:
    """Return among how many programs the columns of a result are divided, and those of each."""
    parts = -(-head_dim // _RESULT_COLUMNS)
    return parts, -(-head_dim // (parts * _MMA_ROWS)) * _MMA_ROWS


def ragged_shared_memory(
    config: MosaicSm80RaggedConfig,
    *,
    head_dim: int,
    v_head_dim: int | None = None,
    itemsize: int,
    **_: int,
) -> int:
    """Return the bytes of shared memory that a program of the ragged kernel needs at most.

    Args:
        config: of the kernel.
        head_dim, itemsize: of K and V.
        v_head_dim: of V, if it is not `head_dim`.
        _: sizes that decoding needs.
    """
    block_k = config.block_k
    one_byte = itemsize == 1
    columns_of_v = result_columns(v_head_dim or head_dim)[1]
    buffers = [
        (2 * head_dim + 16) * config.block_q,
        4 * config.block_q,
        *[(2 * columns + 16) * block_k * 2 for columns in (head_dim, columns_of_v)],  # K and V
        # As they arrive:
        *[columns * block_k for columns in (head_dim, columns_of_v) if one_byte],
        *[12 * block_k] * (2 if one_byte else 1),  # places of their rows and scales
        32 * block_k if one_byte else 0,  # scales
        8 if config.num_warpgroups == 2 else 0,  # the barrier of the turns
    ]
    return sum(-(-size // 1024) * 1024 for size in buffers)  # the compiler aligns each to 1 KB


def ragged_config(
    *,
    num_tokens: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    max_kv_len: int,
    num_seqs: int,
    itemsize: int,
    num_sms: int,
    v_head_dim: int | None = None,
    shared_memory: int = HOPPER_SHARED_MEMORY,
    **_: int,
) -> MosaicSm80RaggedConfig:
    """Return the heuristic config of a call with ragged queries, as `decode_config` does."""
    rows = num_tokens * num_q_heads // num_kv_heads
    # A thread has 128 f32 of results and 64 logits; with more it runs out of registers.
    narrow, tiles = (v_head_dim or head_dim) <= 128, [(1, 64)]
    if rows > 64 * num_seqs:
        tiles = [(2, 128)] * narrow + [(2, 64), (1, 64)]
    loops = [(*tile, block_k, 1) for tile, block_k in itertools.product(tiles, (64, 32, 16))]
    if rows > 64 * num_seqs and narrow and itemsize > 1:
        # Two programs of 128 rows are faster than one of 256, but not where each converts K and V.
        loops.insert(0, (1, 128, 64, 2))
    for num_warpgroups, num_rows, block_k, least_programs in loops:
        config = MosaicSm80RaggedConfig(
            block_q=num_warpgroups * num_rows,
            block_k=block_k,
            num_warpgroups=num_warpgroups,
            num_programs=1,
        )
        needed = ragged_shared_memory(
            config, head_dim=head_dim, v_head_dim=v_head_dim, itemsize=itemsize
        )
        if needed + 1024 <= (shared_memory + 1024) // least_programs:
            break
    # Two warpgroups have all registers of an SM.
    programs_per_sm = 1 if num_warpgroups == 2 else (shared_memory + 1024) // (needed + 1024)
    num_blocks = (rows // config.block_q + num_seqs) * -(-max_kv_len // block_k)
    programs = min(max(programs_per_sm, 1), 2) * num_sms
    per_kv_head = max(1, min(programs // num_kv_heads, num_blocks))
    return dataclasses.replace(config, num_programs=per_kv_head * num_kv_heads)
