"""The choice of experts for one row, which every program of a kernel makes for itself."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_paged.checks import pytree
from pallas_paged.decoder.kernels.operands import Routing
from pallas_paged.kernels.mosaic import ops
from pallas_paged.kernels.mosaic_sm90.config import EXPERTS_UNIT, padded

SLOTS = 64  # rows of wgmma's layout: more than a row has experts
_OTHERS = 64  # experts that each is compared with at once


@pytree
class ChoiceScratch:
    """Refs in shared memory, or their types. X is padded to a multiple of 128."""

    logits: Any  # f32[X]
    ranks: Any  # f32[X]
    experts: Any  # i32[SLOTS], the chosen ones, and behind them others
    weights: Any  # f32[SLOTS]
    chosen: Any  # barrier, complete when `experts` and `weights` are there

    @classmethod
    def types(cls, num_experts: int) -> ChoiceScratch:
        """Return the types for this number of experts."""
        num_experts = padded(num_experts, EXPERTS_UNIT)
        return cls(
            logits=plgpu.SMEM((num_experts,), jnp.float32),
            ranks=plgpu.SMEM((num_experts,), jnp.float32),
            experts=plgpu.SMEM((SLOTS,), jnp.int32),
            weights=plgpu.SMEM((SLOTS,), jnp.float32),
            chosen=plgpu.Barrier(),
        )


def choose(
    logits: jax.Array, bias: Any, scratch: ChoiceScratch, routing: Routing, real_experts: int
) -> jax.Array:
    """Choose experts by logits f32`[X]`, whose layout is strided; return them, i32`[SLOTS]`.

    A bias is a ref to device memory, or None. X is padded: `real_experts` can be chosen.

    Each logit is compared with all others: its rank is how many are larger, or equal and before.
    The ranks go through shared memory, because a thread has some rows of a matrix of wgmma.
    """
    (num_experts,) = logits.shape
    if bias is not None:  # in the layout that takes the fewest elements
        scratch.ranks.at[pl.ds(0, real_experts)][...] = ops.load(bias, ops.WGMMA_COL).astype(
            jnp.float32
        )
        plgpu.commit_smem()
        logits += ops.load_shared(scratch.ranks, logits_layout(num_experts))
    if real_experts < num_experts:
        is_real = ops.iota((num_experts,), 0, logits_layout(num_experts)) < real_experts
        logits = jnp.where(is_real, logits, -jnp.inf)
    scratch.logits[...] = logits
    plgpu.commit_smem()
    own = ops.load_shared(scratch.logits, ops.WGMMA_ROW)
    ranks = ops.full((num_experts,), 0.0, ops.WGMMA_ROW)
    shape = num_experts, _OTHERS
    place, other_place = (ops.iota(shape, axis, ops.WGMMA) for axis in range(2))
    for first in range(0, num_experts, _OTHERS):
        others = ops.load_shared(scratch.logits.at[pl.ds(first, _OTHERS)], ops.WGMMA_COL)
        others = lax.broadcast_in_dim(others, shape, (1,))
        mine = lax.broadcast_in_dim(own, shape, (0,))
        is_behind = (others > mine) | ((others == mine) & (other_place + first < place))
        ranks += jnp.sum(jnp.where(is_behind, 1.0, 0.0), axis=1)
    scratch.ranks[...] = ranks
    plgpu.commit_smem()

    def numerators(logits: jax.Array) -> jax.Array:
        return jnp.exp(logits - largest)

    largest = jnp.max(logits)
    of_sum = numerators(logits)
    if routing.norm_topk_prob:
        ranks = ops.load_shared(scratch.ranks, logits_layout(num_experts))
        of_sum = jnp.where(ranks < routing.num_experts_per_tok, of_sum, 0.0)
    scale = routing.scaling / jnp.sum(of_sum)
    # A row for each slot, whose expert is the one of that rank.
    experts = ops.full((SLOTS,), 0.0, ops.WGMMA_ROW)
    weights = ops.full((SLOTS,), 0.0, ops.WGMMA_ROW)
    shape = SLOTS, _OTHERS
    slot, place = (ops.iota(shape, axis, ops.WGMMA).astype(jnp.float32) for axis in range(2))
    for first in range(0, num_experts, _OTHERS):
        ranks, values = (
            lax.broadcast_in_dim(
                ops.load_shared(ref.at[pl.ds(first, _OTHERS)], ops.WGMMA_COL), shape, (1,)
            )
            for ref in (scratch.ranks, scratch.logits)
        )
        is_slot = ranks == slot
        experts += jnp.sum(jnp.where(is_slot, place + first, 0.0), axis=1)
        weights += jnp.sum(jnp.where(is_slot, numerators(values), 0.0), axis=1)
    # Of logits that are NaN several have one rank.
    chosen = jnp.minimum(experts, real_experts - 1.0).astype(jnp.int32)
    scratch.experts[...] = chosen
    scratch.weights[...] = weights * scale
    plgpu.commit_smem()
    plgpu.barrier_arrive(scratch.chosen)
    return chosen


def logits_layout(num_experts: int) -> Any:
    """Return the layout of the logits of all experts."""
    return plgpu.Layout.WG_STRIDED((num_experts,), vec_size=num_experts // 128)
