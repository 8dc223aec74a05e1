"""Plan of a ragged call: the keys of its tiles, split into work items.

The GPU kernels share this plan. It is computed on the device, from the lengths of the moment, with
static shapes: one compiled program serves all lengths.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_paged.checks import pytree
from pallas_paged.kernels.call import Arrays
from pallas_paged.kernels.logits import LogitOptions
from pallas_paged.kernels.ragged_tiles import Tiles, Tiling, cdiv, div, make_tiles
from pallas_paged.pages.prefix_sums import prefix_sums

# Cost of one more work item of a tile, in blocks: a partial state is written and read again.
_SPLIT_COST = 2.0
# Candidates for the longest item, relative to an even share of all blocks: fine steps where the
# items make one wave of programs, coarse ones around.
_SHARES = (-2, -1.5, -1, -0.5, *(i / 16 for i in range(17)), 1.5, 2)  # log2


def candidates(num_programs: int) -> list[float]:
    """Return candidates for the longest item in units of all blocks; 0 splits nothing."""
    return [float(np.float32(2.0**i / num_programs)) for i in _SHARES] + [0.0]


@pytree
class Plan:
    """Work items, one for each program, and the split tiles that the merge merges.

    A work item is a tile with all of its blocks of keys or, where the tile is split, with some of
    them. The items of a split tile are consecutive, and so are their partial states.
    """

    items: Tiles  # i32`[num_items]` fields, the tile of each item with the item's own `lo` and `hi`
    # i32`[num_items]`, index of the item's partial state; -1 where the item is all of its tile.
    partial: jax.Array
    first_item: jax.Array  # i32`[num_merges]`, the first item of each split tile
    num_items: jax.Array  # i32`[num_merges]`, items of that tile; 0 past the last split tile
    # Partial states for which there is room.
    num_partials: int = dataclasses.field(metadata={"static": True})


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanShape(Tiling):
    """Static sizes of a plan."""

    num_seqs: int  # of the call
    num_tokens: int  # of the call
    max_kv_len: int  # of the call
    num_programs: int  # programs that run at the same time
    fixed_split_size: int | None  # None, or keys after which a sequence of one tile is split

    @classmethod
    def of(cls, arrays: Arrays, config: Any, options: LogitOptions, **sizes: int) -> PlanShape:
        """Return the sizes of a call with a config of any family, which may have `sizes` itself."""
        of_config = {"group": arrays.group, "block_q": config.block_q}
        return cls(
            num_seqs=arrays.num_seqs,
            num_tokens=arrays.q.shape[0],
            max_kv_len=arrays.max_kv_len,
            block_k=config.block_k,
            options=options,
            has_tree=arrays.tree_mask is not None,
            fixed_split_size=config.fixed_split_size,
            **(of_config | sizes),
        )

    @property
    def num_tiles(self) -> int:
        """Tiles for which there is room."""
        return self.most_tiles(self.num_seqs, self.num_tokens)

    @property
    def num_merges(self) -> int:
        """Split tiles for which there is room."""
        most = self.num_programs
        if self.fixed_split_size is not None:  # a sequence may begin within a tile
            most = self.num_seqs * (1 if self.align == 1 else 2)
        return min(most, self.num_tiles)

    @property
    def num_extra(self) -> int:
        """Work items for which there is room beyond one for each tile."""
        if self.fixed_split_size is None:
            return self.num_programs
        most = self.num_seqs * (1 if self.align == 1 else 2)
        return most * (-(-self.max_kv_len // self.fixed_split_size) - 1)

    @property
    def num_items(self) -> int:
        """Work items for which there is room."""
        return self.num_tiles + self.num_extra

    @property
    def num_partials(self) -> int:
        """Partial states for which there is room."""
        return self.num_extra + self.num_merges


@pytree
class Split:
    """Splits of the keys of each tile into work items, i32 but for the last."""

    step: jax.Array  # blocks of a work item
    # Work items of the tile; at least 1 if it has queries, since a program must write the zeros of
    # one that sees no key.
    count: jax.Array
    origin: jax.Array  # the block where the first item begins, or before it
    has_partials: jax.Array  # bool, whether the items leave partial states

    @classmethod
    def of(cls, tiles: Tiles, shape: PlanShape, shares: jax.Array) -> Split:
        """Split all tiles where that ends the call earlier, or at a fixed size.

        The shares f32`[K]` are `candidates`, in a kernel with more zeros.
        """
        blocks = tiles.hi - tiles.lo
        if shape.fixed_split_size is None:
            longest = _longest_item(blocks, shape.num_programs, shape.num_extra, shares)
            counts = cdiv(blocks, longest)
            step = cdiv(blocks, jnp.maximum(counts, 1))  # even items
            counts, origin = cdiv(blocks, jnp.maximum(step, 1)), tiles.lo
        else:
            # Only a sequence whose queries are one tile is split. A longer one has work for several
            # programs, and its partial states would take too much memory. Either way the split of a
            # sequence depends on that sequence alone.
            alone = tiles.q_len <= shape.block_q // shape.group
            fixed = shape.fixed_split_size // shape.block_k
            step = jnp.where(alone, fixed, jnp.maximum(tiles.hi, 1))
            # Split at multiples of the split size from key 0, not from the first key that the tile
            # sees, which depends on the other queries in the tile.
            first = div(tiles.lo, step)
            counts, origin = cdiv(tiles.hi, step) - first, first * step
        counts = jnp.where(tiles.q_len > 0, jnp.maximum(counts, 1), 0)
        has_partials = counts > 1
        if shape.fixed_split_size is not None and shape.align > 1:
            # A row must be rounded in the same way whether its tile is split or not, because in
            # another batch another tile may hold it.
            has_partials |= alone & (tiles.q_len > 0) & (tiles.kv_len > 0)
        return cls(step=step, count=counts, origin=origin, has_partials=has_partials)


def make_plan(
    seq_lens: jax.Array,  # i32[B]
    cu_q_lens: jax.Array,  # i32[B + 1], rising, within [0, T]
    q_positions: jax.Array | None,  # i32[T]; None: the newest q_len positions of the row
    shape: PlanShape,
) -> Plan:
    """Return the plan of a call."""
    num_tiles, num_merges = shape.num_tiles, shape.num_merges
    tiles = make_tiles(seq_lens, cu_q_lens, q_positions, shape.num_tokens, shape)
    tiles = lax.optimization_barrier(tiles)  # else XLA computes them again for every candidate
    split = Split.of(tiles, shape, jnp.array(candidates(shape.num_programs), jnp.float32))
    counts, has_partials = split.count, split.has_partials
    sums = jnp.stack([counts, jnp.where(has_partials, counts, 0), has_partials.astype(jnp.int32)])
    ends, partial_ends, ranks = prefix_sums(lax.optimization_barrier(sums))
    item = jnp.arange(shape.num_items)
    tile = jnp.searchsorted(ends, item, side="right", method="compare_all")
    exists, tile = tile < num_tiles, jnp.minimum(tile, num_tiles - 1)
    index = item - (ends - counts)[tile]
    items = item_of(
        exists, jax.tree.map(lambda x: x[tile], tiles), index, split.origin[tile], split.step[tile]
    )
    partial = (partial_ends - ends)[tile] + item
    where = jnp.where(has_partials, ranks - 1, num_merges)
    none = jnp.zeros(num_merges, jnp.int32)
    return Plan(
        items=items,
        partial=jnp.where(exists & has_partials[tile], partial, -1),
        first_item=none.at[where].set(ends - counts, mode="drop"),
        num_items=none.at[where].set(counts, mode="drop"),
        num_partials=shape.num_partials,
    )


def item_of(
    exists: jax.Array, tile: Tiles, index: jax.Array, origin: jax.Array, step: jax.Array
) -> Tiles:
    """Return work item number `index` of a tile, `origin` and `step` as in `Split`."""
    lo = origin + index * step
    hi = jnp.where(exists, jnp.minimum(lo + step, tile.hi), lo)
    lo = jnp.clip(lo, tile.lo, hi)
    return dataclasses.replace(
        tile,
        q_len=jnp.where(exists, tile.q_len, 0),
        lo=lo,
        hi=hi,
        full_lo=jnp.clip(tile.full_lo, lo, hi),
        full_hi=jnp.clip(tile.full_hi, lo, hi),
    )


def _longest_item(blocks: jax.Array, num_programs: int, extra: int, shares: jax.Array) -> jax.Array:
    """Return the length i32[], in blocks, of the longest work item with which work ends earliest.

    `num_programs` items run at the same time; at most `extra` items more than tiles are made.
    """
    blocks = blocks.astype(jnp.float32)  # exact, and i32 sums might overflow
    total, most = jnp.sum(blocks), jnp.maximum(jnp.max(blocks), 1.0)
    longest = jnp.where(shares > 0, jnp.maximum(jnp.ceil(total * shares), 1.0), most)
    column = blocks[:, None]
    counts = jnp.ceil(column * (1.0 / longest))  # [tiles, candidates], rounding corrected below
    counts += jnp.where(counts * longest < column, 1.0, 0.0)
    counts -= jnp.where((counts - 1.0) * longest >= column, 1.0, 0.0)
    num_items = jnp.sum(counts, axis=0)
    further = num_items - jnp.sum(jnp.where(blocks > 0, 1.0, 0.0))
    waves = cdiv(jnp.minimum(num_items, 2.0**24).astype(jnp.int32), num_programs)
    mean = total / jnp.maximum(num_items, 1.0)
    span = jnp.maximum(waves.astype(jnp.float32) * mean, jnp.minimum(longest, most))
    span = jnp.where(further <= extra, span + _SPLIT_COST / num_programs * further, jnp.inf)
    candidate = jnp.arange(shares.size)
    best = jnp.min(jnp.where(span == jnp.min(span), candidate, shares.size))
    return jnp.max(jnp.where(candidate == best, longest, 1.0)).astype(jnp.int32)
