"""Which tokens top_k and top_p keep: thresholds found by search, without a sort and without a loop.

A token's *gap* is how far its logit lies below the largest of its row: 0 for the best token. A
filter keeps the tokens up to some gap. The search weighs the tokens up to a few gaps at a time, by
sums over the vocabulary, in as many passes as any floats need. So a step that filters can be
captured in a CUDA graph, in which neither a sort nor a loop within the loop of steps would work,
and a vocabulary that is cut over devices is not gathered. These passes define what the search
kernel finds, `kernels/triton/sampling_search.py`, and run where that doesn't.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_paged.engine.sampling.kernels.sampling_noise import NUM_FLOATS, float_of, number_of

Total = Callable[[jax.Array], jax.Array]

_NUM_PIVOTS = 8  # gaps that one pass over the logits measures
_MAX_BLOCKS = 256  # pieces of a row that are summed side by side
_MAX_SHARDS = 16  # devices over which a row may be cut without a copy to cut it into blocks
_NUM_PASSES = math.ceil(math.log(NUM_FLOATS, _NUM_PIVOTS + 1))


def find_limits(
    gap: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    temperature: jax.Array,
    num_filters: int,
    total: Total = lambda x: x,
) -> jax.Array:
    """Return the gap `f32[S]` from which on top_k and then top_p drop tokens.

    Args:
        gap: `f32[S, V]`, at least 0, 0 for the best token of each row.
        top_k: `i32[S]`, 0 = off.
        top_p: `f32[S]`, 1 = off.
        temperature: `f32[S]`, above 0.
        num_filters: static; with 1, rows that have a top_k have no top_p.
        total: adds up over devices that share the vocabulary, where `gap` is one's part.
    """
    blocks = _blocks(gap)
    mass = jnp.exp(-blocks / temperature[:, None, None])
    counts, everything = top_k > 0, jnp.full_like(top_p, jnp.inf)
    weights = jnp.where(counts[:, None, None], 1.0, mass)
    target = jnp.where(counts, top_k.astype(jnp.float32), _target(mass, top_p, total))
    limit = _search(blocks, weights, target, everything, total)
    if num_filters == 1:
        return limit
    mass = jnp.where(blocks < limit[:, None, None], mass, 0.0)
    target = jnp.where(counts, _target(mass, top_p, total), jnp.inf)
    return _search(blocks, mass, target, limit, total)


def num_blocks(vocab_size: int) -> int:
    """Return into how many blocks to cut a vocabulary.

    It is a multiple of the number of devices, if that is a power of two that divides the size.
    """
    least = math.gcd(vocab_size, _MAX_SHARDS)
    return max(x for x in range(least, _MAX_BLOCKS + 1, least) if vocab_size % x == 0)


def _blocks(gap: jax.Array) -> jax.Array:
    return gap.reshape(gap.shape[0], num_blocks(gap.shape[1]), -1)


def _target(mass: jax.Array, top_p: jax.Array, total: Total) -> jax.Array:
    all_mass = total(jnp.sum(jnp.sum(mass, axis=2), axis=1))
    return jnp.where(top_p < 1, top_p * all_mass, jnp.inf)


def _search(
    blocks: jax.Array, weights: jax.Array, target: jax.Array, limit: jax.Array, total: Total
) -> jax.Array:
    """Return the least gap `f32[S]`, or the limit, below which the weights sum to the target.

    Each pass cuts the floats that are left into equal parts. The last one leaves a single float.
    """
    # The target is a number, which XLA does not know. Sums over devices must depend on one another.
    limit = jnp.where(jnp.isnan(target), target, limit)
    steps = jnp.arange(1, _NUM_PIVOTS + 1)[None]
    low, high = jnp.zeros_like(limit, jnp.int32), number_of(limit)  # kept, and not kept
    for _ in range(_NUM_PASSES):
        whole, rest = jnp.divmod(high - low, _NUM_PIVOTS + 1)
        parts = whole[:, None] * steps + rest[:, None] * steps // (_NUM_PIVOTS + 1)
        pivots = low[:, None] + parts
        is_kept = total(_weigh(blocks, weights, float_of(pivots))) < target[:, None]
        low, high = (
            jnp.maximum(low, jnp.max(jnp.where(is_kept, pivots, 0), axis=1)),
            jnp.minimum(high, jnp.min(jnp.where(is_kept, high[:, None], pivots), axis=1)),
        )
    return float_of(high)


def _weigh(blocks: jax.Array, weights: jax.Array, pivots: jax.Array) -> jax.Array:
    """Return the weight of the tokens whose gaps are below each of the pivots `f32[S, J]`."""
    operands = [
        jnp.where(blocks < pivots[:, j, None, None], weights, 0.0) for j in range(_NUM_PIVOTS)
    ]

    # One reduction of many operands reads the gaps once.
    def add(x: tuple[jax.Array, ...], y: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        return tuple(a + b for a, b in zip(x, y, strict=True))

    parts = lax.reduce(tuple(operands), (np.float32(0),) * _NUM_PIVOTS, add, (2,))
    return jnp.sum(jnp.stack(parts, axis=1), axis=2)
