"""Plan of split-KV decoding: the keys of a batch, divided among programs of any GPU kernel family.

The keys of each row are divided into blocks of `block_k` tokens. The blocks of all rows form one
line of work units, and each program of a KV head takes the next equal range of that line, across
row borders (the balanced split of stream-K):

    row 0           row 1   row 2 ...
    |--|--|--|--|--||--|--||--|--|--|--|--|--|--|
    [ program 0  ][ program 1  ][ program 2  ]...

A call may ask for ranges of unsplit rows. It gets them if all rows have the same number of blocks
and no program then has much more to do. And it may ask for short programs, which share a sixteenth
of a long line and start when others end: that evens out the speeds of the multiprocessors. For long
rows of equal length it is faster than unsplit rows.

A program leaves one partial state (out, lse) for each row in its range, at index `program + row`.
From one state to the next on the line the program or the row increases, so all indices differ, and
the partial states of one row are consecutive. The merge reads them back.

With `fixed_split_size` a work unit is a split of that many tokens instead of one block. Every
split has its own partial state, at the index of the unit, so the sums of a row do not depend on
the other rows of the batch.

Work units left of a sliding window do not exist.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_paged.kernels.logits import LogitOptions
from pallas_paged.pages.prefix_sums import prefix_sums

# Least blocks of an even range for which short programs pay, and pay more than unsplit rows.
_LONG_RANGE, _VERY_LONG_RANGE = 16, 48


def programs_per_kv_head(num_programs: int, num_kv_heads: int) -> int:
    """Return how many of the device's `num_programs` work on one KV head, at least one."""
    return max(1, num_programs // num_kv_heads)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodePlan:
    """Static sizes of the split. The methods do the arithmetic, in kernels and outside."""

    options: LogitOptions  # of the logits; only the sliding window matters here
    block_k: int  # tokens of a block
    # Tokens of a work unit, a multiple of `block_k`; None for one block.
    fixed_split_size: int | None
    num_seqs: int  # rows
    with_whole_rows: bool = False  # rows of equal length are not split if that costs little
    num_programs: int  # programs of each KV head that start together
    num_short_programs: int = 0  # programs of each KV head after them
    num_partials: int  # partial states for which there is room, per KV head

    @classmethod
    def of(
        cls,
        config: Any,  # a decode config of any family
        options: LogitOptions,
        *,
        num_seqs: int,
        num_kv_heads: int,
        max_kv_len: int,
        with_whole_rows: bool = False,
        with_short_programs: bool = False,
    ) -> DecodePlan:
        """Return the plan of a call whose rows hold at most `max_kv_len` tokens.

        It has short programs where they are asked for and rows may be long enough.
        """
        num_programs = programs_per_kv_head(config.num_programs, num_kv_heads)
        num_blocks = num_seqs * pl.cdiv(max_kv_len, config.block_k)
        is_long = num_blocks >= _LONG_RANGE * num_programs and config.fixed_split_size is None
        num_short_programs = num_programs if with_short_programs and is_long else 0
        num_partials = num_programs + num_short_programs + num_seqs
        if config.fixed_split_size is not None:
            num_partials = num_seqs * pl.cdiv(max_kv_len, config.fixed_split_size)
        return cls(
            options=options,
            block_k=config.block_k,
            fixed_split_size=config.fixed_split_size,
            num_seqs=num_seqs,
            with_whole_rows=with_whole_rows and num_seqs > 1,
            num_programs=num_programs,
            num_short_programs=num_short_programs,
            num_partials=num_partials,
        )

    @property
    def blocks_per_unit(self) -> int:
        """Blocks of a work unit."""
        return 1 if self.fixed_split_size is None else self.fixed_split_size // self.block_k

    def first_key(self, seq_len: jax.Array) -> jax.Array | int:
        """Return the first key that the newest token of a row of `seq_len` tokens sees."""
        return 0 if self.options.sliding_window is None else self.options.first_key(seq_len - 1)

    def row_blocks(self, seq_len: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the blocks `[first, end)` that the newest token of a row sees."""
        end = pl.cdiv(seq_len, self.block_k)
        return jnp.minimum(self.first_key(seq_len) // self.block_k, end), end

    def num_units(self, num_blocks: jax.Array) -> jax.Array:
        """Return the work units that `num_blocks` blocks of one row make."""
        if self.fixed_split_size is None:
            return num_blocks
        return pl.cdiv(num_blocks, self.blocks_per_unit)

    def unit_ends(self, seq_lens: jax.Array) -> jax.Array:
        """Return where the units of each row end on the line: i32`[B]`, inclusive prefix sums."""
        # The same for every layer of a step, so inside one jit XLA keeps a single copy of it.
        with jax.named_scope("block_prefix_sums"):
            first_block, end_block = self.row_blocks(seq_lens)
            return prefix_sums(self.num_units(end_block - first_block))

    def _range_size(self, num_units: jax.Array) -> jax.Array:
        """Return the units of a range; the last range may have fewer."""
        # Rounded up: no program has more than in the most even split, and one division finds the
        # program of a unit.
        size = even = pl.cdiv(num_units, self.num_programs)
        if self.num_short_programs:
            size = jnp.where(even < _LONG_RANGE, even, even - even // 16)
        if not self.with_whole_rows:
            return size
        # Rows of equal length are not split if that gives a program at most 1/32 more. Other rows
        # may seem equal by their sum: then ranges are only a little longer than needed.
        of_row = jnp.maximum(lax.div(num_units, self.num_seqs), 1)
        unsplit = pl.cdiv(even, of_row) * of_row
        pays = (of_row * self.num_seqs == num_units) & (unsplit - even <= even // 32)
        if self.num_short_programs:
            pays &= even < _VERY_LONG_RANGE
        return jnp.where(pays, unsplit, size)

    def _short_ranges(self, num_units: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return where the short ranges begin, and the units of one."""
        start = jnp.minimum(self._range_size(num_units) * self.num_programs, num_units)
        return start, jnp.maximum(pl.cdiv(num_units - start, self.num_short_programs), 1)

    def units_of_program(
        self, program: jax.Array, num_units: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Return the units `[start, stop)` of a program, of `num_units` on the line."""
        size = self._range_size(num_units)
        start = program * size
        if not self.num_short_programs:
            return start, jnp.minimum(start + size, num_units)
        end, short_size = self._short_ranges(num_units)
        short_start = end + (program - self.num_programs) * short_size
        is_short = program >= self.num_programs
        return (
            jnp.where(is_short, short_start, start),
            jnp.where(
                is_short,
                jnp.minimum(short_start + short_size, num_units),
                jnp.minimum(start + size, end),
            ),
        )

    def partial_index(self, *, program: jax.Array, row: jax.Array, unit: jax.Array) -> jax.Array:
        """Return where a program leaves the partial state of a row, which begins at `unit`."""
        return program + row if self.fixed_split_size is None else unit

    def partials_of_row(self, row: jax.Array, unit_ends_ref: Any) -> tuple[jax.Array, jax.Array]:
        """Return the index of a row's first partial state and their number, 0 for an empty row."""
        (num_seqs,) = unit_ends_ref.shape
        end = unit_ends_ref[row]
        start = jnp.where(row > 0, unit_ends_ref[jnp.maximum(row - 1, 0)], 0)
        if self.fixed_split_size is None:
            num_units = unit_ends_ref[num_seqs - 1]
            size = jnp.maximum(self._range_size(num_units), 1)  # all rows may be empty

            def program_of(unit: jax.Array) -> jax.Array:
                program = lax.div(unit, size)
                if not self.num_short_programs:
                    return program
                short_start, short_size = self._short_ranges(num_units)
                short = self.num_programs + lax.div(unit - short_start, short_size)
                return jnp.where(unit < short_start, program, short)

            first, last = program_of(start) + row, program_of(end - 1) + row
        else:
            first, last = start, end - 1
        return first, jnp.where(start < end, last + 1 - first, 0)
