"""The draw of a token in plain passes: a race of blocks of tokens, then of the tokens of one block.

It is the meaning of the kernels, `kernels/triton/sampling_draw.py`, and runs where they don't. A
vocabulary that is cut over devices is not gathered.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_paged.decoder.peers import DevicePeers
from pallas_paged.engine.sampling.kernels.sampling_noise import (
    BLOCK,
    HALF,
    block_waits,
    row_key,
    token_waits,
    token_weights,
)


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
        group: the devices over which the vocabulary is cut; None: it is not cut.
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
        whole = -(-sums.shape[1] * group.size // parts) * parts
        places = jnp.arange(whole) - group.index * sums.shape[1]
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
