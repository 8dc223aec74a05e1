"""Sampling in plain passes over the vocabulary: the thresholds of top_k and top_p, and the draw.

A token's *gap* is how far its logit lies below the largest of its row: 0 for the best token. A
filter keeps the tokens up to some gap. The search weighs the tokens up to a few gaps at a time, by
sums over the vocabulary, in as many passes as any floats need. A draw is a race of blocks of
tokens, then of the tokens of one block. So there is neither a sort nor a loop, which would not work
in the CUDA graph of a loop of steps, and a vocabulary that is sharded over devices is not gathered.
These passes define what `draw_kernel` and `search_kernel` compute, and run where those don't.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_paged.decoder.peers import DevicePeers

HALF = 1024  # tokens between two that share a call of `threefry`
BLOCK = 2 * HALF  # tokens that race against other blocks as one
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_LOG2_E = np.float32(math.log2(math.e))
_SUBNORMAL = 2**23 - 1  # floats above 0 that a device may flush to 0
NUM_FLOATS = 0x7F800000 - _SUBNORMAL  # from 0 to infinity

Words = tuple[jax.Array, jax.Array]


def threefry(key: Words, count: tuple[jax.Array, jax.Array | np.uint32]) -> Words:
    """Return Threefry-2x32 of 20 rounds (Salmon et al., 2011), two random words `u32[...]`."""
    keys = (*key, key[0] ^ key[1] ^ np.uint32(0x1BD11BDA))
    x, y = count[0] + keys[0], count[1] + keys[1]
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x = x + y
            y = (y << np.uint32(rotation)) | (y >> np.uint32(32 - rotation))
            y = x ^ y
        x = x + keys[(group + 1) % 3]
        y = y + (keys[(group + 2) % 3] + np.uint32(group + 1))
    return x, y


def row_key(seeds: tuple[jax.Array, jax.Array, jax.Array], length: jax.Array) -> Words:
    """Return the key of a row's draw, the same whatever else the batch holds.

    Args:
        seeds: `u32[...]` each, of `SamplingMetadata`.
        length: `i32[...]`, tokens of the row before the one that it draws.
    """
    seed, prompt, index = seeds
    return threefry((seed, prompt), (index, length.astype(jnp.uint32)))


def block_waits(key: Words, blocks: jax.Array) -> jax.Array:
    """Return an exponential variate `f32[...]` of mean 1 for each block `i32[...]` of a row."""
    return _exponential(threefry(key, (blocks.astype(jnp.uint32), np.uint32(1)))[0])


def token_waits(key: Words, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return such variates of tokens `i32[...]` and of those that are `HALF` after them.

    Args:
        key: from `row_key`.
        tokens: of the first halves of blocks.
    """
    first, second = threefry(key, (tokens.astype(jnp.uint32), np.uint32(0)))
    return _exponential(first), _exponential(second)


def _exponential(words: jax.Array) -> jax.Array:
    """Return -log(1 - u) of the u in (0, 1) that random words make; small ones are the finest."""
    u = (words.astype(jnp.float32) + 0.5) * np.float32(2**-32)
    return -jnp.log1p(-jnp.minimum(u, np.float32(1 - 2**-24)))


def token_weights(
    gap: jax.Array, temperature: jax.Array, limit: jax.Array | None = None
) -> jax.Array:
    """Return the probability `f32[...]` of tokens over that of the best one, 0 if filtered out.

    Args:
        gap: `f32[...]`, how far their logits lie below the largest of the row.
        temperature: `f32[...]`, above 0.
        limit: `f32[...]`, the gap from which on filters drop tokens; None if none do.
    """
    weights = jnp.exp2(gap * (-_LOG2_E / divisor(temperature)))
    return weights if limit is None else jnp.where(gap < limit, weights, 0.0)


def min_p_limit(min_p: jax.Array, temperature: jax.Array) -> jax.Array:
    """Return the gap `f32[...]` from which on min_p `f32[...]` drops tokens; infinite for 0."""
    last = number_of(-jnp.log(min_p) * divisor(temperature))  # of the gaps that are kept
    return float_of(jnp.minimum(last + 1, NUM_FLOATS))


def divisor(temperature: jax.Array) -> jax.Array:
    """Return a temperature to divide by; neither it nor its inverse is too small to be normal."""
    return jnp.clip(temperature, 1e-30, 1e30)


def number_of(x: jax.Array) -> jax.Array:
    """Number floats of at least 0 in order; those too small to be normal count as 0."""
    return jnp.maximum(lax.bitcast_convert_type(x, jnp.int32) - _SUBNORMAL, 0)


def float_of(number: jax.Array) -> jax.Array:
    """Return the float of a number of `number_of`."""
    return lax.bitcast_convert_type(jnp.where(number > 0, number + _SUBNORMAL, 0), jnp.float32)


Total = Callable[[jax.Array], jax.Array]

_NUM_PIVOTS = 8  # gaps that one pass over the logits measures
_NUM_PARTS = _NUM_PIVOTS + 1  # of the floats between them
_MAX_BLOCKS = 256  # pieces of a row that are summed side by side
_MAX_SHARDS = 16  # devices over which a row may be sharded without a copy to cut it into blocks
_NUM_PASSES = math.ceil(math.log(NUM_FLOATS, _NUM_PARTS))


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
    blocks = gap.reshape(gap.shape[0], num_blocks(gap.shape[1]), -1)
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
        quotient, rest = jnp.divmod(high - low, _NUM_PARTS)
        parts = quotient[:, None] * steps + rest[:, None] * steps // _NUM_PARTS
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


def draw(
    logits: jax.Array,
    best: jax.Array,
    limit: jax.Array,
    temperature: jax.Array,
    seeds: jax.Array,
    lens: jax.Array,
    group: DevicePeers | None,
) -> jax.Array:
    """Return the token `i32[S]` that each row draws; what a greedy row draws means nothing.

    Args:
        logits: `f32[S, V]`, of this device.
        best: `f32[S]`, the largest logit of all devices.
        limit: `f32[S]`, the gap from the best token from which on tokens are not drawn.
        temperature: `f32[S]`.
        seeds: `u32[S, 3]`, of `SamplingMetadata`.
        lens: `i32[S]`, tokens of each row before the one that it draws.
        group: the devices over which the vocabulary is sharded; None: it is not.
    """
    best, limit, temperature = (x[:, None] for x in (best, limit, temperature))
    seed, prompt, index = (seeds[:, i, None] for i in range(3))
    key = row_key((seed, prompt, index), lens[:, None])
    sums = _sum_blocks(token_weights(best - logits, temperature, limit), group)
    blocks = jnp.arange(sums.shape[1])[None]
    block = largest(-block_waits(key, blocks) / sums, blocks, None)[1][:, None]
    tokens = block * BLOCK + jnp.arange(BLOCK)[None]
    # Of this device's logits; the others have the rest of the block.
    mine = tokens if group is None else tokens - group.index * logits.shape[1]
    mine = jnp.where(mine < 0, logits.shape[1], mine)  # JAX counts -1 from the end
    gap = best - jnp.take_along_axis(logits, mine, axis=1, mode="fill", fill_value=-jnp.inf)
    waits = jnp.concatenate(token_waits(key, tokens[:, :HALF]), axis=1)
    arrival = waits / token_weights(gap, temperature, limit)
    # That of the best token is finite, so that a token of the filters arrives first.
    return largest(-arrival, tokens, group)[1]


def _sum_blocks(weights: jax.Array, group: DevicePeers | None) -> jax.Array:
    """Return the sums `f32[S, blocks]` of the weights `f32[S, V]` of each block of tokens.

    A block may have tokens on two devices.
    """
    num_rows, size = weights.shape
    part = math.gcd(size, BLOCK)
    sums = jnp.sum(weights.reshape(num_rows, -1, part), axis=2)
    parts = BLOCK // part
    if group is None:
        sums = jnp.pad(sums, ((0, 0), (0, -sums.shape[1] % parts)))
    else:
        padded_size = -(-sums.shape[1] * group.size // parts) * parts
        places = jnp.arange(padded_size) - group.index * sums.shape[1]
        places = jnp.where(places < 0, sums.shape[1], places)
        sums = sums.at[:, places].get(mode="fill", fill_value=0)
    sums = jnp.sum(sums.reshape(num_rows, -1, parts), axis=2)
    return sums if group is None else group.sum(sums)


def largest(
    values: jax.Array, places: jax.Array, group: DevicePeers | None
) -> tuple[jax.Array, jax.Array]:
    """Return the largest of values `f32[S, N]`, NaN if there is one, and the least of its places.

    One reduction finds both, where a maximum and an argmax would be two.

    Args:
        values: of this device.
        places: `i32[S, N]`, or `i32[1, N]` of all rows.
        group: over which devices to look; None: this one.
    """

    def larger(x: tuple[jax.Array, ...], y: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        is_x = (x[0] > y[0]) | (x[0] != x[0]) | ((x[0] == y[0]) & (x[1] < y[1]))  # NaN is largest
        return tuple(lax.select(is_x, a, b) for a, b in zip(x, y, strict=True))

    least = np.float32(-np.inf), np.int32(0)
    places = jnp.broadcast_to(places, values.shape)
    best, place = lax.reduce((values, places), least, larger, (1,))
    if group is not None:  # f32 has all integers up to 2**24
        found = group.gather(jnp.stack([best, place.astype(jnp.float32)]))
        best, place = lax.reduce((found[:, 0], found[:, 1].astype(jnp.int32)), least, larger, (0,))
    return best, place
