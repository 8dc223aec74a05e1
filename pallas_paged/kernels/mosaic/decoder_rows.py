"""All products between two attentions of up to 128 rows, a persistent Pallas Mosaic kernel.

    residual += attended o^T
    hidden = swiglu(norm(residual) gate_up^T)
    residual += hidden down^T
    out = norm(residual) qkv^T

As in `decoder_block.py`, which does one row, the kernel is one pipeline of copies of weights that
hardly ever pauses, with one program per SM. In a program a warpgroup sends blocks of the weights
through a ring, one sends the activations of the same columns through another, and others multiply,
64 rows each. Weights do not wait for activations: while programs wait for one another, their ring
fills.

The rows are the first operand of wgmma, which has 64 of them, and features the second. Rows can be
cut in two parts, with half of the programs each, which do not wait for one another. For o, down
and q/k/v a cluster of programs has a tile of features, and each of its programs a part of the
columns. They exchange partial sums through shared memory, so each program ends up with sums of its
own features (`cluster_sums.py`). It makes the residual, the residual times the weight of the norm,
and sums of squares. The root mean square of a row divides the next product, not its input.

All programs of a part wait for one another three times at counters (`arrivals.py`), so all must be
on the device at once.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_paged.kernels.call import result_shape
from pallas_paged.kernels.mosaic import ops
from pallas_paged.kernels.mosaic.arrivals import arrive, let_copies_see_stores, wait_for_arrivals
from pallas_paged.kernels.mosaic.cluster_sums import (
    join_warps,
    meet_cluster,
    receive_sum,
    send_parts,
)
from pallas_paged.kernels.mosaic.ring import wgmma_transforms
from pallas_paged.kernels.mosaic.row_items import Product
from pallas_paged.kernels.mosaic.row_refs import (
    COUNTERS,
    Inputs,
    Outputs,
    Scratch,
    scratch_types,
)
from pallas_paged.kernels.mosaic.row_squares import inverse_rms
from pallas_paged.kernels.mosaic.row_store import load_rows, store_rows
from pallas_paged.kernels.mosaic.rows_config import (
    BLOCK,
    BLOCKS,
    GROUP_ROWS,
    DecoderRowsConfig,
    part_groups,
)

# Counters, each in a line of its own: the first of those of the parts and 64 rows.
_MLP_X, _HIDDEN, _OUT_X = (32 * i for i in range(3))


def rows_kernel(
    inputs: Inputs,
    outputs: Outputs,
    scratch: Scratch,
    *,
    eps: float,
    config: DecoderRowsConfig,
    interpret: bool,
) -> None:
    """Run one program: the first warpgroups multiply, one sends weights, one activations."""
    cluster_size, num_programs = config.cluster_size, config.num_programs
    rank = lax.axis_index("rank") if cluster_size > 1 else jnp.int32(0)
    # Each part of the rows has clusters of its own.
    part = lax.div(lax.axis_index("cluster"), config.num_clusters)
    cluster = lax.rem(lax.axis_index("cluster"), config.num_clusters)
    program = cluster * cluster_size + rank
    num_rows, size = inputs.residual.shape[0] // config.num_parts, inputs.residual.shape[1]
    rows = pl.ds(part * num_rows, num_rows)
    num_consumers = config.num_consumers
    group = lax.axis_index("wg")  # of 64 rows of the part, if this warpgroup multiplies
    first_sum = (part * num_consumers + group) * (num_programs * GROUP_ROWS)
    dtype, transforms = scratch.x.dtype, wgmma_transforms(scratch.x.dtype)
    num_stages, num_x_stages = config.num_stages, config.num_x_stages
    product_of = functools.partial(Product, cluster=cluster, rank=rank, config=config)
    o = product_of(weight=inputs.o, x=inputs.attended, tiles=config.o)
    gate_up = product_of(weight=inputs.gate_up, x=outputs.x, tiles=config.gate_up)
    down = product_of(weight=inputs.down, x=outputs.hidden, tiles=config.down)
    products = [o, gate_up, down]
    if inputs.qkv is not None:
        products.append(product_of(weight=inputs.qkv, x=outputs.x, tiles=config.qkv))

    def sharing(product):
        """Return the axes of programs that share activations, and the barriers of free stages."""
        if product.is_pair and config.share_x:
            return "rank", scratch.x_free_by_all
        return None, scratch.x_free

    def counter(first):
        return inputs.counters.at[pl.ds(first + 16 * part, 1)]

    def store(ref, columns, values):
        store_rows(ref.at[rows, columns], values, group=group, interpret=interpret)

    def send_weights(product, sent):
        def send(index, sent):
            stage = lax.rem(sent, num_stages)

            @pl.when(sent >= num_stages)
            def _():
                plgpu.barrier_wait(scratch.free.at[stage])

            @pl.when(sent >= config.num_in_flight)
            def _():
                before = lax.rem(sent - config.num_in_flight, num_stages)
                plgpu.barrier_wait(scratch.full.at[before])

            for to, where in product.copies(index):
                plgpu.copy_gmem_to_smem(
                    where, scratch.weights.at[stage, to], scratch.full.at[stage]
                )
            return sent + 1

        return lax.fori_loop(0, product.num_stages, send, sent)

    def send_x(product, sent):
        axes, free = sharing(product)
        count = product.num_blocks

        def send(index, _):
            first = product.first_column + index * BLOCK
            stage = lax.rem(sent + index, num_x_stages)

            # All have used the stages of the product before, or they would not have arrived.
            @pl.when(index >= num_x_stages)
            def _():
                plgpu.barrier_wait(free.at[stage])

            for i in range(num_consumers):
                count = min(num_rows - i * GROUP_ROWS, GROUP_ROWS)
                plgpu.copy_gmem_to_smem(
                    product.x.at[pl.ds(rows.start + i * GROUP_ROWS, count), pl.ds(first, BLOCK)],
                    scratch.x.at[stage, i, pl.ds(0, count)],
                    scratch.x_full.at[stage],
                    collective_axes=axes,
                )
            return jnp.int32(0)

        lax.fori_loop(0, count, send, jnp.int32(0))

        @pl.loop(jnp.maximum(count - num_x_stages, 0), count)
        def _drain(i):
            plgpu.barrier_wait(free.at[lax.rem(sent + i, num_x_stages)])

        return sent + count

    def multiply_item(product, used):
        """Multiply an item; return how many stages of both rings were used, and the products."""
        axes, x_free = sharing(product)
        accs_of, acc_size = range(product.tiles.num_accs), product.tiles.acc_size

        def multiply_step(_, carry):
            used, x_used, *accs = carry
            stages = [lax.rem(used + acc, num_stages) for acc in accs_of]
            x_stages = [lax.rem(x_used + i, num_x_stages) for i in range(BLOCKS)]
            terms = []
            for acc, stage in enumerate(stages):
                plgpu.barrier_wait(scratch.full.at[stage])
                for block, x_stage in enumerate(x_stages):
                    if acc == 0:
                        plgpu.barrier_wait(scratch.x_full.at[x_stage])
                    columns = pl.ds(block * BLOCK, BLOCK)
                    weights = scratch.weights.at[stage, pl.ds(0, acc_size), columns]
                    x = scratch.x.at[x_stage, group]
                    terms.append((acc, lambda x=x: x, weights.transpose((1, 0))))
            accs = ops.wgmma_many(accs, terms, overlap=True, interpret=interpret)
            for stage in stages:
                plgpu.barrier_arrive(scratch.free.at[stage])
            if axes is not None:  # one warp arrives at the other programs
                join_warps()
            for x_stage in x_stages:
                plgpu.barrier_arrive(x_free.at[x_stage])
            return used + len(stages), x_used + len(x_stages), *accs

        zeros = [ops.full((GROUP_ROWS, acc_size), 0.0, ops.WGMMA) for _ in accs_of]
        used, x_used, *accs = lax.fori_loop(0, product.num_steps, multiply_step, (*used, *zeros))
        return (used, x_used), accs

    def multiply(product, used, buffer):
        """Multiply; return the sums over the cluster for this program's features."""
        used, accs = multiply_item(product, used)
        if cluster_size == 1:
            return used, accs[0]
        _, width = part_groups(product.tiles, cluster_size)
        how: Any = dict(part=width, cluster_size=cluster_size, group=group)
        meet_cluster(scratch.may_send)
        send_parts(accs, buffer, transforms, num_rows=num_rows, **how)
        meet_cluster(scratch.sent)
        return used, receive_sum(buffer, transforms, **how)

    def load_own(product, residual_ref, norm_ref):
        """Return what is added to a product and what then multiplies it.

        They are loaded ahead, so nothing waits for them after the product. Another program may have
        the same features, and stores the next residual when all have arrived at the counter before.
        """
        own, _ = product.own()
        norm = ops.load(norm_ref.at[own], ops.WGMMA_COL)
        residual = load_rows(residual_ref.at[rows, own], group=group, interpret=interpret)
        return residual, norm

    def add_product(product, used, loaded):
        """Add a product to the residual; return the next product's input, without scale."""
        residual, norm = loaded
        own, num_own = product.own()
        used, total = multiply(product, used, scratch.x)
        x = residual.astype(jnp.float32) + total.astype(dtype).astype(jnp.float32)
        x = x.astype(dtype)
        x32 = x.astype(jnp.float32)
        scaled = x32 * ops.bcast(norm.astype(jnp.float32), x32, 1)
        store(outputs.x, own, scaled.astype(dtype))
        sums = outputs.squares.at[pl.ds(first_sum + program * GROUP_ROWS, GROUP_ROWS)]
        squares = jnp.where(ops.iota(x32.shape, 1, ops.WGMMA) < num_own, x32 * x32, 0.0)
        ops.store(sums, jnp.sum(squares, axis=1))
        store(outputs.residual, own, x)
        return used, scaled

    def load_scale():
        squares = outputs.squares.at[pl.ds(first_sum, num_programs * GROUP_ROWS)]
        return inverse_rms(squares, scratch.sums, group=group, size=size, eps=eps)

    def make_hidden(used, scale):
        used, accs = multiply_item(gate_up, used)
        # Rounded as separate products are.
        accs = [(acc * ops.bcast(scale, acc)).astype(dtype).astype(jnp.float32) for acc in accs]
        tile = gate_up.tiles.tile
        if len(accs) == 1:
            starts = (0, tile)
            accs = [lax.slice(accs[0], (0, i), (GROUP_ROWS, i + tile)) for i in starts]
        gate, up = accs
        hidden = (gate * (1.0 / (1.0 + jnp.exp(-gate))) * up).astype(dtype)
        store(outputs.hidden, pl.ds(gate_up.feature, tile), hidden)
        return used

    def arrive_with(first):
        arrive(counter(first + group), interpret=interpret)
        plgpu.barrier_arrive(scratch.ready)

    def wait(first):
        wait_for_arrivals(counter(first), num_programs, interpret=interpret)

    @pl.when(group < num_consumers)
    def _multiply():
        ops.set_max_registers(config.registers[0], action="increase", interpret=interpret)
        ops.wait_for_previous_kernel(interpret=interpret)

        @pl.when((program == 0) & (part == 0) & (group == 0))
        def _():
            layout = plgpu.Layout.WG_STRIDED((COUNTERS,), vec_size=1)
            ops.store(inputs.next_counters, ops.full((COUNTERS,), 0, layout, jnp.int32))

        used = jnp.int32(0), jnp.int32(0)
        used, _ = add_product(o, used, load_own(o, inputs.residual, inputs.mlp_norm))
        arrive_with(_MLP_X)
        wait(_MLP_X + group)
        used = make_hidden(used, load_scale())
        loaded = load_own(down, outputs.residual, inputs.out_norm)
        arrive_with(_HIDDEN)
        used, scaled = add_product(down, used, loaded)
        arrive_with(_OUT_X)
        wait(_OUT_X + group)
        scale = load_scale()
        if inputs.qkv is not None:
            _, scaled = multiply(products[3], used, scratch.weights)
        own, _ = products[-1].own()
        store(outputs.out, own, (scaled * ops.bcast(scale, scaled)).astype(dtype))

    @pl.when(group == num_consumers)
    def _send_weights():
        ops.set_max_registers(config.registers[1], action="decrease", interpret=interpret)
        sent = jnp.int32(0)
        for product in products:
            sent = send_weights(product, sent)

        @pl.loop(jnp.maximum(sent - num_stages, 0), sent)
        def _drain(i):
            plgpu.barrier_wait(scratch.free.at[lax.rem(i, num_stages)])

        @pl.loop(jnp.maximum(sent - config.num_in_flight, 0), sent)
        def _arrived(i):
            plgpu.barrier_wait(scratch.full.at[lax.rem(i, num_stages)])

    @pl.when(group == num_consumers + 1)
    def _send_x():
        ops.set_max_registers(config.registers[1], action="decrease", interpret=interpret)
        ops.wait_for_previous_kernel(interpret=interpret)
        sent = send_x(o, jnp.int32(0))
        for product, first in zip(products[1:], (_MLP_X, _HIDDEN, _OUT_X), strict=False):
            plgpu.barrier_wait(scratch.ready)
            for i in range(num_consumers):
                wait(first + i)
            let_copies_see_stores(interpret=interpret)
            sent = send_x(product, sent)

        if inputs.qkv is None:
            plgpu.barrier_wait(scratch.ready)


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
        attended: bf16 `[R, A]`, with R a multiple of 8 up to 128.
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
    num_sums = config.num_parts * config.num_consumers * config.num_programs
    outputs = Outputs(
        residual=result_shape((num_rows, size), dtype),
        out=result_shape((num_rows, out_size), dtype),
        x=result_shape((num_rows, size), dtype),
        hidden=result_shape((num_rows, gate_up.shape[0]), dtype),
        squares=result_shape((num_sums * GROUP_ROWS,), jnp.float32),
    )
    scratch = scratch_types(config, dtype)
    cluster: Any = {}
    if config.cluster_size > 1:
        cluster = dict(cluster=(config.cluster_size,), cluster_names=("rank",))

    def body(inputs, outputs):
        def run(scratch):
            rows_kernel(inputs, outputs, scratch, eps=eps, config=config, interpret=interpret)

        pl.run_scoped(run, scratch, collective_axes="wg")

    results = pl.kernel(
        ops.with_trees(body, inputs, outputs),
        out_type=tuple(jax.tree.leaves(outputs)),
        mesh=plgpu.Mesh(
            grid=(config.num_parts * config.num_clusters,),
            grid_names=("cluster",),
            num_threads=config.num_consumers + 2,
            thread_name="wg",
            **cluster,
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        name="between_attentions_of_rows",
        interpret=ops.interpreter(interpret),
    )(*jax.tree.leaves(inputs))
    outputs = jax.tree.unflatten(jax.tree.structure(outputs), results)
    return outputs.residual, outputs.out, (jax.freeze(after), jax.freeze(now))


def new_counters() -> tuple[jax.Array, jax.Array]:
    """Return two sets of cleared counters, for the first of several calls."""
    clear = jnp.zeros(COUNTERS, jnp.int32)
    return clear, clear
