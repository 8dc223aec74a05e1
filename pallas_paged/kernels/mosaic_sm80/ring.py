"""The loop over the blocks of a sequence, with copies of later blocks on their way.

All threads copy and all attend. `num_stages` blocks of K and V are in shared memory: one in use and
the others arriving. A step waits until its block has arrived, starts the copies of the block that
takes the place of the last one, and hands its own to the caller.

Copies of the table's entries start `num_stages - 1` steps before those of their block, or one step
with one stage, which waits for its own copies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl

from pallas_paged.kernels.mosaic_sm80 import ops
from pallas_paged.kernels.mosaic_sm80.pages import Copier


def for_each_block(
    copier: Copier,
    lo: jax.Array,
    hi: jax.Array,
    body: Callable[[jax.Array, jax.Array, Any], Any],
    carry: Callable[[], Any],
    *,
    copy_queries: Callable[[], None] = lambda: None,
) -> Any:
    """Return the carry after `body(block, stage, carry)` for the blocks `[lo, hi)`.

    Args:
        copier: of the sequence. All its shared memory is free, and so is that of the queries.
        body: attends to the block in that stage.
        carry: returns the first carry, when the copies of `copy_queries` have arrived.
        copy_queries: starts further copies.
    """
    interpret = copier.interpret
    num_stages = copier.blocks.k.shape[0]
    ahead = num_stages - 1
    table_ahead = ahead + max(ahead, 1)

    def copy(block, start):
        @pl.when(block < hi)
        def _():
            start(block)

    ops.barrier(interpret=interpret)  # threads may still read what the copies replace
    copy_queries()
    for i in range(table_ahead):
        copy(lo + i, copier.copy_table)
    ops.commit_copies(interpret=interpret)
    ops.wait_for_copies(0, interpret=interpret)
    for i in range(ahead):
        copy(lo + i, copier.copy_block)
        ops.commit_copies(interpret=interpret)

    def step(block, carry):
        if ahead:
            ops.wait_for_copies(ahead - 1, interpret=interpret)
        else:
            ops.barrier(interpret=interpret)
        copy(block + ahead, copier.copy_block)
        copy(block + table_ahead, copier.copy_table)
        ops.commit_copies(interpret=interpret)  # empty at the end, so that the count is right
        if not ahead:
            ops.wait_for_copies(0, interpret=interpret)
        return body(block, lax.rem(block, num_stages), carry)

    return lax.fori_loop(lo, hi, step, carry())
