"""What a consumer warpgroup of the ragged kernel does with a piece of work."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_paged.kernels.logits import LogitOptions, base2_logits
from pallas_paged.kernels.mosaic.ops import (
    MATRIX,
    ROWS,
    add_product,
    along,
    full,
    iota,
    load,
    product,
)
from pallas_paged.kernels.mosaic.ragged_tile import WG_ROWS, Rows, State, per_head
from pallas_paged.kernels.mosaic.ragged_work import in_tree
from pallas_paged.kernels.mosaic.ring import Ring


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turns:
    """How two warpgroups take turns at the matrix unit.

    Attributes:
      barrier: of two arrivals; None for a warpgroup that has the matrix unit to itself.
    """

    barrier: Any

    def arrive(self) -> None:
        """Lets the other go on."""
        if self.barrier is not None:
            plgpu.barrier_arrive(self.barrier)

    def wait(self) -> None:
        """Goes on once the other has arrived as often."""
        if self.barrier is not None:
            plgpu.barrier_wait(self.barrier)

    def take(self) -> None:
        """Meets the other."""
        self.arrive()
        self.wait()


def attend(
    q_smem: Any,  # [64, D]
    ring: Ring,
    piece: dict[str, jax.Array],
    rows: Rows,
    step: jax.Array,
    *,
    turns: Turns,
    alibi_slopes: Any,  # f32[Hq] or None
    row_positions: Any,  # i32[64]; None where queries are their row's newest tokens
    tree_words: Any,  # i32[words, 64] or None
    causal: bool,
    options: LogitOptions,
    interpret: bool,
) -> State:
    """The state of a warpgroup's rows after the blocks of a piece.

    Args:
      step: blocks that came through the ring before.
      causal: a query sees no key after it.
    """
    num_stages, block_k, head_dim = ring.k.shape
    lo, hi, kv_len = piece["lo"], piece["hi"], piece["kv_len"]
    before = kv_len - piece["q_len"]  # keys older than all queries of the sequence
    token = rows.tile.place(rows.wg * WG_ROWS + iota((WG_ROWS,), 0, ROWS))[1]
    positions = before + rows.offset + token
    last_seen = jnp.minimum(positions, kv_len - 1)
    if not causal:  # from a vector all the same: of scalars alone no layout is inferred
        last_seen = jnp.maximum(last_seen, kv_len - 1)
    if row_positions is not None:
        positions = load(row_positions, ROWS)
    slopes = None if alibi_slopes is None else per_head(alibi_slopes, rows, ROWS)

    def visible(block, keys):
        """Which keys of a block each query sees."""
        seen = keys <= along(last_seen, keys)
        if tree_words is not None:
            seen &= in_tree(tree_words, block * block_k, before, keys)
        if options.sliding_window is not None:
            seen &= keys >= along(options.first_key(positions), keys)
        return seen

    def zero_unreadable(block, slot):
        """Values of keys that the tile must not read, which may be NaN: 0 times NaN is NaN."""
        for part in range(0, block_k, WG_ROWS):
            first = block * block_k + part

            @pl.when((first < piece["first_key"]) | (first + WG_ROWS > kv_len))
            def _(part=part, first=first):
                v_ref = ring.v.at[slot, pl.ds(part, WG_ROWS)]
                v = plgpu.load(v_ref, layout=MATRIX)
                keys = first + iota(v.shape, 0, MATRIX)
                readable = (keys >= piece["first_key"]) & (keys < kv_len)
                v_ref[...] = jnp.where(readable, v, jnp.zeros_like(v))
                plgpu.commit_smem()

    def attend_block(masked, block, state):
        m_i, l_i, acc = state
        now = step + (block - lo)
        slot = lax.rem(now, num_stages)

        s = product(q_smem, ring.k.at[slot].transpose((1, 0)), meanwhile=turns.take)
        plgpu.barrier_arrive(ring.k_free.at[slot])
        keys = block * block_k + iota((WG_ROWS, block_k), 1, MATRIX)
        if slopes is None:
            s, factor = base2_logits(s, options, None, keys)
        else:
            s, factor = base2_logits(s, options, along(slopes, s), keys - along(positions, s))
        if masked:
            s = jnp.where(visible(block, keys), s, -jnp.inf)
        m_new = jnp.maximum(m_i, s.max(axis=1) * factor)
        m_safe = jnp.where(m_new == -jnp.inf, 0.0, m_new) if masked else m_new
        alpha = jnp.exp2(m_i - m_safe)
        p = jnp.exp2(s * factor - along(m_safe, s))
        l_new = l_i * alpha + p.sum(axis=1)
        acc = acc * along(alpha, acc)
        # The order that keeps the matrix unit busy: all of the softmax before its turn is passed.
        acc, l_new, m_new, p = lax.optimization_barrier((acc, l_new, m_new, p.astype(ring.v.dtype)))
        if masked:
            # For both warpgroups, before the other one's turn to read the values.
            plgpu.barrier_wait(ring.v_full.at[slot])
            pl.when(rows.wg == 0)(functools.partial(zero_unreadable, block, slot))
        turns.arrive()
        if not masked:
            plgpu.barrier_wait(ring.v_full.at[slot])
        turns.wait()

        def wait_for_next_k():
            @pl.when(block + 1 < hi)
            def _():
                plgpu.barrier_wait(ring.k_full.at[lax.rem(now + 1, num_stages)])

        acc = add_product(acc, p, ring.v.at[slot], meanwhile=wait_for_next_k, interpret=interpret)
        plgpu.barrier_arrive(ring.v_free.at[slot])
        return m_new, l_new, acc

    @pl.when(lo < hi)
    def _():
        plgpu.barrier_wait(ring.k_full.at[lax.rem(step, num_stages)])

    pl.when(rows.wg == 1)(turns.take)
    state = (
        full((WG_ROWS,), -jnp.inf, ROWS),
        full((WG_ROWS,), 0.0, ROWS),
        full((WG_ROWS, head_dim), 0.0, MATRIX),
    )
    attend_full = functools.partial(attend_block, False)
    attend_masked = functools.partial(attend_block, True)
    if options.sliding_window is not None:
        state = lax.fori_loop(lo, piece["full_lo"], attend_masked, state)
    state = lax.fori_loop(piece["full_lo"], piece["full_hi"], attend_full, state)
    state = lax.fori_loop(piece["full_hi"], hi, attend_masked, state)
    pl.when(rows.wg == 0)(turns.take)
    return state
