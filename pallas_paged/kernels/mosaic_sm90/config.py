"""Configs of the Mosaic kernels: what is allowed, what is chosen, when they are faster.

Importing this module does not import Mosaic.
"""

from __future__ import annotations

import dataclasses

from pallas_paged.checks import check_fixed_split_size, check_integer, check_num_programs
from pallas_paged.kernels.call import Sizes
from pallas_paged.kernels.device import HOPPER_SHARED_MEMORY

REDUCE_ROWS = 256  # at most, of a sum over devices
_LEAST_COLUMNS = 512  # of a part of a product
_WGMMA_ROWS = 64  # of a warpgroup's product
_BLOCK_STAGE = 32 * 1024  # bytes of a weight per loop step of the decoder block
_LEAST_TILE = 32  # smaller ones leave too little in the ring while programs wait for one another
_ITEM_ROWS = 8  # of a tile, which take as long as an item takes to begin and to end
_MAX_BLOCK_ROW = 10240  # elements that the registers of a warpgroup hold at once
# Of the product of one row: features of a tile, and columns of the weight per loop step, 32 KB.
LINEAR_TILE, LINEAR_BLOCK_K = 64, 256
# Its rows, `hidden` and logits of experts have zeros behind them up to multiples of these, which
# the threads of a warpgroup take evenly.
ROW_UNIT, HIDDEN_UNIT, EXPERTS_UNIT = 512, 256, 128
_MAX_EXPERTS, _MAX_CHOSEN = 256, 32  # one chosen expert for each lane of a warp


@dataclasses.dataclass(frozen=True, kw_only=True)
class MosaicSm90RaggedConfig:
    """How the Mosaic kernel of ragged queries and its merge run. Results differ by rounding only.

    Attributes:
        block_k: tokens of K/V per loop step; a multiple of 64 in [64, 256].
        num_stages: blocks of K and of V in shared memory, in [2, 8].
        num_consumers: warpgroups of a program that attend, each for 64 query rows, in [1, 3].
        num_q_stages: tiles of queries in shared memory, in [1, 2]. With 2 the queries of the next
            tile are copied while consumers attend to this one.
        num_programs: programs on the device, in [1, 65535]. Each takes the next work item
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
        check_integer("num_consumers", self.num_consumers, 1, 3)
        check_integer("num_q_stages", self.num_q_stages, 1, 2)
        check_integer("block_k", self.block_k, 64, 256)
        if self.block_k % 64:
            raise ValueError(f"block_k={self.block_k} must be a multiple of 64")
        check_integer("num_stages", self.num_stages, 2, 8)
        check_num_programs(self.num_programs)
        check_fixed_split_size(self.fixed_split_size, self.block_k)

    @property
    def block_q(self) -> int:
        """Query rows of a tile."""
        return self.num_consumers * _WGMMA_ROWS


def ragged_config(sizes: Sizes) -> MosaicSm90RaggedConfig:
    """Return the heuristic config of a call with ragged queries."""
    # Measured on an H200, 2026-11: half as long a block costs 12%. With wide heads a longer one has
    # no room in shared memory.
    head_dim, group = sizes.head_dim, sizes.group
    wide, one_byte = head_dim > 128, sizes.itemsize == 1
    # As many consumers as the queries of an average sequence fill. With a converter, two have no
    # registers for products of 256 columns. Three have them up to a head_dim of 64, where they take
    # 11% less time than two (an H100, 2026-11), if the heads of a group fill their rows.
    most = 2
    if head_dim <= 64 and not one_byte and _WGMMA_ROWS * 3 // 8 % group == 0:
        most = 3
    elif wide and one_byte:
        most = 1
    filled = -(-sizes.num_tokens * group // (_WGMMA_ROWS * sizes.expected_seqs))
    return MosaicSm90RaggedConfig(
        block_k=64 if wide and sizes.v_head_dim is None else 128,
        num_consumers=max(1, min(filled, most)),
        num_stages=2,
        num_programs=sizes.num_sms,
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
    dividing = (count for count in (8, 4, 2) if count <= most and num_columns % (8 * count) == 0)
    return next((count for count in dividing if num_columns >= count * _LEAST_COLUMNS), 1)


def prefer_ragged(sizes: Sizes) -> bool:
    """Return whether this kernel is faster than the Triton kernel on a Hopper GPU."""
    # A tile has 64 rows per warpgroup; with fewer rows most of the product is padding.
    return sizes.num_tokens * sizes.group >= _WGMMA_ROWS * sizes.expected_seqs


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderBlockConfig:
    """How the kernel between two attentions runs. Results differ by rounding only."""

    num_programs: int  # no more than there are SMs, for they wait for one another
    num_stages: int = 6  # blocks of weights in shared memory, 32 KB each
    num_in_flight: int = 2  # blocks of 64 features on their way at once, or as many bytes of others
    # Features that a program multiplies at once, in [8, 64], a multiple of 8.
    o_tile: int = LINEAR_TILE
    gate_up_tile: int = LINEAR_TILE
    down_tile: int = LINEAR_TILE
    qkv_tile: int = LINEAR_TILE
    # Parts of the columns of weights that have few rows; of down of experts, parts of the experts
    # of a row.
    o_splits: int = 1
    down_splits: int = 1
    router_splits: int = 1
    experts_per_split: int = 1  # experts of such a part

    @property
    def experts_per_token(self) -> int:
        """Experts of a row; of weights with a router."""
        return self.down_splits * self.experts_per_split


def padded(size: int, unit: int) -> int:
    """Return the size up to the end of its last unit."""
    return -(-size // unit) * unit


def decoder_block_config(
    *,
    size: int,
    attended_size: int,
    hidden_size: int,
    out_size: int,
    num_programs: int,
    num_experts: int = 0,
    experts_per_token: int = 0,
) -> DecoderBlockConfig | None:
    """Return the config for weights of these sizes, or None where the kernel can't do them.

    Args:
        size: of the residual.
        attended_size: of the output of attention.
        hidden_size: of gate and of up.
        out_size: of the last product; 0 without one.
        num_programs: one per SM.
        num_experts, experts_per_token: experts, each with gate, up and down of these sizes; 0 where
            there is one MLP.
    """
    tile, block_k = LINEAR_TILE, LINEAR_BLOCK_K
    if size % tile or attended_size % block_k or hidden_size % tile or out_size % tile:
        return None
    if num_experts % 8 or num_experts > _MAX_EXPERTS or experts_per_token > _MAX_CHOSEN:
        return None
    size, hidden_size = padded(size, ROW_UNIT), padded(hidden_size, HIDDEN_UNIT)

    def best(num_rows: int, splits: list[tuple[int, float]]) -> tuple[int, int]:
        """Return the tile and the splits with the least cost.

        Each pair is a number of splits and the columns of one, as a part of all or in experts. The
        cost is rows of the program with the most, and as many as items and sums of splits take.
        """

        def cost(tile: int, num_splits: int, columns: float) -> float:
            num_items = padded(num_rows, tile) // tile * num_splits
            most = padded(num_items, num_programs) // num_programs
            return most * (tile + _ITEM_ROWS) * columns + num_splits / 2

        tiles = range(LINEAR_TILE, _LEAST_TILE - 1, -8)
        each = ((tile, *pair) for pair in splits for tile in tiles)
        return min(each, key=lambda x: cost(*x))[:2]

    def of_columns(num_columns: int) -> list[tuple[int, float]]:
        counts = [n for n in (1, 2, 4, 8) if n == 1 or num_columns % (n * block_k) == 0]
        fit = [n for n in counts if num_columns <= n * _MAX_BLOCK_ROW]
        return [(n, 1 / n) for n in fit or counts]

    router_splits = experts_per_split = 1
    o_tile, o_splits = best(size, of_columns(attended_size))
    down_tile, down_splits = best(size, of_columns(hidden_size))
    hidden = hidden_size // down_splits
    if num_experts:
        most = max(_MAX_BLOCK_ROW // hidden_size, 1)
        counts = [n for n in (8, 4, 2, 1) if experts_per_token % n == 0 and n <= most]
        down_tile, down_splits = best(size, [(experts_per_token // n, n) for n in counts])
        experts_per_split = experts_per_token // down_splits
        hidden = hidden_size * experts_per_split
        router_splits = max(n for n in range(1, 17) if size % (n * block_k) == 0)
    row = max(size, attended_size // o_splits, hidden)
    if row > _MAX_BLOCK_ROW:
        return None
    rest = (
        sum(-(-2 * n // 1024) * 1024 for n in (row + 64, size)) + 2 * 1024
    )  # barriers, reductions
    rest += 4 * 1024 if num_experts else 0  # logits, the chosen ones and their weights
    num_stages = min((HOPPER_SHARED_MEMORY - rest) // _BLOCK_STAGE, 6)
    if num_stages < 2:
        return None
    return DecoderBlockConfig(
        num_programs=num_programs,
        num_stages=num_stages,
        o_tile=o_tile,
        gate_up_tile=best(hidden_size, [(max(experts_per_token, 1), 1)])[0],
        down_tile=down_tile,
        qkv_tile=best(out_size, [(1, 1)])[0],
        o_splits=o_splits,
        down_splits=down_splits,
        router_splits=router_splits,
        experts_per_split=experts_per_split,
    )
