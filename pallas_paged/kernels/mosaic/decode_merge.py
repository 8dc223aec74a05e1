"""Merge of the partial states of rows that the Mosaic GPU decode kernel leaves, a kernel too.

A program unites the states of some query heads of a row. A state's log-sum-exp is a scalar to it
and the output a vector, of which a thread has an element or two. What such a small kernel costs is
waiting, so all loads of a loop step are on their way at once, and a few rows take one step.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_paged.kernels.logits import LN_2, LOG2_E
from pallas_paged.kernels.mosaic.ops import (
    full,
    interpreter,
    load,
    store,
    wait_for_previous_kernel,
)

MOST_STATES = 48  # that a loop step loads; two registers each
State = tuple[jax.Array, jax.Array, jax.Array]  # m f32[], of base 2; l f32[]; acc f32[D]


def vector_layout(size: int) -> Any:
    """How the 128 threads hold a vector of that size; if it is smaller, some hold the same."""
    of_warp, of_thread = size // 4, max(size // 128, 1)
    lanes = of_warp // of_thread
    return plgpu.Layout.TILED(
        plgpu.Tiling(((size,), (of_warp,), (of_thread,))),
        warp_dims=(-3,),
        lane_dims=(-2,) if lanes == 32 else (plgpu.Replicated(32 // lanes), -2),
        vector_dim=-1,
    )


def merge_slots(
    outs_ref,  # f32[Hkv, slots, N, D], each normalised
    lses_ref,  # f32[Hkv, slots, N]
    first: jax.Array,
    num_slots: jax.Array,
    heads: list[tuple[jax.Array, jax.Array]],
    block_s: int,
) -> list[State]:
    """Unites the states in slots `first .. first + num_slots - 1`.

    Args:
      heads: KV head and column of each query head.
      block_s: slots per loop step.

    Returns:
      A state for each of `heads`.
    """
    head_dim = outs_ref.shape[-1]
    layout = vector_layout(head_dim)

    def merge_some(i, states):
        index = [i * block_s + j for j in range(block_s)]
        # Past the last slot it is the last again, with no weight.
        slots = [first + jnp.minimum(j, num_slots - 1) for j in index]
        loaded = [
            (
                [lses_ref[h, s, n] for s in slots],
                [load(outs_ref.at[h, s, n], layout) for s in slots],
            )
            for h, n in heads
        ]
        seen = [j < num_slots for j in index]
        return [unite(x, seen, *y) for x, y in zip(states, loaded, strict=True)]

    def unite(state, seen, lses, outs):
        m_i, l_i, acc = state
        lses = [jnp.where(*x, -jnp.inf) * LOG2_E for x in zip(seen, lses, strict=True)]
        m_new = functools.reduce(jnp.maximum, lses, m_i)
        alpha = jnp.exp2(m_i - m_new)
        l_new, acc = l_i * alpha, acc * alpha
        for lse, out in zip(lses, outs, strict=True):
            w = jnp.exp2(lse - m_new)
            l_new, acc = l_new + w, acc + w * out
        return m_new, l_new, acc

    nothing = jnp.float32(-jnp.inf), jnp.float32(0.0), full((head_dim,), 0.0, layout)
    return lax.fori_loop(0, pl.cdiv(num_slots, block_s), merge_some, [nothing for _ in heads])


def finish(state: State, sink: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """`(out f32[D], lse)` of a state; a sink joins the denominator if any key was seen."""
    m_i, l_i, acc = state
    empty = l_i == 0.0
    if sink is not None:
        m_new = jnp.where(empty, 0.0, jnp.maximum(m_i, sink * LOG2_E))
        alpha = jnp.exp2(m_i - m_new)
        l_i = jnp.where(empty, 0.0, l_i * alpha + jnp.exp2(sink * LOG2_E - m_new))
        m_i, acc = m_new, acc * alpha
    l_safe = jnp.where(empty, 1.0, l_i)
    return acc * (1.0 / l_safe), jnp.where(empty, -jnp.inf, m_i * LN_2 + jnp.log(l_safe))


def merge_shares_kernel(
    outs_ref,  # f32[Hkv, slots, N, D]
    lses_ref,  # f32[Hkv, slots, N]
    unit_ends_ref,  # i32[B]
    sinks_ref,  # f32[Hq] or None
    o_ref,  # [B, Hq, D]
    lse_ref,  # f32[B, Hq]
    *,
    num_programs: int,
    is_split: bool,
    block_s: int,
    block_h: int,
    interpret: bool,
):
    row = lax.axis_index("row")
    num_seqs, num_q_heads, _ = o_ref.shape
    group = num_q_heads // outs_ref.shape[0]
    end = unit_ends_ref[row]
    start = jnp.where(row > 0, unit_ends_ref[jnp.maximum(row - 1, 0)], 0)
    if is_split:
        first, last = start, end - 1
    else:
        # The shares of `mosaic_decode`; at least 1, since nobody may have any tokens.
        units_per_program = jnp.maximum(pl.cdiv(unit_ends_ref[num_seqs - 1], num_programs), 1)
        first = lax.div(start, units_per_program) + row
        last = lax.div(end - 1, units_per_program) + row
    num_slots = jnp.where(start < end, last + 1 - first, 0)  # a row without tokens has no slot
    q_heads = [lax.axis_index("heads") * block_h + i for i in range(block_h)]
    heads = [(lax.div(q_head, group), lax.rem(q_head, group)) for q_head in q_heads]

    # What was read until here, the kernel before read as well: it was there when that began.
    wait_for_previous_kernel(interpret=interpret)
    sinks = [None if sinks_ref is None else sinks_ref[q_head] for q_head in q_heads]
    states = merge_slots(outs_ref, lses_ref, first, num_slots, heads, block_s)
    for q_head, state, sink in zip(q_heads, states, sinks, strict=True):
        out, lse = finish(state, sink)
        store(o_ref.at[row, q_head], out.astype(o_ref.dtype))
        lse_ref[row, q_head] = lse


def block_sizes(
    *, num_seqs: int, num_q_heads: int, num_programs: int, is_split: bool
) -> tuple[int, int]:
    """Slots per loop step and query heads per program, from static shapes only.

    Args:
      num_seqs, num_q_heads: of the call.
      num_programs, is_split: as in `merge_shares`.
    """
    # Under a fixed split size the order of the sums must not depend on the batch.
    block_s = 8
    if not is_split:
        # Rows of an even batch span about so many shares; a longer row takes more steps.
        span = num_programs // num_seqs + 1
        block_s = pl.cdiv(span, pl.cdiv(span, MOST_STATES))
    block_h = 1
    # Where rows are many, more than a device holds at a time is more waits.
    while (
        num_q_heads % (2 * block_h) == 0
        and num_seqs * num_q_heads > 2048 * block_h
        and 2 * block_h * block_s <= MOST_STATES
    ):
        block_h *= 2
    return block_s, block_h


def merge_shares(
    outs: jax.Array,  # f32[Hkv, slots, N, D]
    lses: jax.Array,  # f32[Hkv, slots, N]
    unit_ends: jax.Array,  # i32[B]
    sinks: jax.Array | None,  # f32[Hq]
    *,
    num_q_heads: int,
    dtype: Any,
    num_programs: int,
    is_split: bool,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """Final `(out dtype[B, Hq, D], lse f32[B, Hq])` from the slots of the decode kernel.

    Args:
      num_q_heads: those of a KV head are the first of its N columns.
      dtype: of the output.
      num_programs: shares that the line of rows was cut into.
      is_split: the line is made of splits of one size, each with a slot.
    """
    (num_seqs,) = unit_ends.shape
    head_dim = outs.shape[-1]
    block_s, block_h = block_sizes(
        num_seqs=num_seqs, num_q_heads=num_q_heads, num_programs=num_programs, is_split=is_split
    )
    operands = [outs, lses, unit_ends] + ([] if sinks is None else [sinks])

    def kernel(*refs):
        inputs, results = refs[: len(operands)], refs[len(operands) :]
        merge_shares_kernel(
            *inputs,
            *([None] if sinks is None else []),
            *results,
            num_programs=num_programs,
            is_split=is_split,
            block_s=block_s,
            block_h=block_h,
            interpret=interpret,
        )

    return plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct((num_seqs, num_q_heads, head_dim), dtype),
            jax.ShapeDtypeStruct((num_seqs, num_q_heads), jnp.float32),
        ),
        grid=(num_q_heads // block_h, num_seqs),  # the last axis has no limit
        grid_names=("heads", "row"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="paged_decode_merge",
        interpret=interpreter(interpret),
    )(*operands)
