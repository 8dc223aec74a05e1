"""Configs of the Mosaic kernel between two attentions of several rows.

Importing this module does not import Mosaic.
"""

from __future__ import annotations

import dataclasses

MAX_ROWS = 64  # of wgmma's first operand
BLOCK = 64  # columns of a block
COPIES = 2  # of weights for each stage
GROUP = 8  # features, of which tiles have a number
_MAX_TILE = 256
_RING_BYTES = 224 * 1024  # of both rings
_BYTES_IN_FLIGHT = 72 * 1024
_MAX_STAGES = 16  # Mosaic takes 32 barriers at most


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProductTiles:
    """How the features of a product are cut into equal tiles, which overlap.

    Attributes:
        num_features: of the weight; pairs of gate and up.
        tile: features of a tile.
        count: of the tiles.
        num_accs: accumulators for a tile; pairs have two.
        blocks: blocks of 64 columns of a stage.
    """

    num_features: int
    tile: int
    count: int
    num_accs: int
    blocks: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderRowsConfig:
    """How the kernel runs. Results differ by rounding only.

    Attributes:
        num_clusters: all of which are on the device at once, for programs wait for one another.
        cluster_size: programs of a cluster, which share the columns of a product; a power of 2.
        o, gate_up, down, qkv: tiles of the products.
        stage_features: rows of a stage of weights, 64 columns each.
        num_stages: of weights in shared memory.
        num_x_stages: blocks of activations there.
        num_in_flight: stages of weights on their way at once.
        share_x: copies of the activations of gate and up go to all programs of a cluster.
    """

    num_clusters: int
    cluster_size: int
    o: ProductTiles
    gate_up: ProductTiles
    down: ProductTiles
    qkv: ProductTiles
    stage_features: int
    num_stages: int
    num_x_stages: int
    num_in_flight: int
    share_x: bool

    @property
    def num_programs(self) -> int:
        return self.num_clusters * self.cluster_size


def decoder_rows_config(
    *,
    size: int,
    attended_size: int,
    hidden_size: int,
    out_size: int,
    num_rows: int,
    num_clusters: int,
    cluster_size: int = 4,
    num_x_stages: int | None = None,
) -> DecoderRowsConfig | None:
    """Return the config for weights of these sizes, or None where the kernel can't do them.

    Args:
        size, attended_size, hidden_size, out_size: as in `decoder_block_config`.
        num_rows: a multiple of 8.
        num_clusters, cluster_size: as in `DecoderRowsConfig`.
        num_x_stages: None: as many as sums need, and not less than 5.
    """
    if any(n % (BLOCK * cluster_size) for n in (size, attended_size, hidden_size)):
        return None
    o, down = (
        _product_tiles(size, num_clusters, 1 if columns % (2 * BLOCK * cluster_size) else 2)
        for columns in (attended_size, hidden_size)
    )
    qkv = _product_tiles(out_size or size, num_clusters, 1)
    gate_up = _product_tiles(hidden_size, num_clusters * cluster_size, 1, is_pair=True)
    if o is None or down is None or qkv is None or gate_up is None:
        return None
    if cluster_size > 1 and max(o.tile, down.tile, qkv.tile, 2 * gate_up.tile) > _MAX_TILE:
        return None
    stage_features = max(2 * gate_up.tile, *(x.tile * x.blocks for x in (o, down, qkv)))
    # Sums use the activations' part of shared memory, and the last ones that of the weights.
    most = max(sum_bytes(x, cluster_size) for x in (o, down))
    needed = 0 if cluster_size == 1 else -(-most // 8192)
    num_x_stages = num_x_stages or max(needed, 5)
    if needed > num_x_stages:
        return None
    stage_bytes = stage_features * BLOCK * 2
    num_stages = min((_RING_BYTES - num_x_stages * 8192) // stage_bytes, _MAX_STAGES)
    return DecoderRowsConfig(
        num_clusters=num_clusters,
        cluster_size=cluster_size,
        o=o,
        gate_up=gate_up,
        down=down,
        qkv=qkv,
        stage_features=stage_features,
        num_stages=max(num_stages, 2),
        num_x_stages=num_x_stages,
        num_in_flight=max(min(_BYTES_IN_FLIGHT // stage_bytes, num_stages), 1),
        share_x=cluster_size > 1 and num_rows % (8 * cluster_size) == 0,
    )


def clusters_at_once(num_sms: int) -> int:
    """Return how many clusters of 4 programs are on a Hopper GPU at once, at least, one on each SM.

    A cluster is within one of 8 processing clusters, whose numbers of SMs are even and differ from
    card to card: at most 2 of each are left. An H200 with 132 SMs had 30 clusters of 4, and not 33.
    """
    return max((num_sms - 2 * 8) // 4, 1)


def part_groups(tiles: ProductTiles, cluster_size: int) -> tuple[int, int]:
    """Return the groups of 8 features of a tile, and of the part of each program of a cluster."""
    groups = tiles.tile // GROUP
    return groups, -(-groups // cluster_size)


def sum_bytes(tiles: ProductTiles, cluster_size: int) -> int:
    """Return the shared memory in which a program gets sums of the others, 64 rows in f32."""
    return part_groups(tiles, cluster_size)[1] * cluster_size * GROUP * MAX_ROWS * 4


def _product_tiles(
    num_features: int, count: int, blocks: int, *, is_pair: bool = False
) -> ProductTiles | None:
    """Return equal tiles of the features."""
    tile = -(-num_features // (GROUP * count)) * GROUP
    # A weight of one block in a stage comes as two copies, a wide tile has two accumulators.
    if not is_pair and (blocks == 1 or tile > 128):
        tile = -(-tile // (2 * GROUP)) * 2 * GROUP
    num_accs = 2 if is_pair or (tile > 128 and count > 1) else 1
    if num_features % GROUP or tile > num_features:
        return None
    return ProductTiles(
        num_features=num_features, tile=tile, count=count, num_accs=num_accs, blocks=blocks
    )
