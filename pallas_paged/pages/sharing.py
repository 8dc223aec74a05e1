"""Pages that several rows or a prefix cache hold: retain, release and attach them.

Functions of a `PageTable`, as pure as those of `page_table`.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from pallas_paged.checks import as_array, checked_array
from pallas_paged.pages.stack import release_pages
from pallas_paged.pages.table import Integers, PageTable, can_fill, on_table


@on_table
def retain(table: PageTable, pages: Integers) -> tuple[PageTable, jax.Array]:
    """Add one reference to each page, for a holder other than a row, such as a prefix cache.

    Only full pages that are not free can be retained. An entry that names another page, or none, is
    not ok and changes nothing; a page that is named twice gets two references.

    Args:
        pages: i32`[P]`; entries outside [0, num_pages) are padding.

    Returns:
        The table and ok bool`[P]`.
    """
    pages = checked_array("pages", pages, jnp.int32)
    ok = _can_share(table, pages)
    retained = jnp.where(ok, pages, table.num_pages)
    return replace(table, ref_counts=table.ref_counts.at[retained].add(1, mode="drop")), ok


@on_table
def release(table: PageTable, pages: Integers) -> PageTable:
    """Remove references that `retain` added; pages without other references are free again.

    The table does not record who holds a reference: releasing a page that was not retained takes it
    from its rows. Free pages are left alone.

    Args:
        pages: i32`[P]`; entries outside [0, num_pages) are padding. A page may be named more than
            once, each time for one reference.
    """
    pages = checked_array("pages", pages, jnp.int32)
    return release_pages(table, jnp.where(_is_live(table, pages), pages, table.num_pages))


@on_table
def attach(
    table: PageTable, rows: Integers, pages: Integers, *, first_blocks: Integers | None = None
) -> tuple[PageTable, jax.Array]:
    """Attach full pages that are held already, such as a cached prefix, to empty rows.

    The pages become the first blocks of the row, shared with their other holders. Every entry reads
    the table as it was before the call, and succeeds in full or not at all. An entry whose row
    lies outside [0, max_seqs) is padding: not ok and otherwise ignored. An entry also fails when
    the row holds tokens or an earlier entry has the same row; when one of its pages is free,
    partial, named twice or after padding; when `first_blocks` is negative; or when its blocks are
    more than `pages_per_seq`.

    Args:
        rows: i32`[A]`, rows to fill.
        pages: i32`[A, n]`, pages of the row's first blocks, then padding, which is any value
            outside [0, num_pages); n may be more than `pages_per_seq`. Padding alone leaves the row
            empty.
        first_blocks: i32`[A]`, blocks before those pages that stay without, as `free_before` leaves
            them; None: 0.

    Returns:
        The table, whose `seq_lens` count the tokens of the pages, and ok bool`[A]`.
    """
    rows = checked_array("rows", rows, jnp.int32)
    given = as_array("pages", pages)
    width = given.shape[-1] if given.ndim else 0
    pages = checked_array("pages", pages, jnp.int32, (rows.shape[0], width))
    pages = jnp.where((pages >= 0) & (pages < table.num_pages), pages, table.num_pages)
    num_blocks = jnp.sum(pages < table.num_pages, axis=1, dtype=jnp.int32)
    column = jnp.arange(width, dtype=jnp.int32)
    blocks, ends = column, num_blocks
    fits = num_blocks <= table.pages_per_seq
    if first_blocks is not None:
        first = checked_array("first_blocks", first_blocks, jnp.int32, rows.shape)
        blocks, ends = column + first[:, None], num_blocks + first
        fits = (first >= 0) & (first <= table.pages_per_seq - num_blocks)  # `ends` may pass int32
    ordered = jnp.sort(pages, axis=1)
    is_repeat = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] < table.num_pages)
    ok = (
        can_fill(table, rows)
        & fits
        & jnp.all(_can_share(table, pages) == (column < num_blocks[:, None]), axis=1)
        & ~jnp.any(is_repeat, axis=1)
    )
    rows = jnp.where(ok, rows, table.max_seqs)
    pages = jnp.where(ok[:, None], pages, table.num_pages)
    table = replace(
        table,
        block_tables=table.block_tables.at[rows[:, None], blocks].set(pages, mode="drop"),
        seq_lens=table.seq_lens.at[rows].set(ends * table.page_size, mode="drop"),
        ref_counts=table.ref_counts.at[pages].add(1, mode="drop"),
    )
    return table, ok


def _is_live(table: PageTable, pages: jax.Array) -> jax.Array:
    refs = table.ref_counts.at[pages]
    return refs.get(mode="fill", fill_value=0, wrap_negative_indices=False) > 0


def _can_share(table: PageTable, pages: jax.Array) -> jax.Array:
    """Return for each of `pages` whether it is full and not free: no row will write to it."""
    rows = jnp.arange(table.max_seqs, dtype=jnp.int32)
    next_blocks = table.block_tables.at[rows, table.seq_lens // table.page_size]
    partial = next_blocks.get(mode="fill", fill_value=table.num_pages)
    return _is_live(table, pages) & ~jnp.isin(pages, partial)
