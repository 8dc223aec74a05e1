"""Plan of the K/V gradient: one program per page sums over all rows that read it.

Rows that share a prefix read the same pages. One program sums the gradient of a page over all of
them in a fixed order: same inputs, same bits, and no partial sums in memory. The plan is computed
on the device with static shapes, like the plan of the forward pass.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_paged.checks import pytree
from pallas_paged.kernels.call import Arrays
from pallas_paged.kernels.logits import LogitOptions


@pytree
class PageReaders:
    """The entries of the block tables through which some query may see a page: its readers."""

    # i32`[num_entries]` of each reader. Readers are sorted by page, and of one page by row and
    # block.
    row: jax.Array
    block: jax.Array
    first: jax.Array  # i32`[P]`, the readers of each page
    end: jax.Array

    @classmethod
    def of(cls, arrays: Arrays, options: LogitOptions) -> PageReaders:
        """Return the readers of a ragged call."""
        pages_per_seq, page_size = arrays.block_tables.shape[1], arrays.page_size
        num_pages = arrays.layout.size(arrays.k_pages.shape, "P")
        q_lens = jnp.diff(arrays.cu_q_lens)
        start = jnp.arange(pages_per_seq) * page_size
        read = (start < arrays.seq_lens[:, None]) & (q_lens > 0)[:, None]
        if arrays.q_positions is None:
            oldest = options.first_key(jnp.maximum(arrays.seq_lens - q_lens, 0))
            read &= start + page_size > oldest[:, None]
        tables = arrays.block_tables
        # Entries left of a window may be any integer: kernels store to the page of a reader.
        read &= (tables >= 0) & (tables < num_pages)
        page = jnp.where(read, tables, num_pages).reshape(-1)
        entry = jnp.arange(page.size)
        _, entry = lax.sort((page, entry), num_keys=1, is_stable=True)
        counts = jnp.zeros(num_pages, jnp.int32).at[page].add(1, mode="drop")
        end = jnp.cumsum(counts)
        return cls(
            row=entry // pages_per_seq, block=entry % pages_per_seq, first=end - counts, end=end
        )


@pytree
class KeyTiles:
    """Blocks of `block_k` keys of a row, and the readers of each page.

    The tile of a page's first reader makes the gradient of the page, over all of its readers.
    Entries are numbers `row * pages_per_seq + block`.
    """

    # i32`[num_tiles]`, `row * tiles_per_row + block of keys`; those with the most queries come
    # first.
    tile: jax.Array
    readers: PageReaders  # of the pages
    # i32`[num_entries]`, the readers of the entry's page; none (`first = end`) where another entry
    # is its first reader, or none reads it.
    first: jax.Array
    end: jax.Array


def make_key_tiles(arrays: Arrays, *, block_k: int, options: LogitOptions) -> KeyTiles:
    """Return the tiles of keys of a ragged call."""
    num_seqs, pages_per_seq = arrays.block_tables.shape
    page_size, num_entries = arrays.page_size, arrays.block_tables.size
    num_pages = arrays.layout.size(arrays.k_pages.shape, "P")
    q_lens = jnp.diff(arrays.cu_q_lens)
    before = arrays.seq_lens - q_lens  # position of a row's first query
    readers = PageReaders.of(arrays, options)
    reader = jnp.minimum(readers.first, num_entries - 1)
    leader = readers.row[reader] * pages_per_seq + readers.block[reader]
    leader = jnp.where(readers.first < readers.end, leader, num_entries)
    none = jnp.zeros(num_entries, jnp.int32)
    first = none.at[leader].set(readers.first, mode="drop")
    end = none.at[leader].set(readers.end, mode="drop")

    # The queries that see a tile: a row's first blocks are seen by the most.
    tiles_per_row = -(-arrays.max_kv_len // block_k)
    start = jnp.arange(tiles_per_row) * block_k
    block = jnp.minimum(
        start[:, None] + jnp.arange(0, block_k, min(page_size, block_k)), arrays.max_kv_len - 1
    )
    leads = (first < end).reshape(num_seqs, pages_per_seq)[:, block // page_size].any(axis=-1)
    seen_by = q_lens[:, None]
    if options.causal and arrays.q_positions is None:
        newest = jnp.maximum(start - before[:, None], 0)
        seen_by = jnp.maximum(q_lens[:, None] - newest, 0)
        if options.sliding_window is not None:
            seen_by = jnp.minimum(seen_by, block_k + options.sliding_window)
    cost = jnp.where(leads, 1 + seen_by, 0).reshape(-1)
    # A tile has a page of its own, or a part of one.
    most_tiles = min(cost.size, num_pages * max(page_size // block_k, 1))
    return KeyTiles(
        tile=jnp.argsort(-cost, stable=True)[:most_tiles].astype(jnp.int32),
        readers=readers,
        first=first,
        end=end,
    )
