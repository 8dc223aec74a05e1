"""The consumer of the Mosaic decode kernel over int8 and fp8 K/V.

The products are the same as in `decode`, with K and V^T in registers:

    S^T [block_k, N] = K [block_k, D] Q^T [D, N]            softmax over the rows
    O^T [D, N]      += V^T [D, block_k] P^T [block_k, N]
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_paged.kernels.decode_plan import DecodePlan
from pallas_paged.kernels.logits import (
    LN_2,
    base2_logits,
    exponents_of,
    power_of_2,
    split_scales,
    visible,
)
from pallas_paged.kernels.mosaic import ops
from pallas_paged.kernels.mosaic.decode_items import WorkItem
from pallas_paged.kernels.mosaic_sm90 import one_byte, one_byte_warpgroup
from pallas_paged.kernels.mosaic_sm90.one_byte_scales import Scales
from pallas_paged.kernels.mosaic_sm90.ring import Ring

_PART_K, _PART_D = 64, 128  # tokens and elements of head_dim of a part of K or V


def _move_queries(
    queries: Any, kv_dtype: Any, reduce: Callable[..., jax.Array], *, interpret: bool
) -> jax.Array | None:
    """Move the queries that arrived to swizzled f16; return f32`[N]` that multiplies them, or None.

    bf16 has a larger range than f16, so the largest element of each head is scaled to [1, 2).
    """
    scales = None
    q = one_byte.queries(queries.arrived, kv_dtype, interpret=interpret)
    if q.dtype != jnp.float16:
        q = q.astype(jnp.float32)
        exponents = jnp.clip(exponents_of(reduce(jnp.abs(q), how="max")), -126, 126)
        q = (q * ops.bcast(power_of_2(-exponents), q, 1)).astype(jnp.float16)
        scales = power_of_2(exponents)
    queries.q.transpose((1, 0))[...] = plgpu.layout_cast(q, ops.WGMMA_TRANSPOSED)
    plgpu.commit_smem()
    return scales


def attend(
    item: WorkItem,
    kv_iter: jax.Array,
    *,
    queries: Any,
    ring: Ring,
    scales: Scales,
    slopes: jax.Array | None,  # f32[N]
    partials: ops.Partials,  # [partials, N, ..], of one KV head
    plan: DecodePlan,
    kv_dtype: Any,
    interpret: bool,
) -> jax.Array:
    """Attend to the K/V of a work item and leave its state; return the blocks used so far."""
    options = plan.options
    block_k, head_dim = ring.k.shape[1:]
    num_columns = queries.q.shape[0]
    window_start = plan.first_key(item.seq_len)
    overlap = ring.num_pairs > 1  # else two programs with 128 registers a thread share an SM
    # A part of K or V^T at a time takes few registers.
    parts = [pl.ds(i, _PART_K) for i in range(0, block_k, _PART_K)]
    reduce = functools.partial(
        one_byte_warpgroup.reduce_columns, scratch=queries.reduced, interpret=interpret
    )
    width = _PART_D if head_dim % _PART_D == 0 else 64
    dims = [pl.ds(i, width) for i in range(0, head_dim, width)]
    if slopes is not None:
        slopes = ops.bcast(slopes, ops.full((_PART_K, num_columns), 0.0, ops.WGMMA), 1)

    def scores(stage):
        """Return q.k of the parts, f32`[_PART_K, N]` each."""
        return ops.wgmma_many(
            [ops.full((_PART_K, num_columns), 0.0, ops.WGMMA) for _ in parts],
            [
                (
                    i,
                    functools.partial(
                        one_byte.keys, ring.k.at[stage, part, d], kv_dtype, interpret=interpret
                    ),
                    queries.q.at[:, d].transpose((1, 0)),
                )
                for i, part in enumerate(parts)
                for d in dims
            ],
            overlap=overlap,
            interpret=interpret,
        )

    def logits(s, block, part, stage, q_scales):
        """Return base-2 logits of the tokens of a part, and which of them the query sees."""
        if scales.of_tokens:
            s *= ops.bcast(scales_of(0, part, stage), s, 0)
        if q_scales is not None:
            s *= ops.bcast(q_scales, s, 1)
        keys = block * block_k + part.start + ops.iota(s.shape, 0, ops.WGMMA)
        s, factor = base2_logits(s, options, slopes, keys - (item.seq_len - 1))
        return s * factor, visible(keys, item.seq_len - 1, options, end=item.seq_len)

    def scales_of(kv, part, stage):
        return plgpu.load(ring.scales.at[kv, stage, part], layout=ops.WGMMA_ROW)

    def attend_block(block, state, q_scales):
        m_i, l_i, acc = state
        stage = ring.stage_of(kv_iter + block - item.lo)
        plgpu.barrier_wait(ring.k_full.at[stage])
        products = scores(stage)
        found = [
            logits(s, block, part, stage, q_scales) for s, part in zip(products, parts, strict=True)
        ]
        plgpu.barrier_arrive(ring.k_free.at[stage])
        if scales.of_tokens:
            # The maximum is taken over the weights, probabilities times the scales of their values.
            # The scales' powers of two go to the exponent.
            split = [split_scales(scales_of(1, part, stage)) for part in parts]
            found = [
                (s + ops.bcast(e, s, 0), mask)
                for (s, mask), (e, *_) in zip(found, split, strict=True)
            ]
        s = [jnp.where(mask, s, -jnp.inf) for s, mask in found]
        m_new = jnp.maximum(m_i, reduce(functools.reduce(jnp.maximum, s), how="max"))
        alpha = jnp.exp2(m_i - m_new)
        l_new = l_i * ops.bcast(alpha, l_i, 1)
        for i, part in enumerate(parts):
            weights = p = jnp.exp2(s[i] - ops.bcast(m_new, s[i], 1))
            if scales.of_tokens:
                _, significands, inverses = split[i]
                # Significands of tokens that the row does not own may be NaN.
                weights = jnp.where(found[i][1], p * ops.bcast(significands, p, 0), 0.0)
                p *= ops.bcast(inverses, p, 0)
            l_new += p
            weights = plgpu.layout_cast(weights.astype(jnp.float16), ops.WGMMA_TRANSPOSED)
            queries.p.at[:, part].transpose((1, 0))[...] = weights
        plgpu.barrier_wait(ring.v_full.at[stage])
        if kv_dtype != jnp.int8:
            # Bytes that the row does not own may mean NaN, and 0 * NaN is NaN.
            @pl.when((block * block_k < window_start) | ((block + 1) * block_k > item.seq_len))
            def _():
                first = window_start - block * block_k, item.seq_len - block * block_k
                one_byte_warpgroup.zero_other_rows(ring.v.at[stage], *first, interpret=interpret)

        plgpu.commit_smem()
        acc = ops.wgmma_many(
            [x * ops.bcast(alpha, x, 1) for x in acc],
            [
                (
                    i,
                    functools.partial(
                        one_byte.values, ring.v.at[stage, part, d], kv_dtype, interpret=interpret
                    ),
                    queries.p.at[:, part].transpose((1, 0)),
                )
                for i, d in enumerate(dims)
                for part in parts
            ],
            overlap=overlap,
            interpret=interpret,
        )  # [width, N] each
        plgpu.barrier_arrive(ring.v_free.at[stage])
        return m_new, l_new, acc

    @pl.when(item.lo < item.hi)
    def _():
        plgpu.barrier_wait(queries.full)
        q_scales = _move_queries(queries, kv_dtype, reduce, interpret=interpret)
        plgpu.barrier_arrive(queries.free)
        if not scales.of_tokens:
            k_scale = ops.full((num_columns,), 1.0, ops.WGMMA_COL) * scales.k[0]
            q_scales = k_scale if q_scales is None else q_scales * k_scale
        state = (
            ops.full((num_columns,), -jnp.inf, ops.WGMMA_COL),
            ops.full((_PART_K, num_columns), 0.0, ops.WGMMA),
            [ops.full((width, num_columns), 0.0, ops.WGMMA) for _ in dims],
        )

        def body(block, state):
            return attend_block(block, state, q_scales)

        m_i, l_i, acc = lax.fori_loop(item.lo, item.hi, body, state)
        l_i = reduce(l_i, how="sum")
        factor = 1.0 / l_i if scales.of_tokens else scales.v[0] / l_i
        for d, x in zip(dims, acc, strict=True):
            out = one_byte.unpermuted(x * ops.bcast(factor, x, 1), interpret=interpret)
            ops.store(partials.out.at[item.partial, :, d].transpose((1, 0)), out)
        ops.store(partials.lse.at[item.partial], m_i * LN_2 + jnp.log(l_i))

    return kv_iter + item.hi - item.lo
