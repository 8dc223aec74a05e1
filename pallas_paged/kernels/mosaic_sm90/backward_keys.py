"""The gradients of keys and values, a Pallas Mosaic GPU kernel for Hopper.

A program has 128 keys of a row, 64 for each of two consumer warpgroups. A producer streams the
blocks of packed queries that see them, with the gradients of their results. Products are
transposed, with keys on M, so the gradients stay in registers to the end:

    S^T = K Q^T      dP^T = V dO^T      P^T = exp(S^T - lse)      dS^T = P^T (dP^T - delta)
    dV += P^T dO     dK += dS^T Q

It writes f32 sums for each key of each row; `backward` adds the sums of pages that rows share.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_paged.checks import pytree
from pallas_paged.kernels.backward import recompute
from pallas_paged.kernels.call import result_shape, varying_by_device
from pallas_paged.kernels.logits import LogitOptions, visible
from pallas_paged.kernels.mosaic import ops
from pallas_paged.kernels.mosaic.pages import Pages
from pallas_paged.kernels.mosaic_sm90.backward_rows import Work
from pallas_paged.kernels.mosaic_sm90.ring import wgmma_transforms
from pallas_paged.pages.layout import K, V

BLOCK_K = 128
BLOCK_Q = 64
_WG = 64  # keys of a consumer
CONSUMERS = 2
CONSUMER_REGISTERS = 240
PRODUCER_REGISTERS = 24


@pytree
class QueryRows:
    """Packed rows of queries: arrays, or refs to them."""

    q: Any  # [Hkv, R, D]
    d_out: Any  # [Hkv, R, D]
    lse: Any  # f32[Hkv, R] in base 2
    delta: Any  # f32[Hkv, R]

    def send(self, scratch: Any, stage: Any, *, kv_head: Any, where: Any) -> None:
        """Copy rows to a stage of shared memory, whose barrier `full` counts four arrivals."""
        for field in dataclasses.fields(self):
            source, target = getattr(self, field.name), getattr(scratch, field.name)
            plgpu.copy_gmem_to_smem(
                source.at[kv_head, where], target.at[stage], scratch.full.at[stage]
            )


@pytree
class BackwardInputs:
    """Operands of the kernel, or refs to them."""

    rows: QueryRows
    pages: Pages
    work: Work


@pytree
class KeysScratch:
    """Refs in shared memory of a program, or their types."""

    k: Any  # [128, D]
    v: Any
    q: Any  # [num_stages, 64, D]
    d_out: Any
    lse: Any  # f32[num_stages, 64]
    delta: Any
    kv_full: Any  # barrier
    full: Any  # barriers [num_stages]
    free: Any  # barriers [num_stages], complete when both consumers have used a block

    @classmethod
    def types(cls, *, num_stages: int, head_dim: int, page_size: int, dtype: Any) -> KeysScratch:
        """Return the types of the refs."""
        transforms = wgmma_transforms(dtype)
        keys = plgpu.SMEM((BLOCK_K, head_dim), dtype, transforms=transforms)
        queries = plgpu.SMEM((num_stages, BLOCK_Q, head_dim), dtype, transforms=transforms)
        vector = plgpu.SMEM((num_stages, BLOCK_Q), jnp.float32)
        copies = 2 * max(BLOCK_K // page_size, 1)
        return cls(
            k=keys, v=keys, q=queries, d_out=queries, lse=vector, delta=vector,
            kv_full=plgpu.Barrier(num_arrivals=copies),
            full=plgpu.Barrier(num_arrivals=4, num_barriers=num_stages),
            free=plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=num_stages),
        )  # fmt: skip


def _keys_kernel(
    inputs: BackwardInputs,
    outputs: tuple[Any, Any],  # f32[Hkv, B * tiles_per_row * 128, D], gradients of K and of V
    scratch: KeysScratch,
    *,
    group: int,
    tiles_per_row: int,
    options: LogitOptions,
    interpret: bool,
) -> None:
    """One program: the gradients of one tile of keys."""
    num_stages = scratch.q.shape[0]
    head = lax.axis_index("kv_head")
    tile = lax.axis_index("tile")
    work = jax.tree.map(lambda ref: ref[tile], inputs.work)
    wg = lax.axis_index("wg")
    num_blocks = work.hi - work.lo

    @pl.when(wg == CONSUMERS)
    def _():
        ops.set_max_registers(PRODUCER_REGISTERS, action="decrease", interpret=interpret)
        _produce(inputs, scratch, work, head)

    @pl.when(wg < CONSUMERS)
    def _():
        ops.set_max_registers(CONSUMER_REGISTERS, action="increase", interpret=interpret)
        mine = pl.ds(wg * _WG, _WG)
        k, v = scratch.k.at[mine], scratch.v.at[mine]
        head_dim = k.shape[1]
        zeros = ops.full((_WG, head_dim), 0.0, ops.WGMMA)
        ops.wait_if(num_blocks > 0, scratch.kv_full)

        def add(masked, block, sums):
            dk, dv = sums
            now = block - work.lo
            stage = lax.rem(now, num_stages)
            q, d_out = scratch.q.at[stage], scratch.d_out.at[stage]
            plgpu.barrier_wait(scratch.full.at[stage])
            s, dp = two_products(k, q.transpose((1, 0)), v, d_out.transpose((1, 0)))
            lse = plgpu.load(scratch.lse.at[stage], layout=ops.WGMMA_COL)
            delta = plgpu.load(scratch.delta.at[stage], layout=ops.WGMMA_COL)
            sees = None
            if masked:
                keys = work.first + wg * _WG + ops.iota((_WG, BLOCK_Q), 0, ops.WGMMA)
                positions = None
                # Mosaic finds no layout for values that nothing uses.
                if options.causal or options.sliding_window is not None:
                    row = block * BLOCK_Q + ops.iota((BLOCK_Q,), 0, ops.WGMMA_COL)
                    positions = ops.bcast(work.before + row // group, s, 1)
                last = positions if options.causal else None
                sees = visible(keys, positions, options, end=work.kv_len, last=last)
            p, _, ds = recompute(
                s, dp, ops.bcast(lse, s, 1), ops.bcast(delta, s, 1), sees, None, None,
                options=options, exp2=jnp.exp2,
            )  # fmt: skip
            dv = ops.wgmma_accumulate(dv, p.astype(q.dtype), d_out, interpret=interpret)
            dk = ops.wgmma_accumulate(dk, ds.astype(q.dtype), q, interpret=interpret)
            plgpu.barrier_arrive(scratch.free.at[stage])
            return dk, dv

        add_masked, add_full = (functools.partial(add, masked) for masked in (True, False))
        sums = lax.fori_loop(work.lo, work.full_lo, add_masked, (zeros, zeros))
        sums = lax.fori_loop(work.full_lo, work.full_hi, add_full, sums)
        dk, dv = lax.fori_loop(work.full_hi, work.hi, add_masked, sums)
        first = work.seq * (tiles_per_row * BLOCK_K) + work.first + wg * _WG
        for ref, d in zip(outputs, (dk * options.sm_scale, dv), strict=True):
            ops.store(ref.at[head, pl.ds(pl.multiple_of(first, _WG), _WG)], d)


def two_products(a: Any, b: Any, c: Any, d: Any) -> tuple[jax.Array, jax.Array]:
    """Return f32 `a @ b` and `c @ d` of refs to shared memory, both started before the wait."""

    def multiply(first, second):
        plgpu.wgmma(first, a, b)
        plgpu.wgmma(second, c, d)
        return first[...], second[...]

    types = (plgpu.ACC((x.shape[0], y.shape[1]), jnp.float32) for x, y in ((a, b), (c, d)))
    return pl.run_scoped(multiply, *types)


def _produce(inputs: BackwardInputs, scratch: KeysScratch, work: Work, head: jax.Array) -> None:
    """Send the tile of keys, then the blocks of queries."""
    num_stages = scratch.q.shape[0]
    page_size, rows = inputs.pages.page_size, inputs.rows
    tokens = min(page_size, BLOCK_K)

    @pl.when(work.hi > work.lo)
    def _():
        last_page = (work.kv_len - 1) // page_size
        for i in range(0, BLOCK_K, tokens):
            place = work.first + i
            # Past the row's last page the table may hold anything: copy the last page again.
            page = inputs.pages.block_tables[work.seq, jnp.minimum(place // page_size, last_page)]
            first = 0
            if page_size > tokens:
                first = pl.multiple_of(lax.rem(place, page_size), tokens)
            for kv, ref in ((K, scratch.k), (V, scratch.v)):
                box = inputs.pages.box(kv, page=page, tokens=pl.ds(first, tokens), kv_head=head)
                plgpu.copy_gmem_to_smem(box, ref.at[pl.ds(i, tokens)], scratch.kv_full)

    @pl.loop(work.lo, work.hi)
    def _(block):
        stage = ops.free_stage(scratch.free, block - work.lo)
        where = pl.ds(pl.multiple_of(work.origin + block * BLOCK_Q, BLOCK_Q), BLOCK_Q)
        rows.send(scratch, stage, kv_head=head, where=where)

    @pl.loop(jnp.maximum(work.hi - num_stages, work.lo), work.hi)
    def _(block):
        plgpu.barrier_wait(scratch.free.at[lax.rem(block - work.lo, num_stages)])


def keys_gradient(
    inputs: BackwardInputs,
    *,
    group: int,
    tiles_per_row: int,
    options: LogitOptions,
    num_stages: int,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """Return the gradients of K and V of each row, f32`[Hkv, B * tiles_per_row * 128, D]`."""
    num_kv_heads, _, head_dim = inputs.rows.q.shape
    num_tiles = inputs.work.seq.shape[0]
    shape = num_kv_heads, num_tiles * BLOCK_K, head_dim
    out = (result_shape(shape, jnp.float32, varying=False),) * 2
    kernel = functools.partial(
        _keys_kernel,
        group=group,
        tiles_per_row=tiles_per_row,
        options=options,
        interpret=interpret,
    )
    scratch = KeysScratch.types(
        num_stages=num_stages,
        head_dim=head_dim,
        page_size=inputs.pages.page_size,
        dtype=inputs.rows.q.dtype,
    )
    return run_tiles(
        kernel, inputs, out, scratch, name="attention_gradient_of_keys", interpret=interpret
    )


def run_tiles(kernel: Callable[..., None], inputs: BackwardInputs, *types: Any, **how: Any) -> Any:
    """Return the results of `ops.run_kernel` with a program for each tile of each KV head."""
    found = ops.run_kernel(
        kernel,
        inputs,
        *types,
        params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        grid=(inputs.rows.q.shape[0], inputs.work.seq.shape[0]),
        grid_names=("kv_head", "tile"),
        num_threads=CONSUMERS + 1,
        thread_name="wg",
        **how,
    )
    return jax.tree.map(varying_by_device, found)
