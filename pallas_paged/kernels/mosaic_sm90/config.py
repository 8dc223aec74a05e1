"""Configs of the Mosaic kernels: what is allowed, what is chosen, when they are faster.

Importing this module does not import Mosaic.
"""

from __future__ import annotations

import dataclasses

from pallas_paged.checks import (
    check_fixed_split_size,
    check_integer,
    check_num_programs,
)
from pallas_paged.kernels.call import Kernel

REDUCE_ROWS = 256  # at most, of a sum over devices
_LEAST_COLUMNS = 512  # of a part of a product
_WGMMA_ROWS = 64  # of a warpgroup's product
_BLOCK_STAGE = 32 * 1024  # bytes of a weight per loop step of the decoder block
_SHARED_MEMORY = 227 * 1024  # bytes that a program can have
_MAX_BLOCK_ROW = 8192  # elements that the registers of a warpgroup hold at once
# Of the product of one row: features of a tile, and columns of the weight per loop step, 32 KB.
LINEAR_TILE, LINEAR_BLOCK_K = 64, 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class MosaicDecodeConfig:
    """How the Mosaic decode kernel and its merge run. Results differ by rounding only.

    Attributes:
        block_k: tokens of K/V per loop step; a multiple of 64 in [64, 256].
        num_stages: blocks of K and of V in shared memory, in [2, 8].
        num_programs: programs on the whole device, in [1, 65535]. Each KV head gets an equal number
            of them, at least one, and divides the blocks of all rows evenly among them.
        fixed_split_size: None, or tokens after which every row is split, a multiple of `block_k`,
            as in `DecodeConfig`. The bits of a row then depend on that row alone.
        num_pairs: programs that share a CUDA block, in [1, 4], each a warpgroup that copies and one
            that attends. With int8 and fp8 pages only; a stage is then `num_pairs` blocks.

    Raises:
        ValueError: a value is outside its range.
    """

    block_k: int
    num_stages: int
    num_programs: int
    fixed_split_size: int | None = None
    num_pairs: int = 1

    def __post_init__(self) -> None:
        check_integer("num_pairs", self.num_pairs, 1, 4)
        _check_loop(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MosaicRaggedConfig:
    """How the Mosaic kernel of ragged queries and its merge run. Results differ by rounding only.

    Attributes:
        block_k, num_stages: as in `MosaicDecodeConfig`.
        num_consumers: warpgroups of a program that attend, each for 64 query rows, in [1, 2].
        num_q_stages: tiles of queries in shared memory, in [1, 2]. With 2 the queries of the next
            tile are copied while consumers attend to this one.
        num_programs: programs on the whole device, in [1, 65535]. Each takes the next work item
            when it has finished one.
        fixed_split_size: None, or tokens after which the K/V are split of every row whose queries
            fit one tile, a multiple of `block_k`. As in `RaggedConfig`, but partial results take
            twice the memory: a sequence of one tile's length can lie in two tiles.

    Raises:
        ValueError: a value is outside its range.
    """

    block_k: int
    num_consumers: int
    num_stages: int
    num_programs: int
    fixed_split_size: int | None = None
    num_q_stages: int = 2

    def __post_init__(self) -> None:
        check_integer("num_consumers", self.num_consumers, 1, 2)
        check_integer("num_q_stages", self.num_q_stages, 1, 2)
        _check_loop(self)

    @property
    def block_q(self) -> int:
        """Query rows of a tile."""
        return self.num_consumers * _WGMMA_ROWS


def _check_loop(config: MosaicDecodeConfig | MosaicRaggedConfig) -> None:
    check_integer("block_k", config.block_k, 64, 256)
    if config.block_k % 64:
        raise ValueError(f"block_k={config.block_k} must be a multiple of 64")
    check_integer("num_stages", config.num_stages, 2, 8)
    check_num_programs(config.num_programs)
    check_fixed_split_size(config.fixed_split_size, config.block_k)


def decode_config(
    *,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    max_kv_len: int,
    num_seqs: int,
    itemsize: int,
    num_sms: int,
    **_: int,
) -> MosaicDecodeConfig:
    """Return the heuristic config of a decode call, from static shapes only.

    Args:
        num_q_heads, num_kv_heads, head_dim, num_seqs: sizes of the call.
        max_kv_len: tokens that a full row of the block table can hold. Rows are assumed to be as
            long: a call with a wide table and short rows gets the config of long rows.
        itemsize: bytes of an element of K or V.
        num_sms: streaming multiprocessors of the device.
        _: sizes that other heuristics need.
    """
    # Measured on an H200, 2026-11: at head_dim 128 one program with two stages of 128 tokens beat
    # two programs, deeper rings and smaller blocks on all but tiny batches.
    block_k = 128 if head_dim == 128 else 64
    programs_per_sm = 2 if head_dim < 128 else 1
    num_stages = 2 if head_dim == 128 else 3
    if head_dim == 256 and num_q_heads // num_kv_heads > 24:
        num_stages = 2  # the queries leave no room for a third stage
    num_pairs = 1
    if itemsize == 1:
        block_k, num_stages, num_pairs, programs_per_sm = _one_byte_decode(
            head_dim, num_q_heads // num_kv_heads
        )
    # More programs than blocks would only write empty partial states.
    num_blocks = num_seqs * -(-max_kv_len // block_k)
    per_kv_head = max(1, min(programs_per_sm * num_sms // num_kv_heads, num_blocks))
    return MosaicDecodeConfig(
        block_k=block_k,
        num_stages=num_stages,
        num_programs=per_kv_head * num_kv_heads,
        num_pairs=num_pairs,
    )


def _one_byte_decode(head_dim: int, group: int) -> tuple[int, int, int, int]:
    """Return block_k, num_stages, num_pairs and programs per SM for int8 and fp8 pages.

    Of two programs on an SM one converts while the other waits for its products.
    """
    num_columns = 8 * -(-min(group, 64) // 8)
    # Two blocks of 128 registers a thread fit on an SM. Where more are needed, a block has two
    # pairs, whose threads that attend get those of threads that copy.
    num_pairs = 1 if head_dim <= 128 and num_columns == 8 else 2
    sizes = [(block_k, stages) for block_k in (128, 64) for stages in (3, 2)]
    for block_k, num_stages in sizes if head_dim <= 128 else sizes[2:]:
        ring = 2 * num_stages * block_k * (head_dim + 4)
        queries = num_columns * (4 * head_dim + 2 * block_k + 16)
        if ring + queries <= 107 * 1024:  # of 113, since buffers are rounded up
            return block_k, num_stages, num_pairs, 2
    return 64, 3, 1, 1


def ragged_config(
    *,
    num_tokens: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    max_kv_len: int,
    expected_seqs: int,
    num_sms: int,
    itemsize: int,
    **_: int,
) -> MosaicRaggedConfig:
    """Return the heuristic config of a call with `num_tokens` queries, as `decode_config` does.

    `expected_seqs` are the rows that are likely to have queries.
    """
    # Measured on an H200, 2026-11: 128 rows and blocks of 32 KB; half as long a block costs 12%.
    wide, one_byte = head_dim > 128, itemsize == 1
    block_k = 64 if wide else 128
    if head_dim == 64 and max_kv_len >= 2048 and not one_byte:
        block_k = 256
    # One consumer is enough where the queries of an average sequence fit its rows. With a
    # converter, two have no registers for products of 256 columns.
    rows = num_tokens * (num_q_heads // num_kv_heads)
    one_consumer = rows <= _WGMMA_ROWS * expected_seqs or (wide and one_byte)
    return MosaicRaggedConfig(
        block_k=block_k,
        num_consumers=1 if one_consumer else 2,
        num_stages=2,
        num_programs=num_sms,
        num_q_stages=1 if wide else 2,  # a second tile of 64 KB does not fit
    )


def reduce_parts(*, num_rows: int, num_columns: int) -> int:
    """Return the parts of a product that the kernel of sums over devices adds up; 1: none.

    Args:
        num_rows: of x.
        num_columns: of x and of the weight, on this device.
    """
    # Measured on two H200, 2026-11, for 1 and 64 rows of a layer of 8B (docs/parallel.md).
    if num_rows > 64:
        return 1
    most = 8 if num_rows == 1 else 4
    whole = (count for count in (8, 4, 2) if count <= most and num_columns % (8 * count) == 0)
    return next((count for count in whole if num_columns >= count * _LEAST_COLUMNS), 1)


def prefer_mosaic(kernel: Kernel, **sizes: int) -> bool:
    """Return whether the Mosaic kernel is faster than the Triton kernel on a Hopper GPU.

    Args:
        kernel: "decode" or "ragged".
        sizes: those of the call, as `decode_config` or `ragged_config` takes them.
    """
    group = sizes["num_q_heads"] // sizes["num_kv_heads"]
    if kernel == "ragged":
        # A tile has 64 rows per warpgroup; with fewer rows most of the product is padding.
        return sizes["num_tokens"] * group >= _WGMMA_ROWS * sizes["expected_seqs"]
    # Measured on an H200, 2026-11, by bench.decode: up to 5% faster where few KV heads of few rows
    # are long, 1% faster with 8 query heads or more per KV head; up to 8% slower elsewhere.
    if sizes["itemsize"] == 1:
        return False
    few_and_long = sizes["num_seqs"] * sizes["num_kv_heads"] <= 64 and sizes["max_kv_len"] >= 2048
    return sizes["head_dim"] == 128 and (group >= 8 or few_and_long)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderBlockConfig:
    """How the kernel between two attentions runs. Results differ by rounding only.

    Attributes:
        num_programs: no more than there are SMs, for they wait for one another.
        num_stages: blocks of weights in shared memory, 32 KB each.
        num_in_flight: blocks on their way at once.
        o_splits, down_splits: parts into which the columns of the two weights are cut that have few
            rows.
    """

    num_programs: int
    num_stages: int = 6
    num_in_flight: int = 2
    o_splits: int = 1
    down_splits: int = 1


def decoder_block_config(
    *, size: int, attended_size: int, hidden_size: int, out_size: int, num_programs: int
) -> DecoderBlockConfig | None:
    """Return the config for weights of these sizes, or None where the kernel can't do them.

    Args:
        size: of the residual.
        attended_size: of the output of attention.
        hidden_size: of gate and of up.
        out_size: of the last product; 0 without one.
        num_programs: one per SM.
    """
    tile, block_k = LINEAR_TILE, LINEAR_BLOCK_K
    if size % 512 or attended_size % block_k or hidden_size % block_k or out_size % tile:
        return None

    def splits(num_columns: int) -> int:
        """As many parts as give each program at most one tile of one part."""
        for count in (8, 4, 2):
            if size // tile * count <= num_programs and num_columns % (count * block_k) == 0:
                return count
        return 1

    o_splits, down_splits = splits(attended_size), splits(hidden_size)
    row = max(size, attended_size // o_splits, hidden_size // down_splits)
    if row > _MAX_BLOCK_ROW:
        return None
    rest = (
        sum(-(-2 * n // 1024) * 1024 for n in (row + 64, size)) + 2 * 1024
    )  # barriers, reductions
    num_stages = min((_SHARED_MEMORY - rest) // _BLOCK_STAGE, 6)
    if num_stages < 2:
        return None
    return DecoderBlockConfig(
        num_programs=num_programs,
        num_stages=num_stages,
        o_splits=o_splits,
        down_splits=down_splits,
    )
