"""Sampling in two Pallas-Triton kernels: the search for top_k and top_p, and the draw.

Both look at a token's *gap*: how far its logit lies below the largest one of its row.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_paged.kernels.call import result_shape
from pallas_paged.kernels.sampling_noise import (
    FARTHEST,
    HALF,
    divisor,
    exponentials,
    float_of,
    number_of,
    row_key,
)
from pallas_paged.kernels.triton.specs import whole

_LOG2_E = math.log2(math.e)
_MOST_OCTAVES = 16  # below the upper bound, among which a round places its pivots
_NO_TOKEN = 2**31 - 1

Load = Callable[[jax.Array, int], jax.Array]  # (index of a step, place in the step) -> gaps


def search_kernel(
    logits_ref,  # f32[S, V]
    best_ref,  # f32[S]
    temperature_ref,  # f32[S]
    top_k_ref,  # i32[S]
    top_p_ref,  # f32[S]
    limit_ref,  # f32[S]
    list_ref,  # f32[S, V]
    *,
    block: int,
    unroll: int,
    num_pivots: int,
    interpret: bool,
):
    """One program: the gap from which on the filters of one row drop tokens.

    It weighs the tokens below a few pivots, which leaves a bracket that holds the limit, lists the
    gaps within the bracket, and goes on with the list. Each token counts as 1 for top_k, and as
    its probability for top_p.
    """
    row = pl.program_id(0)
    vocab_size = logits_ref.shape[1]
    best, temperature = best_ref[row], temperature_ref[row]
    draws = temperature > 0
    rate = _LOG2_E / divisor(temperature)
    top_k, top_p = top_k_ref[row], top_p_ref[row]
    lanes = jnp.arange(block)

    def load_row(step: jax.Array, piece: int) -> jax.Array:
        index = (step * unroll + piece) * block + lanes
        x = plgpu.load(logits_ref.at[row, index], mask=index < vocab_size, other=-jnp.inf)
        return best - x

    def load_list(count: jax.Array) -> Load:
        def load(step: jax.Array, _: int) -> jax.Array:
            index = step * block + lanes
            return plgpu.load(list_ref.at[row, index], mask=index < count, other=jnp.inf)

        return load

    def weigh(load: Load, pieces: int, size: Any, pivots: list, scale: jax.Array) -> list:
        """Return the weights of all gaps below each pivot."""

        def add(step, sums):
            gaps = [load(step, piece) for piece in range(pieces)]
            for gap in gaps:
                weight = jnp.exp2(gap * scale)
                sums = [
                    jnp.where(gap < pivot, total + weight, total)
                    for total, pivot in zip(sums, pivots, strict=True)
                ]
            return sums

        zeros = [jnp.zeros(block, jnp.float32)] * len(pivots)
        sums = lax.fori_loop(0, pl.cdiv(size, block * pieces), add, zeros)
        return [jnp.sum(one) for one in sums]

    def keep(load: Load, pieces: int, size: Any, low: jax.Array, high: jax.Array) -> tuple:
        """List the gaps of at least low and below high; return their number, least and largest."""
        low, high = float_of(low), float_of(high)

        def add(step, carry):
            count, least, largest = carry
            gaps = [load(step, piece) for piece in range(pieces)]
            for gap in gaps:
                is_kept = (gap >= low) & (gap < high)
                places = jnp.cumsum(is_kept.astype(jnp.int32))
                if not interpret:
                    plgpu.debug_barrier()  # the list may be written where it has been read
                # Where the mask is off the interpreter writes too, but not out of range.
                target = jnp.where(is_kept, count + places - 1, vocab_size)
                plgpu.store(list_ref.at[row, target], gap, mask=is_kept)
                count += jnp.sum(is_kept.astype(jnp.int32))
                least = jnp.where(is_kept, jnp.minimum(least, gap), least)
                largest = jnp.where(is_kept, jnp.maximum(largest, gap), largest)
            return count, least, largest

        start = jnp.int32(0), jnp.full(block, jnp.inf), jnp.zeros(block, jnp.float32)
        count, least, largest = lax.fori_loop(0, pl.cdiv(size, block * pieces), add, start)
        if not interpret:
            plgpu.debug_barrier()
        return count, jnp.min(least), jnp.max(largest)

    def narrow(state, pivots, sums, target):
        """Return the bracket, and the weight of what lies below it."""
        low, high, below = state
        new, most = below, low
        for pivot, total in zip(pivots, sums, strict=True):
            is_kept = below + total < target
            most = jnp.where(is_kept, jnp.maximum(most, pivot), most)
            new = jnp.where(is_kept, jnp.maximum(new, below + total), new)
            high = jnp.where(is_kept, high, jnp.minimum(high, pivot))
        return most, high, new

    def snap(low, high, found):
        """Return the bracket without what lies beside all of its gaps."""
        count, least, largest = found
        some = count > 0
        low = jnp.where(some, jnp.maximum(low, number_of(least)), low)
        return low, jnp.where(some, jnp.minimum(high, number_of(largest) + 1), high)

    def search(is_mass: jax.Array, limit: jax.Array) -> jax.Array:
        scale = jnp.where(is_mass, -rate, 0.0)
        # What lies deeper weighs too little to matter, as the best token weighs 1.
        left = jnp.maximum(1 - top_p, np.float32(2**-24))
        reach = (jnp.log(vocab_size / left) + 1) * divisor(temperature)
        reach = jnp.where(is_mass, jnp.minimum(limit, reach), limit)
        steps = [(j + 1) / (num_pivots + 1) for j in range(num_pivots)]
        pivots = [jnp.where(is_mass, reach * x, 2.0 ** (8 * x - 2)) for x in steps]
        *sums, total = weigh(load_row, unroll, vocab_size, [*pivots, limit], scale)
        target = jnp.where(is_mass, top_p * total, top_k.astype(jnp.float32))
        state = jnp.int32(0), number_of(reach), jnp.float32(0)
        low, high, below = narrow(state, [number_of(x) for x in pivots], sums, target)
        found = keep(load_row, unroll, vocab_size, low, high)

        def goes_on(carry):
            low, high, _, count = carry
            return (count > 0) & (high - low > 1)

        def step(carry):
            low, high, below, count = carry
            start = jnp.maximum(low, high - (_MOST_OCTAVES << 23))
            width = jnp.maximum(lax.div(high - start, num_pivots + 1), 1)
            pivots = [jnp.minimum(start + width * (j + 1), high - 1) for j in range(num_pivots)]
            load = load_list(count)
            sums = weigh(load, 1, count, [float_of(x) for x in pivots], scale)
            low, high, below = narrow((low, high, below), pivots, sums, target)
            found = keep(load, 1, count, low, high)
            return *snap(low, high, found), below, found[0]

        _, high, _, _ = lax.while_loop(goes_on, step, (*snap(low, high, found), below, found[0]))
        return float_of(high)

    def phase(index, limit):
        is_mass = index == 1
        is_on = draws & jnp.where(is_mass, top_p < 1, (top_k > 0) & (top_k < vocab_size))
        return lax.cond(is_on, lambda: search(is_mass, limit), lambda: limit)

    limit_ref[row] = lax.fori_loop(0, 2, phase, jnp.float32(jnp.inf))


def search(
    logits: jax.Array,  # f32[S, V]
    best: jax.Array,  # f32[S]
    temperature: jax.Array,  # f32[S]
    top_k: jax.Array,  # i32[S]
    top_p: jax.Array,  # f32[S]
    *,
    interpret: bool,
    block: int = 2048,
    unroll: int = 4,
    num_pivots: int = 7,
    num_warps: int = 16,
) -> jax.Array:
    """Return the gap `f32[S]` from which on top_k and then top_p drop tokens."""
    num_rows, _ = logits.shape
    inputs = (logits, best, temperature, top_k, top_p)
    outputs = (result_shape((num_rows,), jnp.float32), result_shape(logits.shape, jnp.float32))
    limit, _ = pl.pallas_call(
        functools.partial(
            search_kernel, block=block, unroll=unroll, num_pivots=num_pivots, interpret=interpret
        ),
        grid=(num_rows,),
        in_specs=whole(inputs),
        out_specs=whole(outputs),
        out_shape=outputs,
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=1),
        interpret=interpret,
        name="sampling_search",
    )(*inputs)
    return limit


def draw_kernel(
    logits_ref,  # f32[S, V]
    best_ref,  # f32[S]
    limit_ref,  # f32[S] or None
    temperature_ref,  # f32[S]
    min_p_ref,  # f32[S]
    seeds_ref,  # u32[S, 3]
    lens_ref,  # i32[S]
    arrival_ref,  # f32[S, programs]
    token_ref,  # i32[S, programs]
    *,
    pieces: int,
):
    """One program: which token of a part of a row arrives first, and when."""
    row, part = pl.program_id(0), pl.program_id(1)
    vocab_size = logits_ref.shape[1]
    best, temperature = best_ref[row], temperature_ref[row]
    rate = _LOG2_E / divisor(temperature)
    deepest = jnp.minimum(-jnp.log(min_p_ref[row]), FARTHEST) * divisor(temperature)
    limit = jnp.float32(jnp.inf) if limit_ref is None else limit_ref[row]
    key = row_key(seeds_ref[row, 0], seeds_ref[row, 1], seeds_ref[row, 2], lens_ref[row])
    lanes = jnp.arange(HALF)
    count = jnp.minimum(pl.cdiv(vocab_size, 2 * HALF) - part * pieces, pieces)

    def step(index, carry):
        piece = part * pieces + index
        tokens = [piece * (2 * HALF) + half * HALF + lanes for half in range(2)]
        gaps = [
            best - plgpu.load(logits_ref.at[row, one], mask=one < vocab_size, other=-jnp.inf)
            for one in tokens
        ]
        is_kept = [(gap <= deepest) & (gap < limit) for gap in gaps]

        def race(arrival, token):
            noise = exponentials(key, piece * HALF + lanes)
            for gap, kept, one, wait in zip(gaps, is_kept, tokens, noise, strict=True):
                new = jnp.where(kept, wait * jnp.exp2(gap * rate), jnp.inf)
                token = jnp.where(new < arrival, one, token)
                arrival = jnp.minimum(arrival, new)
            return arrival, token

        some = jnp.max((is_kept[0] | is_kept[1]).astype(jnp.int32)) > 0
        return lax.cond(some, race, lambda *carry: carry, *carry)

    start = jnp.full(HALF, jnp.inf), jnp.full(HALF, _NO_TOKEN)
    count = jnp.where(temperature > 0, count, 0)
    arrival, token = lax.fori_loop(0, count, step, start)
    first = jnp.min(arrival)
    arrival_ref[row, part] = first
    token_ref[row, part] = jnp.min(jnp.where(arrival == first, token, _NO_TOKEN))


def draw(
    logits: jax.Array,  # f32[S, V]
    best: jax.Array,  # f32[S]
    limit: jax.Array | None,  # f32[S]
    temperature: jax.Array,  # f32[S]
    min_p: jax.Array,  # f32[S]
    seeds: jax.Array,  # u32[S, 3]
    lens: jax.Array,  # i32[S]
    *,
    interpret: bool,
    num_programs: int = 1024,
    num_warps: int = 4,
) -> jax.Array:
    """Return the token `i32[S]` that each row with a temperature draws."""
    num_rows, vocab_size = logits.shape
    num_pieces = pl.cdiv(vocab_size, 2 * HALF)
    pieces = pl.cdiv(num_pieces, max(num_programs // num_rows, 1))
    inputs = (logits, best, limit, temperature, min_p, seeds, lens)
    shape = num_rows, pl.cdiv(num_pieces, pieces)
    outputs = (result_shape(shape, jnp.float32), result_shape(shape, jnp.int32))
    arrival, token = pl.pallas_call(
        functools.partial(draw_kernel, pieces=pieces),
        grid=shape,
        in_specs=whole(inputs),
        out_specs=whole(outputs),
        out_shape=outputs,
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=1),
        interpret=interpret,
        name="sampling_draw",
    )(*inputs)
    first = jnp.min(arrival, axis=1, keepdims=True)
    return jnp.min(jnp.where(arrival == first, token, _NO_TOKEN), axis=1)
