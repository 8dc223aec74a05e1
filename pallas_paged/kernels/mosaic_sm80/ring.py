"""The loop over the blocks of a row, with copies of later blocks on their way.

All threads copy and all attend. `num_stages` blocks of K and V are in shared memory: one in use and
the others arriving. A step waits until its block has arrived, starts the copies of the block that
takes the place of the last one, and hands its own to the caller.

Copies of a block's table entries start `num_stages - 1` steps before copies of the block, or one
step with one stage, which waits for its own copies.

The last steps of a row start the copies of the next row's first blocks, so that a program waits for
its first row only. A row with too few blocks leaves that to the next row itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_paged.kernels.mosaic_sm80 import ops
from pallas_paged.kernels.mosaic_sm80.pages import Copier


@dataclasses.dataclass(frozen=True, kw_only=True)
class Span:
    """Blocks of one row."""

    copier: Copier  # of the row
    lo: jax.Array  # the blocks `[lo, hi)`
    hi: jax.Array
    copy_queries: Callable[[], None]  # starts the copies of the row's queries


def for_each_block(
    span: Span,
    following: Span,
    body: Callable[[jax.Array, jax.Array, Any], Any],
    carry: Callable[[], Any],
    *,
    place: jax.Array,
    started: jax.Array,
    prefetch_next: jax.Array,
    queries_prefetched: bool,
) -> Any:
    """Return the carry after `body(block, stage, carry)` for the blocks of a span.

    Args:
        span: at least one block, or none where `started` is false.
        following: the next span of the program.
        body: attends to the block in that stage.
        carry: returns the first carry, when the queries have arrived. All threads see them.
        place: of the first block among all that the program attends to.
        started: whether the loop over the span before this one started the first copies.
        prefetch_next: whether to start copies of `following`, see `can_prefetch`.
        queries_prefetched: whether to copy its queries too: `body` does not read their buffer.
    """
    copier, lo, hi = span.copier, span.lo, span.hi
    interpret = copier.interpret
    ahead, table_ahead = _ahead(copier)

    def copy(block, start):
        """Start a copy for a block of the span or, after its last, of `following`."""
        own = block < hi
        there = following.lo + block - hi

        @pl.when(own | (prefetch_next & (there < following.hi)))
        def _():
            chosen = copier.where(own, following.copier)
            start(chosen, jnp.where(own, block, there), place + block - lo)

    def start_all():
        ops.barrier(interpret=interpret)  # threads may still read the old data
        span.copy_queries()
        for i in range(table_ahead):
            copy(lo + i, Copier.copy_table)
        ops.commit_copies(interpret=interpret)
        ops.wait_for_copies(0, interpret=interpret)
        for i in range(ahead):
            copy(lo + i, Copier.copy_block)
            ops.commit_copies(interpret=interpret)

    def step(block, carry):
        if ahead:
            ops.wait_for_copies(ahead - 1, interpret=interpret)
        else:
            ops.barrier(interpret=interpret)
        copy(block + ahead, Copier.copy_block)
        copy(block + table_ahead, Copier.copy_table)
        if queries_prefetched:
            pl.when(prefetch_next & (block + max(ahead, 1) == hi))(following.copy_queries)
        ops.commit_copies(interpret=interpret)  # empty at the end, so that the count is right
        if not ahead:
            ops.wait_for_copies(0, interpret=interpret)
        return body(block, lax.rem(place + block - lo, copier.num_stages), carry)

    pl.when(~started)(start_all)
    # The queries are in the group of the first block, or in the newest one.
    pending = max(ahead - 1, 0) if queries_prefetched else 0
    pl.when(started)(lambda: ops.wait_for_copies(pending, interpret=interpret))
    carry = lax.fori_loop(lo, hi, step, carry())
    if not queries_prefetched:

        @pl.when(prefetch_next)
        def _():
            following.copy_queries()
            ops.commit_copies(interpret=interpret)

    return carry


def can_prefetch(span: Span, following: Span) -> jax.Array:
    """Return whether the loop over a span can start the first copies of the one after it."""
    _, table_ahead = _ahead(span.copier)
    return (span.hi - span.lo >= table_ahead) & (following.lo < following.hi)


def _ahead(copier: Copier) -> tuple[int, int]:
    """Return the number of steps by which a block's copies and its entries' copies start early."""
    ahead = copier.num_stages - 1
    return ahead, ahead + max(ahead, 1)
