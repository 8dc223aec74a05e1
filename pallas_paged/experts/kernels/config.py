"""Config of the grouped product on Hopper. Importing this module does not import Mosaic."""

from __future__ import annotations

import dataclasses

WG_ROWS = 64  # of wgmma's first operand, one a warpgroup
FEW_ROWS = 64  # tokens up to which all go through each expert that any of them chose
ALIGN = 8  # rows of a swizzled tile in shared memory, so copies begin at multiples of it
SWIGLU_ALPHA = 1.702  # of gpt-oss
_RING = 208 * 1024  # bytes of the ring
_MAX_COLUMNS = 256  # of wgmma's second operand


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedConfig:
    """Sizes of tiles and of the ring. Results of other configs differ by rounding only."""

    num_consumers: int  # warpgroups that multiply, each 64 rows of a tile
    # Rows that are copied for each of them, a multiple of 8 up to 64. Others hold anything, and are
    # not stored.
    copy_rows: int
    columns: int  # rows of the weight in a tile: columns of the result, or those of gate and up
    block_k: int  # elements of K of a stage
    num_stages: int  # of the ring
    num_programs: int  # of the grid

    @property
    def block_rows(self) -> int:
        """Rows of a tile."""
        return (self.num_consumers - 1) * WG_ROWS + self.copy_rows

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a thread that multiplies, and of one that sends."""
        return (240, 56) if self.num_consumers == 1 else (224, 56)


def many_rows_config(*, n: int, average: int, num_programs: int) -> GroupedConfig:
    """Return the config for sorted rows, `average` of a group; `n` as in `few_rows_config`."""
    consumers = 1 if average <= WG_ROWS else 2
    return _fill(consumers, WG_ROWS, min(_MAX_COLUMNS, n), 64, num_programs)


def few_rows_config(
    *, num_rows: int, active: float, k: int, n: int, is_pair: bool, num_programs: int
) -> GroupedConfig:
    """Return the config where all rows go through each active expert.

    Args:
        num_rows: tokens, up to 64.
        active: experts that are read, as expected.
        k, n: sizes of a matrix of the weight; n is gate and up of all features.
        is_pair: whether the weight is gate and up.
    """
    copy_rows = -(-num_rows // ALIGN) * ALIGN

    def cost(columns: int) -> float:
        # Rounds of all programs; each reads columns of the weight, and rows from the L2 cache.
        rounds = -(-active * -(-n // columns) // num_programs)
        return rounds * (columns + copy_rows / 2 + 16)

    step = 16 if is_pair else 8
    columns = min(range(64, 128 + 1, step), key=cost)
    # Reads of 256 bytes of a row are 3% faster than those of 128, and 128 columns than 256.
    block_k = 128 if k % 128 == 0 else 64
    return _fill(1, copy_rows, columns, block_k, num_programs)


def _fill(
    consumers: int, copy_rows: int, columns: int, block_k: int, num_programs: int
) -> GroupedConfig:
    stage = (consumers * WG_ROWS + columns) * block_k * 2
    return GroupedConfig(
        num_consumers=consumers,
        copy_rows=copy_rows,
        columns=columns,
        block_k=block_k,
        num_stages=min(_RING // stage, 8),
        num_programs=num_programs,
    )
