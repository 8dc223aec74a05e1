"""Which tokens top_k, top_p and min_p keep: thresholds found by search, without a sort.

A token's *depth* is how far its logit, divided by the temperature, lies below the largest: 0 for
the best token. A filter keeps the tokens up to some depth. The search measures the tokens below a
few depths at a time, by sums over the vocabulary, until one token is left in between. So a step
that filters can be captured in a CUDA graph, and a vocabulary that is cut over devices is not
gathered.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_NUM_PIVOTS = 16  # depths that one pass over the logits measures
_MAX_BLOCKS = 256  # pieces of a row that are summed side by side
MAX_SHARDS = 16  # devices over which a row may be cut without a copy to cut it into blocks
_SUBNORMAL = 2**23 - 1  # floats above 0 that a device may flush to 0
_ROUNDING = 2**-16  # more than the relative error of a sum over a vocabulary in f32


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, eq=False)
class Bracket:
    """What is known of the depths that filters keep, of S rows.

    Attributes:
        near: `f32[S]`, depth up to which tokens are kept.
        far: `f32[S]`, depth from which on tokens are dropped.
        weight_near, weight_far: `f32[S]`, weight of the tokens that are less deep than these.
        target: `f32[S]`, the token that brings the weight to it is the last that is kept.
        counts: `bool[S]`, whether a token weighs 1, for top_k, or exp(-depth), for top_p.
        is_new: `bool[S]`, whether nothing is measured yet.
        top_p: `f32[S]`, to be searched after top_k; 1 = off.
        is_done: `bool[S]`, whether the search has ended.
        pivots: `f32[S, J]`, depths to measure next, rising.
    """

    near: jax.Array
    far: jax.Array
    weight_near: jax.Array
    weight_far: jax.Array
    target: jax.Array
    counts: jax.Array
    is_new: jax.Array
    top_p: jax.Array
    is_done: jax.Array
    pivots: jax.Array


def start_bracket(
    vocab_size: int, top_k: jax.Array, top_p: jax.Array, is_active: jax.Array
) -> Bracket:
    """Return the bracket from which `narrow` starts.

    Args:
        vocab_size: tokens of a row.
        top_k: `i32[S]`, 0 = off.
        top_p: `f32[S]`, 1 = off.
        is_active: `bool[S]`, False for rows that keep all tokens.
    """
    is_done = ~(is_active & ((top_k > 0) | (top_p < 1)))
    zero, infinity = jnp.zeros_like(top_p), jnp.full_like(top_p, jnp.inf)
    bracket = Bracket(
        near=jnp.where(is_done, infinity, zero),
        far=infinity,
        weight_near=zero,
        weight_far=infinity,
        target=top_k.astype(jnp.float32),
        counts=top_k > 0,
        is_new=jnp.ones_like(is_done),
        top_p=top_p,
        is_done=is_done,
        pivots=jnp.zeros((top_p.size, _NUM_PIVOTS), jnp.float32),
    )
    return replace(bracket, pivots=_pivots(bracket, vocab_size))


def narrow(depth: jax.Array, bracket: Bracket, tolerance: jax.Array) -> Bracket:
    """Search until near and far enclose few tokens.

    Args:
        depth: `f32[S, V]`, at least 0, 0 for the best token of each row that is searched.
        bracket: of `start_bracket`, or of an earlier call.
        tolerance: `f32[]`, share of the probability that may lie between near and far; with 0
            the filters keep exactly the tokens that are less deep than far, and near equals far.
    """
    blocks = depth.reshape(depth.shape[0], num_blocks(depth.shape[1]), -1)

    def body(bracket: Bracket) -> Bracket:
        bracket = _update(bracket, *_measure(blocks, bracket), tolerance)
        return replace(bracket, pivots=_pivots(bracket, depth.shape[1]))

    bracket = replace(bracket, is_done=bracket.is_done & (bracket.near >= bracket.far))
    return lax.while_loop(lambda x: ~jnp.all(x.is_done), body, bracket)


def num_blocks(vocab_size: int) -> int:
    """Return into how many blocks to cut a vocabulary.

    It is a multiple of the number of devices, if that is a power of two that divides the size.
    """
    least = math.gcd(vocab_size, MAX_SHARDS)
    return max(x for x in range(least, _MAX_BLOCKS + 1, least) if vocab_size % x == 0)


def _pivots(bracket: Bracket, vocab_size: int) -> jax.Array:
    """Return the depths to measure next.

    The first pass measures depths that cover what is common, and then far. The next ones cut the
    bracket into parts that hold equal numbers of floats, so that there are few passes at worst.
    """
    near, far = (x[:, None] for x in (bracket.near, bracket.far))
    steps = jnp.arange(1, _NUM_PIVOTS + 1)[None]
    low, high = _bits(near), _bits(far)
    whole, rest = jnp.divmod(high - low, _NUM_PIVOTS + 1)
    parts = _float(low + whole * steps + rest * steps // (_NUM_PIVOTS + 1))
    # Deeper than this, all tokens together have less than 1 - top_p of the best one's probability.
    deepest = math.log(vocab_size) - jnp.log1p(-jnp.minimum(bracket.top_p, 1 - 2**-24))
    common = jnp.where(
        bracket.counts[:, None],
        jnp.asarray(np.geomspace(2**-5, 2**7, _NUM_PIVOTS), jnp.float32)[None],
        deepest[:, None] * (steps.astype(jnp.float32) / (_NUM_PIVOTS - 1)),
    )
    common = jnp.where(steps < _NUM_PIVOTS, jnp.minimum(common, far), far)
    return jnp.where(bracket.is_new[:, None], common, parts)


def _measure(blocks: jax.Array, bracket: Bracket) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Measure depths `f32[S, N, V/N]` in one pass.

    Returns:
        Weight of the tokens that are less deep than each pivot `f32[S, J]`; depths of the first
        and the last token in the bracket `f32[S]`, inf and -1 where there is none.
    """
    near, far, counts = (x[:, None, None] for x in (bracket.near, bracket.far, bracket.counts))
    weights = jnp.where(counts, 1.0, jnp.exp(-blocks))
    operands = [
        jnp.where(blocks < bracket.pivots[:, j, None, None], weights, 0.0)
        for j in range(_NUM_PIVOTS)
    ]
    # One reduction of many operands reads the depths once. The first depth is negated, so that
    # two kinds of sums, and as many messages between devices, are enough.
    operands.append(jnp.where(blocks >= near, -blocks, -jnp.inf))
    operands.append(jnp.where(blocks < far, blocks, -1.0))

    def combine(x: tuple[jax.Array, ...], y: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        sums = [a + b for a, b in zip(x[:-2], y[:-2], strict=True)]
        return (*sums, lax.max(x[-2], y[-2]), lax.max(x[-1], y[-1]))

    inits = [np.float32(0)] * _NUM_PIVOTS + [np.float32(-np.inf)] * 2
    parts = lax.reduce(tuple(operands), tuple(inits), combine, (2,))
    sums = jnp.sum(jnp.stack(parts[:-2], axis=1), axis=2)
    first, last = jnp.max(jnp.stack(parts[-2:]), axis=2)
    return sums, -first, last


def _update(
    bracket: Bracket,
    weights: jax.Array,
    first: jax.Array,
    last: jax.Array,
    tolerance: jax.Array,
) -> Bracket:
    """Return the bracket after a pass; rows that are done stay as they are."""
    counts, top_p, pivots = bracket.counts, bracket.top_p, bracket.pivots
    target = jnp.where(bracket.is_new & ~counts, top_p * weights[:, -1], bracket.target)
    kept = weights < target[:, None]
    near = jnp.maximum(bracket.near, jnp.max(jnp.where(kept, pivots, 0.0), axis=1))
    far = jnp.minimum(bracket.far, jnp.min(jnp.where(kept, jnp.inf, pivots), axis=1))
    weight_near = jnp.maximum(bracket.weight_near, jnp.max(jnp.where(kept, weights, 0.0), axis=1))
    weight_far = jnp.minimum(bracket.weight_far, jnp.min(jnp.where(kept, jnp.inf, weights), axis=1))
    # No token lies between the ends and the first and last token: those weights stay the same.
    near = jnp.maximum(near, first)
    far = jnp.minimum(far, _float(_bits(jnp.maximum(last, 0.0)) + 1))
    between = weight_far - weight_near
    is_exact = (first >= last) | (_bits(far) - _bits(near) <= 1)
    is_exact |= counts & ((weight_far <= target) | (between <= 1))
    is_exact |= ~counts & (between + _ROUNDING * weight_far < 2 * jnp.exp(-far))
    near = jnp.where(is_exact, far, near)
    is_done = is_exact | (~counts & (between <= tolerance * weight_near))
    # After top_k comes top_p, of what top_k has left.
    again = is_done & counts & (top_p < 1)
    after = Bracket(
        near=jnp.where(again, 0.0, near),
        far=far,
        weight_near=jnp.where(again, 0.0, weight_near),
        weight_far=jnp.where(again, jnp.inf, weight_far),
        target=target,
        counts=counts & ~again,
        is_new=again,
        top_p=top_p,
        is_done=is_done & ~again,
        pivots=pivots,
    )

    def choose(old: jax.Array, new: jax.Array) -> jax.Array:
        return jnp.where(bracket.is_done.reshape(-1, *(1,) * (old.ndim - 1)), old, new)

    return jax.tree.map(choose, bracket, after)


def _bits(depth: jax.Array) -> jax.Array:
    """Number floats of at least 0 in order; those too small to be normal count as 0."""
    return jnp.maximum(lax.bitcast_convert_type(depth, jnp.int32) - _SUBNORMAL, 0)


def _float(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(jnp.where(bits > 0, bits + _SUBNORMAL, 0), jnp.float32)
