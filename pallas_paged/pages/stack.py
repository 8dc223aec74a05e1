"""The stack of free pages: pages are taken off it, and put back when no reference is left.

Both functions gather from and scatter into the arrays of `num_pages` elements, and scan none.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

import jax
import jax.numpy as jnp

from pallas_paged.pages.prefix_sums import prefix_sums


@dataclass(frozen=True, kw_only=True, eq=False)
class PageStack:
    """The fields of a `PageTable` that count references and hold the free pages."""

    ref_counts: jax.Array  # i32`[num_pages]`
    free_pages: jax.Array  # i32`[num_pages]`; the first `num_free` entries are the free pages
    num_free: jax.Array  # i32`[]`

    @property
    def num_pages(self) -> int:
        return self.ref_counts.shape[0]


Stack = TypeVar("Stack", bound=PageStack)


def take_pages(
    stack: Stack, valid: jax.Array, need: jax.Array, *, width: int
) -> tuple[Stack, jax.Array, jax.Array]:
    """Pop `need` i32`[X]` pages for each valid entry, in order, while the running total fits.

    Returns:
        The stack, ok bool`[X]` and the pages i32`[X, width]`, padded with the sentinel.
    """
    none = stack.num_pages
    need = jnp.where(valid, need, 0)
    total = prefix_sums(need)
    ok = valid & ((need == 0) | (total <= stack.num_free))
    count = jnp.arange(width, dtype=jnp.int32)
    taken = ok[:, None] & (count < need[:, None])  # [X, width]
    depth = (total - need)[:, None] + count
    index = jnp.where(taken, stack.num_free - 1 - depth, none)
    pages = stack.free_pages.at[index].get(mode="fill", fill_value=none)
    stack = replace(
        stack,
        ref_counts=stack.ref_counts.at[pages].set(1, mode="drop"),
        num_free=stack.num_free - jnp.sum(taken, dtype=jnp.int32),
    )
    return stack, ok, pages


def release_pages(stack: Stack, pages: jax.Array) -> Stack:
    """Remove one reference for each entry of `pages` i32`[X]`; sentinel entries are dropped."""
    none = stack.num_pages
    refs = stack.ref_counts.at[pages].add(-1, mode="drop")
    # All entries that shared a page see its count reach 0, but one must push it: each writes its
    # own number into the count, the highest stays, and that entry pushes the page and sets the
    # count back to 0. A caller may release a page more often than it was held; a count below 0 then
    # also means free.
    number = jnp.arange(1, pages.size + 1, dtype=jnp.int32)
    dead = jnp.where(refs.at[pages].get(mode="fill", fill_value=1) <= 0, pages, none)
    refs = refs.at[dead].max(number, mode="drop")
    pushes = refs.at[dead].get(mode="fill", fill_value=0) == number
    refs = refs.at[jnp.where(pushes, pages, none)].set(0, mode="drop")
    index = jnp.where(pushes, stack.num_free + jnp.cumsum(pushes, dtype=jnp.int32) - 1, none)
    return replace(
        stack,
        ref_counts=refs,
        free_pages=stack.free_pages.at[index].set(pages, mode="drop"),
        num_free=stack.num_free + jnp.sum(pushes, dtype=jnp.int32),
    )
