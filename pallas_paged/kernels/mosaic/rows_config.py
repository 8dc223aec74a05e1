"""Configs of the Mosaic kernel between two attentions of several rows.

Importing this module does not import Mosaic.
"""

from __future__ import annotations

import dataclasses

ROWS_TILE = 256  # features of a stage, at most
MAX_ROWS = 64  # of wgmma's first operand


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProductTiles:
    """How a product of several rows is cut into work items.

    Attributes:
        tile: features of an item, at most 256; pairs of gate and up, at most 128.
        splits: parts of the columns.
    """

    tile: int
    splits: int = 1

    def num_accs(self, *, is_pair: bool) -> int:
        """Return into how many accumulators of at most 128 features a tile is cut."""
        return 2 if is_pair or self.tile > 128 else 1

    def blocks_per_stage(self, *, is_pair: bool) -> int:
        """Return how many blocks of 64 columns a stage of weights has: 1, 2 or 4."""
        features = self.tile * (2 if is_pair else 1)
        most = min(ROWS_TILE // features, 4 // self.num_accs(is_pair=is_pair))
        return 4 if most == 4 else 2 if most >= 2 else 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderRowsConfig:
    """How the kernel between two attentions of several rows runs. Results differ by rounding only.

    Attributes:
        num_programs: no more than there are SMs, for they wait for one another.
        o, gate_up, down, qkv: tiles of the products.
        num_chunks: into which a row is cut where partial sums are added up.
        num_stages: blocks of weights in shared memory, 32 KB each.
        num_x_stages: blocks of activations there, 8 KB each.
        num_in_flight: blocks of weights on their way at once.
    """

    num_programs: int
    o: ProductTiles
    gate_up: ProductTiles
    down: ProductTiles
    qkv: ProductTiles
    num_chunks: int = 1
    num_stages: int = 6
    num_x_stages: int = 4
    num_in_flight: int = 2

    def __post_init__(self) -> None:
        pairs = [(tiles, tiles is self.gate_up) for tiles in self.products]
        most = max(tiles.blocks_per_stage(is_pair=is_pair) for tiles, is_pair in pairs)
        if self.num_x_stages < most:
            raise ValueError(f"num_x_stages={self.num_x_stages} must be at least {most}")

    @property
    def products(self) -> tuple[ProductTiles, ...]:
        return self.o, self.gate_up, self.down, self.qkv


def decoder_rows_config(
    *,
    num_rows: int,
    size: int,
    attended_size: int,
    hidden_size: int,
    out_size: int,
    num_programs: int,
) -> DecoderRowsConfig | None:
    """Return the config for weights of these sizes, or None where the kernel can't do them.

    Args:
        num_rows: a multiple of 8, at most 64.
        size, attended_size, hidden_size, out_size, num_programs: as in `decoder_block_config`.
    """
    shapes = (
        (size, attended_size, False),
        (hidden_size, size, True),
        (size, hidden_size, False),
        (out_size or size, size, False),
    )
    products = [
        _product_tiles(*shape, num_rows=num_rows, num_programs=num_programs) for shape in shapes
    ]
    o, gate_up, down, qkv = products
    if o is None or gate_up is None or down is None or qkv is None:
        return None
    # Threads have one, two or four elements of a chunk at once.
    chunks = [
        n for n in (16, 8, 4, 2, 1) if size % (256 * n) == 0 and (out_size or size) % (128 * n) == 0
    ]
    if not chunks:
        return None
    used = products if out_size else products[:3]
    num_items = max(
        shape[0] // tiles.tile * tiles.splits
        for shape, tiles in zip(shapes, used, strict=False)
        if tiles is not None
    )
    return DecoderRowsConfig(
        num_programs=min(num_programs, num_items),
        o=o,
        gate_up=gate_up,
        down=down,
        qkv=qkv,
        num_chunks=next((n for n in chunks if n * num_rows <= num_programs), 1),
    )


def _product_tiles(
    num_features: int, num_columns: int, is_pair: bool, *, num_rows: int, num_programs: int
) -> ProductTiles | None:
    """Return the tiles of the least estimated time. The estimate was not compared with times."""

    def time(tiles: ProductTiles) -> float:
        """Estimate a time, in units of that of a byte that a program reads from device memory."""
        width = 2 if is_pair else 1
        num_items = num_features // tiles.tile * tiles.splits
        columns = num_columns // tiles.splits
        weights = -(-num_items // num_programs) * tiles.tile * width * columns * 2
        # What goes through the L2 cache: the weights, activations for each item, partial sums.
        sums = 4 * num_rows * num_features * tiles.splits * (tiles.splits > 1)
        total = num_features * width * num_columns * 2 + num_items * num_rows * columns * 2
        start = 20_000 * -(-num_items // num_programs)  # of an item, the first ones of its copies
        return max(weights, (total + 2 * sums) / num_programs / 1.4) + sums / num_programs + start

    fits = []
    for splits in (1, 2, 4, 8, 16):
        for tile in range(16, (128 if is_pair else 256) + 1, 8):
            tiles = ProductTiles(tile=tile, splits=splits)
            blocks = tiles.blocks_per_stage(is_pair=is_pair)
            copies_per_acc = 4 // (tiles.num_accs(is_pair=is_pair) * blocks)
            acc_size = tile if is_pair else tile // tiles.num_accs(is_pair=is_pair)
            if (
                num_features % tile == 0
                and num_columns % (64 * blocks * splits) == 0
                and tile % (8 * copies_per_acc) == 0
                and acc_size % (8 * copies_per_acc) == 0
                and (splits == 1 or not is_pair)
                and blocks <= 2
            ):
                fits.append(tiles)
    return min(fits, key=time, default=None)
