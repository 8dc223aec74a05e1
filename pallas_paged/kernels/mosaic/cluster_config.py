"""Configs of the Mosaic kernel between two attentions of several rows, on clusters of programs.

Importing this module does not import Mosaic.
"""

from __future__ import annotations

import dataclasses

MAX_ROWS = 64  # of wgmma's first operand
BLOCK = 64  # columns of a block of activations, 8 KB for 64 rows
COPIES = 4  # of weights for each stage
_RING_BYTES = 224 * 1024  # of both rings


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterTiles:
    """How a product is cut into work items.

    Attributes:
        tile: features of an item; pairs of gate and up.
        num_accs: accumulators into which they are cut; pairs have two.
        blocks: blocks of 64 columns of a stage.
    """

    tile: int
    num_accs: int
    blocks: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterRowsConfig:
    """How the kernel runs. Results differ by rounding only.

    Attributes:
        num_clusters: all of which are on the device at once, for programs wait for one another.
        cluster_size: programs of a cluster, which share the columns of a product.
        o, gate_up, down, qkv: tiles of the products.
        stage_features: rows of a stage of weights, 64 columns each.
        num_stages: of weights in shared memory.
        num_x_stages: blocks of activations there.
        num_in_flight: stages of weights on their way at once.
        share_x: copies of the activations of gate and up go to all programs of a cluster.
    """

    num_clusters: int
    cluster_size: int
    o: ClusterTiles
    gate_up: ClusterTiles
    down: ClusterTiles
    qkv: ClusterTiles
    stage_features: int
    num_stages: int
    num_x_stages: int = 4
    num_in_flight: int = 2
    share_x: bool = False
    groups: int = 1

    @property
    def num_programs(self) -> int:
        return self.num_clusters * self.cluster_size


def cluster_rows_config(
    *,
    size: int,
    attended_size: int,
    hidden_size: int,
    out_size: int,
    num_clusters: int = 32,
    cluster_size: int = 4,
    kb_in_flight: int = 64,
    num_x_stages: int = 4,
    share_x: bool = False,
    groups: int = 1,
) -> ClusterRowsConfig | None:
    """Return the config for weights of these sizes, or None where the kernel can't do them."""
    num_programs = num_clusters * cluster_size
    pairs = _pair_tile(hidden_size, num_programs)
    # Interpreted, one program has all features of a product as its tile.
    for stage_features in (128, 256) if cluster_size > 1 else (max(size, out_size, 256),):
        tiles = [
            _split_tiles(n, k, stage_features, num_x_stages // 2, num_clusters, cluster_size)
            for n, k in (
                (size, attended_size),
                (size, hidden_size),
                (out_size or size, size),
            )
        ]
        if pairs is None or 2 * pairs > stage_features or None in tiles or size % BLOCK:
            continue
        o, down, qkv = tiles
        # Sums use the activations' part of shared memory, and the last ones that of the weights.
        if cluster_size > 1 and size // num_clusters * 64 * 4 > num_x_stages * 8192:
            continue
        num_stages = (_RING_BYTES - num_x_stages * 8192) // (stage_features * BLOCK * 2)
        return ClusterRowsConfig(
            num_clusters=num_clusters,
            cluster_size=cluster_size,
            o=o,
            gate_up=ClusterTiles(tile=pairs, num_accs=2, blocks=2 if 4 * pairs <= stage_features else 1),
            down=down,
            qkv=qkv,
            stage_features=stage_features,
            num_stages=max(num_stages, 2),
            num_x_stages=num_x_stages,
            share_x=share_x,
            groups=groups,
            num_in_flight=max(kb_in_flight * 1024 // (stage_features * BLOCK * 2), 1),
        )
    return None


def _pair_tile(num_pairs: int, num_programs: int) -> int | None:
    """Return the tile with which programs have equally many pairs of gate and up."""
    fits = [n for n in range(16, 129, 16) if num_pairs % n == 0]

    def time(n: int) -> tuple[int, int]:
        rounds = -(-(num_pairs // n) // num_programs)
        return rounds * n, rounds

    return min(fits, key=time, default=None)


def _split_tiles(
    num_features: int,
    num_columns: int,
    stage_features: int,
    max_blocks: int,
    num_clusters: int,
    cluster_size: int,
) -> ClusterTiles | None:
    if num_features % (8 * cluster_size * num_clusters):
        return None
    tile = num_features // num_clusters
    num_accs = 1 if tile <= 128 or cluster_size == 1 else 2
    most = min(stage_features // tile, max_blocks, COPIES // num_accs)
    blocks = next((n for n in (4, 2, 1) if n <= most), 1)
    copies_per_acc = COPIES // (num_accs * blocks)
    fits = (
        tile <= stage_features
        and tile % (8 * num_accs * copies_per_acc) == 0
        and tile // num_accs % (tile // cluster_size) == 0
        and num_columns % (cluster_size * blocks * BLOCK) == 0
    )
    return ClusterTiles(tile=tile, num_accs=num_accs, blocks=blocks) if fits else None
