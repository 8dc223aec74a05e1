"""How split-KV decoding divides the keys of a batch among programs, for every GPU kernel family.

The keys of each row are cut into blocks of `block_k` tokens. The blocks of all rows lie end to end
on one line of work units, and each program of a KV head takes the next equal range of that line,
across row borders (the balanced split of stream-K):

    row 0           row 1   row 2 ...
    |--|--|--|--|--||--|--||--|--|--|--|--|--|--|
    [ program 0  ][ program 1  ][ program 2  ]...

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

from pallas_paged.kernels.config_fields import programs_per_kv_head
from pallas_paged.kernels.logits import LogitOptions
from pallas_paged.prefix_sums import prefix_sums


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodePlan:
    """Static sizes of the split. The methods do the arithmetic, in kernels and outside.

    Attributes:
        options: of the logits; only the sliding window matters here.
        block_k: tokens of a block.
        fixed_split_size: tokens of a work unit, a multiple of `block_k`; None for one block.
        num_programs: programs of each KV head.
        num_partials: partial states for which there is room, per KV head.
    """

    options: LogitOptions
    block_k: int
    fixed_split_size: int | None
    num_programs: int
    num_partials: int

    @classmethod
    def of(
        cls,
        config: Any,  # a decode config of any family
        options: LogitOptions,
        *,
        num_seqs: int,
        num_kv_heads: int,
        max_kv_len: int,
    ) -> DecodePlan:
        """Return the plan of a call whose rows hold at most `max_kv_len` tokens."""
        num_programs = programs_per_kv_head(config.num_programs, num_kv_heads)
        num_partials = num_programs + num_seqs
        if config.fixed_split_size is not None:
            num_partials = num_seqs * pl.cdiv(max_kv_len, config.fixed_split_size)
        return cls(
            options=options,
            block_k=config.block_k,
            fixed_split_size=config.fixed_split_size,
            num_programs=num_programs,
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

    def units_of_program(
        self, program: jax.Array, num_units: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Return the units `[start, stop)` of a program, of `num_units` on the line."""
        # Rounded up: no program has more than in the most even split, and one division finds the
        # program of a unit.
        units_per_program = pl.cdiv(num_units, self.num_programs)
        start = program * units_per_program
        return start, jnp.minimum(start + units_per_program, num_units)

    def partial_index(self, *, program: jax.Array, row: jax.Array, unit: jax.Array) -> jax.Array:
        """Return where a program leaves the partial state of a row, which begins at `unit`."""
        return program + row if self.fixed_split_size is None else unit

    def partials_of_row(self, row: jax.Array, unit_ends_ref: Any) -> tuple[jax.Array, jax.Array]:
        """Return the index of a row's first partial state and their number, 0 for an empty row."""
        (num_seqs,) = unit_ends_ref.shape
        end = unit_ends_ref[row]
        start = jnp.where(row > 0, unit_ends_ref[jnp.maximum(row - 1, 0)], 0)
        if self.fixed_split_size is None:
            # At least 1: all rows may be empty.
            units_per_program = jnp.maximum(
                pl.cdiv(unit_ends_ref[num_seqs - 1], self.num_programs), 1
            )
            first = lax.div(start, units_per_program) + row
            last = lax.div(end - 1, units_per_program) + row
        else:
            first, last = start, end - 1
        return first, jnp.where(start < end, last + 1 - first, 0)
