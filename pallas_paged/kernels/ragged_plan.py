"""Which tiles of queries a ragged call has, in which order, and how their keys are split.

The GPU kernels share this plan. It is computed on the device, from the lengths of the moment, with
static shapes: one compiled program serves all lengths.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_paged.kernels.logits import LogitOptions

# Cost of one more work item of a tile, in blocks: a partial state is written and read again.
_SPLIT_COST = 2.0
# Candidates for the longest item, relative to an even share of all blocks: fine steps where the
# items make one wave of programs, coarse ones around.
_SHARES = (-2, -1.5, -1, -0.5, *(i / 16 for i in range(17)), 1.5, 2)  # log2


def candidates(num_programs: int) -> list[float]:
    """Return candidates for the longest item in units of all blocks; 0 splits nothing."""
    return [float(np.float32(2.0**i / num_programs)) for i in _SHARES] + [0.0]


def _div(a: jax.Array, b: Any) -> jax.Array:
    """Return `a / b` rounded to 0, which takes fewer instructions than rounded down."""
    return lax.div(*jnp.broadcast_arrays(a, jnp.asarray(b, a.dtype)))


def cdiv(a: jax.Array, b: Any) -> jax.Array:
    """Return `a / b` rounded up, for `a` of at least 0."""
    return _div(a + (b - 1), b)


def _cumsum(x: jax.Array) -> jax.Array:
    """Return cumulative sums over the last axis; short ones in one kernel, not a scan's three."""
    size = x.shape[-1]
    if size > 2048:
        return jnp.cumsum(x, axis=-1)
    before = jnp.arange(size) <= jnp.arange(size)[:, None]
    return jnp.sum(jnp.where(before, x[..., None, :], 0), axis=-1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Tiles:
    """Packed query rows (token after token, within a token head after head), cut into tiles.

    A tile holds queries of one sequence. Sequences with the most keys come first, and within one
    the tiles that see the most: the last to start are the shortest. Tokens past the last sequence
    are cut up like one more sequence, without keys. Entries past the last tile have `q_len = 0`.

    Attributes (all i32`[num_tiles]`):
        row: index of the sequence; 0 for padding tiles.
        q_start, q_len: first token and number of tokens of the sequence in the packed queries.
        kv_len: keys of the sequence.
        first_key: the first key that any query of the tile sees.
        offset: first packed query row of the tile within its sequence.
        lo, hi: `[lo, hi)` holds every block of keys that any query of the tile sees.
        full_lo, full_hi: every query sees every key of the blocks `[full_lo, full_hi)`.
    """

    row: jax.Array
    q_start: jax.Array
    q_len: jax.Array
    kv_len: jax.Array
    first_key: jax.Array
    offset: jax.Array
    lo: jax.Array
    hi: jax.Array
    full_lo: jax.Array
    full_hi: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """Work items, one for each program, and what the merge unites.

    A work item is a tile with all of its blocks of keys or, where the tile is split, with some of
    them. The items of a split tile are consecutive, and so are their partial states.

    Attributes:
        items: i32`[num_items]` fields, the tile of each item with the item's own `lo` and `hi`.
        partial: i32`[num_items]`, index of the item's partial state; -1 where the item is all of
            its tile.
        first_item: i32`[num_merges]`, the first item of each split tile.
        num_items: i32`[num_merges]`, items of that tile; 0 past the last split tile.
        num_partials: partial states for which there is room. Static.
    """

    items: Tiles
    partial: jax.Array
    first_item: jax.Array
    num_items: jax.Array
    num_partials: int = dataclasses.field(metadata={"static": True})


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanShape:
    """Static sizes of a plan.

    Attributes:
        num_seqs, num_tokens, max_kv_len: sizes of the call.
        group: packed query rows of a token.
        block_q, block_k: packed query rows of a tile, and keys of a block.
        options: of the logits; only the sliding window matters here.
        has_tree: whether queries see keys by a tree mask.
        align: tiles start at multiples of it among all packed tokens. The first tile of a sequence
            may therefore begin before the sequence; those tokens have negative offsets. With
            `align > 1` the group is 1.
        num_programs: programs that run at the same time.
        fixed_split_size: None, or keys after which a sequence of one tile is split.
    """

    num_seqs: int
    num_tokens: int
    max_kv_len: int
    group: int
    block_q: int
    block_k: int
    options: LogitOptions
    has_tree: bool
    num_programs: int
    fixed_split_size: int | None
    align: int = 1

    @property
    def num_tiles(self) -> int:
        """Tiles for which there is room."""
        return _num_tiles(self.num_seqs, self.num_tokens, self.group, self.block_q, self.align)

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


def make_plan(
    seq_lens: jax.Array,  # i32[B]
    cu_q_lens: jax.Array,  # i32[B + 1], rising, within [0, T]
    q_positions: jax.Array | None,  # i32[T]; None: the newest q_len positions of the row
    shape: PlanShape,
) -> Plan:
    """Return the plan of a call."""
    tiles = make_tiles(
        seq_lens,
        cu_q_lens,
        q_positions,
        num_tokens=shape.num_tokens,
        group=shape.group,
        block_q=shape.block_q,
        block_k=shape.block_k,
        options=shape.options,
        has_tree=shape.has_tree,
        align=shape.align,
    )
    return split_tiles(tiles, shape)


def make_tiles(
    seq_lens: jax.Array,  # i32[B]
    cu_q_lens: jax.Array,  # i32[B + 1], rising, within [0, T]
    q_positions: jax.Array | None,  # i32[T]; None: the newest q_len positions of the row
    *,
    num_tokens: int,
    group: int,
    block_q: int,
    block_k: int,
    options: LogitOptions,
    has_tree: bool,
    align: int = 1,
) -> Tiles:
    """Return the tiles of a call; the arguments are as in `PlanShape`."""
    num_seqs = seq_lens.shape[0]
    num_tiles = _num_tiles(num_seqs, num_tokens, group, block_q, align)
    order = jnp.argsort(-seq_lens, stable=True)
    rows = jnp.append(order, 0)
    # The tokens that belong to no sequence come last.
    starts = jnp.append(cu_q_lens[order], cu_q_lens[-1])
    lens = jnp.append(jnp.diff(cu_q_lens)[order], num_tokens - cu_q_lens[-1])
    kv_lens = jnp.append(seq_lens[order], 0)
    lead, counts = count_tiles(starts, lens, group=group, block_q=block_q, align=align)
    ends = _cumsum(counts)

    tile = jnp.arange(num_tiles)
    rank = jnp.searchsorted(ends, tile, side="right", method="compare_all")
    exists, rank = rank <= num_seqs, jnp.minimum(rank, num_seqs)
    offset = (ends[rank] - 1 - tile) * block_q - lead[rank] * group
    q_start = starts[rank]

    def positions_of(first_token, last_token):
        tokens = first_token[:, None] + jnp.arange((block_q - 1) // group + 2)
        mine = tokens <= last_token[:, None]
        positions = q_positions.at[q_start[:, None] + tokens].get(mode="clip")
        first = jnp.min(jnp.where(mine, positions, jnp.iinfo(jnp.int32).max), axis=1)
        return first, jnp.max(jnp.where(mine, positions, 0), axis=1)

    return tile_of(
        exists,
        row=rows[rank],
        q_start=q_start,
        q_len=lens[rank],
        kv_len=kv_lens[rank],
        offset=offset,
        group=group,
        block_q=block_q,
        block_k=block_k,
        options=options,
        has_tree=has_tree,
        positions_of=None if q_positions is None else positions_of,
    )


def _num_tiles(num_seqs: int, num_tokens: int, group: int, block_q: int, align: int) -> int:
    most_seqs = min(num_seqs + 1, num_tokens)
    return (num_tokens + (align - 1) * most_seqs) * group // block_q + most_seqs


def count_tiles(start: Any, q_len: Any, *, group: int, block_q: int, align: int) -> tuple[Any, Any]:
    """Return tokens before a sequence that are in its first tile, and its number of tiles."""
    lead = jnp.where(q_len > 0, start % align, 0)
    return lead, cdiv((q_len + lead) * group, block_q)


def tile_of(
    exists: jax.Array,
    *,
    row: jax.Array,
    q_start: jax.Array,
    q_len: jax.Array,
    kv_len: jax.Array,
    offset: jax.Array,
    group: int,
    block_q: int,
    block_k: int,
    options: LogitOptions,
    has_tree: bool,
    positions_of: Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]] | None = None,
) -> Tiles:
    """Return tiles of `block_q` packed query rows with the blocks of keys that they see.

    Args:
        exists: tiles past the last one have no queries.
        positions_of: returns the least and the largest position of the queries `first_token` to
            `last_token` of each tile, whose sequence has older keys only. None if the queries are
            the newest tokens of their sequence.
        Others: as in `Tiles` and `PlanShape`.
    """
    q_len, kv_len = jnp.where(exists, q_len, 0), jnp.where(exists, kv_len, 0)
    first_token = jnp.maximum(offset // group, 0)
    last_token = jnp.minimum((offset + block_q - 1) // group, q_len - 1)
    before = kv_len - q_len  # keys older than all queries of the sequence
    if positions_of is None:
        first, last = before + first_token, before + last_token
        causal_full = before if has_tree else first + 1
        seen = kv_len if has_tree else jnp.minimum(last + 1, kv_len)
        if not options.causal:
            causal_full = seen = kv_len
    else:  # every key is older than every query
        first, last = positions_of(first_token, last_token)
        causal_full = seen = kv_len
    hi = cdiv(jnp.maximum(seen, 0), block_k)
    first_key = options.first_key(first)
    lo = jnp.minimum(_div(first_key, block_k), hi)
    full_hi = jnp.clip(_div(jnp.minimum(causal_full, kv_len), block_k), lo, hi)
    full_lo = cdiv(jnp.minimum(options.first_key(last), kv_len), block_k)
    full_lo = jnp.clip(full_lo, lo, full_hi)
    return Tiles(
        row=row,
        q_start=q_start,
        q_len=q_len,
        kv_len=kv_len,
        first_key=jnp.minimum(first_key, jnp.maximum(kv_len - 1, 0)),
        offset=jnp.where(exists, offset, 0),
        lo=lo,
        hi=jnp.where(exists, hi, lo),
        full_lo=full_lo,
        full_hi=full_hi,
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Split:
    """How the keys of each tile are split into work items, i32 but for the last.

    Attributes:
        step: blocks of a work item.
        count: work items of the tile; at least 1 if it has queries, since a program must write the
            zeros of one that sees no key.
        origin: the block where the first item begins, or before it.
        has_partials: bool, whether the items leave partial states.
    """

    step: jax.Array
    count: jax.Array
    origin: jax.Array
    has_partials: jax.Array

    @classmethod
    def of(cls, tiles: Tiles, shape: PlanShape, shares: jax.Array) -> Split:
        """Split tiles where that ends the call earlier, or at a fixed size.

        Args:
            tiles: all tiles.
            shape: of the plan.
            shares: f32`[K]`, `candidates`, in a kernel with more zeros.
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
            # Cut at multiples of the split size from key 0, not from the first key that the tile
            # sees, which depends on the other queries in the tile.
            first = _div(tiles.lo, step)
            counts, origin = cdiv(tiles.hi, step) - first, first * step
        counts = jnp.where(tiles.q_len > 0, jnp.maximum(counts, 1), 0)
        has_partials = counts > 1
        if shape.fixed_split_size is not None and shape.align > 1:
            # A row must be rounded in the same way whether its tile is split or not, because in
            # another batch another tile may hold it.
            has_partials |= alone & (tiles.q_len > 0) & (tiles.kv_len > 0)
        return cls(step=step, count=counts, origin=origin, has_partials=has_partials)


def split_tiles(tiles: Tiles, shape: PlanShape) -> Plan:
    """Return the plan of a call with these tiles."""
    num_tiles, num_merges = shape.num_tiles, shape.num_merges
    tiles = lax.optimization_barrier(tiles)  # else XLA computes them again for every candidate
    split = Split.of(tiles, shape, jnp.array(candidates(shape.num_programs), jnp.float32))
    counts, has_partials = split.count, split.has_partials
    sums = jnp.stack([counts, jnp.where(has_partials, counts, 0), has_partials.astype(jnp.int32)])
    ends, partial_ends, ranks = _cumsum(lax.optimization_barrier(sums))
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
