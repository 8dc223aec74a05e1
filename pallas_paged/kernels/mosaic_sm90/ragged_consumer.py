"""Attention of a consumer warpgroup of the ragged kernel to a work tile."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_paged.kernels.logits import base2_logits
from pallas_paged.kernels.mosaic import ops
from pallas_paged.kernels.mosaic.ragged_work import QueryRows, WorkDescriptor
from pallas_paged.kernels.mosaic.softmax_state import State, empty_state
from pallas_paged.kernels.mosaic_sm90.ragged_tile import WG_ROWS, TileRows
from pallas_paged.kernels.mosaic_sm90.ring import Ring, zero_unreadable
from pallas_paged.kernels.ragged_tiles import for_each_block


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScheduleBarrier:
    """Ping-pong of two consumers: the softmax of one runs under the products of the other.

    They are half a block apart: the second one arrives once before its first work tile, the first
    one once after its last. Three consumers take no turns, and wait for one another only to `meet`.

    Attributes:
        barrier: of an arrival of each consumer; None where consumers wait for no other.
        num_consumers: of the program.
    """

    barrier: Any
    num_consumers: int

    @property
    def takes_turns(self) -> bool:
        """Whether there are two, and they wait for one another."""
        return self.barrier is not None and self.num_consumers == 2

    def arrive(self) -> None:
        """Let the other consumer go on."""
        if self.takes_turns:
            plgpu.barrier_arrive(self.barrier)

    def wait(self) -> None:
        """Wait until the other consumer has arrived the same number of times."""
        if self.takes_turns:
            plgpu.barrier_wait(self.barrier)

    def meet(self) -> None:
        """Let three consumers wait for one another."""
        if self.barrier is not None and not self.takes_turns:
            plgpu.barrier_arrive(self.barrier)
            plgpu.barrier_wait(self.barrier)

    def begin(self, wg: jax.Array) -> None:
        """Begin with the work tiles of a program, as consumer `wg`."""
        pl.when(wg == 1)(self.arrive)

    def end(self, wg: jax.Array) -> None:
        """End after the last one."""
        pl.when(wg == 0)(self.arrive)
        self.wait()


def attend(
    q_smem: Any,  # [64, D]
    ring: Ring,
    work: WorkDescriptor,
    rows: TileRows,
    kv_iter: jax.Array,
    *,
    schedule: ScheduleBarrier,
    queries: QueryRows,
    values_are_zeroed: bool,
    k_scales: Any,  # f32[num_stages, block_k] times `only_factor`, f32[] or None
    interpret: bool,
) -> State:
    """Return the state of a warpgroup's rows after the blocks of a work item.

    It ends with an arrival at the schedule barrier. The first consumer waits after it has stored
    its results, the second one here, at its next work item.

    Args:
        kv_iter: blocks that came through the ring before.
        values_are_zeroed: where the tile must not read them, by a converter.
    """
    num_stages, block_k, head_dim = ring.v.shape
    lo, hi, kv_len = work.lo, work.hi, work.kv_len
    options, positions, slopes = queries.options, queries.positions, queries.slopes
    only_factor = None if k_scales is None else options.only_factor(slopes)

    def zero_values(block, stage):
        zero_unreadable(ring, stage, block, first_key=work.first_key, kv_len=kv_len, commit=True)

    def load_scales(stage):
        """Return the scales of the keys of a stage f32[block_k], or the one of all keys f32[]."""
        return plgpu.load(k_scales.at[stage], layout=ops.WGMMA_COL) if k_scales.ndim else k_scales

    def attend_block(masked, block, state):
        m_i, l_i, acc = state
        now = kv_iter + (block - lo)
        stage = lax.rem(now, num_stages)

        def beside_product():
            schedule.arrive()
            scales = None if k_scales is None else load_scales(stage)
            schedule.wait()
            return scales

        k = ring.k.at[stage].transpose((1, 0))
        s, scales = ops.wgmma_beside(q_smem, k, beside_product)
        plgpu.barrier_arrive(ring.k_free.at[stage])
        if scales is not None:
            if scales.ndim:
                s = s * ops.bcast(scales, s, axis=1)
            else:
                s = s * (scales if only_factor is None else scales * only_factor)
        keys = block * block_k + ops.iota((WG_ROWS, block_k), 1, ops.WGMMA)
        if only_factor is not None:
            factor = 1.0
        elif slopes is None:
            s, factor = base2_logits(s, options, None, keys)
        else:
            s, factor = base2_logits(
                s, options, ops.bcast(slopes, s), keys - ops.bcast(positions, s)
            )
        if masked:
            s = jnp.where(queries.sees(block * block_k, keys), s, -jnp.inf)
        m_new = jnp.maximum(m_i, s.max(axis=1) * factor)
        m_safe = jnp.where(m_new == -jnp.inf, 0.0, m_new) if masked else m_new
        alpha = jnp.exp2(m_i - m_safe)
        if only_factor is None:
            p = jnp.exp2(s * factor - ops.bcast(m_safe, s))
        else:
            maxima = ops.bcast(m_safe, s)
            p = jnp.exp2(ops.difference(s, maxima, ops.WGMMA, interpret=interpret))
        l_new = l_i * alpha + p.sum(axis=1)
        acc = acc * ops.bcast(alpha, acc)
        # All of the softmax stays before the arrival below; this order keeps the tensor cores busy.
        acc, l_new, m_new, p = lax.optimization_barrier((acc, l_new, m_new, p.astype(ring.v.dtype)))
        if masked and not values_are_zeroed:
            # The first consumer zeroes for all, before the others may read the values.
            plgpu.barrier_wait(ring.v_full.at[stage])
            pl.when(rows.wg == 0)(functools.partial(zero_values, block, stage))
            schedule.meet()
        schedule.arrive()
        if not masked or values_are_zeroed:
            plgpu.barrier_wait(ring.v_full.at[stage])
        schedule.wait()

        def wait_for_next_k():
            @pl.when(block + 1 < hi)
            def _():
                plgpu.barrier_wait(ring.k_full.at[lax.rem(now + 1, num_stages)])

        acc = ops.wgmma_accumulate(
            acc, p, ring.v.at[stage], overlap=wait_for_next_k, interpret=interpret
        )
        plgpu.barrier_arrive(ring.v_free.at[stage])
        return m_new, l_new, acc

    @pl.when(lo < hi)
    def _():
        plgpu.barrier_wait(ring.k_full.at[lax.rem(kv_iter, num_stages)])

    pl.when(rows.wg == 1)(schedule.wait)
    state = for_each_block(attend_block, work, empty_state(WG_ROWS, head_dim), options)
    # The other consumer need not wait while this one stores its results, nor this one for its last
    # softmax: the wait comes before the next work tile.
    schedule.arrive()
    return state
