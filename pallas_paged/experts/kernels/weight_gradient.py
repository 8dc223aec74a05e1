"""The gradient of grouped matrices on Hopper, a persistent Pallas Mosaic kernel by TMA and wgmma.

    out[group] = a[rows of the group]^T @ b[rows of the group]

As in `grouped`, a warpgroup copies blocks of 64 rows through a ring, and two multiply: each has 64
columns of a, whose rows are summed over, and all columns of b in a tile. In the first and the last
block of a group the consumers write zeros over rows of other groups, which may hold anything.
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
from pallas_paged.experts.kernels.config import ALIGN, WG_ROWS
from pallas_paged.experts.kernels.grouped import multiply_stages
from pallas_paged.experts.kernels.rows import store_rows
from pallas_paged.kernels.mosaic import ops
from pallas_paged.kernels.mosaic_sm90.ring import wgmma_transforms

_CONSUMERS = 2
_COLUMNS = 256  # of b in a tile
_STAGES = 4
_REGISTERS = (232, 40)


@pytree
class GradientInputs:
    """Inputs of the kernel: arrays or refs."""

    a: Any  # 16-bit `[M, K]`
    b: Any  # `[M, N]`
    starts: Any  # `i32[G]`, the first row of each group
    sizes: Any  # `i32[G]`, its number of rows


@pytree
class Scratch:
    """The ring, and a barrier of the consumers."""

    a: Any  # [num_stages, 2, 64, 64] in shared memory
    b: Any  # [num_stages, 64, columns]
    full: Any  # barriers [num_stages]
    free: Any
    zeroed: Any  # complete when both consumers have written zeros


def _scratch_types(columns: int, dtype: Any) -> Scratch:
    memory = functools.partial(plgpu.SMEM, dtype=dtype, transforms=wgmma_transforms(dtype))
    return Scratch(
        a=memory((_STAGES, _CONSUMERS, WG_ROWS, WG_ROWS)),
        b=memory((_STAGES, WG_ROWS, columns)),
        full=plgpu.Barrier(num_arrivals=_CONSUMERS + 1, num_barriers=_STAGES),
        free=plgpu.Barrier(num_arrivals=_CONSUMERS, num_barriers=_STAGES),
        zeroed=plgpu.Barrier(num_arrivals=_CONSUMERS),
    )


def _gradient_kernel(
    inputs: GradientInputs, out: Any, scratch: Scratch, *, num_programs: int, interpret: bool
) -> None:
    """Run one program: the first warpgroups multiply, the last one sends."""
    (num_groups,), k = inputs.starts.shape, inputs.a.shape[1]
    columns = scratch.b.shape[2]
    num_column_tiles = pl.cdiv(inputs.b.shape[1], columns)
    num_row_tiles = pl.cdiv(k, _CONSUMERS * WG_ROWS)
    num_items = num_groups * num_row_tiles * num_column_tiles
    program, consumer = lax.axis_index("program"), lax.axis_index("wg")
    num_own = lax.div(num_items - program + num_programs - 1, num_programs)

    def item_of(i):
        """Return the group of an item, its first rows of the group, its size, and its places."""
        index = jnp.minimum(program + i * num_programs, num_items - 1)
        tile, column = (f(index, num_column_tiles) for f in (lax.div, lax.rem))
        group, row = (f(tile, num_row_tiles) for f in (lax.div, lax.rem))
        places = row * (_CONSUMERS * WG_ROWS), column * columns
        return group, inputs.starts[group], inputs.sizes[group], *places

    def blocks_of(start, size):
        """Return the first row of the blocks of a group, and their number."""
        first = lax.div(start, ALIGN) * ALIGN
        count = lax.div(start + size - first + WG_ROWS - 1, WG_ROWS)
        return first, jnp.where(size > 0, count, 0)

    def send_item(i, carry):
        sent, (_, start, size, row, column) = carry
        following = item_of(i + 1)  # loaded while this one is sent
        first, count = blocks_of(start, size)

        def send(step, sent):
            stage = ops.free_stage(scratch.free, sent)
            rows = pl.ds(pl.multiple_of(first + step * WG_ROWS, ALIGN), WG_ROWS)
            full = scratch.full.at[stage]
            for n in range(_CONSUMERS):
                of_a = pl.ds(pl.multiple_of(row + n * WG_ROWS, WG_ROWS), WG_ROWS)
                plgpu.copy_gmem_to_smem(inputs.a.at[rows, of_a], scratch.a.at[stage, n], full)
            of_b = pl.ds(pl.multiple_of(column, columns), columns)
            plgpu.copy_gmem_to_smem(inputs.b.at[rows, of_b], scratch.b.at[stage], full)
            return sent + 1

        return lax.fori_loop(0, count, send, sent), following

    def write_zeros(stage, lo, hi):
        """Write zeros over the rows of a block outside of `lo..hi-1`."""
        half = columns // _CONSUMERS
        own = pl.ds(pl.multiple_of(consumer * half, half), half)
        for ref in (scratch.a.at[stage, consumer], scratch.b.at[stage, :, own]):
            place = ops.iota(ref.shape, 0, ops.WGMMA)
            values = ops.load_shared(ref, ops.WGMMA)
            zeros = ops.full(ref.shape, 0.0, ops.WGMMA, ref.dtype)
            ref[...] = jnp.where((place >= lo) & (place < hi), values, zeros)
        plgpu.commit_smem()
        plgpu.barrier_arrive(scratch.zeroed)
        plgpu.barrier_wait(scratch.zeroed)

    def multiply_item(i, carry):
        used, (group, start, size, row, column) = carry
        following = item_of(i + 1)
        first, count = blocks_of(start, size)

        def operands(step, stage):
            lo = start - first - step * WG_ROWS
            hi = lo + size

            @pl.when((lo > 0) | (hi < WG_ROWS))
            def _():
                write_zeros(stage, lo, hi)

            return scratch.a.at[stage, consumer].transpose((1, 0)), scratch.b.at[stage]

        product = multiply_stages(scratch, used, count, columns, operands)
        place = row + consumer * WG_ROWS
        word = jnp.where(place < k, -1, 0)
        store_rows(
            out,
            product.astype(out.dtype),
            row=group * k + place,
            column=column,
            words=(word, word),
            interpret=interpret,
        )
        return used + count, following

    @pl.when(num_own > 0)
    def _work():
        @pl.when(consumer < _CONSUMERS)
        def _multiply():
            ops.set_max_registers(_REGISTERS[0], action="increase", interpret=interpret)
            lax.fori_loop(0, num_own, multiply_item, (jnp.int32(0), item_of(0)))

        @pl.when(consumer == _CONSUMERS)
        def _send():
            ops.set_max_registers(_REGISTERS[1], action="decrease", interpret=interpret)
            sent, _ = lax.fori_loop(0, num_own, send_item, (jnp.int32(0), item_of(0)))
            ops.drain(scratch.free, sent)


@functools.partial(jax.jit, static_argnames=("num_programs", "interpret"))
def weight_gradient(
    inputs: GradientInputs, *, num_programs: int, interpret: bool = False
) -> jax.Array:
    """Return `[G, K, N]`, for M a multiple of 8, and K and N multiples of 64."""
    num_groups, k, n = len(inputs.starts), inputs.a.shape[1], inputs.b.shape[1]
    columns = min(_COLUMNS, pl.cdiv(n, 128) * 128)
    a, b = inputs.a, inputs.b
    if interpret:  # the interpreter knows nothing of copies past the end
        a, b = (
            jnp.pad(x, ((0, WG_ROWS), (0, -x.shape[1] % size)))
            for x, size in ((a, _CONSUMERS * WG_ROWS), (b, columns))
        )
    out = ops.run_kernel(
        functools.partial(_gradient_kernel, num_programs=num_programs, interpret=interpret),
        GradientInputs(a=a, b=b, starts=inputs.starts, sizes=inputs.sizes),
        jax.ShapeDtypeStruct((num_groups * a.shape[1], b.shape[1]), a.dtype),
        _scratch_types(columns, a.dtype),
        name="grouped_weight_gradient",
        params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=interpret,
        grid=(num_programs,),
        grid_names=("program",),
        num_threads=_CONSUMERS + 1,
        thread_name="wg",
    )
    return out.reshape(num_groups, -1, out.shape[1])[:, :k, :n]
