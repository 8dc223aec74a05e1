"""The stack of free pages: pages are taken off it, and put back when nobody refers to them.

Both functions gather from and scatter into the arrays of `num_pages` elements, and scan none.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from pallas_paged.page_table import PageTable


def take_pages(
    table: PageTable, valid: jax.Array, need: jax.Array, *, width: int
) -> tuple[PageTable, jax.Array, jax.Array]:
    """Pops `need` [X] pages for each valid entry, in order, while the running total fits.

    Returns the table, ok bool[X] and the pages int32[X, width], padded with the sentinel.
    """
    need = jnp.where(valid, need, 0)
    total = jnp.cumsum(need, dtype=jnp.int32)
    ok = valid & ((need == 0) | (total <= table.num_free))
    count = jnp.arange(width, dtype=jnp.int32)
    taken = ok[:, None] & (count < need[:, None])  # [X, width]
    depth = (total - need)[:, None] + count
    index = jnp.where(taken, table.num_free - 1 - depth, table.num_pages)
    pages = table.free_pages.at[index].get(mode="fill", fill_value=table.num_pages)
    table = replace(
        table,
        ref_counts=table.ref_counts.at[pages].set(1, mode="drop"),
        num_free=table.num_free - jnp.sum(taken, dtype=jnp.int32),
    )
    return table, ok, pages


def release_pages(table: PageTable, pages: jax.Array) -> PageTable:
    """Gives up one reference for each entry of `pages` int32[X]; sentinel entries are dropped."""
    none = table.num_pages
    refs = table.ref_counts.at[pages].add(-1, mode="drop")
    # All entries that shared a page see it reach 0, but one must push it: each leaves a ticket in
    # the count, the highest stays, and its owner pushes the page and puts the 0 back. Entries may
    # be more than references if a caller releases what is not his: below 0 is no less free.
    ticket = jnp.arange(1, pages.size + 1, dtype=jnp.int32)
    dead = jnp.where(refs.at[pages].get(mode="fill", fill_value=1) <= 0, pages, none)
    refs = refs.at[dead].max(ticket, mode="drop")
    pushes = refs.at[dead].get(mode="fill", fill_value=0) == ticket
    refs = refs.at[jnp.where(pushes, pages, none)].set(0, mode="drop")
    index = jnp.where(pushes, table.num_free + jnp.cumsum(pushes, dtype=jnp.int32) - 1, none)
    return replace(
        table,
        ref_counts=refs,
        free_pages=table.free_pages.at[index].set(pages, mode="drop"),
        num_free=table.num_free + jnp.sum(pushes, dtype=jnp.int32),
    )
