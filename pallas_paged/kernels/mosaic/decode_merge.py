"""Merge of the partial states that the Mosaic decode kernel leaves, a Pallas Mosaic GPU kernel.

A program unites the states of some query heads of one row. A thread holds the log-sum-exps of
states as scalars and one or two elements of each output. Such a small kernel spends its time
waiting, so a loop step starts all of its loads at once, and a row takes few steps.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_paged.kernels.call import result_shape
from pallas_paged.kernels.decode_plan import DecodePlan
from pallas_paged.kernels.logits import LN_2, LOG2_E
from pallas_paged.kernels.mosaic import ops

MAX_STATES_PER_STEP = 48  # that a loop step loads; each takes two registers


def vector_layout(size: int) -> Any:
    """Return how 128 threads hold a vector; where it has fewer elements, threads share them."""
    of_warp, of_thread = size // 4, max(size // 128, 1)
    lanes = of_warp // of_thread
    return plgpu.Layout.TILED(
        plgpu.Tiling(((size,), (of_warp,), (of_thread,))),
        warp_dims=(-3,),
        lane_dims=(-2,) if lanes == 32 else (plgpu.Replicated(32 // lanes), -2),
        vector_dim=-1,
    )


def pieces_of(head_dim: int) -> list[int]:
    """Return the powers of two, the largest first, whose sum is `head_dim`."""
    return [1 << i for i in range(head_dim.bit_length() - 1, -1, -1) if head_dim >> i & 1]


def piece_refs(ref: Any) -> list[Any]:
    """Return the refs to the pieces of a vector, the last axis of `ref`."""
    (head_dim,) = ref.shape
    pieces = pieces_of(head_dim)
    if len(pieces) == 1:
        return [ref]
    return [ref.at[pl.ds(sum(pieces[:i]), size)] for i, size in enumerate(pieces)]


def merge_partials(
    partials: ops.Partials,  # [Hkv, partials, N, ..]
    first: jax.Array,
    num_partials: jax.Array,
    columns: list[tuple[jax.Array, jax.Array]],
    block_s: int,
) -> list[ops.State]:
    """Unite the partial states `first .. first + num_partials - 1`.

    Args:
        columns: KV head and column of each query head.
        block_s: partial states per loop step.

    Returns:
        A state (m f32[], l f32[], acc) for each of `columns`, where acc is the pieces of f32[D].
    """
    layouts = {size: vector_layout(size) for size in pieces_of(partials.out.shape[-1])}

    def merge_some(i, states):
        index = [i * block_s + j for j in range(block_s)]
        # Past the last partial state the last is loaded again, with weight 0.
        where = [first + jnp.minimum(j, num_partials - 1) for j in index]
        loaded = [
            (
                [partials.lse[h, i, n] for i in where],
                [
                    [ops.load(ref, layouts[ref.shape[0]]) for ref in piece_refs(row)]
                    for row in (partials.out.at[h, i, n] for i in where)
                ],
            )
            for h, n in columns
        ]
        exists = [j < num_partials for j in index]
        return [unite(x, exists, *y) for x, y in zip(states, loaded, strict=True)]

    def unite(state, exists, lses, outs):
        m_i, l_i, acc = state
        lses = [jnp.where(*x, -jnp.inf) * LOG2_E for x in zip(exists, lses, strict=True)]
        m_new = functools.reduce(jnp.maximum, lses, m_i)
        alpha = jnp.exp2(m_i - m_new)
        l_new, acc = l_i * alpha, [x * alpha for x in acc]
        for lse, out in zip(lses, outs, strict=True):
            w = jnp.exp2(lse - m_new)
            l_new, acc = l_new + w, [x + w * y for x, y in zip(acc, out, strict=True)]
        return m_new, l_new, acc

    zeros = [ops.full((size,), 0.0, layout) for size, layout in layouts.items()]
    nothing = jnp.float32(-jnp.inf), jnp.float32(0.0), zeros
    return lax.fori_loop(0, pl.cdiv(num_partials, block_s), merge_some, [nothing for _ in columns])


def finish(state: Any, sink: jax.Array | None) -> tuple[Any, jax.Array]:
    """Return `(pieces of out f32[D], lse)` of a state.

    A sink joins the denominator if any key was seen.
    """
    empty = state[1] == 0.0
    if sink is not None:
        state = ops.join_sinks(state, sink, empty, lambda acc, alpha: [x * alpha for x in acc])
    m_i, l_i, acc = state
    l_safe = jnp.where(empty, 1.0, l_i)
    return [x * (1.0 / l_safe) for x in acc], jnp.where(
        empty, -jnp.inf, m_i * LN_2 + jnp.log(l_safe)
    )


def merge_decode_kernel(
    partials: ops.Partials,  # [Hkv, partials, N, ..]
    unit_ends_ref,  # i32[B]
    sinks_ref,  # f32[Hq] or None
    o_ref,  # [B, Hq, D]
    lse_ref,  # f32[B, Hq]
    *,
    plan: DecodePlan,
    head_tiles: tuple[int, int],
    block_s: int,
    block_h: int,
    interpret: bool,
) -> None:
    """Run one program: the final results of `block_h` query heads of a row."""
    row = lax.axis_index("row")
    num_tiles, heads = head_tiles
    group = o_ref.shape[1] * num_tiles // partials.out.shape[0]
    first, num_partials = plan.partials_of_row(row, unit_ends_ref)
    q_heads = [lax.axis_index("heads") * block_h + i for i in range(block_h)]
    columns = [(lax.div(q_head, group), lax.rem(q_head, group)) for q_head in q_heads]
    if num_tiles > 1:
        columns = [(h * num_tiles + lax.div(n, heads), lax.rem(n, heads)) for h, n in columns]

    # The reads above are safe before the wait: the kernel before this one reads the same array, so
    # it was complete when that kernel started.
    ops.wait_for_previous_kernel(interpret=interpret)
    sinks = [None if sinks_ref is None else sinks_ref[q_head] for q_head in q_heads]
    states = merge_partials(partials, first, num_partials, columns, block_s)
    for q_head, state, sink in zip(q_heads, states, sinks, strict=True):
        out, lse = finish(state, sink)
        for ref, piece in zip(piece_refs(o_ref.at[row, q_head]), out, strict=True):
            ops.store(ref, piece.astype(o_ref.dtype))
        lse_ref[row, q_head] = lse


def block_sizes(plan: DecodePlan, *, num_seqs: int, num_q_heads: int) -> tuple[int, int]:
    """Return partial states per loop step and query heads per program, from static sizes only."""
    # Under a fixed split size the order of the sums must not depend on the batch.
    block_s = 8
    if plan.fixed_split_size is None:
        # A row of an even batch spans about this many programs; a longer row takes more steps.
        span = plan.num_programs // num_seqs + 1
        block_s = pl.cdiv(span, pl.cdiv(span, MAX_STATES_PER_STEP))
    block_h = 1
    # Many rows exceed one wave of programs, so each program gets several heads.
    while (
        num_q_heads % (2 * block_h) == 0
        and num_seqs * num_q_heads > 2048 * block_h
        and 2 * block_h * block_s <= MAX_STATES_PER_STEP
    ):
        block_h *= 2
    return block_s, block_h


def merge_decode(
    partials: ops.Partials,  # [Hkv, partials, N, ..]
    unit_ends: jax.Array,  # i32[B]
    sinks: jax.Array | None,  # f32[Hq]
    *,
    plan: DecodePlan,
    num_q_heads: int,
    head_tiles: tuple[int, int] = (1, 0),
    dtype: Any,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """Return the final `(out dtype[B, Hq, D], lse f32[B, Hq])` of a decode call.

    Args:
        partials: those of the decode kernel. The first columns of a KV head are its query heads.
        unit_ends: from `DecodePlan.unit_ends`.
        sinks: logits of the attention sinks, or None.
        head_tiles: parts of the query heads of a KV head, each like a KV head of its own in
            `partials`, and the heads of a part, which matter if there are several.
    """
    (num_seqs,) = unit_ends.shape
    block_s, block_h = block_sizes(plan, num_seqs=num_seqs, num_q_heads=num_q_heads)
    inputs = partials, unit_ends, sinks
    results = (
        result_shape((num_seqs, num_q_heads, partials.out.shape[-1]), dtype),
        result_shape((num_seqs, num_q_heads), jnp.float32),
    )
    kernel = functools.partial(
        merge_decode_kernel,
        plan=plan,
        head_tiles=head_tiles,
        block_s=block_s,
        block_h=block_h,
        interpret=interpret,
    )
    return plgpu.kernel(
        ops.with_trees(kernel, *inputs, *results),
        out_type=results,
        grid=(num_q_heads // block_h, num_seqs),  # CUDA does not limit the last axis
        grid_names=("heads", "row"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="paged_decode_merge",
        interpret=ops.interpreter(interpret),
    )(*jax.tree.leaves(inputs))
