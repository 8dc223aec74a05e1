"""Which tokens top_k and top_p keep: thresholds found by search, without a sort and without a loop.

A token's *depth* is how far its logit, divided by the temperature, lies below the largest: 0 for
the best token. A filter keeps the tokens up to some depth. The search measures the tokens above a
few depths at a time, by sums over the vocabulary, in as many passes as any floats need. So a step
that filters can be captured in a CUDA graph, in which neither a sort nor a loop within the loop of
steps would work, and a vocabulary that is cut over devices is not gathered.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_paged.engine.logprobs import top_tokens

MAX_FEW = 64  # the largest top_k that needs no search
_NUM_PIVOTS = 8  # depths that one pass over the logits measures
_MAX_BLOCKS = 256  # pieces of a row that are summed side by side
_MAX_SHARDS = 16  # devices over which a row may be cut without a copy to cut it into blocks
_SUBNORMAL = 2**23 - 1  # floats above 0 that a device may flush to 0
_NUM_DEPTHS = 0x7F800000 - _SUBNORMAL  # from 0 to infinity
_NUM_PASSES = math.ceil(math.log(_NUM_DEPTHS, _NUM_PIVOTS + 1))


def limit_few(
    depth: jax.Array, top_k: jax.Array, top_p: jax.Array, num_devices: int = 1
) -> jax.Array:
    """Return the depth `f32[S]` from which on top_k and then top_p drop tokens.

    Args:
        depth: `f32[S, V]`, at least 0, 0 for the best token of each row.
        top_k: `i32[S]`; rows where it is not in 1 to `MAX_FEW` drop nothing.
        top_p: `f32[S]`, 1 = off.
        num_devices: static, over which the vocabulary is cut.
    """
    num_best = min(MAX_FEW, depth.shape[1])
    best = -top_tokens(-depth, num_best, num_devices)[0]  # [S, B], the least deep first
    kth = jnp.take_along_axis(best, jnp.clip(top_k - 1, 0, num_best - 1)[:, None], axis=1)
    # All tokens as deep as the last one are kept, also those that are not among the best.
    num_kept = jnp.sum(depth <= kth, axis=1, dtype=jnp.float32)
    num_ties = num_kept - jnp.sum(best < kth, axis=1, dtype=jnp.float32)
    weights = jnp.where(best < kth, jnp.exp(-best), 0.0)
    total = jnp.sum(weights, axis=1) + num_ties * jnp.exp(-kth[:, 0])
    is_before = best[:, None] < best[:, :, None]
    before = jnp.sum(jnp.where(is_before, weights[:, None], 0.0), axis=2)
    target = jnp.where(top_p < 1, top_p * total, jnp.inf)
    kept = jnp.where(before < target[:, None], jnp.minimum(best, kth), 0.0)
    deepest = jnp.max(kept, axis=1)
    is_limited = (top_k > 0) & (top_k <= MAX_FEW) & (deepest < jnp.inf)
    return jnp.where(is_limited, _float(_number(deepest) + 1), jnp.inf)


def limit_count(depth: jax.Array, top_k: jax.Array) -> jax.Array:
    """Return the depth from which on any top_k drops tokens, as `limit_few`; 0 = off."""
    blocks = _blocks(depth)
    target = jnp.where(top_k > 0, top_k.astype(jnp.float32), jnp.inf)
    return _search(blocks, jnp.ones_like(blocks), target, jnp.full_like(target, jnp.inf))


def limit_mass(depth: jax.Array, top_p: jax.Array, limit: jax.Array) -> jax.Array:
    """Return the depth from which on top_p drops tokens.

    Args:
        depth: as in `limit_few`.
        top_p: `f32[S]`, 1 = off.
        limit: `f32[S]`, depth from which on tokens are dropped already; it is the least result.
    """
    blocks = _blocks(depth)
    weights = jnp.where(blocks < limit[:, None, None], jnp.exp(-blocks), 0.0)
    total = jnp.sum(jnp.sum(weights, axis=2), axis=1)
    return _search(blocks, weights, jnp.where(top_p < 1, top_p * total, jnp.inf), limit)


def num_blocks(vocab_size: int) -> int:
    """Return into how many blocks to cut a vocabulary.

    It is a multiple of the number of devices, if that is a power of two that divides the size.
    """
    least = math.gcd(vocab_size, _MAX_SHARDS)
    return max(x for x in range(least, _MAX_BLOCKS + 1, least) if vocab_size % x == 0)


def _blocks(depth: jax.Array) -> jax.Array:
    return depth.reshape(depth.shape[0], num_blocks(depth.shape[1]), -1)


def _search(
    blocks: jax.Array, weights: jax.Array, target: jax.Array, limit: jax.Array
) -> jax.Array:
    """Return the least depth `f32[S]`, or the limit, above which the weights sum to the target.

    Each pass cuts the floats that are left into equal parts. The last one leaves a single float.
    """
    steps = jnp.arange(1, _NUM_PIVOTS + 1)[None]
    low, high = jnp.zeros_like(limit, jnp.int32), _number(limit)  # kept, and not kept
    for _ in range(_NUM_PASSES):
        whole, rest = jnp.divmod(high - low, _NUM_PIVOTS + 1)
        parts = whole[:, None] * steps + rest[:, None] * steps // (_NUM_PIVOTS + 1)
        pivots = low[:, None] + parts
        is_kept = _weigh(blocks, weights, _float(pivots)) < target[:, None]
        low, high = (
            jnp.maximum(low, jnp.max(jnp.where(is_kept, pivots, 0), axis=1)),
            jnp.minimum(high, jnp.min(jnp.where(is_kept, high[:, None], pivots), axis=1)),
        )
    return _float(high)


def _weigh(blocks: jax.Array, weights: jax.Array, pivots: jax.Array) -> jax.Array:
    """Return the weight of the tokens that are less deep than each of the pivots `f32[S, J]`."""
    operands = [
        jnp.where(blocks < pivots[:, j, None, None], weights, 0.0) for j in range(_NUM_PIVOTS)
    ]

    # One reduction of many operands reads the depths once.
    def add(x: tuple[jax.Array, ...], y: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        return tuple(a + b for a, b in zip(x, y, strict=True))

    parts = lax.reduce(tuple(operands), (np.float32(0),) * _NUM_PIVOTS, add, (2,))
    return jnp.sum(jnp.stack(parts, axis=1), axis=2)


def _number(depth: jax.Array) -> jax.Array:
    """Number floats of at least 0 in order; those too small to be normal count as 0."""
    return jnp.maximum(lax.bitcast_convert_type(depth, jnp.int32) - _SUBNORMAL, 0)


def _float(number: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(jnp.where(number > 0, number + _SUBNORMAL, 0), jnp.float32)
