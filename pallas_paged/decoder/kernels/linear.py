"""The product of one row with a weight, a Pallas Mosaic GPU kernel for Hopper.

    out [1, N] = x [1, K] weight [N, K]^T, or silu(x gate^T) * (x up^T)

It takes as long as the weight takes to be read, so the kernel is a pipeline of copies. A program is
two warpgroups, and has every `programs`-th tile of 64 features. The producer sends blocks of the
weight through a ring in shared memory, the first ones before the preceding kernel has ended: a
weight does not depend on it. The consumer multiplies. wgmma takes 64 rows at a time and at least 8
columns, so features are its rows, and x is its first column. The copies fill the others with zeros:

    out^T [64, 8] = weight [64, K] x^T [K, 8]
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

from pallas_paged.kernels.call import result_shape
from pallas_paged.kernels.mosaic import ops
from pallas_paged.kernels.mosaic_sm90.config import LINEAR_BLOCK_K, LINEAR_TILE
from pallas_paged.kernels.mosaic_sm90.ring import wgmma_transforms

NUM_STAGES = 6
_COLUMNS = 8


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Scratch:
    """Refs in shared memory, or their types."""

    weights: Any  # [NUM_STAGES, LINEAR_TILE, block_k], one or two: gate and up
    x: Any  # [NUM_STAGES, _COLUMNS, block_k]
    out: Any  # [_COLUMNS, LINEAR_TILE]
    full: Any  # barriers [NUM_STAGES], complete when weights and x have arrived
    free: Any  # barriers [NUM_STAGES], complete when they were used

    @classmethod
    def types(cls, *, num_weights: int, dtype: Any, out_dtype: Any) -> Scratch:
        """Return the types of the refs."""
        block_k = LINEAR_BLOCK_K // num_weights
        swizzled = functools.partial(plgpu.SMEM, dtype=dtype, transforms=wgmma_transforms(dtype))
        return cls(
            weights=[swizzled((NUM_STAGES, LINEAR_TILE, block_k)) for _ in range(num_weights)],
            x=swizzled((NUM_STAGES, _COLUMNS, block_k)),
            out=plgpu.SMEM((_COLUMNS, LINEAR_TILE), out_dtype),
            full=plgpu.Barrier(num_arrivals=num_weights + 1, num_barriers=NUM_STAGES),
            free=plgpu.Barrier(num_barriers=NUM_STAGES),
        )


def linear_kernel(
    x_ref,  # [1, K]
    weight_ref,  # [N, K], or of gate and up [N, 2, K]
    out_ref,  # [1, N]
    scratch: Scratch,
    *,
    num_programs: int,
    interpret: bool,
) -> None:
    """Run one program: warpgroup 0 multiplies, warpgroup 1 sends."""
    block_k = scratch.x.shape[2]
    num_tiles, num_blocks = out_ref.shape[1] // LINEAR_TILE, x_ref.shape[1] // block_k
    program = lax.axis_index("program")
    my_tiles = lax.div(num_tiles - 1 - program + num_programs, num_programs)
    total = my_tiles * num_blocks
    # Traced, because JAX refuses static slices that go past the end of x.
    all_rows = pl.ds(0 * program, _COLUMNS)
    ops.let_next_kernel_start(interpret=interpret)

    def features(index):
        return pl.ds((program + index * num_programs) * LINEAR_TILE, LINEAR_TILE)

    def columns(i):
        return pl.ds(lax.rem(i, num_blocks) * block_k, block_k)

    def send_weights(i):
        stage, tile = lax.rem(i, NUM_STAGES), features(lax.div(i, num_blocks))
        for which, blocks in enumerate(scratch.weights):
            where = (tile, columns(i)) if len(weight_ref.shape) == 2 else (tile, which, columns(i))
            plgpu.copy_gmem_to_smem(weight_ref.at[where], blocks.at[stage], scratch.full.at[stage])

    def send_x(i):
        stage = lax.rem(i, NUM_STAGES)
        plgpu.copy_gmem_to_smem(
            x_ref.at[all_rows, columns(i)], scratch.x.at[stage], scratch.full.at[stage]
        )

    def multiply_tile(index):
        def multiply_block(block, accs):
            stage = lax.rem(index * num_blocks + block, NUM_STAGES)
            plgpu.barrier_wait(scratch.full.at[stage])
            x_block = scratch.x.at[stage].transpose((1, 0))
            accs = [
                ops.wgmma_accumulate(acc, blocks.at[stage], x_block, interpret=interpret)
                for acc, blocks in zip(accs, scratch.weights, strict=True)
            ]
            plgpu.barrier_arrive(scratch.free.at[stage])
            return accs

        zeros = [ops.full((LINEAR_TILE, _COLUMNS), 0.0, ops.WGMMA) for _ in scratch.weights]
        # Rounded as separate products are.
        out, *ups = (
            acc.astype(out_ref.dtype) for acc in lax.fori_loop(0, num_blocks, multiply_block, zeros)
        )
        for up in ups:
            gate = out.astype(jnp.float32)
            out = gate * (1.0 / (1.0 + jnp.exp(-gate))) * up.astype(jnp.float32)
        out = plgpu.layout_cast(out.astype(out_ref.dtype), ops.WGMMA_TRANSPOSED)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the last tile
        scratch.out.transpose((1, 0))[...] = out
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(scratch.out, out_ref.at[all_rows, features(index)])  # the first row

    @pl.when(lax.axis_index("wg") == 0)
    def _multiply():
        pl.loop(0, my_tiles)(multiply_tile)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the end of the kernel waits for the rest

    @pl.when(lax.axis_index("wg") == 1)
    def _send():
        first = jnp.minimum(total, NUM_STAGES)
        pl.loop(0, first)(send_weights)
        ops.wait_for_previous_kernel(interpret=interpret)
        pl.loop(0, first)(send_x)

        @pl.loop(first, total)
        def _rest(i):
            plgpu.barrier_wait(scratch.free.at[lax.rem(i, NUM_STAGES)])
            send_weights(i)
            send_x(i)

        @pl.loop(jnp.maximum(total - NUM_STAGES, 0), total)
        def _drain(i):
            plgpu.barrier_wait(scratch.free.at[lax.rem(i, NUM_STAGES)])


def linear(
    x: jax.Array, weight: jax.Array, *, out_dtype: Any, num_programs: int, interpret: bool
) -> jax.Array:
    """Return `x @ weight.T`, or with SwiGLU `silu(x @ gate.T) * (x @ up.T)`.

    Args:
        x: `[1, K]` of 16-bit elements, K a multiple of `LINEAR_BLOCK_K`.
        weight: `[N, K]`, or of gate and up `[N, 2, K]`; N a multiple of `LINEAR_TILE`.
        out_dtype: of the result `[1, N]`.
        num_programs: on the whole device.
    """
    num_programs = min(num_programs, weight.shape[0] // LINEAR_TILE)
    out = result_shape((1, weight.shape[0]), out_dtype)
    scratch: Any = (Scratch.types(num_weights=weight.ndim - 1, dtype=x.dtype, out_dtype=out_dtype),)
    return plgpu.kernel(
        functools.partial(linear_kernel, num_programs=num_programs, interpret=interpret),
        out_type=out,
        scratch_types=scratch,
        grid=(num_programs,),
        grid_names=("program",),
        num_threads=2,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="linear",
        interpret=ops.interpreter(interpret),
    )(x, weight)
