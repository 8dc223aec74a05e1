"""Split-KV decode attention over paged K/V by mma.sync and cp.async, a Pallas Mosaic GPU kernel.

`DecodePlan` divides the keys of the batch among the programs. A program is one warpgroup. It copies
the blocks of its work items to shared memory, attends to each (`ring`), and leaves partial states,
which `mosaic.decode_merge` merges.

The query heads of a KV head, padded to a multiple of 16, are the rows of both products. The four
warps divide the keys of S and the columns of O, so the maximum of a row goes across warps, and P
goes through shared memory:

    S [R, block_k] = Q [R, D] K^T [D, block_k]              softmax over the columns
    O [R, D]      += P [R, block_k] V [block_k, D]

Flash-Decoding's split over K/V, divided evenly as in stream-K; the loop as in FlashAttention-2.
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

from pallas_paged.checks import pytree
from pallas_paged.kernels.call import Arrays, result_shape
from pallas_paged.kernels.decode_plan import DecodePlan
from pallas_paged.kernels.decode_states import DecodeStates
from pallas_paged.kernels.logits import LN_2, LogitOptions, base2_logits, split_scales, visible
from pallas_paged.kernels.mosaic import ops as mosaic_ops
from pallas_paged.kernels.mosaic.decode_items import WorkItem, for_each_work_item
from pallas_paged.kernels.mosaic.ops import Partials, bcast, full, iota, load_shared
from pallas_paged.kernels.mosaic.pages import Pages
from pallas_paged.kernels.mosaic_sm80 import one_byte, ops
from pallas_paged.kernels.mosaic_sm80.config import (
    CallTypes,
    MosaicSm80DecodeConfig,
    decode_columns,
    decode_rows,
)
from pallas_paged.kernels.mosaic_sm80.pages import Blocks, Copier
from pallas_paged.kernels.mosaic_sm80.ring import Span, can_prefetch, for_each_block


@pytree
class DecodeInputs:
    """Operands of the kernel, or refs to them."""

    q: Any  # `[B * Hq, D]`; with one-byte pages pairs of elements i32`[B * Hq, D / 2]`
    pages: Pages  # K, V and the block tables
    seq_lens: Any  # i32`[B]`
    unit_ends: Any  # i32`[B]`, from `DecodePlan`
    alibi_slopes: Any  # f32`[head tiles, R]` or None
    q_dtype: Any = dataclasses.field(metadata={"static": True})  # of the queries


@pytree
class DecodeScratch:
    """Refs in shared memory, or their types."""

    arrived: Any  # i32[R, W]: q as pairs, with one-byte pages; else None
    q: list[Any]  # [R, W]: the queries, or their even and their odd elements
    p: Any  # [R, block_k], the probabilities of a block
    blocks: Blocks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Heads:
    """The query heads of a program."""

    group: int  # query heads of a KV head
    rows: int  # of a tile of heads
    kv_dtype: Any  # of the pages

    @property
    def num_tiles(self) -> int:
        """Tiles of a KV head."""
        return pl.cdiv(self.group, self.rows)


def scratch_types(config: MosaicSm80DecodeConfig, types: CallTypes) -> DecodeScratch:
    """Return the types of the shared memory of a program."""
    rows = decode_rows(types.group, types.head_dim)
    columns = decode_columns(types.head_dim, types.itemsize)
    one = types.itemsize == 1
    operand = jnp.float16 if one else types.dtype
    return DecodeScratch(
        arrived=plgpu.SMEM((rows, columns), jnp.int32) if one else None,
        q=[ops.swizzled((rows, columns), operand)] * (2 if one else 1),
        p=ops.swizzled((rows, config.block_k), operand),
        blocks=Blocks.types(config, types, columns=columns),
    )


def attend(
    item: WorkItem,
    next_item: WorkItem,
    carry: tuple[jax.Array, jax.Array],
    *,
    inputs: DecodeInputs,
    scratch: DecodeScratch,
    partials: Partials,  # [Hkv, partials, head tiles * R, ..]
    heads: Heads,
    plan: DecodePlan,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """Attend to the K/V of a work item and leave its state; return the carry of the loop."""
    options, pages, blocks = plan.options, inputs.pages, scratch.blocks
    _, block_k, columns = blocks.k.shape
    tile = lax.axis_index("head_tile")
    kv_head = lax.div(tile, heads.num_tiles)
    first_head = lax.rem(tile, heads.num_tiles) * heads.rows
    num_heads = jnp.minimum(heads.group - first_head, heads.rows)
    first_key = plan.first_key(item.seq_len)
    place, started = carry
    layouts = ops.MmaLayouts(m_warps=heads.rows // 16)
    mma = functools.partial(ops.mma, interpret=interpret)

    def span_of(item):
        copier = Copier(
            pages=pages,
            blocks=blocks,
            row=item.row,
            kv_head=kv_head,
            first_key=plan.first_key(item.seq_len),
            end_key=item.seq_len,
            interpret=interpret,
        )
        copy = functools.partial(copy_queries, item.row)
        return Span(copier=copier, lo=item.lo, hi=item.hi, copy_queries=copy)

    def copy_queries(row):
        first = row * (heads.group * pages.num_kv_heads) + kv_head * heads.group + first_head
        to = scratch.q[0] if scratch.arrived is None else scratch.arrived
        plain = scratch.arrived is not None
        ops.copy_rows(inputs.q, to, first, num_heads, plain=plain, interpret=interpret)

    def operands(ref):
        """Return K or V in registers as the right side of a product: one matrix or two."""
        x = load_shared(ref, layouts.rhs)
        if jnp.dtype(heads.kv_dtype).itemsize > 1:
            return [x]
        return one_byte.to_f16(x, heads.kv_dtype, layouts.rhs, interpret=interpret)

    by_token = blocks.k_scales is not None
    only_factor = None  # of the logits, which goes to the queries
    if pages.k_scales is not None:
        only_factor = options.only_factor(inputs.alibi_slopes)

    def start():
        q_scales = None
        if scratch.arrived is not None:
            q_scales = one_byte.load_queries(
                [(scratch.arrived, scratch.q)], inputs.q_dtype, layouts, interpret=interpret
            )
            if only_factor is not None:
                q_scales = q_scales * only_factor
            if pages.k_scales is not None and not by_token:
                q_scales = q_scales * pages.k_scales[0]
        state = (
            full((heads.rows,), -jnp.inf, layouts.row),
            full((heads.rows, block_k), 0.0, layouts.acc),
            [full((heads.rows, columns), 0.0, layouts.acc) for _ in scratch.q],
        )
        return q_scales, state

    def attend_block(block, stage, carry):
        q_scales, (m_i, l_i, acc) = carry
        s = full((heads.rows, block_k), 0.0, layouts.acc)
        keys_t = operands(blocks.k.at[stage].transpose((1, 0)))
        for ref, k in zip(scratch.q, keys_t, strict=True):  # q in registers would take too many
            s = mma(s, load_shared(ref, layouts.lhs), k)
        keys = block * block_k + iota(s.shape, 1, layouts.acc)
        if q_scales is not None:
            s = s * bcast(q_scales, s)
        if by_token:
            s = s * bcast(load_shared(blocks.k_scales.at[stage], layouts.col), s, 1)
        slopes = inputs.alibi_slopes
        if slopes is not None:
            slopes = mosaic_ops.load(slopes.at[tile], layouts.row)
        factor = 1.0
        if only_factor is None:
            s, factor = base2_logits(
                s,
                options,
                None if slopes is None else bcast(slopes, s),
                None if slopes is None else keys - (item.seq_len - 1),
            )
        significands = inverses = None
        if blocks.v_scales is not None:
            # The maximum is taken over the weights, since f16 has a small range.
            v_scales = load_shared(blocks.v_scales.at[stage], layouts.col)
            exponents, significands, inverses = split_scales(v_scales)
            s, factor = s * factor + bcast(exponents, s, 1), 1.0

        def masked(s):
            sees = visible(keys, item.seq_len - 1, options, end=item.seq_len)
            return jnp.where(sees, s, -jnp.inf)

        is_whole = (block * block_k >= first_key) & ((block + 1) * block_k <= item.seq_len)
        s = lax.cond(is_whole, lambda s: s, masked, s)
        m_new = jnp.maximum(m_i, s.max(axis=1) * factor)
        alpha = jnp.exp2(m_i - m_new)
        p = jnp.exp2(s * factor - bcast(m_new, s))
        weights = p if significands is None else p * bcast(significands, p, 1)
        p = p if inverses is None else p * bcast(inverses, p, 1)
        # Each thread sums its own keys. The sum across threads is taken once, at the end.
        l_new = l_i * bcast(alpha, l_i) + p
        scratch.p[...] = weights.astype(scratch.p.dtype)
        ops.barrier(interpret=interpret)
        weights = load_shared(scratch.p, layouts.lhs)
        values = operands(blocks.v.at[stage])
        acc = [mma(a * bcast(alpha, a), weights, v) for a, v in zip(acc, values, strict=True)]
        return q_scales, (m_new, l_new, acc)

    span, following = span_of(item), span_of(next_item)
    prefetch_next = can_prefetch(span, following)

    @pl.when(item.lo < item.hi)
    def attend_blocks():
        _, (m_i, l_i, acc) = for_each_block(
            span,
            following,
            attend_block,
            start,
            place=place,
            started=started,
            prefetch_next=prefetch_next,
            queries_prefetched=scratch.arrived is not None,
        )
        l_i = l_i.sum(axis=1)
        factor = 1.0 / l_i
        if pages.v_scales is not None and not pages.scales_by_token:
            factor = factor * pages.v_scales[0]
        outs = [a * bcast(factor, a) for a in acc]
        out, layout = outs[0], layouts.acc
        if len(outs) > 1:
            out, layout = one_byte.interleave(*outs, layouts, interpret=interpret)
        index = (kv_head, item.partial, pl.ds(first_head, heads.rows))
        ops.store_rows(partials.out.at[index], out, num_heads, layout, interpret=interpret)
        mosaic_ops.store(partials.lse.at[index], m_i * LN_2 + jnp.log(l_i))

    return place + item.hi - item.lo, prefetch_next


def decode_states(
    arrays: Arrays,
    *,
    options: LogitOptions,
    config: MosaicSm80DecodeConfig,
    interpret: bool,
) -> DecodeStates:
    """Attend with one query token per row, without the merge."""
    num_kv_heads, head_dim = arrays.num_kv_heads, arrays.head_dim
    kv_dtype = arrays.k_pages.dtype
    rows = decode_rows(arrays.group, head_dim)
    heads = Heads(group=arrays.group, rows=rows, kv_dtype=kv_dtype)
    plan = DecodePlan.of(
        config,
        options,
        num_seqs=arrays.num_seqs,
        num_kv_heads=num_kv_heads * heads.num_tiles,
        max_kv_len=arrays.max_kv_len,
    )
    inputs = _inputs(arrays, plan, heads)
    scratch = scratch_types(config, CallTypes.of(arrays))
    columns = len(scratch.q) * decode_columns(head_dim, kv_dtype.itemsize)
    states = (num_kv_heads, plan.num_partials, heads.num_tiles * rows)
    partials = Partials(
        out=result_shape((*states, columns), jnp.float32),
        lse=result_shape(states, jnp.float32),
    )

    def body(inputs, partials, scratch):
        attend_item = functools.partial(
            attend,
            inputs=inputs,
            scratch=scratch,
            partials=partials,
            heads=heads,
            plan=plan,
            interpret=interpret,
        )
        for_each_work_item(attend_item, inputs.seq_lens, inputs.unit_ends, plan=plan)

    partials = mosaic_ops.run_kernel(
        body,
        inputs,
        partials,
        scratch,
        name="paged_decode",
        params=ops.COMPILER_PARAMS,
        interpret=interpret,
        grid=(num_kv_heads * heads.num_tiles, plan.num_programs),
        grid_names=("head_tile", "program"),
    )
    return DecodeStates(
        out=partials.out,
        lse=partials.lse,
        unit_ends=inputs.unit_ends,
        sinks=arrays.sinks,
        plan=plan,
        num_q_heads=arrays.num_q_heads,
        head_dim=head_dim,
    )


def _inputs(arrays: Arrays, plan: DecodePlan, heads: Heads) -> DecodeInputs:
    num_kv_heads, group = arrays.num_kv_heads, arrays.group

    def tiled(x):
        """Return values of the query heads `[..., Hq]` as `[..., head tiles, R]`."""
        x = x.reshape(*x.shape[:-1], num_kv_heads, group)
        padding = heads.num_tiles * heads.rows - group
        x = jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, padding),))
        return x.reshape(*x.shape[:-2], num_kv_heads * heads.num_tiles, heads.rows)

    q = arrays.q.reshape(arrays.num_seqs * arrays.num_q_heads, -1)
    if arrays.k_pages.dtype.itemsize == 1:  # XLA sees a bitcast, so nothing is copied
        q = lax.bitcast_convert_type(q.reshape(len(q), -1, 2), jnp.int32)
    slopes = arrays.alibi_slopes
    return DecodeInputs(
        q=q,
        q_dtype=arrays.q.dtype,
        pages=Pages.of(arrays, words=True),
        seq_lens=arrays.seq_lens,
        unit_ends=plan.unit_ends(arrays.seq_lens),
        alibi_slopes=None if slopes is None else tiled(slopes),
    )
