"""Which rows belong to which expert, in integers: the sort of routed pairs, and tiles of rows.

Nothing here sorts by `jnp.sort`, which a CUDA graph can't hold, and nothing adds in an order that
may change.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_paged.checks import pytree

_BLOCK = 256  # pairs whose ranks are counted by comparing each with all others


@pytree
class Groups:
    """Consecutive rows of each group."""

    starts: jax.Array  # `i32[G]`, its first row
    sizes: jax.Array  # `i32[G]`, its number of rows

    @classmethod
    def of(cls, sizes: jax.Array, *, align: int = 1) -> Groups:
        """Return groups that follow one another, each from a multiple of `align` on."""
        spaces = (sizes + align - 1) // align * align
        return cls(starts=jnp.cumsum(spaces) - spaces, sizes=sizes)


@pytree
class Tiles:
    """Tiles of consecutive rows, each with rows of one group."""

    # `i32[num_tiles, 4]`: the group of a tile, its first row, and from where to where rows of the
    # tile are of the group.
    fields: jax.Array
    count: jax.Array  # `i32[1]`, the number of tiles; others hold anything


def max_tiles(num_rows: int, num_groups: int, *, block: int, align: int) -> int:
    """Return how many tiles of `block` rows there can be."""
    nonempty = min(num_groups, num_rows)
    return nonempty + (num_rows + (align - 1) * nonempty) // block


def tiles_of(groups: Groups, *, num_rows: int, block: int, align: int = 1) -> Tiles:
    """Return the tiles of groups that do not overlap, in their order.

    Args:
        num_rows: rows in all groups, at most.
        block: rows of a tile.
        align: tiles begin at multiples of it, so the first ones may have rows of other groups.
    """
    starts, sizes = groups.starts, groups.sizes
    firsts = starts // align * align
    counts = jnp.where(sizes > 0, (starts + sizes - firsts + block - 1) // block, 0)
    ends = jnp.cumsum(counts)
    count = max_tiles(num_rows, len(sizes), block=block, align=align)
    tile = jnp.arange(count, dtype=jnp.int32)
    group = jnp.sum(ends <= tile[:, None], axis=1, dtype=jnp.int32)
    group = jnp.minimum(group, len(sizes) - 1)
    row = firsts[group] + (tile - (ends - counts)[group]) * block
    lo = jnp.maximum(starts[group] - row, 0)
    hi = jnp.minimum(starts[group] + sizes[group] - row, block)
    fields = jnp.stack([group, row, lo, hi], axis=1)
    return Tiles(fields=fields.astype(jnp.int32), count=ends[-1:].astype(jnp.int32))


@pytree
class SortedPairs:
    """Pairs of a token and an expert, sorted by expert, those of an expert in their order."""

    groups: Groups  # the rows of each expert
    rows: jax.Array  # `i32[T, k]`, the row of each pair; `R` for pairs without an expert
    pairs: jax.Array  # `i32[R]`, the pair `t * k + j` of each row; `T * k` for rows without one

    @property
    def tokens(self) -> jax.Array:
        """`i32[R]`, the token of each row; `T` for rows without one."""
        return self.pairs // self.rows.shape[1]


def sort_pairs(expert_indices: jax.Array, num_experts: int, *, align: int = 1) -> SortedPairs:
    """Sort routed pairs by expert.

    Args:
        expert_indices: `i32[T, k]`; a pair whose index is not in `0..num_experts - 1` has none.
        align: experts begin at rows that are multiples of it.
    """
    num_pairs = expert_indices.size
    num_rows = num_pairs + (align - 1) * min(num_experts, num_pairs)
    num_rows = -(-num_rows // align) * align
    experts = expert_indices.reshape(-1)
    experts = jnp.where((experts >= 0) & (experts < num_experts), experts, num_experts)
    padding = -num_pairs % _BLOCK
    blocks = jnp.pad(experts, (0, padding), constant_values=num_experts).reshape(-1, _BLOCK)
    all_experts = jnp.arange(num_experts, dtype=jnp.int32)
    counts = jnp.sum(blocks[:, :, None] == all_experts, axis=1, dtype=jnp.int32)
    before = jnp.cumsum(counts, axis=0) - counts
    groups = Groups.of(jnp.sum(counts, axis=0), align=align)
    place = jnp.arange(_BLOCK)
    is_before = (blocks[:, None, :] == blocks[:, :, None]) & (place < place[:, None])
    rank = jnp.sum(is_before, axis=2, dtype=jnp.int32)
    first = groups.starts + before  # of an expert in a block
    first = jnp.take_along_axis(first, jnp.minimum(blocks, num_experts - 1), axis=1)
    rows = jnp.where(blocks < num_experts, first + rank, num_rows).reshape(-1)[:num_pairs]
    pairs = jnp.full(num_rows, num_pairs, jnp.int32)
    pair = lax.iota(jnp.int32, num_pairs)
    # Rows past the end are dropped, so the others are unique.
    pairs = pairs.at[rows].set(pair, mode="drop")
    return SortedPairs(groups=groups, rows=rows.reshape(expert_indices.shape), pairs=pairs)
