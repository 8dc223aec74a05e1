"""Split-KV decode attention over paged K/V, a Pallas Mosaic GPU kernel for Hopper.

`DecodePlan` divides the keys of the batch among the programs. A program is two warpgroups that walk
the same work items. The producer sends the queries and the K/V of each item to shared memory
(`ring`), the consumer attends and leaves partial states, and `decode_merge` merges them.

wgmma takes 64 rows at a time, and a KV head has fewer query heads than that. So tokens are the
rows, and the query heads, padded to N, a multiple of 8, are the columns:

    S^T [block_k, N] = K [block_k, D] Q^T [D, N]            softmax over the rows
    O^T [D, N]      += V^T [D, block_k] P^T [block_k, N]

Columns past the group's heads hold other heads' data or zeros; the merge ignores them.

There is one consumer, because the maximum over tokens goes across the four warps of a warpgroup,
through scratch memory that a program has once: two consumers that reduce at the same time get wrong
numbers.

Flash-Decoding's split over K/V, divided evenly as in stream-K; producer and consumer warpgroups as
in FlashAttention-3 (Shah 2024).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_paged.kernels.call import Arrays, result_shape
from pallas_paged.kernels.decode_plan import DecodePlan
from pallas_paged.kernels.decode_states import DecodeStates
from pallas_paged.kernels.logits import LN_2, LogitOptions, base2_logits, visible
from pallas_paged.kernels.mosaic import ops
from pallas_paged.kernels.mosaic.decode_items import WorkItem, for_each_work_item
from pallas_paged.kernels.mosaic.decode_merge import merge_decode
from pallas_paged.kernels.mosaic_sm90 import decode_one_byte, one_byte
from pallas_paged.kernels.mosaic_sm90.config import MosaicDecodeConfig
from pallas_paged.kernels.mosaic_sm90.decode_inputs import DecodeInputs
from pallas_paged.kernels.mosaic_sm90.decode_scratch import (
    Queries,
    compiler_params,
    head_tiles,
    padded_group,
    scratch_types,
)
from pallas_paged.kernels.mosaic_sm90.one_byte_scales import ScaleSender
from pallas_paged.kernels.mosaic_sm90.ring import Ring, drain, stream
from pallas_paged.kernels.mosaic_sm90.row_copies import RowCopies, needs_row_copies, stream_rows


def _produce(
    item: WorkItem,
    kv_iter: jax.Array,
    *,
    inputs: DecodeInputs,
    queries: Queries,
    ring: Ring,
    kv_head: jax.Array,
    first_head: jax.Array,
    num_q_heads: int,
    plan: DecodePlan,
    interpret: bool,
) -> jax.Array:
    """Send the queries and the K/V of a work item; return the blocks sent so far."""

    @pl.when(item.lo < item.hi)
    def _():
        @pl.when(kv_iter > 0)
        def _():
            plgpu.barrier_wait(queries.free)

        # The copy fills rows past the end of q with zeros.
        heads = pl.ds(item.row * num_q_heads + first_head, queries.arrived.shape[0])
        plgpu.copy_gmem_to_smem(inputs.q.at[heads], queries.arrived, queries.full)

    block_table, kv_len = inputs.block_tables.at[item.row], jnp.maximum(item.seq_len, 1)
    page_size, first_key = inputs.pool.page_size, None
    if plan.options.sliding_window is not None:
        first_key = plan.first_key(item.seq_len)
    pages: Any = {
        "first_page": None if first_key is None else first_key // page_size,
        "last_page": (kv_len - 1) // page_size,
    }
    scales = None
    if inputs.scales is not None and inputs.scales.of_tokens:
        scales = ScaleSender(
            scales=inputs.scales,
            stages=ring.scales,
            block_table=block_table,
            kv_head=kv_head,
            **pages,
            interpret=interpret,
        )
    blocks: Any = {"lo": item.lo, "hi": item.hi, "kv_iter": kv_iter, "scales": scales}
    if needs_row_copies(page_size):
        copies = RowCopies(
            ring=ring,
            pool=inputs.pool,
            block_table=block_table,
            kv_head=kv_head,
            **pages,
            swizzle=128 if inputs.scales is None else one_byte.swizzle_bytes(ring.k.shape[-1]),
            interpret=interpret,
        )
        return stream_rows(copies, **blocks)
    lens: Any = {"kv_len": kv_len, "first_key": first_key}
    return stream(ring, inputs.pool, kv_head, block_table, **lens, **blocks)


def attend(
    item: WorkItem,
    kv_iter: jax.Array,
    *,
    queries: Queries,
    ring: Ring,
    slopes: jax.Array | None,  # f32[N]
    partials: ops.Partials,  # [partials, N, ..], of one KV head
    plan: DecodePlan,
    interpret: bool,
) -> jax.Array:
    """Attend to the K/V of a work item and leave its state; return the blocks used so far."""
    options = plan.options
    num_stages, block_k, head_dim = ring.k.shape
    num_columns = queries.q.shape[0]
    window_start = plan.first_key(item.seq_len)

    def mask(block, shape):
        keys = block * block_k + ops.iota(shape, 0, ops.WGMMA)
        return visible(keys, item.seq_len - 1, options, end=item.seq_len)

    def attend_block(block, state):
        m_i, l_i, acc = state
        stage = lax.rem(kv_iter + block - item.lo, num_stages)
        plgpu.barrier_wait(ring.k_full.at[stage])
        s = ops.wgmma(ring.k.at[stage], queries.q.transpose((1, 0)))  # [block_k, N]
        plgpu.barrier_arrive(ring.k_free.at[stage])
        distances = None
        if slopes is not None:
            distances = block * block_k + ops.iota(s.shape, 0, ops.WGMMA) - (item.seq_len - 1)
        s, factor = base2_logits(
            s, options, None if slopes is None else ops.bcast(slopes, s, 1), distances
        )
        s = jnp.where(mask(block, s.shape), s, -jnp.inf)
        m_new = jnp.maximum(m_i, s.max(axis=0) * factor)
        alpha = jnp.exp2(m_i - m_new)
        p = jnp.exp2(s * factor - ops.bcast(m_new, s, 1))
        # Each thread sums its own tokens. The sum across warps is taken once, at the end.
        l_new = l_i * ops.bcast(alpha, l_i, 1) + p
        p = plgpu.layout_cast(p.astype(ring.v.dtype), ops.WGMMA_TRANSPOSED)
        queries.p.transpose((1, 0))[...] = p
        plgpu.barrier_wait(ring.v_full.at[stage])

        # Tokens that the row does not own may be NaN in V, and 0 * NaN is NaN.
        @pl.when((block * block_k < window_start) | ((block + 1) * block_k > item.seq_len))
        def _():
            for i in range(0, head_dim, 64):  # a part at a time takes few registers
                v_ref = ring.v.at[stage, :, pl.ds(i, 64)]
                v = plgpu.load(v_ref, layout=ops.WGMMA)
                v_ref[...] = jnp.where(mask(block, v.shape), v, jnp.zeros_like(v))

        plgpu.commit_smem()
        acc = ops.wgmma_accumulate(
            acc * ops.bcast(alpha, acc, 1),
            ring.v.at[stage].transpose((1, 0)),
            queries.p.transpose((1, 0)),
            interpret=interpret,
        )  # [D, N]
        plgpu.barrier_arrive(ring.v_free.at[stage])
        return m_new, l_new, acc

    @pl.when(item.lo < item.hi)
    def _():
        plgpu.barrier_wait(queries.full)
        queries.q.transpose((1, 0))[...] = plgpu.load(
            queries.arrived.transpose((1, 0)), layout=ops.WGMMA_TRANSPOSED, optimized=False
        )
        plgpu.commit_smem()
        plgpu.barrier_arrive(queries.free)
        state = (
            ops.full((num_columns,), -jnp.inf, ops.WGMMA_COL),
            ops.full((block_k, num_columns), 0.0, ops.WGMMA),
            ops.full((head_dim, num_columns), 0.0, ops.WGMMA),
        )
        m_i, l_i, acc = lax.fori_loop(item.lo, item.hi, attend_block, state)
        l_i = l_i.sum(axis=0)
        out = plgpu.layout_cast(acc * ops.bcast(1.0 / l_i, acc, 1), ops.WGMMA_TRANSPOSED)
        ops.store(partials.out.at[item.partial].transpose((1, 0)), out)
        ops.store(partials.lse.at[item.partial], m_i * LN_2 + jnp.log(l_i))

    return kv_iter + item.hi - item.lo


def _decode_kernel(
    inputs: DecodeInputs,
    partials: ops.Partials,  # [Hkv * parts of a group, partials, N, ..]
    queries: Queries,
    ring: Ring,
    *,
    plan: DecodePlan,
    group: int,
    kv_dtype: Any,
    interpret: bool,
) -> None:
    """Run one program: warpgroup 0 attends, warpgroup 1 sends its queries and K/V."""

    def role():
        return lax.axis_index("wg")

    program = None
    if inputs.scales is None:
        part = lax.axis_index("kv_head")
    else:
        pair, warpgroup = role() // 2, lax.rem(role(), 2)
        queries, ring = queries.of(pair), dataclasses.replace(ring, pair=pair)
        index = lax.axis_index("program") * ring.num_pairs + pair
        # In the last block there may be a pair too many, whose program has no work.
        part = jnp.minimum(index // plan.num_programs, partials.lse.shape[0] - 1)
        program = index - part * plan.num_programs

        def role():
            return warpgroup

    for_each = functools.partial(
        for_each_work_item,
        seq_lens_ref=inputs.seq_lens,
        unit_ends_ref=inputs.unit_ends,
        plan=plan,
        program=program,
    )
    ops.let_next_kernel_start(interpret=interpret)

    @pl.when(role() == 0)
    def _():
        if ring.num_pairs > 1:
            registers = one_byte.REGISTERS[ring.num_pairs][1]
            ops.set_max_registers(registers, action="increase", interpret=interpret)
        slopes = None
        if inputs.alibi_slopes is not None:
            slopes = ops.load(inputs.alibi_slopes.at[part], ops.WGMMA_COL)
        of_kv = attend
        if inputs.scales is not None:
            of_kv = functools.partial(
                decode_one_byte.attend, scales=inputs.scales, kv_dtype=kv_dtype
            )
        for_each(
            functools.partial(
                of_kv,
                queries=queries,
                ring=ring,
                slopes=slopes,
                partials=jax.tree.map(lambda ref: ref.at[part], partials),
                plan=plan,
                interpret=interpret,
            )
        )

    @pl.when(role() == 1)
    def _():
        if ring.num_pairs > 1:
            registers = one_byte.REGISTERS[ring.num_pairs][0]
            ops.set_max_registers(registers, action="decrease", interpret=interpret)
        num_tiles, heads = head_tiles(group)
        kv_head = part if num_tiles == 1 else part // num_tiles
        first_head = kv_head * group
        if num_tiles > 1:
            first_head += lax.rem(part, num_tiles) * heads
        send = functools.partial(
            _produce,
            inputs=inputs,
            queries=queries,
            ring=ring,
            kv_head=kv_head,
            first_head=first_head,
            num_q_heads=group * inputs.pool.num_kv_heads,
            plan=plan,
            interpret=interpret,
        )
        kv_iter = for_each(send)
        drain(ring, kv_iter)

        @pl.when(kv_iter > 0)
        def _():
            plgpu.barrier_wait(queries.free)


def paged_decode(
    arrays: Arrays, *, options: LogitOptions, config: MosaicDecodeConfig, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """Attend with one query token per row; return `(out [B, Hq, D], lse f32[B, Hq])`."""
    states = decode_states(arrays, options=options, config=config, interpret=interpret)
    return merge_states(states, dtype=arrays.q.dtype, interpret=interpret)


def merge_states(
    states: DecodeStates, *, dtype: Any, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """Return `(out dtype[B, Hq, D], lse f32[B, Hq])`."""
    return merge_decode(
        ops.Partials(out=states.out, lse=states.lse),
        states.unit_ends,
        states.sinks,
        plan=states.plan,
        num_q_heads=states.num_q_heads,
        head_tiles=states.head_tiles,
        head_dim=states.head_dim,
        dtype=dtype,
        interpret=interpret,
    )


def decode_states(
    arrays: Arrays, *, options: LogitOptions, config: MosaicDecodeConfig, interpret: bool
) -> DecodeStates:
    """Attend with one query token per row, without the merge."""
    group, head_dim = arrays.group, arrays.head_dim
    num_parts = arrays.num_kv_heads * head_tiles(group)[0]
    plan = DecodePlan.of(
        config,
        options,
        num_seqs=arrays.num_seqs,
        num_kv_heads=num_parts,
        max_kv_len=arrays.max_kv_len,
    )
    inputs = DecodeInputs.of(arrays, plan)
    scratch: Any = scratch_types(
        config,
        group=group,
        head_dim=head_dim,
        page_size=arrays.page_size,
        dtype=arrays.q.dtype,
        kv_dtype=arrays.k_pages.dtype,
        scales_of_tokens=inputs.scales is not None and inputs.scales.of_tokens,
    )
    grid: dict[str, Any] = {
        "grid": (num_parts, plan.num_programs),
        "grid_names": ("kv_head", "program"),
    }
    if inputs.scales is not None:
        num_programs = num_parts * plan.num_programs
        grid = {"grid": (pl.cdiv(num_programs, config.num_pairs),), "grid_names": ("program",)}
    columns = (num_parts, plan.num_partials, padded_group(group))
    partials = ops.Partials(
        out=result_shape((*columns, head_dim), jnp.float32),
        lse=result_shape(columns, jnp.float32),
    )
    kernel = functools.partial(
        _decode_kernel,
        plan=plan,
        group=group,
        kv_dtype=arrays.k_pages.dtype,
        interpret=interpret,
    )
    out, lse = plgpu.kernel(
        ops.with_trees(kernel, inputs, partials),
        out_type=(partials.out, partials.lse),
        scratch_types=scratch,
        **grid,
        num_threads=2 * config.num_pairs,
        thread_name="wg",
        compiler_params=compiler_params(arrays.k_pages.dtype),
        kernel_name="paged_decode",
        interpret=ops.interpreter(interpret),
    )(*jax.tree.leaves(inputs))
    return DecodeStates(
        out=out,
        lse=lse,
        unit_ends=inputs.unit_ends,
        sinks=arrays.sinks,
        plan=plan,
        num_q_heads=arrays.num_q_heads,
        head_tiles=head_tiles(group),
    )
