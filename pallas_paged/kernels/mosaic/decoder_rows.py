"""All products between two attentions of up to 64 rows, a persistent Pallas Mosaic kernel.

    residual += attended o^T
    hidden = swiglu(norm(residual) gate_up^T)
    residual += hidden down^T
    out = norm(residual) qkv^T

As in `decoder_block.py`, which does one row, the kernel is one pipeline of copies of weights that
hardly ever pauses, with one program per SM. A program is three warpgroups: one sends blocks of the
weights through a ring, one sends the activations of the same columns through another, and one
multiplies. Weights do not wait for activations: while programs wait for one another, their ring
fills.

The rows are the first operand of wgmma, which has 64 of them, and features the second. Work items
are tiles of features. They are as wide as registers allow, for each item reads all rows of its
columns. Weights with few tiles are split along K, too. Their items store partial sums in f32. When
those of all programs are there, each program adds up its part of the rows in a fixed order, so
results have the same bits each time. It makes the residual, the residual times the weight of the
norm, and sums of squares. The root mean square of a row divides the next product, not its input.

Programs wait for one another at counters (`arrivals.py`), so all must be on the device at once:
there are no more of them than SMs.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_paged.kernels.call import result_shape
from pallas_paged.kernels.mosaic import ops
from pallas_paged.kernels.mosaic.arrivals import (
    arrive,
    let_copies_see_stores,
    wait_for_arrivals,
)
from pallas_paged.kernels.mosaic.ring import wgmma_transforms
from pallas_paged.kernels.mosaic.row_store import store_rows
from pallas_paged.kernels.mosaic.rows_config import (
    MAX_ROWS,
    ROWS_TILE,
    DecoderRowsConfig,
    ProductTiles,
)

_COLUMNS = 64  # of a block
_COPIES = 4  # of weights for each stage
# Counters, each in a line of its own.
_O, _MLP_X, _HIDDEN, _DOWN, _OUT_X, _QKV = (32 * i for i in range(6))
_COUNTERS = 256


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Inputs:
    """Arrays or refs to device memory."""

    attended: Any  # [R, A]
    residual: Any  # [R, E]
    o: Any  # [E, A]
    mlp_norm: Any  # [E]
    gate_up: Any  # [F, 2, E]
    down: Any  # [E, F]
    out_norm: Any  # [E]
    qkv: Any  # [N, E], or None: out is the norm
    counters: Any  # i32[_COUNTERS], a ref
    next_counters: Any  # of the next call, to be cleared


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Outputs:
    """Refs to device memory, or their types. All but the first two are only for the kernel."""

    residual: Any  # [R, E]
    out: Any  # [R, N], or the norm [R, E]
    x: Any  # [R, E], the residual times the weight of a norm
    hidden: Any  # [R, F]
    parts: Any  # f32[splits, R, E], of o and of down
    out_parts: Any  # f32[splits, R, N]
    squares: Any  # f32[chunks, 64], sums over the chunks of a row


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Scratch:
    """Refs in shared memory, or their types."""

    weights: Any  # [num_stages, ROWS_TILE, _COLUMNS]
    x: Any  # [num_x_stages, 64, _COLUMNS]
    full: Any  # barriers [num_stages], complete when all copies have arrived
    free: Any  # barriers [num_stages], complete when they were used
    x_full: Any  # barriers [num_x_stages]
    x_free: Any
    ready: Any  # barrier, complete when the activations of the next product can be read


@dataclasses.dataclass(frozen=True, kw_only=True)
class Product:
    """Which blocks of a weight and of its activations the programs have, in which order.

    A work item is a tile of features and one part of the columns; a program has every
    `num_programs`-th item. A stage holds, for each of its blocks of columns, the features of each
    accumulator.
    """

    weight: Any  # ref [N, K] or [N, 2, K]
    x: Any  # ref [R, K]
    tiles: ProductTiles
    num_programs: int

    @property
    def is_pair(self) -> bool:
        """Whether the two accumulators are gate and up of the same features."""
        return len(self.weight.shape) == 3

    @property
    def num_accs(self) -> int:
        return self.tiles.num_accs(is_pair=self.is_pair)

    @property
    def acc_size(self) -> int:
        """Features of an accumulator."""
        return self.tiles.tile if self.is_pair else self.tiles.tile // self.num_accs

    @property
    def blocks_per_stage(self) -> int:
        return self.tiles.blocks_per_stage(is_pair=self.is_pair)

    @property
    def num_columns(self) -> int:
        """Columns of an item."""
        return self.weight.shape[-1] // self.tiles.splits

    @property
    def num_blocks(self) -> int:
        """Blocks of activations of an item."""
        return self.num_columns // _COLUMNS

    @property
    def num_tiles(self) -> int:
        return self.weight.shape[0] // self.tiles.tile

    def items(self, program: Any) -> Any:
        """Return how many items a program has."""
        total = self.num_tiles * self.tiles.splits
        return lax.div(total - 1 - program + self.num_programs, self.num_programs)

    def item(self, program: Any, index: Any) -> tuple[Any, Any]:
        """Return the first feature of an item, and its part of the columns."""
        item, num_tiles = program + index * self.num_programs, self.num_tiles
        return lax.rem(item, num_tiles) * self.tiles.tile, lax.div(item, num_tiles)

    def rows_of(self, block: int, acc: int) -> int:
        """Return where in a stage the features of an accumulator start."""
        return (block * self.num_accs + acc) * self.acc_size

    def copies(self, feature: Any, split: Any, stage: Any) -> Iterator[tuple[Any, Any]]:
        """Yield the rows of a ring's stage and the refs to be copied there, `_COPIES` in all."""
        parts = _COPIES // (self.num_accs * self.blocks_per_stage)
        size = self.acc_size // parts
        for block in range(self.blocks_per_stage):
            first = split * self.num_columns + (stage * self.blocks_per_stage + block) * _COLUMNS
            columns = pl.ds(first, _COLUMNS)
            for acc in range(self.num_accs):
                for part in range(parts):
                    to = pl.ds(self.rows_of(block, acc) + part * size, size)
                    start = feature + part * size
                    if self.is_pair:
                        yield to, self.weight.at[pl.ds(start, size), acc, columns]
                    else:
                        start = start + acc * self.acc_size
                        yield to, self.weight.at[pl.ds(start, size), columns]


def rows_kernel(
    inputs: Inputs,
    outputs: Outputs,
    scratch: Scratch,
    *,
    eps: float,
    config: DecoderRowsConfig,
    interpret: bool,
) -> None:
    """Run one program: warpgroup 0 multiplies, 1 sends weights, 2 sends activations."""
    program = lax.axis_index("program")
    num_rows, size = inputs.residual.shape
    dtype, num_programs = scratch.x.dtype, config.num_programs
    num_stages, num_x_stages = config.num_stages, config.num_x_stages
    product_of = functools.partial(Product, num_programs=num_programs)
    o = product_of(weight=inputs.o, x=inputs.attended, tiles=config.o)
    gate_up = product_of(weight=inputs.gate_up, x=outputs.x, tiles=config.gate_up)
    down = product_of(weight=inputs.down, x=outputs.hidden, tiles=config.down)
    products = [o, gate_up, down]
    if inputs.qkv is not None:
        products.append(product_of(weight=inputs.qkv, x=outputs.x, tiles=config.qkv))

    def counter(first):
        return inputs.counters.at[pl.ds(first, 1)]

    def send_weights(product, sent):
        stages = product.num_blocks // product.blocks_per_stage

        def send(index, sent):
            feature, split = product.item(program, lax.div(index, stages))
            stage = lax.rem(sent, num_stages)

            @pl.when(sent >= num_stages)
            def _():
                plgpu.barrier_wait(scratch.free.at[stage])

            @pl.when(sent >= config.num_in_flight)
            def _():
                before = lax.rem(sent - config.num_in_flight, num_stages)
                plgpu.barrier_wait(scratch.full.at[before])

            for to, where in product.copies(feature, split, lax.rem(index, stages)):
                plgpu.copy_gmem_to_smem(
                    where, scratch.weights.at[stage, to], scratch.full.at[stage]
                )
            return sent + 1

        return lax.fori_loop(0, product.items(program) * stages, send, sent)

    def send_x(product, sent):
        num_blocks = product.num_blocks

        def send(index, sent):
            _, split = product.item(program, lax.div(index, num_blocks))
            first = split * product.num_columns + lax.rem(index, num_blocks) * _COLUMNS
            stage = lax.rem(sent, num_x_stages)

            @pl.when(sent >= num_x_stages)
            def _():
                plgpu.barrier_wait(scratch.x_free.at[stage])

            plgpu.copy_gmem_to_smem(
                product.x.at[pl.ds(0, num_rows), pl.ds(first, _COLUMNS)],
                scratch.x.at[stage, pl.ds(0, num_rows)],
                scratch.x_full.at[stage],
            )
            return sent + 1

        return lax.fori_loop(0, product.items(program) * num_blocks, send, sent)

    def multiply(product, used, store):
        """Multiply a program's items; return how many stages of both rings were used so far."""
        accs_of = range(product.num_accs)

        def multiply_item(index, used):
            feature, split = product.item(program, index)

            def multiply_stage(_, carry):
                used, x_used, *accs = carry
                stage = lax.rem(used, num_stages)
                x_stages = [
                    lax.rem(x_used + i, num_x_stages) for i in range(product.blocks_per_stage)
                ]
                plgpu.barrier_wait(scratch.full.at[stage])
                terms = []
                for block, x_stage in enumerate(x_stages):
                    plgpu.barrier_wait(scratch.x_full.at[x_stage])
                    for acc in accs_of:
                        rows = pl.ds(product.rows_of(block, acc), product.acc_size)
                        weights = scratch.weights.at[stage, rows].transpose((1, 0))
                        terms.append((acc, scratch.x.at[x_stage], weights))
                accs = ops.wgmma_blocks(accs, terms, interpret=interpret)
                plgpu.barrier_arrive(scratch.free.at[stage])
                for x_stage in x_stages:
                    plgpu.barrier_arrive(scratch.x_free.at[x_stage])
                return used + 1, x_used + len(x_stages), *accs

            zeros = [ops.full((MAX_ROWS, product.acc_size), 0.0, ops.WGMMA) for _ in accs_of]
            stages = product.num_blocks // product.blocks_per_stage
            used, x_used, *accs = lax.fori_loop(0, stages, multiply_stage, (*used, *zeros))
            store(feature, split, accs)
            return used, x_used

        return lax.fori_loop(0, product.items(program), multiply_item, used)

    def store_part(parts):
        def store(feature, split, accs):
            for i, acc in enumerate(accs):
                columns = pl.ds(feature + i * acc.shape[1], acc.shape[1])
                store_rows(parts.at[split, :, columns], acc, interpret=interpret)

        return store

    def chunks(num_columns, body):
        """Run a body for each row and columns that this program has."""
        count = num_columns // config.num_chunks

        @pl.loop(
            0, lax.div(num_rows * config.num_chunks - 1 - program + num_programs, num_programs)
        )
        def _chunk(index):
            item = program + index * num_programs
            row, chunk = lax.div(item, config.num_chunks), lax.rem(item, config.num_chunks)
            vec_size = next(n for n in (4, 2, 1) if count % (128 * n) == 0)
            layout = plgpu.Layout.WG_STRIDED((count,), vec_size=vec_size)
            body(row, chunk, pl.ds(chunk * count, count), layout)

    def add_parts(parts, splits, row, columns, layout):
        loaded = [ops.load(parts.at[split, row, columns], layout) for split in range(splits)]
        return functools.reduce(operator.add, loaded)

    def add_to_residual(residual_ref, norm_ref, splits):
        """Add the parts of a product to the residual."""

        def add(row, chunk, columns, layout):
            residual = ops.load(residual_ref.at[row, columns], layout)
            norm = ops.load(norm_ref.at[columns], layout)
            total = add_parts(outputs.parts, splits, row, columns, layout)
            x = residual.astype(jnp.float32) + total.astype(dtype).astype(jnp.float32)
            x = x.astype(dtype)
            ops.store(outputs.residual.at[row, columns], x)
            x32 = x.astype(jnp.float32)
            scaled = (x32 * norm.astype(jnp.float32)).astype(dtype)
            ops.store(outputs.x.at[row, columns], scaled)
            outputs.squares[chunk, row] = jnp.sum(x32 * x32)

        chunks(size, add)

    def scale_of(squares):
        """Return what the norm multiplies rows with."""
        return lax.rsqrt(functools.reduce(operator.add, squares) / size + eps)

    def store_hidden(feature, split, accs):
        squares = [ops.load(outputs.squares.at[i], ops.WGMMA_ROW) for i in range(config.num_chunks)]
        scale = ops.bcast(scale_of(squares), accs[0])
        # Rounded as separate products are.
        gate, up = ((acc * scale).astype(dtype).astype(jnp.float32) for acc in accs)
        hidden = (gate * (1.0 / (1.0 + jnp.exp(-gate))) * up).astype(dtype)
        columns = pl.ds(feature, hidden.shape[1])
        store_rows(outputs.hidden.at[:, columns], hidden, interpret=interpret)

    def store_out(row, chunk, columns, layout):
        del chunk
        scale = scale_of([outputs.squares[i, row] for i in range(config.num_chunks)])
        if inputs.qkv is not None:
            total = add_parts(outputs.out_parts, config.qkv.splits, row, columns, layout)
        else:
            total = ops.load(outputs.residual.at[row, columns], layout).astype(jnp.float32)
            total = total * ops.load(inputs.out_norm.at[columns], layout).astype(jnp.float32)
        ops.store(outputs.out.at[row, columns], (total * scale).astype(dtype))

    def meet(first):
        """Wait for all programs."""
        arrive(counter(first), interpret=interpret)
        wait_for_arrivals(counter(first), num_programs, interpret=interpret)

    @pl.when(lax.axis_index("wg") == 0)
    def _multiply():
        ops.set_max_registers(240, action="increase", interpret=interpret)
        ops.wait_for_previous_kernel(interpret=interpret)

        @pl.when(program == 0)
        def _():
            layout = plgpu.Layout.WG_STRIDED((_COUNTERS,), vec_size=2)
            ops.store(inputs.next_counters, ops.full((_COUNTERS,), 0, layout, jnp.int32))

        used = jnp.int32(0), jnp.int32(0)
        used = multiply(o, used, store_part(outputs.parts))
        meet(_O)
        add_to_residual(inputs.residual, inputs.mlp_norm, config.o.splits)
        meet(_MLP_X)
        plgpu.barrier_arrive(scratch.ready)
        used = multiply(gate_up, used, store_hidden)
        meet(_HIDDEN)
        plgpu.barrier_arrive(scratch.ready)
        used = multiply(down, used, store_part(outputs.parts))
        meet(_DOWN)
        add_to_residual(outputs.residual, inputs.out_norm, config.down.splits)
        meet(_OUT_X)
        if inputs.qkv is not None:
            plgpu.barrier_arrive(scratch.ready)
            multiply(products[3], used, store_part(outputs.out_parts))
            meet(_QKV)
        chunks(outputs.out.shape[1], store_out)

    @pl.when(lax.axis_index("wg") == 1)
    def _send_weights():
        ops.set_max_registers(40, action="decrease", interpret=interpret)
        sent = jnp.int32(0)
        for product in products:
            sent = send_weights(product, sent)

        @pl.loop(jnp.maximum(sent - num_stages, 0), sent)
        def _drain(i):
            plgpu.barrier_wait(scratch.free.at[lax.rem(i, num_stages)])

        @pl.loop(jnp.maximum(sent - config.num_in_flight, 0), sent)
        def _arrived(i):
            plgpu.barrier_wait(scratch.full.at[lax.rem(i, num_stages)])

    @pl.when(lax.axis_index("wg") == 2)
    def _send_x():
        ops.set_max_registers(40, action="decrease", interpret=interpret)
        ops.wait_for_previous_kernel(interpret=interpret)
        sent = jnp.int32(0)
        for i, product in enumerate(products):
            if i > 0:
                plgpu.barrier_wait(scratch.ready)
                let_copies_see_stores(interpret=interpret)
            sent = send_x(product, sent)

        @pl.loop(jnp.maximum(sent - num_x_stages, 0), sent)
        def _drain(i):
            plgpu.barrier_wait(scratch.x_free.at[lax.rem(i, num_x_stages)])


@functools.partial(jax.jit, static_argnames=("eps", "config", "interpret"))
def between_attentions(
    attended: jax.Array,
    residual: jax.Array,
    counters: tuple[jax.Array, jax.Array],
    *,
    o: jax.Array,
    mlp_norm: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    out_norm: jax.Array,
    qkv: jax.Array | None,
    eps: float,
    config: DecoderRowsConfig,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, tuple[jax.Array, jax.Array]]:
    """Return the residual, the next `qkv` or the norm, and the counters of the next call.

    It is traced and lowered once for all layers with the same sizes.

    Args:
        attended: bf16 `[R, A]`, with R a multiple of 8 up to 64.
        residual: bf16 `[R, E]`.
        counters: of `new_counters`, or what the call before returned.
        o, gate_up, down, qkv: weights `[E, A]`, `[F, 2, E]`, `[E, F]` and `[N, E]` or None.
        mlp_norm, out_norm: weights `[E]`.
        eps: of the norms.
        config: of one program if interpreted.
    """
    (num_rows, size), dtype = residual.shape, residual.dtype
    out_size = size if qkv is None else qkv.shape[0]
    now, after = map(jax.new_ref, counters)
    inputs = Inputs(
        attended=attended,
        residual=residual,
        o=o,
        mlp_norm=mlp_norm,
        gate_up=gate_up,
        down=down,
        out_norm=out_norm,
        qkv=qkv,
        counters=now,
        next_counters=after,
    )
    num_splits = max(config.o.splits, config.down.splits)
    num_out_splits = 1 if qkv is None else config.qkv.splits
    outputs = Outputs(
        residual=result_shape((num_rows, size), dtype),
        out=result_shape((num_rows, out_size), dtype),
        x=result_shape((num_rows, size), dtype),
        hidden=result_shape((num_rows, gate_up.shape[0]), dtype),
        parts=result_shape((num_splits, num_rows, size), jnp.float32),
        out_parts=result_shape((num_out_splits, num_rows, out_size), jnp.float32),
        squares=result_shape((config.num_chunks, MAX_ROWS), jnp.float32),
    )
    transforms = wgmma_transforms(dtype)
    num_stages, num_x_stages = config.num_stages, config.num_x_stages
    scratch = Scratch(
        weights=plgpu.SMEM((num_stages, ROWS_TILE, _COLUMNS), dtype, transforms=transforms),
        x=plgpu.SMEM((num_x_stages, MAX_ROWS, _COLUMNS), dtype, transforms=transforms),
        full=plgpu.Barrier(num_arrivals=_COPIES, num_barriers=num_stages),
        free=plgpu.Barrier(num_barriers=num_stages),
        x_full=plgpu.Barrier(num_barriers=num_x_stages),
        x_free=plgpu.Barrier(num_barriers=num_x_stages),
        ready=plgpu.Barrier(),
    )

    def body(inputs, outputs):
        def run(scratch):
            rows_kernel(inputs, outputs, scratch, eps=eps, config=config, interpret=interpret)

        pl.run_scoped(run, scratch, collective_axes="wg")

    results = pl.kernel(
        ops.with_trees(body, inputs, outputs),
        out_type=tuple(jax.tree.leaves(outputs)),
        mesh=plgpu.Mesh(
            grid=(config.num_programs,), grid_names=("program",), num_threads=3, thread_name="wg"
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        name="between_attentions_of_rows",
        interpret=ops.interpreter(interpret),
    )(*jax.tree.leaves(inputs))
    outputs = jax.tree.unflatten(jax.tree.structure(outputs), results)
    return outputs.residual, outputs.out, (jax.freeze(after), jax.freeze(now))


def new_counters() -> tuple[jax.Array, jax.Array]:
    """Return two sets of cleared counters, for the first of several calls."""
    clear = jnp.zeros(_COUNTERS, jnp.int32)
    return clear, clear
