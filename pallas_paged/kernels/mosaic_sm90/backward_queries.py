"""The gradient of queries, a Pallas Mosaic GPU kernel for Hopper.

A program has 128 packed rows of queries, 64 for each of two consumer warpgroups; a producer streams
the blocks of keys that they see through the ring of the forward pass:

    S = Q K^T      dP = dO V^T      P = exp(S - lse)      dS = P (dP - delta)      dQ += dS K
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_paged.checks import pytree
from pallas_paged.kernels.backward import recompute
from pallas_paged.kernels.call import result_shape
from pallas_paged.kernels.logits import LogitOptions, visible
from pallas_paged.kernels.mosaic import ops
from pallas_paged.kernels.mosaic_sm90.backward_keys import (
    CONSUMER_REGISTERS,
    CONSUMERS,
    PRODUCER_REGISTERS,
    BackwardInputs,
    run_tiles,
    two_products,
)
from pallas_paged.kernels.mosaic_sm90.backward_rows import ROWS
from pallas_paged.kernels.mosaic_sm90.ring import Ring, drain, stream, wgmma_transforms
from pallas_paged.kernels.ragged_tiles import for_each_block

_WG = ROWS // CONSUMERS
_STAGES = 2


@pytree
class QueriesScratch:
    """Refs in shared memory of a program, or their types."""

    q: Any  # [2, 64, D]
    d_out: Any
    lse: Any  # f32[2, 64]
    delta: Any
    full: Any  # barriers [2], of the rows of each consumer
    ring: Ring
    both: Any  # barrier of the two consumers

    @classmethod
    def types(cls, *, block_k: int, head_dim: int, page_size: int, dtype: Any) -> QueriesScratch:
        """Return the types of the refs."""
        rows = plgpu.SMEM((CONSUMERS, _WG, head_dim), dtype, transforms=wgmma_transforms(dtype))
        vector = plgpu.SMEM((CONSUMERS, _WG), jnp.float32)
        return cls(
            q=rows, d_out=rows, lse=vector, delta=vector,
            full=plgpu.Barrier(num_arrivals=4, num_barriers=CONSUMERS),
            ring=Ring.types(
                num_stages=_STAGES, block_k=block_k, head_dim=head_dim, v_head_dim=head_dim,
                page_size=page_size, dtype=dtype, num_consumers=CONSUMERS,
            ),
            both=plgpu.Barrier(num_arrivals=CONSUMERS),
        )  # fmt: skip


def _queries_kernel(
    inputs: BackwardInputs,
    output: Any,  # [Hkv, R, D]
    scratch: QueriesScratch,
    *,
    group: int,
    options: LogitOptions,
    interpret: bool,
) -> None:
    """One program: the gradient of one tile of queries."""
    ring = scratch.ring
    num_stages, block_k, head_dim = ring.k.shape
    head = lax.axis_index("kv_head")
    tile = lax.axis_index("tile")
    work = jax.tree.map(lambda ref: ref[tile], inputs.work)
    wg = lax.axis_index("wg")
    first_key = None  # that any query of the tile sees
    if options.sliding_window is not None:
        oldest = work.before + (work.first - work.origin) // group
        first_key = options.first_key(jnp.maximum(oldest, 0))

    def rows_of(wg):
        return pl.ds(pl.multiple_of(work.first + wg * _WG, _WG), _WG)

    @pl.when(wg == CONSUMERS)
    def _():
        ops.set_max_registers(PRODUCER_REGISTERS, action="decrease", interpret=interpret)
        for i in range(CONSUMERS):
            inputs.rows.send(scratch, i, kv_head=head, where=rows_of(i))
        kv_iter = stream(
            ring,
            inputs.pages,
            work.seq,
            head,
            lo=work.lo,
            hi=work.hi,
            kv_len=jnp.maximum(work.kv_len, 1),
            first_key=first_key,
            kv_iter=jnp.int32(0),
        )
        drain(ring, kv_iter)

    @pl.when(wg < CONSUMERS)
    def _():
        ops.set_max_registers(CONSUMER_REGISTERS, action="increase", interpret=interpret)
        q, d_out = scratch.q.at[wg], scratch.d_out.at[wg]
        plgpu.barrier_wait(scratch.full.at[wg])
        lse = plgpu.load(scratch.lse.at[wg], layout=ops.WGMMA_ROW)
        delta = plgpu.load(scratch.delta.at[wg], layout=ops.WGMMA_ROW)
        positions = None
        # Mosaic finds no layout for values that nothing uses.
        if options.causal or options.sliding_window is not None:
            row = work.first - work.origin + wg * _WG + ops.iota((_WG,), 0, ops.WGMMA_ROW)
            positions = work.before + row // group

        def zero_unreadable(block, stage):
            """Zero keys that no query sees: they may be NaN, and 0 * NaN is NaN."""
            for part in range(0, block_k, _WG):
                first = block * block_k + part
                unreadable = first + _WG > work.kv_len
                if first_key is not None:
                    unreadable |= first < first_key

                @pl.when(unreadable)
                def _(part=part, first=first):
                    ref = ring.k.at[stage, pl.ds(part, _WG)]
                    k = plgpu.load(ref, layout=ops.WGMMA)
                    keys = first + ops.iota(k.shape, 0, ops.WGMMA)
                    readable = keys < work.kv_len
                    if first_key is not None:
                        readable &= keys >= first_key
                    ref[...] = jnp.where(readable, k, jnp.zeros_like(k))
                    plgpu.commit_smem()

        def add(masked, block, dq):
            now = block - work.lo
            stage = lax.rem(now, num_stages)
            plgpu.barrier_wait(ring.k_full.at[stage])
            if masked:
                pl.when(wg == 0)(functools.partial(zero_unreadable, block, stage))
                plgpu.barrier_arrive(scratch.both)
                plgpu.barrier_wait(scratch.both)
            plgpu.barrier_wait(ring.v_full.at[stage])
            k, v = ring.k.at[stage], ring.v.at[stage]
            s, dp = two_products(q, k.transpose((1, 0)), d_out, v.transpose((1, 0)))
            plgpu.barrier_arrive(ring.v_free.at[stage])
            sees = None
            if masked:
                keys = block * block_k + ops.iota((_WG, block_k), 1, ops.WGMMA)
                rows = None if positions is None else ops.bcast(positions, s)
                last = rows if options.causal else None
                sees = visible(keys, rows, options, end=work.kv_len, last=last)
            _, _, ds = recompute(
                s, dp, ops.bcast(lse, s), ops.bcast(delta, s), sees, None, None,
                options=options, exp2=jnp.exp2,
            )  # fmt: skip
            dq = ops.wgmma_accumulate(dq, ds.astype(ring.k.dtype), k, interpret=interpret)
            plgpu.barrier_arrive(ring.k_free.at[stage])
            return dq

        zeros = ops.full((_WG, head_dim), 0.0, ops.WGMMA)
        dq = for_each_block(add, work, zeros, options)
        q[...] = (dq * options.sm_scale).astype(output.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q, output.at[head, rows_of(wg)])
        plgpu.wait_smem_to_gmem(0)


def queries_gradient(
    inputs: BackwardInputs, *, group: int, options: LogitOptions, block_k: int, interpret: bool
) -> jax.Array:
    """Return the gradient of the packed rows of queries `[Hkv, R, D]`."""
    q = inputs.rows.q
    out = result_shape(q.shape, q.dtype, varying=False)
    scratch = QueriesScratch.types(
        block_k=block_k, head_dim=q.shape[2], page_size=inputs.pages.page_size, dtype=q.dtype
    )
    kernel = functools.partial(_queries_kernel, group=group, options=options, interpret=interpret)
    return run_tiles(
        kernel, inputs, out, scratch, name="attention_gradient_of_queries", interpret=interpret
    )
