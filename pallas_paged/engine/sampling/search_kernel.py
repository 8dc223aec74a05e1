"""The search for top_k and top_p in a Pallas-Triton kernel.

It looks at a token's *gap*: how far its logit lies below the largest one of its row.
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

from pallas_paged.engine.sampling.draw_kernel import load_logits
from pallas_paged.engine.sampling.passes import divisor, float_of, number_of
from pallas_paged.kernels.call import result_shape
from pallas_paged.kernels.triton.specs import full_specs, load_masked

_LOG2_E = math.log2(math.e)
_MOST_OCTAVES = 16  # below the upper bound, among which a round places its pivots
_NUM_PIVOTS = 6
_STEPS = [(i + 1) / (_NUM_PIVOTS + 1) for i in range(_NUM_PIVOTS)]
# Pivots for the row beside what a sample of it says, in units of the sample's first bracket.
_OFFSETS = (-0.5, -0.15, 0.0, 0.15, 0.5, 1.5)
_LIST_LOADS = 4  # elements of a thread's list that it reads at a time

# The gaps of a step of a loop; infinity where there is none.
Load = Callable[[jax.Array], list[jax.Array]]


def search_kernel(
    logits_ref,  # f32[S, V]
    masks_ref,  # i32[S, W] or None
    maxima_ref,  # f32[S, blocks]
    temperature_ref,  # f32[S]
    top_k_ref,  # i32[S]
    top_p_ref,  # f32[S]
    limit_ref,  # f32[S]
    list_ref,  # f32[S, V]
    *,
    num_threads: int,
    num_loads: int,
):
    """One program: the gap from which on the filters of one row drop tokens.

    It weighs the tokens below a few pivots, which leaves a bracket that holds the limit, lists the
    gaps within the bracket, and goes on with the list. Each token counts as 1 for top_k, and as
    its probability for top_p. Each thread has a list of its own, every `num_threads`-th element of
    the row's: it reads what it wrote itself, in order, without a barrier and without prefix sums.
    """
    row = pl.program_id(0)
    vocab_size = logits_ref.shape[1]
    blocks = jnp.arange(pl.next_power_of_2(maxima_ref.shape[1]))
    best = jnp.max(load_masked(maxima_ref, row, blocks, -jnp.inf))
    temperature = temperature_ref[row]
    draws = temperature > 0
    rate = _LOG2_E / divisor(temperature)
    top_k, top_p = top_k_ref[row], top_p_ref[row]
    threads = jnp.arange(num_threads)

    def load_row(step: jax.Array, width: int = num_threads, stride: int = 0) -> list[jax.Array]:
        count = num_loads * num_threads // width
        first = [(step * count + i) * (stride or width) for i in range(count)]
        index = [one + jnp.arange(width) for one in first]
        return [best - load_logits(logits_ref, masks_ref, row, one) for one in index]

    def load_list(sizes: jax.Array) -> Load:
        def load(step: jax.Array) -> list[jax.Array]:
            places = [step * _LIST_LOADS + i for i in range(_LIST_LOADS)]
            return [
                plgpu.load(
                    list_ref.at[row, one * num_threads + threads], mask=one < sizes, other=jnp.inf
                )
                for one in places
            ]

        return load

    def add_weights(pivots: list, scale: jax.Array, gaps: list, sums: list) -> list:
        for gap in gaps:
            weight = jnp.exp2(gap * scale)
            sums = [
                jnp.where(gap < pivot, total + weight, total)
                for total, pivot in zip(sums, pivots, strict=True)
            ]
        return sums

    def weigh(
        load: Load, num_steps: Any, pivots: list, scale: jax.Array, width: int = num_threads
    ) -> list:
        """Return the weights of all gaps below each pivot; an array of the load has `width`."""
        zeros = [jnp.zeros(width, jnp.float32)] * len(pivots)
        add = functools.partial(add_weights, pivots, scale)
        return [jnp.sum(one) for one in _stream(load, num_steps, add, zeros)]

    def keep(load: Load, num_steps: Any, low: jax.Array, high: jax.Array) -> tuple:
        """List the gaps of at least low and below high.

        Returns:
            The bracket without what lies beside all of its gaps, the size of each thread's list,
            and the steps that a loop over the lists takes.
        """
        least, most = float_of(low), float_of(high)

        def add(gaps, carry):
            sizes, smallest, largest = carry
            for gap in gaps:
                is_kept = (gap >= least) & (gap < most)
                # Where the mask is off the interpreter writes too, but not out of range.
                place = jnp.where(is_kept, sizes * num_threads + threads, vocab_size)
                plgpu.store(list_ref.at[row, place], gap, mask=is_kept)
                sizes = jnp.where(is_kept, sizes + 1, sizes)
                smallest = jnp.where(is_kept, jnp.minimum(smallest, gap), smallest)
                largest = jnp.where(is_kept, jnp.maximum(largest, gap), largest)
            return sizes, smallest, largest

        zeros = jnp.zeros(num_threads, jnp.float32)
        start = zeros.astype(jnp.int32), zeros + jnp.inf, zeros
        sizes, smallest, largest = _stream(load, num_steps, add, start)
        num_steps = pl.cdiv(jnp.max(sizes), _LIST_LOADS)
        some = num_steps > 0
        smallest, largest = number_of(jnp.min(smallest)), number_of(jnp.max(largest))
        low = jnp.where(some, jnp.maximum(low, smallest), low)
        high = jnp.where(some, jnp.minimum(high, largest + 1), high)
        return low, high, sizes, num_steps

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

    def search(is_mass: jax.Array, limit: jax.Array) -> jax.Array:
        scale = jnp.where(is_mass, -rate, 0.0)
        # What lies deeper weighs too little to matter, as the best token weighs 1.
        left = jnp.maximum(1 - top_p, np.float32(2**-24))
        reach = (jnp.log(vocab_size / left) + 1) * divisor(temperature)
        reach = jnp.where(is_mass, jnp.minimum(limit, reach), limit)
        start = jnp.int32(0), number_of(reach), jnp.float32(0)
        num_steps = pl.cdiv(vocab_size, num_threads * num_loads)

        def bracket() -> tuple:
            """Return the bracket that pivots leave, the weight below it, and the target."""
            # A sample of the row, weighed twice, says about where the limit lies.
            sample = load_row(jnp.int32(0), stride=vocab_size // num_loads)
            part = num_threads * num_loads / vocab_size

            def weigh_sample(_: Any, carry: tuple) -> tuple:
                low, high, _, width, *pivots = carry
                zeros = [jnp.zeros(num_threads, jnp.float32)] * (_NUM_PIVOTS + 1)
                sums = add_weights([*pivots, limit], scale, sample, zeros)
                *sums, total = (jnp.sum(one) for one in sums)
                target = jnp.where(is_mass, top_p * total, top_k.astype(jnp.float32) * part)
                numbers = [number_of(x) for x in pivots]
                low, high, _ = narrow((low, high, jnp.float32(0)), numbers, sums, target)
                first, last = float_of(low), float_of(high)
                last_width, width = width, jnp.where(last < jnp.inf, last - first, first)
                return low, high, last_width, width, *(first + width * x for x in _STEPS)

            pivots = [jnp.where(is_mass, reach * x, 2.0 ** (8 * x - 2)) for x in _STEPS]
            carry = *start[:2], jnp.float32(0), jnp.float32(0), *pivots
            low, _, first_width, width, *_ = lax.fori_loop(0, 2, weigh_sample, carry)
            middle = float_of(low) + width / 2
            pivots = [jnp.maximum(middle + first_width * x, 0.0) for x in _OFFSETS]

            width = num_threads * math.gcd(num_loads, 4)  # four neighbours a thread are one load
            load = functools.partial(load_row, width=width)
            *sums, total = weigh(load, num_steps, [*pivots, limit], scale, width)
            target = jnp.where(is_mass, top_p * total, top_k.astype(jnp.float32))
            return *narrow(start, [number_of(x) for x in pivots], sums, target), target

        # What a small top_k has left is a short list already. A branch of Triton's must not return
        # constants, but a loop may run once or never.
        is_short = (limit < jnp.inf) & (top_k <= num_threads * _LIST_LOADS)
        times = jnp.where(is_short, jnp.int32(0), jnp.int32(1))
        low, high, below, target = lax.fori_loop(
            jnp.int32(0), times, lambda *_: bracket(), (*start, jnp.float32(0))
        )

        def goes_on(carry):
            low, high, _, num_steps, _ = carry
            return (num_steps > 0) & (high - low > 1)

        def step(carry):
            low, high, sizes, num_steps, below = carry
            start = jnp.maximum(low, high - (_MOST_OCTAVES << 23))
            width = jnp.maximum(lax.div(high - start, _NUM_PIVOTS + 1), 1)
            pivots = [jnp.minimum(start + width * (j + 1), high - 1) for j in range(_NUM_PIVOTS)]
            load = load_list(sizes)
            sums = weigh(load, num_steps, [float_of(x) for x in pivots], scale)
            low, high, below = narrow((low, high, below), pivots, sums, target)
            return *keep(load, num_steps, low, high), below

        found = keep(load_row, num_steps, low, high)
        *_, sizes, num_list_steps = found

        def target_of_list() -> jax.Array:
            return top_p * weigh(load_list(sizes), num_list_steps, [jnp.inf], scale)[0]

        target = lax.cond(is_short, target_of_list, lambda: target)
        return float_of(lax.while_loop(goes_on, step, (*found, below))[1])

    def phase(index, limit):
        is_mass = index == 1
        is_on = draws & jnp.where(is_mass, top_p < 1, (top_k > 0) & (top_k < vocab_size))
        return lax.cond(is_on, lambda: search(is_mass, limit), lambda: limit)

    limit_ref[row] = lax.fori_loop(0, 2, phase, jnp.float32(jnp.inf))


def _stream(load: Load, num_steps: Any, add: Callable[[Any, Any], Any], state: Any) -> Any:
    """Add the gaps of each step to a state; those of the next are on their way meanwhile."""

    def step(index, carry):
        gaps, state = carry
        return load(index + 1), add(gaps, state)

    return lax.fori_loop(0, num_steps, step, (load(jnp.int32(0)), state))[1]


def search(
    logits: jax.Array,  # f32[S, V]
    masks: jax.Array | None,  # i32[S, W]
    maxima: jax.Array,  # f32[S, blocks]
    temperature: jax.Array,  # f32[S]
    top_k: jax.Array,  # i32[S]
    top_p: jax.Array,  # f32[S]
    *,
    interpret: bool,
    num_warps: int = 16,
    num_loads: int = 16,
) -> jax.Array:
    """Return the gap `f32[S]` from which on top_k and then top_p drop tokens."""
    num_rows, vocab_size = logits.shape
    num_threads = 32 * num_warps
    inputs = (logits, masks, maxima, temperature, top_k, top_p)
    outputs = (result_shape((num_rows,), jnp.float32), result_shape(logits.shape, jnp.float32))
    limit, _ = pl.pallas_call(
        functools.partial(
            search_kernel,
            num_threads=num_threads,
            num_loads=min(num_loads, pl.cdiv(vocab_size, num_threads)),
        ),
        grid=(num_rows,),
        in_specs=full_specs(inputs),
        out_specs=full_specs(outputs),
        out_shape=outputs,
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=1),
        interpret=interpret,
        name="sampling_search",
    )(*inputs)
    return limit
