"""Which tiles of queries a ragged call has, in which order, and how their keys are split.

The GPU kernels share this plan. It is computed on the device, from the lengths of the moment, with
static shapes: one compiled program serves all lengths.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from pallas_paged.kernels.logits import LogitOptions

# Cost of one more work item of a tile, in blocks: a partial state is written and read again.
_SPLIT_COST = 2.0
# Candidates for the longest item, relative to an even share of all blocks: fine steps where the
# items make one wave of programs, coarse ones around.
_SHARES = tuple(2.0**i for i in (-2, -1.5, -1, -0.5, *(i / 16 for i in range(17)), 1.5, 2))


def _cdiv(a, b):
    return (a + b - 1) // b


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
    """Return tiles of `block_q` packed query rows, of which a token has `group`.

    Tiles start at multiples of `align` among all packed tokens. The first tile of a sequence may
    therefore begin before the sequence; those tokens have negative offsets.
    """
    num_seqs = seq_lens.shape[0]
    most_seqs = min(num_seqs + 1, num_tokens)
    num_tiles = (num_tokens + (align - 1) * most_seqs) * group // block_q + most_seqs
    order = jnp.argsort(-seq_lens, stable=True)
    rows = jnp.append(order, 0)
    # The tokens that belong to no sequence come last.
    starts = jnp.append(cu_q_lens[order], cu_q_lens[-1])
    lens = jnp.append(jnp.diff(cu_q_lens)[order], num_tokens - cu_q_lens[-1])
    kv_lens = jnp.append(seq_lens[order], 0)
    lead = jnp.where(lens > 0, starts % align, 0)
    counts = _cdiv((lens + lead) * group, block_q)
    ends = _cumsum(counts)

    tile = jnp.arange(num_tiles)
    rank = jnp.searchsorted(ends, tile, side="right", method="compare_all")
    exists, rank = rank <= num_seqs, jnp.minimum(rank, num_seqs)
    offset = (ends[rank] - 1 - tile) * block_q - lead[rank] * group
    q_len = jnp.where(exists, lens[rank], 0)
    kv_len = jnp.where(exists, kv_lens[rank], 0)
    first_token = jnp.maximum(offset // group, 0)
    last_token = jnp.minimum((offset + block_q - 1) // group, q_len - 1)
    before = kv_len - q_len  # keys older than all queries of the sequence
    if q_positions is None:
        first, last = before + first_token, before + last_token
        causal_full = before if has_tree else first + 1
        seen = kv_len if has_tree else jnp.minimum(last + 1, kv_len)
        if not options.causal:
            causal_full = seen = kv_len
    else:  # every key is older than every query
        tokens = first_token[:, None] + jnp.arange((block_q - 1) // group + 2)
        mine = tokens <= last_token[:, None]
        positions = q_positions.at[starts[rank][:, None] + tokens].get(mode="clip")
        first = jnp.min(jnp.where(mine, positions, jnp.iinfo(jnp.int32).max), axis=1)
        last = jnp.max(jnp.where(mine, positions, 0), axis=1)
        causal_full = seen = kv_len
    hi = _cdiv(jnp.maximum(seen, 0), block_k)
    first_key = options.first_key(first)
    lo = jnp.minimum(first_key // block_k, hi)
    full_hi = jnp.clip(jnp.minimum(causal_full, kv_len) // block_k, lo, hi)
    full_lo = _cdiv(jnp.minimum(options.first_key(last), kv_len), block_k)
    full_lo = jnp.clip(full_lo, lo, full_hi)
    return Tiles(
        row=rows[rank],
        q_start=starts[rank],
        q_len=q_len,
        kv_len=kv_len,
        first_key=jnp.minimum(first_key, jnp.maximum(kv_len - 1, 0)),
        offset=jnp.where(exists, offset, 0),
        lo=lo,
        hi=jnp.where(exists, hi, lo),
        full_lo=full_lo,
        full_hi=full_hi,
    )


def make_plan(
    tiles: Tiles,
    *,
    tile_tokens: int,
    block_k: int,
    num_programs: int,
    fixed_split_size: int | None,
    max_kv_len: int,
    num_seqs: int,
    align: int = 1,
) -> Plan:
    """Return the plan that splits the keys of tiles where that ends earlier, or at a fixed size.

    Args:
        tile_tokens: a sequence of at most this many tokens is one tile.
        num_programs: programs that run at the same time.
        fixed_split_size: None, or keys after which a sequence of one tile is split.
        align: as in `make_tiles`.
    """
    num_tiles = tiles.row.shape[0]
    blocks = tiles.hi - tiles.lo
    if fixed_split_size is None:
        extra = num_merges = num_programs
        longest = _longest_item(blocks, num_programs, extra)
        counts = _cdiv(blocks, longest)
        step = _cdiv(blocks, jnp.maximum(counts, 1))  # even items
        counts = _cdiv(blocks, jnp.maximum(step, 1))
    else:
        # Only a sequence whose queries are one tile is split. A longer one has work for several
        # programs, and its partial states would take too much memory. Either way the split of a
        # sequence depends on that sequence alone.
        alone = tiles.q_len <= tile_tokens
        step = jnp.where(alone, fixed_split_size // block_k, jnp.maximum(tiles.hi, 1))
        # Cut at multiples of the split size from key 0, not from the first key that the tile sees,
        # which depends on the other queries in the tile.
        counts = _cdiv(tiles.hi, step) - tiles.lo // step
        num_merges = num_seqs * (1 if align == 1 else 2)  # a sequence may begin within a tile
        extra = num_merges * (_cdiv(max_kv_len, fixed_split_size) - 1)
    num_merges = min(num_merges, num_tiles)
    # A tile that sees no key is a work item too: a program must write its zeros.
    counts = jnp.where(tiles.q_len > 0, jnp.maximum(counts, 1), 0)
    is_split = counts > 1
    if fixed_split_size is not None and align > 1:
        # A row must be rounded in the same way whether its tile is split or not, because in
        # another batch another tile may hold it.
        is_split |= alone & (tiles.q_len > 0) & (tiles.kv_len > 0)
    sums = jnp.stack([counts, jnp.where(is_split, counts, 0), is_split.astype(jnp.int32)])
    ends, partial_ends, ranks = _cumsum(lax.optimization_barrier(sums))
    item = jnp.arange(num_tiles + extra)
    tile = jnp.searchsorted(ends, item, side="right", method="compare_all")
    exists, tile = tile < num_tiles, jnp.minimum(tile, num_tiles - 1)
    items = jax.tree.map(lambda field: field[tile], tiles)
    origin = items.lo if fixed_split_size is None else items.lo // step[tile] * step[tile]
    lo = origin + (item - (ends - counts)[tile]) * step[tile]
    hi = jnp.where(exists, jnp.minimum(lo + step[tile], items.hi), lo)
    lo = jnp.clip(lo, items.lo, hi)
    items = dataclasses.replace(
        items,
        q_len=jnp.where(exists, items.q_len, 0),
        lo=lo,
        hi=hi,
        full_lo=jnp.clip(items.full_lo, lo, hi),
        full_hi=jnp.clip(items.full_hi, lo, hi),
    )

    partial = (partial_ends - ends)[tile] + item
    where = jnp.where(is_split, ranks - 1, num_merges)
    none = jnp.zeros(num_merges, jnp.int32)
    return Plan(
        items=items,
        partial=jnp.where(exists & is_split[tile], partial, -1),
        first_item=none.at[where].set(ends - counts, mode="drop"),
        num_items=none.at[where].set(counts, mode="drop"),
        num_partials=extra + num_merges,
    )


def _longest_item(blocks: jax.Array, num_programs: int, extra: int) -> jax.Array:
    """Return the length i32[], in blocks, of the longest work item with which work ends earliest.

    `num_programs` items run at the same time; at most `extra` items more than tiles are made.
    """
    blocks = lax.optimization_barrier(blocks)  # else XLA computes them again for every candidate
    total = jnp.sum(blocks.astype(jnp.float32))
    share = total / num_programs
    longest = jnp.ceil(share * jnp.array(_SHARES, jnp.float32)).astype(jnp.int32)
    longest = jnp.maximum(jnp.append(longest, jnp.max(blocks)), 1)  # [K], the last splits nothing
    # In f32, as is the total: i32 might overflow where the longest item is short.
    num_items = jnp.sum(_cdiv(blocks, longest[:, None]).astype(jnp.float32), axis=1)
    further = num_items - num_items[-1]
    waves = jnp.ceil(num_items / num_programs)
    mean = total / jnp.maximum(num_items, 1.0)
    span = jnp.maximum(waves * mean, jnp.minimum(longest, longest[-1]).astype(jnp.float32))
    span += _SPLIT_COST / num_programs * further
    return longest[jnp.argmin(jnp.where(further <= extra, span, jnp.inf))]
