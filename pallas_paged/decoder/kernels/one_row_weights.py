"""A weight in blocks, divided among the programs of the kernel between two attentions."""

from __future__ import annotations

import dataclasses
from typing import Any

from jax import lax
from jax.experimental import pallas as pl

from pallas_paged.kernels.mosaic_sm90.config import LINEAR_TILE as TILE

HALF = 128  # columns of a half of a stage: a whole block is 32 KB


@dataclasses.dataclass(frozen=True, kw_only=True)
class Product:
    """Which blocks of a weight the programs have, in which order.

    A work item is a tile of features and one part of the columns; a program has every
    `num_programs`-th item.
    """

    weight: Any  # ref [N, K] or [N, 2, K]
    num_programs: int
    num_splits: int = 1

    @property
    def is_pair(self) -> bool:
        """Whether the halves of a stage are gate and up of the same columns."""
        return len(self.weight.shape) == 3

    @property
    def num_columns(self) -> int:
        """Columns of an item."""
        return self.weight.shape[-1] // self.num_splits

    @property
    def num_blocks(self) -> int:
        """Stages of an item."""
        return self.num_columns // (HALF if self.is_pair else 2 * HALF)

    def num_items(self, program: Any) -> Any:
        """Return how many items a program has."""
        total = self.weight.shape[0] // TILE * self.num_splits
        return lax.div(total - 1 - program + self.num_programs, self.num_programs)

    def item(self, program: Any, index: Any) -> tuple[Any, Any]:
        """Return the features of an item, as a slice, and its part of the columns."""
        item = program + index * self.num_programs
        return pl.ds(lax.div(item, self.num_splits) * TILE, TILE), lax.rem(item, self.num_splits)

    def halves(self, features: Any, split: Any, block: Any) -> list[Any]:
        """Return the refs to the two halves of a block."""
        if self.is_pair:
            columns = pl.ds(split * self.num_columns + block * HALF, HALF)
            return [self.weight.at[features, i, columns] for i in range(2)]
        first = split * self.num_columns + block * 2 * HALF
        return [self.weight.at[features, pl.ds(first + i * HALF, HALF)] for i in range(2)]
