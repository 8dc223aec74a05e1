"""A matrix product for few rows, a Pallas Mosaic GPU kernel for Hopper.

    out [M, N] = x [M, K] weight [N, K]^T

Such a product takes as long as its weights take to be read, so the kernel is a pipeline of copies.
A program is two warpgroups. The producer sends tiles of the weight through a ring in shared memory,
starting before the preceding kernel has ended: the weight does not depend on it. The consumer
multiplies. wgmma takes 64 rows at a time, so features are its rows, and the rows of x, padded to a
multiple of 8, are its columns:

    out^T [tile_n, M] = weight [tile_n, K] x^T [K, M]

`silu(gate) * up`, the RMS norm of x and the sum with a residual can be part of the product. A norm
needs whole rows of x in shared memory, so only few rows can have it.

A program takes every `programs`-th tile of features. Where tiles are few, the programs of a cluster
divide K; they add their sums in shared memory, always in the same order.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_paged.kernels.call import result_shape
from pallas_paged.kernels.mosaic import ops
from pallas_paged.kernels.mosaic.linear_config import (
    AHEAD_COLUMNS,
    AHEAD_ROWS,
    LinearConfig,
)
from pallas_paged.kernels.mosaic.ring import wgmma_transforms

COMPILER_PARAMS = plgpu.CompilerParams(approx_math=True)
ROW_VECTOR = 8  # elements of a row of x that a thread loads at once: 16 bytes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Inputs:
    """Operands of the kernel, or refs to them."""

    x: Any  # [M, K]
    weight: Any  # [N, K], or with SwiGLU [N, 2, K], gate and up
    norm_weight: Any  # [K], of the RMS norm of x, or None
    residual: Any  # [M, N], added to the product, or None
    prefetch: Any  # weights [N, K] of later products


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Scratch:
    """Refs in shared memory, or their types."""

    weights: Any  # [num_stages, rows, block_k] of each part: one, or gate and up
    x: Any  # [blocks, padded rows of x, block_k]: all of x if it is normed, else num_stages blocks
    out: Any  # [padded rows of x, rows]
    residual: Any  # as out, or None
    sums: Any  # f32[num_splits - 1, sums of a program], from the other programs, or None
    full: Any  # barriers [num_stages], complete when weights and x have arrived
    free: Any  # barriers [num_stages], complete when they were used
    residual_full: Any  # barrier, complete when the residual has arrived, or None


def scratch_types(config: LinearConfig, inputs: Inputs, *, out_dtype: Any) -> Scratch:
    """Return the types of the shared memory of a program."""
    dtype, (num_rows, in_size) = inputs.x.dtype, inputs.x.shape
    num_columns = pl.cdiv(num_rows, 8) * 8
    num_parts = inputs.weight.ndim - 1
    rows = config.tile_n // num_parts
    stages, others = config.num_stages, config.num_splits - 1
    normed = inputs.norm_weight is not None
    swizzled = functools.partial(plgpu.SMEM, dtype=dtype, transforms=wgmma_transforms(dtype))
    out = plgpu.SMEM((num_columns, rows), out_dtype)
    return Scratch(
        weights=[swizzled((stages, rows, config.block_k)) for _ in range(num_parts)],
        x=swizzled((in_size // config.block_k if normed else stages, num_columns, config.block_k)),
        out=out,
        residual=None if inputs.residual is None else out,
        sums=plgpu.SMEM((others, config.tile_n * num_columns), jnp.float32) if others else None,
        full=plgpu.Barrier(num_arrivals=num_parts + (not normed), num_barriers=stages),
        free=plgpu.Barrier(num_barriers=stages),
        residual_full=None if inputs.residual is None else plgpu.Barrier(),
    )


def linear_kernel(
    inputs: Inputs,
    out_ref,  # [M, N]
    scratch: Scratch,
    *,
    eps: float,
    config: LinearConfig,
    interpret: bool,
) -> None:
    """Run one program: warpgroup 0 multiplies, warpgroup 1 sends."""
    num_parts = len(scratch.weights)
    num_stages, rows, block_k = scratch.weights[0].shape
    num_columns, _ = scratch.out.shape
    normed = inputs.norm_weight is not None
    num_clusters = config.num_programs // config.num_splits
    num_tiles = pl.cdiv(out_ref.shape[1], rows)
    cluster = lax.axis_index("cluster")
    split = lax.axis_index("split")
    num_blocks = inputs.x.shape[1] // block_k // config.num_splits  # of one tile
    first_block = split * num_blocks
    my_tiles = lax.div(num_tiles - 1 - cluster + num_clusters, num_clusters)
    total = my_tiles * num_blocks
    # All rows of x, padded. Traced, because JAX refuses static slices that go past the end.
    all_rows = pl.ds(0 * split, num_columns)
    ops.let_next_kernel_start(interpret=interpret)

    def columns(i):
        return pl.ds((first_block + lax.rem(i, num_blocks)) * block_k, block_k)

    def tile_of(ref, index):
        return ref.at[all_rows, pl.ds((cluster + index * num_clusters) * rows, rows)]

    def send_weights(i):
        features = pl.ds((cluster + lax.div(i, num_blocks) * num_clusters) * rows, rows)
        stage = lax.rem(i, num_stages)
        for part, blocks in enumerate(scratch.weights):
            where = (features, part) if num_parts > 1 else (features,)
            plgpu.copy_gmem_to_smem(
                inputs.weight.at[(*where, columns(i))], blocks.at[stage], scratch.full.at[stage]
            )

    def send_x(i):
        stage = lax.rem(i, num_stages)
        plgpu.copy_gmem_to_smem(
            inputs.x.at[all_rows, columns(i)],
            scratch.x.at[stage],
            scratch.full.at[stage],
        )

    def multiply_tile(index):
        if inputs.residual is not None:
            plgpu.copy_gmem_to_smem(
                tile_of(inputs.residual, index), scratch.residual, scratch.residual_full
            )

        def multiply_block(block, accs):
            stage = lax.rem(index * num_blocks + block, num_stages)
            plgpu.barrier_wait(scratch.full.at[stage])
            x_block = scratch.x.at[first_block + block if normed else stage]
            accs = [
                ops.wgmma_accumulate(
                    acc, blocks.at[stage], x_block.transpose((1, 0)), interpret=interpret
                )
                for acc, blocks in zip(accs, scratch.weights, strict=True)
            ]
            plgpu.barrier_arrive(scratch.free.at[stage])
            return accs

        zeros = [ops.full((rows, num_columns), 0.0, ops.WGMMA) for _ in range(num_parts)]
        accs = lax.fori_loop(0, num_blocks, multiply_block, zeros)
        if scratch.sums is not None:
            accs = ops.sum_over_cluster(accs, scratch.sums)
        if inputs.residual is not None:
            plgpu.barrier_wait(scratch.residual_full)

        @pl.when(split == 0)
        def _():
            # Rounded where separate operations would round.
            out, *ups = (acc.astype(out_ref.dtype) for acc in accs)
            for up in ups:
                gate = out.astype(jnp.float32)
                out = gate * (1.0 / (1.0 + jnp.exp(-gate))) * up.astype(jnp.float32)
            out = plgpu.layout_cast(out.astype(out_ref.dtype), ops.WGMMA_TRANSPOSED)
            if inputs.residual is not None:
                residual = plgpu.load(
                    scratch.residual.transpose((1, 0)),
                    layout=ops.WGMMA_TRANSPOSED,
                    optimized=False,
                ).astype(jnp.float32)
                out = (out.astype(jnp.float32) + residual).astype(out_ref.dtype)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            scratch.out.transpose((1, 0))[...] = out
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(scratch.out, tile_of(out_ref, index))

    @pl.when(lax.axis_index("wg") == 0)
    def _multiply():
        if normed or inputs.residual is not None:
            ops.wait_for_previous_kernel(interpret=interpret)
        if normed:
            norm_rows(inputs.x, inputs.norm_weight, scratch.x, eps=eps, interpret=interpret)
        pl.loop(0, my_tiles)(multiply_tile)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the end of the kernel waits for the rest

    @pl.when(lax.axis_index("wg") == 1)
    def _stream():
        first = jnp.minimum(total, num_stages)
        pl.loop(0, first)(send_weights)
        ops.wait_for_previous_kernel(interpret=interpret)
        if not normed:
            pl.loop(0, first)(send_x)

        @pl.loop(first, total)
        def _send(i):
            plgpu.barrier_wait(scratch.free.at[lax.rem(i, num_stages)])
            send_weights(i)
            if not normed:
                send_x(i)

        if not interpret:
            program = cluster * config.num_splits + split
            for ref, num_blocks_ahead in zip(inputs.prefetch, config.prefetch, strict=True):
                prefetch(ref, num_blocks_ahead, program, config.num_programs)

        @pl.loop(jnp.maximum(total - num_stages, 0), total)
        def _drain(i):
            plgpu.barrier_wait(scratch.free.at[lax.rem(i, num_stages)])

        if scratch.sums is not None:
            ops.wait_for_cluster()


def prefetch(weight_ref, num_blocks: int, program: jax.Array, num_programs: int) -> None:
    """Start to read a program's share of a weight's first columns into the L2 cache."""
    num_features, _ = weight_ref.shape
    across = num_features // AHEAD_ROWS

    @pl.loop(0, pl.cdiv(num_blocks, num_programs))
    def _share(i):
        block = i * num_programs + program

        @pl.when(block < num_blocks)
        def _():
            features = pl.ds(lax.rem(block, across) * AHEAD_ROWS, AHEAD_ROWS)
            columns = pl.ds(lax.div(block, across) * AHEAD_COLUMNS, AHEAD_COLUMNS)
            plgpu.async_prefetch(weight_ref.at[features, columns])


def norm_rows(x_ref, weight_ref, blocks_ref, *, eps: float, interpret: bool) -> None:
    """Store the RMS norm of the rows of x to shared memory, as blocks of columns."""
    num_rows, in_size = x_ref.shape
    layout = plgpu.Layout.WG_STRIDED((in_size,), ROW_VECTOR)
    weight = ops.load(weight_ref, layout).astype(jnp.float32)
    rows = [ops.load(x_ref.at[i], layout) for i in range(num_rows)]  # all are on their way at once
    for i, row in enumerate(rows):
        row = row.astype(jnp.float32)
        scale = lax.rsqrt(jnp.sum(row * row) / in_size + eps)
        out = (row * scale * weight).astype(x_ref.dtype)
        ops.store_swizzled_row(blocks_ref, i, out, ROW_VECTOR, interpret=interpret)
    plgpu.commit_smem()


def linear(
    x: jax.Array,
    weight: jax.Array,
    *,
    norm_weight: jax.Array | None = None,
    eps: float = 0.0,
    residual: jax.Array | None = None,
    prefetch: Sequence[jax.Array] = (),
    out_dtype: Any,
    config: LinearConfig,
    interpret: bool,
) -> jax.Array:
    """Return `x @ weight.T`, or `silu(x @ gate.T) * (x @ up.T)`.

    Args:
        x: `[M, K]`, M at most 64 and at most 8 or a multiple of 8.
        weight: `[N, K]`, or `[N, 2, K]`, gate and up.
        norm_weight: `[K]` of an RMS norm that x goes through first, or None. Only with M at most 8
            and K a multiple of 1024.
        eps: of the norm.
        residual: `[M, N]`, added to the product, or None.
        prefetch: weights `[N, K]` of later products, of which `config.prefetch` says how much is
            read into the L2 cache.
    """
    inputs = Inputs(
        x=x,
        weight=weight,
        norm_weight=norm_weight,
        residual=residual,
        prefetch=tuple(prefetch),
    )
    out = result_shape((x.shape[0], weight.shape[0]), out_dtype)
    kernel = functools.partial(linear_kernel, eps=eps, config=config, interpret=interpret)
    scratch: Any = (scratch_types(config, inputs, out_dtype=out_dtype),)
    return plgpu.kernel(
        ops.with_trees(kernel, inputs, out),
        out_type=out,
        scratch_types=scratch,
        grid=(config.num_programs // config.num_splits,),
        grid_names=("cluster",),
        cluster=(config.num_splits,),
        cluster_names=("split",),
        num_threads=2,
        thread_name="wg",
        compiler_params=COMPILER_PARAMS,
        kernel_name="linear",
        interpret=ops.interpreter(interpret),
    )(*jax.tree.leaves(inputs))
