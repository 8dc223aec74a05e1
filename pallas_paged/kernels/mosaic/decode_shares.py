"""The share of a Mosaic decode program: which rows it attends to, and to which of their blocks."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_paged.kernels.logits import LogitOptions

if TYPE_CHECKING:
    from pallas_paged.kernels.mosaic.config import MosaicDecodeConfig

_WAYS = 16  # in which a step of the search for a row divides the rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """A row as far as it is in a share, or one split of it.

    Attributes:
      row, seq_len: which row, and its tokens.
      lo, hi: its blocks `[lo, hi)`, none if the row has no tokens.
      slot: of the partial state.
    """

    row: jax.Array
    seq_len: jax.Array
    lo: jax.Array
    hi: jax.Array
    slot: jax.Array


def row_blocks(
    seq_len: jax.Array, options: LogitOptions, block_k: int
) -> tuple[jax.Array, jax.Array]:
    """The blocks `[first, end)` of a row that its newest token sees."""
    end = pl.cdiv(seq_len, block_k)
    return jnp.minimum(first_key(seq_len, options) // block_k, end), end


def first_key(seq_len: jax.Array, options: LogitOptions) -> jax.Array | int:
    """The first key of a row that its newest token sees."""
    return 0 if options.sliding_window is None else options.first_key(seq_len - 1)


def row_of(unit: jax.Array, unit_ends_ref: Any) -> jax.Array:
    """The row that a unit of the line belongs to: how many rows end at or before it.

    Each load that depends on another is a wait, so every step of the search loads the ends of many
    rows at once.
    """
    (num_seqs,) = unit_ends_ref.shape
    row = jnp.int32(0)  # as many rows are known to have ended
    width = 1
    while width < num_seqs:
        width *= _WAYS
    while width > 1:
        width //= _WAYS
        ended = jnp.int32(0)
        for i in range(1, min(_WAYS, pl.cdiv(num_seqs, width))):
            last = row + (i * width - 1)
            end = unit_ends_ref[jnp.minimum(last, num_seqs - 1)]
            ended += ((last < num_seqs) & (end <= unit)).astype(jnp.int32)
        row += ended * width
    return row


def walk(
    body: Callable[[Piece, jax.Array], jax.Array],
    seq_lens_ref: Any,
    unit_ends_ref: Any,
    *,
    options: LogitOptions,
    config: MosaicDecodeConfig,
) -> jax.Array:
    """Calls `body(piece, step)` for every piece of the program's share, and returns the last step.

    Args:
      body: returns `step` plus the blocks of the piece; the first step is 0.
    """
    (num_seqs,) = seq_lens_ref.shape
    program = lax.axis_index("program")
    total = unit_ends_ref[num_seqs - 1]
    # As in the merge, which finds the program of a unit by one division.
    units_per_program = pl.cdiv(total, config.num_programs)
    start = program * units_per_program
    stop = jnp.minimum(start + units_per_program, total)
    blocks_per_unit = (
        1 if config.fixed_split_size is None else config.fixed_split_size // config.block_k
    )

    def lengths_of(row):
        row = jnp.minimum(row, num_seqs - 1)
        return seq_lens_ref[row], unit_ends_ref[row]

    def next_piece(state):
        row, unit, lengths, step = state
        next_lengths = lengths_of(row + 1)  # long before they are used
        seq_len, row_end = lengths
        first_block, end_block = row_blocks(seq_len, options, config.block_k)
        row_start = row_end - pl.cdiv(end_block - first_block, blocks_per_unit)
        next_unit = jnp.minimum(row_end, stop if config.fixed_split_size is None else unit + 1)
        lo = first_block + (unit - row_start) * blocks_per_unit
        hi = jnp.minimum(first_block + (next_unit - row_start) * blocks_per_unit, end_block)
        slot = program + row if config.fixed_split_size is None else unit
        step = body(Piece(row=row, seq_len=seq_len, lo=lo, hi=hi, slot=slot), step)
        ended = next_unit == row_end
        lengths = jax.tree.map(functools.partial(jnp.where, ended), next_lengths, lengths)
        return row + ended.astype(jnp.int32), next_unit, lengths, step

    first_row = row_of(start, unit_ends_ref)
    state = first_row, start, lengths_of(first_row), jnp.int32(0)
    return lax.while_loop(lambda state: state[1] < stop, next_piece, state)[-1]
