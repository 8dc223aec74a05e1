"""The share of a Mosaic decode program: its work items, one after another.

`DecodePlan` divides the work units of a batch among the programs. A work item is the part of one
row in the range of a program or, under a fixed split size, one split of a row.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_paged.kernels.decode_plan import DecodePlan

_SEARCH_WAYS = 16  # parts into which a step of the search for a row divides the rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkItem:
    """Blocks of one row that a program attends to, and the index of their partial state."""

    row: jax.Array  # index of the row
    seq_len: jax.Array  # tokens of the row
    lo: jax.Array  # its blocks `[lo, hi)`; none if the row has no tokens
    hi: jax.Array
    partial: jax.Array  # index of the partial state


def row_of_unit(unit: jax.Array, unit_ends_ref: Any) -> jax.Array:
    """Return the row that a work unit belongs to: the number of rows that end at or before it.

    Every load that depends on another load is a wait, so a step of the search loads the ends of
    many rows at once.
    """
    (num_seqs,) = unit_ends_ref.shape
    row = jnp.int32(0)  # all rows before it are known to end at or before the unit
    width = 1
    while width < num_seqs:
        width *= _SEARCH_WAYS
    while width > 1:
        width //= _SEARCH_WAYS
        ended = jnp.int32(0)
        for i in range(1, min(_SEARCH_WAYS, pl.cdiv(num_seqs, width))):
            last = row + (i * width - 1)
            end = unit_ends_ref[jnp.minimum(last, num_seqs - 1)]
            ended += ((last < num_seqs) & (end <= unit)).astype(jnp.int32)
        row += ended * width
    return row


def for_each_work_item(
    body: Callable[..., Any],
    seq_lens_ref: Any,  # i32[B]
    unit_ends_ref: Any,  # i32[B]
    *,
    plan: DecodePlan,
) -> None:
    """Run `body(item, next_item, carry)`, which returns a carry, for each work item of the program.

    The carry has the number of blocks until now, and whether copies for the item are on their way.
    The last item has a next one without blocks.
    """
    (num_seqs,) = seq_lens_ref.shape
    program = lax.axis_index("program")
    start, stop = plan.units_of_program(program, unit_ends_ref[num_seqs - 1])

    def lengths_of(row):
        row = jnp.minimum(row, num_seqs - 1)
        return seq_lens_ref[row], unit_ends_ref[row]

    def item_of(row, unit, lengths):
        """Return the item that begins at a unit, and the units at which it and its row end."""
        seq_len, row_end = lengths
        first_block, end_block = plan.row_blocks(seq_len)
        row_start = row_end - plan.num_units(end_block - first_block)
        next_unit = jnp.minimum(row_end, stop if plan.fixed_split_size is None else unit + 1)
        item = WorkItem(
            row=row,
            seq_len=seq_len,
            lo=first_block + (unit - row_start) * plan.blocks_per_unit,
            hi=jnp.minimum(first_block + (next_unit - row_start) * plan.blocks_per_unit, end_block),
            partial=plan.partial_index(program=program, row=row, unit=unit),
        )
        return item, next_unit, row_end

    def next_item(state):
        row, unit, lengths, carry = state
        next_lengths = lengths_of(row + 1)  # loaded long before they are used
        item, next_unit, row_end = item_of(row, unit, lengths)
        ended = next_unit == row_end
        chosen = jax.tree.map(functools.partial(jnp.where, ended), next_lengths, lengths)
        after = row + ended.astype(jnp.int32), next_unit, chosen
        following, _, _ = item_of(*after)
        hi = jnp.where(next_unit < stop, following.hi, following.lo)
        return *after, body(item, dataclasses.replace(following, hi=hi), carry)

    first_row = row_of_unit(start, unit_ends_ref)
    state = first_row, start, lengths_of(first_row), (jnp.int32(0), jnp.bool_(False))
    lax.while_loop(lambda state: state[1] < stop, next_item, state)
