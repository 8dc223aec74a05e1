"""Config of the Mosaic kernel between two attentions of several rows.

Importing this module does not import Mosaic.
"""

from __future__ import annotations

import dataclasses

GROUP_ROWS = 64  # of wgmma's first operand
_MAX_PART = 2 * GROUP_ROWS
MAX_ROWS = 2 * _MAX_PART
COLUMNS_PER_BLOCK = 64  # of activations, as in wgmma's tiles
BLOCKS_PER_STAGE = 2  # of weights: copies of 256 bytes of a row are faster
COPIES_PER_STAGE = 2  # of weights
GROUP_BYTES = GROUP_ROWS * 8 * 2  # of 64 rows and 8 features
FEATURE_MULTIPLE = 8  # the features of a tile are a multiple
# Features of a tile, and of an accumulator, for registers. Those of accumulators are tried in turn.
_MAX_TILE = 304
_MAX_ACCS = (160, 80)
_RING_BYTES = 224 * 1024  # of both rings
_BYTES_IN_FLIGHT = 80 * 1024
_SMALL = 1024  # size of the residual
_MAX_STAGES = 16  # Mosaic takes 32 barriers at most


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProductTiles:
    """Division of the features of a product into equal tiles, which overlap."""

    num_features: int  # features of the weight; pairs of gate and up
    tile: int  # features of a tile
    count: int  # number of tiles
    is_pair: bool  # whether the weight is gate and up of the same features
    num_accs: int  # accumulators for a tile, each with stages of its own

    @property
    def acc_size(self) -> int:
        """Features of an accumulator; gate, then up, if pairs have only one."""
        return self.tile * (2 if self.is_pair else 1) // self.num_accs


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderBatchConfig:
    """Sizes of tiles, rings and clusters. Results of other configs differ by rounding only."""

    num_parts: int  # equal parts of the rows, each with its own clusters
    num_consumers: int  # warpgroups that multiply, each 64 rows of a part
    # Clusters of a part. All must be on the device at once: programs wait for one another.
    num_clusters: int
    cluster_size: int  # programs of a cluster, which share the columns of a product; a power of 2
    o: ProductTiles  # tiles of the products
    gate_up: ProductTiles
    down: ProductTiles
    qkv: ProductTiles
    # Rows of a stage of weights, `BLOCKS_PER_STAGE * COLUMNS_PER_BLOCK` columns each.
    stage_features: int
    num_stages: int  # of weights in shared memory
    num_x_stages: int  # blocks of activations there
    # Stages of weights in flight at once; None: 80 KB of each product, whose stages may be smaller.
    num_in_flight: int | None

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a thread that multiplies, and of one that sends."""
        return (240, 96) if self.num_consumers == 1 else (200, 56)

    @property
    def num_programs(self) -> int:
        """Programs of a part of the rows."""
        return self.num_clusters * self.cluster_size

    @property
    def sum_bytes(self) -> int:
        """Bytes that a device sends to another for a sum over devices, see `device_sums`."""
        groups = part_groups(self.o, self.cluster_size)[1]
        return self.num_parts * self.num_programs * self.num_consumers * groups * GROUP_BYTES


def decoder_batch_config(
    *,
    size: int,
    attended_size: int,
    hidden_size: int,
    out_size: int,
    num_rows: int,
    num_clusters: int,
    cluster_size: int,
    num_x_stages: int | None = None,
    num_parts: int | None = None,
) -> DecoderBatchConfig | None:
    """Return the config for weights of these sizes, or None where the kernel can't do them.

    Args:
        size, attended_size, hidden_size, out_size: as in `decoder_block_config`.
        num_rows: a multiple of 8 up to 64, and of 16 up to 256.
        num_clusters: clusters on the device at once. The config has fewer if tiles then have the
            same size, since they read less.
        cluster_size: as in `DecoderBatchConfig`.
        num_x_stages: None: enough for sums, and at least 5, or 6 with two consumers, or 8 for small
            models.
        num_parts: None: 2 for more than 128 rows, and for more than 64 of small models, for which
            half as many tiles that are twice as wide are faster.
    """
    if num_parts is None:
        num_parts = 2 if num_rows > (GROUP_ROWS if size <= _SMALL else _MAX_PART) else 1
    num_clusters = max(num_clusters // num_parts, 1)
    if cluster_size > 1:
        num_clusters = _fewest_clusters(
            num_clusters, cluster_size, size, hidden_size, out_size or size
        )
    if any(
        n % (BLOCKS_PER_STAGE * COLUMNS_PER_BLOCK * cluster_size)
        for n in (size, attended_size, hidden_size)
    ):
        return None
    num_consumers = -(-(num_rows // num_parts) // GROUP_ROWS)
    for max_acc in _MAX_ACCS:
        o = down = _product_tiles(size, num_clusters, max_acc)
        qkv = _product_tiles(out_size or size, num_clusters, max_acc)
        gate_up = _product_tiles(hidden_size, num_clusters * cluster_size, max_acc, is_pair=True)
        if o is None or down is None or qkv is None or gate_up is None:
            continue
        products = o, gate_up, down, qkv
        if cluster_size > 1 and max(x.acc_size * x.num_accs for x in products) > _MAX_TILE:
            continue
        stage_features = max(x.acc_size for x in products)
        # Sums use the activations' part of shared memory, and the last ones that of the weights.
        most = max(_sum_bytes(x, cluster_size) for x in (o, down))
        needed = 0 if cluster_size == 1 else -(-most // 8192)
        is_small = size <= _SMALL and num_consumers == 1
        num_x = num_x_stages or max(needed, 8 if is_small else 4 + num_consumers)
        stage_bytes = stage_features * BLOCKS_PER_STAGE * COLUMNS_PER_BLOCK * 2
        x_bytes = num_consumers * num_x * 8192
        num_stages = max(min((_RING_BYTES - x_bytes) // stage_bytes, _MAX_STAGES), 2)
        last_sums = 0 if cluster_size == 1 else num_consumers * _sum_bytes(qkv, cluster_size)
        # Measured on an H200, 2026-11-23: more copies of narrow tiles slow others by up to 1.4%.
        in_flight = None
        if size > _SMALL and num_consumers == 1:
            in_flight = stages_in_flight(stage_features, num_stages)
        if needed <= num_x and last_sums <= num_stages * stage_bytes:
            return DecoderBatchConfig(
                num_parts=num_parts,
                num_consumers=num_consumers,
                num_clusters=num_clusters,
                cluster_size=cluster_size,
                o=o,
                gate_up=gate_up,
                down=down,
                qkv=qkv,
                stage_features=stage_features,
                num_stages=num_stages,
                num_x_stages=num_x,
                num_in_flight=in_flight,
            )
    return None


def stages_in_flight(features: int, num_stages: int) -> int:
    """Return the number of stages of this size that are in flight at once."""
    return max(
        min(_BYTES_IN_FLIGHT // (features * BLOCKS_PER_STAGE * COLUMNS_PER_BLOCK * 2), num_stages),
        1,
    )


def _fewest_clusters(num_clusters: int, cluster_size: int, size: int, hidden: int, out: int) -> int:
    """Return the smallest cluster count with the same tile size."""

    def groups(num_clusters: int) -> list[int]:
        counts = (size, num_clusters), (out, num_clusters), (hidden, num_clusters * cluster_size)
        return [-(-num_features // (FEATURE_MULTIPLE * count)) for num_features, count in counts]

    step = max(4 // cluster_size, 1)  # sums of squares of 4 programs are added up at a time
    num_clusters -= num_clusters % step
    while num_clusters > step and groups(num_clusters - step) == groups(num_clusters):
        num_clusters -= step
    return num_clusters


def clusters_at_once(num_sms: int, num_rows: int) -> tuple[int, int]:
    """Return the least number of clusters on a Hopper GPU at once, and the programs of each.

    Smaller clusters exchange fewer sums, which take long with many rows. Each program has an SM. A
    cluster is within one of 8 processing clusters, whose numbers of SMs are even and differ from
    card to card: of clusters of 4, at most 2 SMs of each are left. An H200 with 132 SMs had 30 of
    them, and not 33.
    """
    if num_rows > GROUP_ROWS:
        return num_sms // 2, 2
    return max((num_sms - 2 * 8) // 4, 1), 4


def part_groups(tiles: ProductTiles, cluster_size: int) -> tuple[int, int]:
    """Return the groups of 8 features of a tile, and of the part of each program of a cluster."""
    groups = tiles.tile // FEATURE_MULTIPLE
    return groups, -(-groups // cluster_size)


def _sum_bytes(tiles: ProductTiles, cluster_size: int) -> int:
    """Return the bytes of the receive buffer per 64 rows."""
    return part_groups(tiles, cluster_size)[1] * cluster_size * FEATURE_MULTIPLE * GROUP_ROWS * 4


def _product_tiles(
    num_features: int, count: int, max_acc: int, *, is_pair: bool = False
) -> ProductTiles | None:
    """Return equal tiles of the features."""
    tile = -(-num_features // (FEATURE_MULTIPLE * count)) * FEATURE_MULTIPLE
    num_accs = 2 if count > 1 and tile * (2 if is_pair else 1) > max_acc else 1
    if not is_pair and num_accs == 2:
        tile = -(-tile // (2 * FEATURE_MULTIPLE)) * 2 * FEATURE_MULTIPLE
    if not is_pair or num_accs == 2:
        tile = max(tile, 2 * FEATURE_MULTIPLE)  # a stage comes as two copies
    if num_features % FEATURE_MULTIPLE or tile > num_features:
        return None
    return ProductTiles(
        num_features=num_features, tile=tile, count=count, is_pair=is_pair, num_accs=num_accs
    )
