"""The weights of blocks of tokens and the draw of a token, in two Pallas-Triton kernels."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_paged.engine.sampling.passes import (
    BLOCK,
    HALF,
    block_waits,
    min_p_limit,
    row_key,
    token_waits,
    token_weights,
)
from pallas_paged.kernels.call import result_shape
from pallas_paged.kernels.triton.specs import full_specs, load_masked

_LEAST = np.finfo(np.float32).min
_NO_TOKEN = 2**31 - 1


def load_logits(logits_ref, masks_ref, row: jax.Array, tokens: jax.Array) -> jax.Array:
    """Return the logits of tokens of a row, -inf where there is none or its bit is 0.

    The 32 tokens of a word are neighbours, which load it from the cache: there are no masks of
    bytes in the device's memory.
    """
    logits = load_masked(logits_ref, row, tokens, -jnp.inf)
    if masks_ref is None:
        return logits
    words = plgpu.load(masks_ref.at[row, tokens >> 5], mask=tokens < logits_ref.shape[1], other=0)
    return jnp.where((words >> (tokens & 31)) & 1 == 1, logits, -jnp.inf)


def weigh_kernel(
    logits_ref,  # f32[S, V]
    masks_ref,  # i32[S, W] or None
    temperature_ref,  # f32[S]
    maxima_ref,  # f32[S, blocks]
    sums_ref,  # f32[S, blocks]
):
    """One program: the largest logit of a block of a row, and the weight of the block beside it.

    The weight is NaN where a logit is NaN or +inf; a maximum of Triton's leaves out NaN.
    """
    block, row = pl.program_id(0), pl.program_id(1)
    logits = load_logits(logits_ref, masks_ref, row, block * BLOCK + jnp.arange(BLOCK))
    largest = jnp.max(logits)
    gap = jnp.maximum(largest, _LEAST) - logits  # infinite where all of the block is masked
    maxima_ref[row, block] = largest
    sums_ref[row, block] = jnp.sum(token_weights(gap, temperature_ref[row]))


def weigh(
    logits: jax.Array,  # f32[S, V]
    masks: jax.Array | None,  # i32[S, W]
    temperature: jax.Array,  # f32[S]
    *,
    interpret: bool,
    num_warps: int = 1,
) -> tuple[jax.Array, jax.Array]:
    """Return the largest logits of blocks of 2048 tokens, and their weights: `f32[S, blocks]`."""
    num_rows, vocab_size = logits.shape
    num_blocks = pl.cdiv(vocab_size, BLOCK)
    inputs = (logits, masks, temperature)
    outputs = (result_shape((num_rows, num_blocks), jnp.float32),) * 2
    maxima, sums = pl.pallas_call(
        weigh_kernel,
        grid=(num_blocks, num_rows),
        in_specs=full_specs(inputs),
        out_specs=full_specs(outputs),
        out_shape=outputs,
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=1),
        interpret=interpret,
        name="sampling_weigh",
    )(*inputs)
    return maxima, sums


def draw_kernel(
    logits_ref,  # f32[S, V]
    masks_ref,  # i32[S, W] or None
    maxima_ref,  # f32[S, blocks]
    sums_ref,  # f32[S, blocks]
    limit_ref,  # f32[S] or None
    temperature_ref,  # f32[S]
    min_p_ref,  # f32[S]
    seeds_ref,  # u32[S, 3]
    lens_ref,  # i32[S]
    token_ref,  # i32[S]
    *,
    num_lanes: int,
):
    """One program: which block of a row arrives first, and which of its tokens does.

    A token of a greedy row arrives after its gap. Filters take weight from a block, so that it
    arrives no earlier than by all of its tokens: blocks are weighed again in the order of those
    times, one of each lane at a time, until one that is weighed again comes before all others.
    """
    row = pl.program_id(0)
    num_blocks = maxima_ref.shape[1]
    width = pl.cdiv(pl.next_power_of_2(num_blocks), num_lanes)
    lanes = jnp.arange(num_lanes)
    blocks = jnp.arange(width)[None] * num_lanes + lanes[:, None]
    maxima = load_masked(maxima_ref, row, blocks, -jnp.inf)
    sums = load_masked(sums_ref, row, blocks, 0.0)
    best = jnp.max(jnp.max(maxima, axis=1))
    is_finite = jnp.sum(jnp.sum(sums, axis=1)) > 0
    temperature = temperature_ref[row]
    limit = min_p_limit(min_p_ref[row], temperature)
    if limit_ref is not None:
        limit = jnp.minimum(limit, limit_ref[row])
    draws = temperature > 0
    filters = draws & (limit < jnp.inf)
    seeds = seeds_ref[row, 0], seeds_ref[row, 1], seeds_ref[row, 2]
    key = row_key(seeds, lens_ref[row])
    waits = block_waits(key, blocks)
    gaps = best - maxima
    arrivals = jnp.where(draws, waits / (sums * token_weights(gaps, temperature)), gaps)
    bounds = jnp.where(filters & (gaps < limit), arrivals, jnp.inf)
    arrivals = jnp.where(filters, jnp.inf, arrivals)

    def goes_on(carry):
        arrivals, bounds = (jnp.min(x, axis=1) for x in carry)
        return jnp.min(bounds) < jnp.min(arrivals)

    def weigh_again(carry):
        arrivals, bounds = carry
        bound, block = _first(bounds, blocks)
        tokens = block[:, None] * BLOCK + jnp.arange(BLOCK)[None]
        is_early = (bound < jnp.min(jnp.min(arrivals, axis=1)))[:, None]
        tokens = jnp.where(is_early, tokens, _NO_TOKEN)
        gap = best - load_logits(logits_ref, masks_ref, row, tokens)
        sums = jnp.sum(token_weights(gap, temperature, limit), axis=1)
        is_block = is_early & (blocks == block[:, None])
        arrivals = jnp.where(is_block, waits / sums[:, None], arrivals)
        return arrivals, jnp.where(is_block, jnp.inf, bounds)

    arrivals, _ = lax.while_loop(goes_on, weigh_again, (arrivals, bounds))
    block = _first(*_first(arrivals, blocks))[1]
    block = jnp.minimum(block, num_blocks - 1)  # also where the logits are NaN

    halves = [block * BLOCK + half * HALF + jnp.arange(HALF) for half in range(2)]
    times = []
    for wait, some in zip(token_waits(key, halves[0]), halves, strict=True):
        gap = best - load_logits(logits_ref, masks_ref, row, some)
        weight = token_weights(gap, temperature, limit)
        times.append(jnp.where(draws, wait / weight, gap))
    first, second = times
    tokens = jnp.where(second < first, halves[1], halves[0])
    token = _first(jnp.minimum(first, second), tokens)[1]
    token_ref[row] = jnp.where(is_finite, token, -1)


def _first(arrivals: jax.Array, places: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the earliest arrival along the last axis, and the first of the places that have it."""
    earliest = jnp.min(arrivals, axis=-1)
    is_first = arrivals == earliest[..., None]
    return earliest, jnp.min(jnp.where(is_first, places, _NO_TOKEN), axis=-1)


def draw(
    logits: jax.Array,  # f32[S, V]
    masks: jax.Array | None,  # i32[S, W]
    maxima: jax.Array,  # f32[S, blocks]
    sums: jax.Array,  # f32[S, blocks]
    limit: jax.Array | None,  # f32[S]
    temperature: jax.Array,  # f32[S]
    min_p: jax.Array,  # f32[S]
    seeds: jax.Array,  # u32[S, 3]
    lens: jax.Array,  # i32[S]
    *,
    interpret: bool,
    num_lanes: int = 2,
    num_warps: int = 8,
) -> jax.Array:
    """Return the token `i32[S]` that each row draws, or its best token if it is greedy.

    It is -1 where the largest logit is NaN or infinite.
    """
    inputs = (logits, masks, maxima, sums, limit, temperature, min_p, seeds, lens)
    output = result_shape(lens.shape, jnp.int32)
    return pl.pallas_call(
        functools.partial(draw_kernel, num_lanes=num_lanes),
        grid=lens.shape,
        in_specs=full_specs(inputs),
        out_specs=full_specs(output),
        out_shape=output,
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=1),
        interpret=interpret,
        name="sampling_draw",
    )(*inputs)
