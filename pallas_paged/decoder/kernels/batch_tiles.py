"""A program's blocks of weights and activations in the kernel of several rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_paged.decoder.kernels.batch_config import (
    BLOCKS_PER_STAGE,
    COLUMNS_PER_BLOCK,
    COPIES_PER_STAGE,
    FEATURE_MULTIPLE,
    DecoderBatchConfig,
    ProductTiles,
    part_groups,
    stages_in_flight,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Product:
    """A program's part of a product.

    Gate and up are divided by features only. Of other weights a cluster has a tile of features, and
    each of its programs a part of the columns; then each has the sums of a part of the features.
    Tiles and parts are equally large, so they may overlap.
    """

    weight: Any  # ref [N, K] or [N, 2, K]
    x: Any  # ref [R, K]
    tiles: ProductTiles
    cluster: Any
    rank: Any  # in the cluster
    config: DecoderBatchConfig

    @property
    def is_pair(self) -> bool:
        return self.tiles.is_pair

    @property
    def num_columns(self) -> int:
        """Columns that a program has."""
        return self.weight.shape[-1] // (1 if self.is_pair else self.config.cluster_size)

    @property
    def first_column(self) -> Any:
        return 0 if self.is_pair else self.rank * self.num_columns

    @property
    def num_blocks(self) -> int:
        """Blocks of activations."""
        return self.num_columns // COLUMNS_PER_BLOCK

    @property
    def num_stages(self) -> int:
        """Stages of weights."""
        return self.num_steps * self.tiles.num_accs

    @property
    def num_steps(self) -> int:
        """Number of stages for each accumulator."""
        return self.num_blocks // BLOCKS_PER_STAGE

    @property
    def num_in_flight(self) -> int:
        """Stages of weights in flight at once."""
        config = self.config
        if config.num_in_flight is not None:
            return config.num_in_flight
        return stages_in_flight(self.tiles.acc_size, config.num_stages)

    def _start(self, index: Any) -> Any:
        """Return the first feature of a tile, or of the one behind the last all features."""
        tiles = self.tiles
        groups = tiles.num_features // FEATURE_MULTIPLE
        return (
            _spread(index, tiles.count, groups, tiles.tile // FEATURE_MULTIPLE) * FEATURE_MULTIPLE
        )

    @property
    def feature(self) -> Any:
        """The first feature of the tile."""
        if self.is_pair:
            return self._start(self.cluster * self.config.cluster_size + self.rank)
        return self._start(self.cluster)

    def own(self) -> tuple[Any, Any]:
        """Return the features whose sums this program has, and the number no other program has."""
        groups, width = part_groups(self.tiles, self.config.cluster_size)
        first, after = (
            _spread(self.rank + i, self.config.cluster_size, groups, width) * FEATURE_MULTIPLE
            for i in range(2)
        )
        of_tile = self._start(self.cluster + 1) - self.feature
        return pl.ds(self.feature + first, width * FEATURE_MULTIPLE), jnp.minimum(
            after, of_tile
        ) - first

    def copies(self, stage: Any) -> Iterator[tuple[Any, Any]]:
        """Yield rows of a ring's stage and the ref to copy there, `COPIES_PER_STAGE` times."""
        tiles, size = self.tiles, self.tiles.acc_size
        step, acc = lax.div(stage, tiles.num_accs), lax.rem(stage, tiles.num_accs)
        columns = pl.ds(
            self.first_column + step * (BLOCKS_PER_STAGE * COLUMNS_PER_BLOCK),
            BLOCKS_PER_STAGE * COLUMNS_PER_BLOCK,
        )
        if self.is_pair and tiles.num_accs == 1:
            for i in range(COPIES_PER_STAGE):
                to = pl.ds(i * tiles.tile, tiles.tile)
                yield to, self.weight.at[pl.ds(self.feature, tiles.tile), i, columns]
            return
        weight, feature = self.weight, self.feature
        if self.is_pair:
            weight = weight.at[:, acc]
        else:
            feature = feature + acc * size
        half = pl.cdiv(size, COPIES_PER_STAGE * FEATURE_MULTIPLE) * FEATURE_MULTIPLE
        for first in range(0, size, half):
            rows = min(half, size - first)
            yield pl.ds(first, rows), weight.at[pl.ds(feature + first, rows), columns]


def _spread(index: Any, count: int, total: int, width: int) -> Any:
    """Return where one of `count` equal intervals starts that cover `total`, perhaps overlapping.

    That of index `count` is `total`.
    """
    if count == 1:
        return index * total
    start = lax.div(index * (total - width), count - 1)
    return jnp.where(index < count, start, total)
