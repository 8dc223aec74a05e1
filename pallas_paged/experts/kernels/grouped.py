"""The grouped product on Hopper, a persistent Pallas Mosaic kernel by TMA and wgmma.

    out[rows of a tile, columns] = x[rows of the tile, :] @ w[group of the tile][:, columns]

A program is one producer warpgroup, which copies blocks of x and of the weight through a ring in
shared memory, and one or two consumers, each with 64 rows of a tile. Tiles are made on the device
(`plan.tiles_of`), and programs take their products with a tile of columns in turn, columns first,
so that programs beside each other have the same rows or the same matrix.

A tile may have rows of other groups too: each row of a product depends on that row alone, and only
those of the group are stored. Rows of x follow one another and are copied by TMA, or each is
anywhere and is copied by all threads of the producer (`cp.async`), which saves a sorted copy of x.

Where the weight is gate and up of features, `[G, F, 2, K]`, a tile has both of the same features,
and the consumer stores their activation.
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
from pallas_paged.experts.kernels.config import ALIGN, SWIGLU_ALPHA, WG_ROWS, GroupedConfig
from pallas_paged.experts.kernels.rows import copy_rows, rows_to_copy, store_rows, wait_for_rows
from pallas_paged.kernels.mosaic import ops
from pallas_paged.kernels.mosaic_sm90.ring import wgmma_transforms

# Fields of a tile; behind them are two words for each consumer, bits of the rows that are stored.
_GROUP, _ROW, _OUT_ROW, _WORDS = range(4)
_PENDING = 2  # groups of copied rows on their way, while the next is started


@dataclasses.dataclass(frozen=True, kw_only=True)
class Epilogue:
    """What is static of the product."""

    # Whether the weight is `[G, F, 2, K]`, and the result the activation `[M, F]`.
    is_pair: bool = False
    swiglu_limit: float | None = None  # of `fused_experts`
    transpose_rhs: bool = True  # whether the weight is `[G, N, K]`; of a pair it is
    # Whether there may be tiles of group G, without a matrix, whose product is 0.
    zeros: bool = False
    has_same_rows: bool = False  # whether the rows of x are the first ones for all tiles


@pytree
class GroupedInputs:
    """Inputs of the kernel: arrays or refs."""

    x: Any  # 16-bit `[M, K]`
    rows: Any  # `i32[R]`, the row of x of each row of a tile, or None for the row itself
    w: Any  # `[G, N, K]`, `[G, K, N]` or `[G, F, 2, K]`
    bias: Any  # `[G, N]`, `[G, 2, F]` or None
    # `i32[num_tiles, 3 + 2 * num_consumers]`: group, first row of x or of `rows`, first row of the
    # result, and bits of the rows that are stored.
    fields: Any
    count: Any  # `i32[1]`, tiles


@pytree
class Scratch:
    """The ring."""

    x: Any  # [num_stages, num_consumers, 64, block_k] in shared memory
    w: Any  # [num_stages, columns, block_k] or [num_stages, block_k, columns]
    full: Any  # barriers [num_stages], complete when all copies have arrived
    free: Any  # barriers [num_stages], complete when all consumers have used a stage


def _scratch_types(config: GroupedConfig, how: Epilogue, dtype: Any, copies_rows: bool) -> Scratch:
    memory = functools.partial(plgpu.SMEM, dtype=dtype, transforms=wgmma_transforms(dtype))
    block, stages = (config.columns, config.block_k), config.num_stages
    copies = (1 if copies_rows else config.num_consumers) + (2 if how.is_pair else 1)
    return Scratch(
        x=memory((stages, config.num_consumers, WG_ROWS, config.block_k)),
        w=memory((stages, *(block if how.transpose_rhs else reversed(block)))),
        full=plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
        free=plgpu.Barrier(num_arrivals=config.num_consumers, num_barriers=stages),
    )


def _grouped_kernel(
    inputs: GroupedInputs,
    out: Any,
    scratch: Scratch,
    *,
    config: GroupedConfig,
    how: Epilogue,
    interpret: bool,
) -> None:
    """Run one program: the first warpgroups multiply, the last one sends."""
    num_groups, block_k = inputs.w.shape[0], config.block_k
    num_stages, num_programs = config.num_stages, config.num_programs
    width = config.columns // (2 if how.is_pair else 1)  # of the result
    num_columns = inputs.w.shape[1 if how.transpose_rhs else 2]
    num_column_tiles = pl.cdiv(num_columns, width)
    num_steps = pl.cdiv(inputs.x.shape[1], block_k)
    program, group = lax.axis_index("program"), lax.axis_index("wg")
    num_items = inputs.count[0] * num_column_tiles
    num_own = lax.div(num_items - program + num_programs - 1, num_programs)

    def item_of(i):
        """Return the fields of the i-th item of this program, and its first column."""
        index = jnp.minimum(program + i * num_programs, num_items - 1)
        tile = lax.div(index, num_column_tiles)
        fields = tuple(inputs.fields[tile, field] for field in range(inputs.fields.shape[1]))
        return fields, lax.rem(index, num_column_tiles) * width

    def steps_of(fields):
        return jnp.where(fields[_GROUP] < num_groups, num_steps, 0) if how.zeros else num_steps

    def copies(fields, column, step, stage):
        """Yield the source and the destination of each copy of a stage."""
        ks = pl.ds(pl.multiple_of(step * block_k, block_k), block_k)
        for i in range(config.num_consumers if inputs.rows is None else 0):
            first = i * WG_ROWS
            if not how.has_same_rows:
                first = pl.multiple_of(fields[_ROW] + first, ALIGN)
            rows = pl.ds(first, config.copy_rows)
            yield inputs.x.at[rows, ks], scratch.x.at[stage, i, pl.ds(0, config.copy_rows)]
        columns, to = pl.ds(pl.multiple_of(column, width), width), scratch.w.at[stage]
        matrix = inputs.w.at[fields[_GROUP]]
        if how.is_pair:
            for i in range(2):
                yield matrix.at[columns, i, ks], to.at[pl.ds(i * width, width)]
        else:
            yield (matrix.at[columns, ks] if how.transpose_rhs else matrix.at[ks, columns]), to

    def arrive_with_rows(sent, num_pending):
        """Tell the consumers of the rows sent before the newest `num_pending` stages."""
        wait_for_rows(num_pending, interpret=interpret)

        @pl.when(sent >= num_pending)
        def _():
            plgpu.barrier_arrive(scratch.full.at[lax.rem(sent - num_pending, num_stages)])

    def send_item(i, carry):
        sent, (fields, column) = carry
        following = item_of(i + 1)  # loaded while this one is sent
        rows = None
        if inputs.rows is not None:
            num_rows = config.num_consumers * WG_ROWS
            rows = rows_to_copy(inputs.rows, fields[_ROW], num_rows, interpret=interpret)

        def send(step, sent):
            stage = ops.free_stage(scratch.free, sent)
            for where, to in copies(fields, column, step, stage):
                plgpu.copy_gmem_to_smem(where, to, scratch.full.at[stage])
            if rows is not None:
                to = scratch.x.at[stage]
                copy_rows(inputs.x, rows, step * block_k, to, interpret=interpret)
                arrive_with_rows(sent, _PENDING)
            return sent + 1

        return lax.fori_loop(0, steps_of(fields), send, sent), following

    def operands(_, stage):
        w = scratch.w.at[stage]
        return scratch.x.at[stage, group], w.transpose((1, 0)) if how.transpose_rhs else w

    def skip(used, count):
        @pl.loop(used, used + count)
        def _(step):
            stage = lax.rem(step, num_stages)
            plgpu.barrier_wait(scratch.full.at[stage])
            plgpu.barrier_arrive(scratch.free.at[stage])

    def biased(values, ref):
        if ref is None:
            return values
        bias = ops.load(ref, ops.WGMMA_COL)
        return values + ops.bcast(bias.astype(jnp.float32), values, 1)

    def finish(product, matrix, column):
        bias = None if inputs.bias is None else inputs.bias.at[matrix]
        columns = pl.ds(column, width)
        if not how.is_pair:
            return biased(product, None if bias is None else bias.at[columns])
        gate, up = (
            biased(
                lax.slice(product, (0, i * width), (WG_ROWS, (i + 1) * width)),
                None if bias is None else bias.at[i, columns],
            )
            for i in range(2)
        )
        return activate(gate, up, how.swiglu_limit)

    def multiply_item(i, carry):
        used, (fields, column) = carry
        following = item_of(i + 1)
        count = steps_of(fields)
        words = fields[_WORDS], fields[_WORDS + 1]
        if config.num_consumers == 2:
            words = tuple(
                jnp.where(group == 0, word, fields[_WORDS + 2 + i]) for i, word in enumerate(words)
            )
        has_rows = (words[0] | words[1]) != 0

        @pl.when(has_rows)
        def _():
            product = multiply_stages(scratch, used, count, config.columns, operands)
            product = finish(product, fields[_GROUP], column)
            store_rows(
                out,
                product.astype(out.dtype),
                row=fields[_OUT_ROW] + group * WG_ROWS,
                column=column,
                words=words,
                interpret=interpret,
            )

        @pl.when(jnp.logical_not(has_rows))
        def _():
            skip(used, count)

        return used + count, following

    @pl.when(num_own > 0)
    def _work():
        @pl.when(group < config.num_consumers)
        def _multiply():
            ops.set_max_registers(config.registers[0], action="increase", interpret=interpret)
            lax.fori_loop(0, num_own, multiply_item, (jnp.int32(0), item_of(0)))

        @pl.when(group == config.num_consumers)
        def _send():
            ops.set_max_registers(config.registers[1], action="decrease", interpret=interpret)
            sent, _ = lax.fori_loop(0, num_own, send_item, (jnp.int32(0), item_of(0)))
            if inputs.rows is not None:
                for i in reversed(range(_PENDING)):
                    arrive_with_rows(sent - 1, i)
            ops.drain(scratch.free, sent)


def multiply_stages(
    scratch: Any, used: Any, count: Any, columns: int, operands: Callable[[Any, Any], Any]
) -> jax.Array:
    """Return the sum f32 `[64, columns]` of products of `count` stages of a ring, and free them.

    `used` stages were before. `operands` returns the refs of a product, by its number and its
    stage.
    """
    num_stages = scratch.full.shape[0]

    def accumulate(acc):
        @pl.loop(0, count)
        def _(step):
            stage = lax.rem(used + step, num_stages)
            plgpu.barrier_wait(scratch.full.at[stage])
            plgpu.wgmma(acc, *operands(step, stage))
            plgpu.wgmma_wait(1)  # for the step before

            @pl.when(step > 0)
            def _():
                plgpu.barrier_arrive(scratch.free.at[lax.rem(used + step - 1, num_stages)])

        return acc[...]

    product = pl.run_scoped(accumulate, plgpu.ACC((WG_ROWS, columns), jnp.float32))

    @pl.when(count > 0)
    def _():
        plgpu.barrier_arrive(scratch.free.at[lax.rem(used + count - 1, num_stages)])

    return product


def activate(gate: jax.Array, up: jax.Array, limit: float | None) -> jax.Array:
    """Return the activation of f32 gate and up."""
    if limit is None:
        return gate * (1.0 / (1.0 + jnp.exp(-gate))) * up
    gate, up = jnp.minimum(gate, limit), jnp.maximum(jnp.minimum(up, limit), -limit)
    return (up + 1.0) * gate * (1.0 / (1.0 + jnp.exp(gate * -SWIGLU_ALPHA)))


@functools.partial(jax.jit, static_argnames=("num_rows", "config", "how", "interpret"))
def grouped_product(
    inputs: GroupedInputs,
    *,
    num_rows: int,
    config: GroupedConfig,
    how: Epilogue,
    interpret: bool = False,
) -> jax.Array:
    """Return `[num_rows, N]`, or `[num_rows, F]` of a pair; rows in no tile hold anything."""
    if inputs.rows is not None and config.num_stages < _PENDING + 2:
        # A stage is free when the next product has begun, whose rows must have been announced.
        raise ValueError(f"{config.num_stages=} must be at least {_PENDING + 2}")
    num_columns = inputs.w.shape[1 if how.transpose_rhs else 2]
    columns = num_columns
    if interpret:  # the interpreter knows nothing of copies past the end
        inputs, columns = _padded(inputs, config, how)
    out = ops.run_kernel(
        functools.partial(_grouped_kernel, config=config, how=how, interpret=interpret),
        inputs,
        jax.ShapeDtypeStruct((num_rows, columns), inputs.x.dtype),
        _scratch_types(config, how, inputs.x.dtype, inputs.rows is not None),
        name="grouped_product",
        params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=interpret,
        grid=(config.num_programs,),
        grid_names=("program",),
        num_threads=config.num_consumers + 1,
        thread_name="wg",
    )
    return out[:, :num_columns]


def _padded(
    inputs: GroupedInputs, config: GroupedConfig, how: Epilogue
) -> tuple[GroupedInputs, int]:
    width = config.columns // (2 if how.is_pair else 1)
    column_axis = 1 if how.transpose_rhs else 2
    k_axis = {2: 1, 1: inputs.w.ndim - 1}[column_axis]
    more = -inputs.w.shape[column_axis] % width
    more_k = -inputs.w.shape[k_axis] % config.block_k
    pads = [(0, 0)] * inputs.w.ndim
    pads[column_axis], pads[k_axis] = (0, more), (0, more_k)
    w = jnp.pad(inputs.w, pads)
    x = jnp.pad(inputs.x, ((0, config.num_consumers * WG_ROWS), (0, more_k)))
    bias = inputs.bias
    if bias is not None:
        bias = jnp.pad(bias, [(0, 0)] * (bias.ndim - 1) + [(0, more)])
    return dataclasses.replace(inputs, w=w, x=x, bias=bias), w.shape[column_axis]
