"""Tiles of the queries of a ragged call, in order, with the keys that each sees."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_paged.checks import pytree
from pallas_paged.kernels.logits import LogitOptions
from pallas_paged.pages.prefix_sums import prefix_sums


def div(a: jax.Array, b: Any) -> jax.Array:
    """Return `a / b` rounded to 0, which takes fewer instructions than rounded down."""
    return lax.div(*jnp.broadcast_arrays(a, jnp.asarray(b, a.dtype)))


def cdiv(a: jax.Array, b: Any) -> jax.Array:
    """Return `a / b` rounded up, for `a` of at least 0."""
    return div(a + (b - 1), b)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiling:
    """How queries are divided into tiles, and keys into blocks."""

    group: int  # packed query rows of a token
    block_q: int  # packed query rows of a tile
    block_k: int  # keys of a block
    options: LogitOptions  # of the logits; only the sliding window and causality matter here
    has_tree: bool  # whether queries see keys by a tree mask
    # Tiles start at multiples of it among all packed tokens. The first tile of a sequence may
    # therefore begin before the sequence; those tokens have negative offsets. With `align > 1` the
    # group is 1.
    align: int = 1

    def most_tiles(self, num_seqs: int, num_tokens: int) -> int:
        """Return for how many tiles there is room."""
        most_seqs = min(num_seqs + 1, num_tokens)
        return (num_tokens + (self.align - 1) * most_seqs) * self.group // self.block_q + most_seqs

    def count_tiles(self, start: Any, q_len: Any) -> tuple[Any, Any]:
        """Return tokens before a sequence that are in its first tile, and its number of tiles."""
        lead = jnp.where(q_len > 0, start % self.align, 0)
        return lead, cdiv((q_len + lead) * self.group, self.block_q)


@pytree
class Tiles:
    """Packed query rows (token after token, within a token head after head), divided into tiles.

    A tile holds queries of one sequence. Sequences with the most keys come first, and within one
    the tiles that see the most: the last to start are the shortest. Tokens past the last sequence
    are treated as one more sequence, without keys. Entries past the last tile have `q_len = 0`.

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


def for_each_block(
    body: Callable[[bool, jax.Array, Any], Any], tile: Any, carry: Any, options: LogitOptions
) -> Any:
    """Return the carry after `body(masked, block, carry)` for the blocks of a tile.

    Args:
        body: attends to a block, with a mask if some query does not see some key of it.
        tile: with `lo`, `full_lo`, `full_hi` and `hi` as in `Tiles`, of one tile.
    """
    masked, full = (functools.partial(body, x) for x in (True, False))
    if options.sliding_window is not None:
        carry = lax.fori_loop(tile.lo, tile.full_lo, masked, carry)
    carry = lax.fori_loop(tile.full_lo, tile.full_hi, full, carry)
    return lax.fori_loop(tile.full_hi, tile.hi, masked, carry)


def make_tiles(
    seq_lens: jax.Array,  # i32[B]
    cu_q_lens: jax.Array,  # i32[B + 1], rising, within [0, T]
    q_positions: jax.Array | None,  # i32[T]; None: the newest q_len positions of the row
    num_tokens: int,
    tiling: Tiling,
) -> Tiles:
    """Return the tiles of a call with `num_tokens` packed query tokens."""
    num_seqs, group, block_q = seq_lens.shape[0], tiling.group, tiling.block_q
    tile = jnp.arange(tiling.most_tiles(num_seqs, num_tokens))
    order = jnp.argsort(-seq_lens, stable=True)
    rows = jnp.append(order, 0)
    # The tokens that belong to no sequence come last.
    starts = jnp.append(cu_q_lens[order], cu_q_lens[-1])
    lens = jnp.append(jnp.diff(cu_q_lens)[order], num_tokens - cu_q_lens[-1])
    kv_lens = jnp.append(seq_lens[order], 0)
    lead, counts = tiling.count_tiles(starts, lens)
    ends = prefix_sums(counts)

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
        tiling,
        row=rows[rank],
        q_start=q_start,
        q_len=lens[rank],
        kv_len=kv_lens[rank],
        offset=offset,
        positions_of=None if q_positions is None else positions_of,
    )


def tile_of(
    exists: jax.Array,
    tiling: Tiling,
    *,
    row: jax.Array,
    q_start: jax.Array,
    q_len: jax.Array,
    kv_len: jax.Array,
    offset: jax.Array,
    positions_of: Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]] | None = None,
) -> Tiles:
    """Return tiles of `block_q` packed query rows with the blocks of keys that they see.

    Args:
        exists: tiles past the last one have no queries.
        positions_of: returns the least and the largest position of the queries `first_token` to
            `last_token` of each tile, whose sequence has older keys only. None if the queries are
            the newest tokens of their sequence.
        Others: as in `Tiles`.
    """
    group, block_q, block_k = tiling.group, tiling.block_q, tiling.block_k
    options, has_tree = tiling.options, tiling.has_tree
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
    lo = jnp.minimum(div(first_key, block_k), hi)
    full_hi = jnp.clip(div(jnp.minimum(causal_full, kv_len), block_k), lo, hi)
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
