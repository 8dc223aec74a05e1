"""Merge of the partial states of the Mosaic decode kernels, a Pallas Mosaic GPU kernel.

A program merges the states of some query heads of one row. Such a small kernel spends its time
waiting, so a loop step starts all of its loads at once, and a row takes few steps.

With few rows all threads share a head, or a part of its elements where it has many. With many rows
a program has more, and each warp a head of its own: a thread then computes the weights of fewer
heads, and it loads up to 16 bytes at once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_paged.kernels.call import result_shape
from pallas_paged.kernels.decode_plan import DecodePlan
from pallas_paged.kernels.decode_states import DecodeStates
from pallas_paged.kernels.logits import LOG2_E
from pallas_paged.kernels.mosaic import ops
from pallas_paged.kernels.mosaic.softmax_state import State, finish, scale

MAX_STATES_PER_STEP = 48  # each takes two registers


def heads_layout(num_heads: int, head_dim: int) -> Any:
    """Return the layout of outputs `[num_heads, head_dim]` of one, two or four heads on four warps.

    A warp has elements of one head. Where these are fewer than its threads, threads share them.
    """
    tile = min(head_dim & -head_dim, 512 // num_heads)
    of_warp = tile * num_heads // 4
    of_thread = max(of_warp // 32, 1)
    lanes = of_warp // of_thread
    of_head = ((of_warp,),) if num_heads < 4 else ()
    return plgpu.Layout.TILED(
        plgpu.Tiling(((num_heads, tile), *of_head, (of_thread,))),
        warp_dims=(-4, -3) if num_heads == 2 else (-3,),
        lane_dims=(-2,) if lanes == 32 else (plgpu.Replicated(32 // lanes), -2),
        vector_dim=-1,
    )


def merge_partials(
    partials: Any,  # `ops.Partials` or `DecodeStates`
    first: jax.Array,
    num_partials: jax.Array,
    places: list[Callable[[Any], tuple[Any, ...]]],
    block_s: int,
    elements: Any,
    layout: Any,
    *,
    heads: tuple[int, ...] = (),
    may_be_empty: bool = False,
) -> list[State]:
    """Return the merged partial states `first .. first + num_partials - 1` for each of `places`.

    A state is m f32`heads`, l f32`heads` and acc f32`[*heads, D]`.

    Args:
        places: of each query head, or of each H neighbours, the function from a partial state to
            its index in `lse`.
        block_s: partial states per loop step.
        elements: D of them as a `pl.ds`, which are loaded of each state.
        layout: of `[*heads, D]`.
        heads: `(H,)` if a place has H heads, `()` if it has one without an axis.
        may_be_empty: states may have seen no key.
    """
    of_state = () if partials.out.shape[-1] == elements.size else (elements,)

    def masked(exists, lse):
        return jnp.where(jnp.broadcast_to(exists, lse.shape), lse, -jnp.inf)

    def load_lse(index):
        return ops.load(partials.lse.at[index], layout.reduce(1)) if heads else partials.lse[index]

    def merge_some(i, states):
        index = [i * block_s + j for j in range(block_s)]
        # Past the last partial state the last is loaded again, with weight 0.
        where = [first + jnp.minimum(j, num_partials - 1) for j in index]
        loaded = [
            (
                [load_lse(place(i)) for i in where],
                [ops.load(partials.out.at[(*place(i), *of_state)], layout) for i in where],
            )
            for place in places
        ]
        exists = [j < num_partials for j in index]
        return [merge(x, exists, *y) for x, y in zip(states, loaded, strict=True)]

    def merge(state, exists, lses, outs):
        m_i, l_i, acc = state
        lses = [masked(*x) * LOG2_E for x in zip(exists, lses, strict=True)]
        m_new = functools.reduce(jnp.maximum, lses, m_i)
        m_safe = jnp.where(m_new == -jnp.inf, 0.0, m_new) if may_be_empty else m_new
        alpha = jnp.exp2(m_i - m_safe)
        l_new, acc = l_i * alpha, scale(acc, alpha)
        for lse, out in zip(lses, outs, strict=True):
            w = jnp.exp2(lse - m_safe)
            l_new, acc = l_new + w, acc + scale(out, w)
        return m_new, l_new, acc

    def all_heads(value):
        return ops.full(heads, value, layout.reduce(1)) if heads else jnp.float32(value)

    acc = ops.full((*heads, elements.size), 0.0, layout)
    nothing = all_heads(-jnp.inf), all_heads(0.0), acc
    return lax.fori_loop(0, pl.cdiv(num_partials, block_s), merge_some, [nothing for _ in places])


def _merge_decode_kernel(
    states: DecodeStates,
    results: tuple[Any, Any],  # [B, Hq, D] and f32[B, Hq]
    *,
    block_s: int,
    block_h: int,
    block_d: int,
) -> None:
    """Run one program: the final results of `block_h` query heads of a row, `block_d` elements."""
    row, (o_ref, lse_ref) = lax.axis_index("row"), results
    group = states.num_q_heads // states.out.shape[0]
    first, num_partials = states.plan.partials_of_row(row, states.unit_ends)
    # Heads that are neighbours in the partial states and in the result.
    together = math.gcd(block_h, 4, group)
    num_parts = states.head_dim // block_d
    program = lax.axis_index("heads")
    first_head, part = lax.div(program, num_parts) * block_h, lax.rem(program, num_parts)
    q_heads = [first_head + i for i in range(0, block_h, together)]
    columns = [(lax.div(q_head, group), lax.rem(q_head, group)) for q_head in q_heads]

    heads_of = [pl.ds(q_head, together) for q_head in q_heads]
    layout = heads_layout(together, block_d)
    sinks = (
        [None] * len(q_heads)
        if states.sinks is None
        else [ops.load(states.sinks.at[x], layout.reduce(1)) for x in heads_of]
    )
    places: list[Any] = [lambda i, h=h, n=n: (h, i, pl.ds(n, together)) for h, n in columns]
    elements = pl.ds(part * block_d, block_d)
    merged = merge_partials(
        states, first, num_partials, places, block_s, elements, layout, heads=(together,)
    )
    for x, state, sink in zip(heads_of, merged, sinks, strict=True):
        out, lse = finish(state, sink)
        ops.store(o_ref.at[row, x, elements], out.astype(o_ref.dtype))
        ops.store(lse_ref.at[row, x], lse)  # all parts have the same


def block_sizes(plan: DecodePlan, *, num_seqs: int, num_q_heads: int, span: int) -> tuple[int, int]:
    """Return partial states per loop step and query heads per program, from static sizes only.

    Args:
        span: partial states of a row of an even batch; a longer row takes more steps.
    """
    # Under a fixed split size the order of the sums must not depend on the batch.
    block_s = 8
    if plan.fixed_split_size is None:
        block_s = pl.cdiv(span, pl.cdiv(span, MAX_STATES_PER_STEP))
    block_h = 1
    # A program takes longer to start than to merge a head, so with many rows it gets several.
    while (
        num_q_heads % (2 * block_h) == 0
        and num_seqs * num_q_heads > 512 * block_h
        and 2 * block_h * block_s <= MAX_STATES_PER_STEP
    ):
        block_h *= 2
    return block_s, block_h


def elements_of_program(num_heads: int, head_dim: int) -> int:
    """Return the elements of a head that a program has, for query heads of all rows."""
    return math.gcd(head_dim, 128) if head_dim > 256 and num_heads <= 256 else head_dim


def merge_decode(
    states: DecodeStates, *, dtype: Any, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """Return the final `(out dtype[B, Hq, D], lse f32[B, Hq])` of a decode call."""
    num_seqs, num_q_heads = states.unit_ends.shape[0], states.num_q_heads
    # A row begins and ends within the shares of programs: there are enough to matter.
    span = states.plan.num_programs // num_seqs + 2 * (num_seqs > 1)
    block_s, block_h = block_sizes(
        states.plan, num_seqs=num_seqs, num_q_heads=num_q_heads, span=span
    )
    results = (
        result_shape((num_seqs, num_q_heads, states.head_dim), dtype),
        result_shape((num_seqs, num_q_heads), jnp.float32),
    )
    block_d = elements_of_program(num_seqs * num_q_heads, states.head_dim)
    sizes: Any = dict(block_s=block_s, block_h=block_h, block_d=block_d)
    return ops.run_kernel(
        functools.partial(_merge_decode_kernel, **sizes),
        states,
        results,
        name="paged_decode_merge",
        params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        # CUDA does not limit the last axis.
        grid=(num_q_heads // block_h * (states.head_dim // block_d), num_seqs),
        grid_names=("heads", "row"),
    )
