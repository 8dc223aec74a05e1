"""What the kernels and plain XLA share when they sample: noise, weights, the numbers of floats."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

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
