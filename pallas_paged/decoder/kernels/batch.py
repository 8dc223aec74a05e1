"""All products between two attentions of up to 256 rows, a persistent Pallas Mosaic kernel.

    residual += attended o^T
    hidden = swiglu(norm(residual) gate_up^T)
    residual += hidden down^T
    out = norm(residual) qkv^T

Like `one_row`, the kernel is one pipeline of copies of weights, with one program per SM. In a
program one warpgroup sends blocks of the weights through a ring, one sends the activations of the
same columns through another, and others multiply, 64 rows each. Weights do not wait for
activations: while programs wait for one another, their ring fills.

Rows are the first operand of wgmma, 64 at a time, and features the second. Rows can be divided in
two parts, with half of the programs each, which do not wait for one another. For o, down and q/k/v
a cluster of programs has a tile of features, and each of its programs a part of the columns. They
exchange partial sums (`cluster_sums`), so each program ends up with the sums of its own features.
It makes the residual, the residual times the weight of the norm, and sums of squares. The root mean
square of a row divides the next product, not its input. All programs of a part wait for one another
three times (`grid_barrier`), so all must be on the device at once.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_paged.decoder.kernels import device_sums, grid_barrier
from pallas_paged.decoder.kernels.batch_config import (
    BLOCKS_PER_STAGE,
    COLUMNS_PER_BLOCK,
    GROUP_ROWS,
    DecoderBatchConfig,
    part_groups,
)
from pallas_paged.decoder.kernels.batch_refs import (
    COUNTERS,
    SUMS,
    BatchOutputs,
    BatchScratch,
    output_types,
    scratch_types,
)
from pallas_paged.decoder.kernels.batch_rows import inverse_rms, load_rows, store_rows, sum_squares
from pallas_paged.decoder.kernels.batch_tiles import Product
from pallas_paged.decoder.kernels.cluster_sums import sum_over_cluster
from pallas_paged.decoder.kernels.operands import BlockInputs, BlockWeights
from pallas_paged.decoder.kernels.peer_memory import PeerMemory
from pallas_paged.kernels.mosaic import ops
from pallas_paged.kernels.mosaic_sm90.ring import wgmma_transforms

_LOADS = 10  # loads of squares of a thread that are in flight while it sends
# Counters of the first part and its first 64 rows, each in its own cache line.
_MLP_X, _HIDDEN, _OUT_X = (32 * i for i in range(3))


def _rows_kernel(
    inputs: BlockInputs,
    outputs: BatchOutputs,
    scratch: BatchScratch,
    *,
    eps: float,
    config: DecoderBatchConfig,
    interpret: bool,
) -> None:
    """Run one program: the first warpgroups multiply, one sends weights, one activations."""
    weights, peers = inputs.weights, inputs.peers
    cluster_size, num_programs = config.cluster_size, config.num_programs
    rank = lax.axis_index("rank") if cluster_size > 1 else jnp.int32(0)
    part = lax.div(lax.axis_index("cluster"), config.num_clusters)
    cluster = lax.rem(lax.axis_index("cluster"), config.num_clusters)
    program = cluster * cluster_size + rank
    index = part * num_programs + program  # of all parts
    num_rows, size = inputs.residual.shape[0] // config.num_parts, inputs.residual.shape[1]
    rows = pl.ds(part * num_rows, num_rows)
    num_consumers = config.num_consumers
    group = lax.axis_index("wg")  # of 64 rows of the part, if this warpgroup multiplies
    dtype, transforms = scratch.x.dtype, wgmma_transforms(scratch.x.dtype)
    num_stages, num_x_stages = config.num_stages, config.num_x_stages
    product_of = functools.partial(Product, cluster=cluster, rank=rank, config=config)
    o = product_of(weight=weights.o, x=inputs.attended, tiles=config.o)
    gate_up = product_of(weight=weights.gate_up, x=outputs.x, tiles=config.gate_up)
    down = product_of(weight=weights.down, x=outputs.hidden, tiles=config.down)
    products = [o, gate_up, down]
    if weights.qkv is not None:
        products.append(product_of(weight=weights.qkv, x=outputs.x, tiles=config.qkv))

    wait_for_all = functools.partial(
        grid_barrier.wait_for_arrivals, count=num_programs, interpret=interpret
    )

    def counter(first):
        return inputs.mailbox.at[pl.ds(first + 16 * part, 1)]

    def squares_of(group):
        return outputs.squares.at[part * num_consumers + group]

    def store(ref, columns, values):
        store_rows(ref.at[rows, columns], values, group=group, interpret=interpret)

    def wait_for_weights(first, after):
        @pl.loop(first, after)
        def _wait(i):
            plgpu.barrier_wait(scratch.full.at[lax.rem(i, num_stages)])

    def send_weights(product, sent, arrived):
        """Send the weights of a product; return the number of stages sent and arrived."""

        def send(index, carry):
            sent, arrived = carry
            stage = ops.free_stage(scratch.free, sent)
            arrived_next = jnp.maximum(arrived, sent - product.num_in_flight + 1)
            wait_for_weights(arrived, arrived_next)
            for to, where in product.copies(index):
                to_ref = scratch.weights.at[stage, to]
                plgpu.copy_gmem_to_smem(where, to_ref, scratch.full.at[stage])
            return sent + 1, arrived_next

        return lax.fori_loop(0, product.num_stages, send, (sent, arrived))

    def send_x(product, sent, squares=None):
        """Send the activations of a product, and add up squares of rows meanwhile."""
        count = product.num_blocks
        at_once = min(count, num_x_stages)

        def send(index, _):
            first = product.first_column + index * COLUMNS_PER_BLOCK
            stage = lax.rem(sent + index, num_x_stages)

            # All have used the stages of the product before, or they would not have arrived.
            ops.wait_if(index >= num_x_stages, scratch.x_free.at[stage])
            for i in range(num_consumers):
                count = min(num_rows - i * GROUP_ROWS, GROUP_ROWS)
                plgpu.copy_gmem_to_smem(
                    product.x.at[
                        pl.ds(rows.start + i * GROUP_ROWS, count), pl.ds(first, COLUMNS_PER_BLOCK)
                    ],
                    scratch.x.at[stage, i, pl.ds(0, count)],
                    scratch.x_full.at[stage],
                )
            return jnp.int32(0)

        lax.fori_loop(0, at_once, send, jnp.int32(0))
        first = at_once
        if squares is not None:
            per_round = (count - at_once) // pl.cdiv(squares.shape[0], _LOADS)
            for _ in sum_squares(squares, scratch.sums.at[0], at_once=_LOADS):
                lax.fori_loop(first, first + per_round, send, jnp.int32(0))
                first += per_round
            plgpu.barrier_arrive(scratch.summed)
        lax.fori_loop(first, count, send, jnp.int32(0))

        @pl.loop(count - at_once, count)
        def _drain(i):
            plgpu.barrier_wait(scratch.x_free.at[lax.rem(sent + i, num_x_stages)])

        return sent + count

    def multiply_item(product, used):
        """Multiply an item; return the number of stages used of both rings, and the products."""
        accs_of, acc_size = range(product.tiles.num_accs), product.tiles.acc_size

        def multiply_step(_, carry):
            used, x_used, *accs = carry
            stages = [lax.rem(used + acc, num_stages) for acc in accs_of]
            x_stages = [lax.rem(x_used + i, num_x_stages) for i in range(BLOCKS_PER_STAGE)]
            terms = []
            for acc, stage in enumerate(stages):
                plgpu.barrier_wait(scratch.full.at[stage])
                for block, x_stage in enumerate(x_stages):
                    if acc == 0:
                        plgpu.barrier_wait(scratch.x_full.at[x_stage])
                    columns = pl.ds(block * COLUMNS_PER_BLOCK, COLUMNS_PER_BLOCK)
                    weights = scratch.weights.at[stage, pl.ds(0, acc_size), columns]
                    x = scratch.x.at[x_stage, group]
                    terms.append((acc, x, weights.transpose((1, 0))))
            accs = ops.wgmma_many(accs, terms, interpret=interpret)
            for stage in stages:
                plgpu.barrier_arrive(scratch.free.at[stage])
            for x_stage in x_stages:
                plgpu.barrier_arrive(scratch.x_free.at[x_stage])
            return used + len(stages), x_used + len(x_stages), *accs

        zeros = [ops.full((GROUP_ROWS, acc_size), 0.0, ops.WGMMA) for _ in accs_of]
        used, x_used, *accs = lax.fori_loop(0, product.num_steps, multiply_step, (*used, *zeros))
        return (used, x_used), accs

    def sum_products(product, accs, buffer):
        """Return the sums over the cluster, which come through the buffer."""
        if cluster_size == 1:
            return accs[0]
        return sum_over_cluster(
            accs,
            buffer,
            transforms,
            may_send=scratch.may_send,
            sent=scratch.sent,
            part=part_groups(product.tiles, cluster_size)[1],
            cluster_size=cluster_size,
            num_rows=num_rows,
            group=group,
        )

    def load_own(product, residual_ref, norm_ref):
        """Return the residual and the weight of the norm, loaded before the product needs them.

        Another program may have the same features: it stores the next residual when all have
        arrived at the counter before.
        """
        own, _ = product.own()
        norm = ops.load(norm_ref.at[own], ops.WGMMA_COL)
        residual = load_rows(residual_ref.at[rows, own], group=group, interpret=interpret)
        return residual, norm

    def add_product(product, used, loaded, sum_over_devices):
        """Add a product to the residual; return it and the next product's unscaled input."""
        residual, norm = loaded
        own, num_own = product.own()
        used, accs = multiply_item(product, used)
        total = sum_products(product, accs, scratch.x)
        if sum_over_devices is not None:
            total = sum_over_devices(total.astype(dtype))
        x = (residual.astype(jnp.float32) + total.astype(dtype).astype(jnp.float32)).astype(dtype)
        x32 = x.astype(jnp.float32)
        scaled = x32 * ops.bcast(norm.astype(jnp.float32), x32, 1)
        store(outputs.x, own, scaled.astype(dtype))
        if num_programs == 1:  # interpreted: the sums of three more programs are 0
            squares_of(group)[...] = jnp.zeros((1, SUMS), jnp.float32)
        place = lax.div(program, 4), pl.ds(lax.rem(program, 4) * GROUP_ROWS, GROUP_ROWS)
        squares = jnp.where(ops.iota(x32.shape, 1, ops.WGMMA) < num_own, x32 * x32, 0.0)
        ops.store(squares_of(group).at[place], jnp.sum(squares, axis=1))
        return used, x, scaled

    def sum_own_squares():
        # The sender of this product's activations has waited for the squares of all programs.
        return sum_squares(squares_of(group), scratch.sums.at[group], at_once=num_programs)

    load_scale = functools.partial(inverse_rms, scratch.sums.at[group], size=size, eps=eps)

    def make_hidden(used):
        used, accs = multiply_item(gate_up, used)
        if num_consumers == 1:
            plgpu.barrier_wait(scratch.summed)
        else:
            for _ in sum_own_squares():
                pass
        scale = load_scale()
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
        grid_barrier.arrive(counter(first + group), interpret=interpret)
        plgpu.barrier_arrive(scratch.ready)

    @pl.when(group < num_consumers)
    def _multiply():
        ops.set_max_registers(config.registers[0], action="increase", interpret=interpret)
        ops.wait_for_previous_kernel(interpret=interpret)

        @pl.when((program == 0) & (part == 0) & (group == 0))
        def _():
            layout = plgpu.Layout.WG_STRIDED((COUNTERS,), vec_size=1)
            ops.store(inputs.next_mailbox, ops.full((COUNTERS,), 0, layout, jnp.int32))

        sums: list[Any] = [None, None]
        if peers is not None:
            first = device_sums.next_number(device_sums.load_count(peers, index))
            numbers = first, device_sums.next_number(first)
            sums = [
                functools.partial(
                    device_sums.sum_over_devices,
                    peers=peers,
                    number=number,
                    tile=index * num_consumers + group,
                    group=group,
                    num_rows=num_rows,
                )
                for number in numbers
            ]
        used = jnp.int32(0), jnp.int32(0)
        used, x, _ = add_product(o, used, load_own(o, inputs.residual, weights.mlp_norm), sums[0])
        arrive_with(_MLP_X)
        store(outputs.residual, o.own()[0], x)  # no program waits for it
        used = make_hidden(used)
        loaded = load_own(down, outputs.residual, weights.out_norm)
        arrive_with(_HIDDEN)
        used, x, scaled = add_product(down, used, loaded, sums[1])
        arrive_with(_OUT_X)
        store(outputs.residual, down.own()[0], x)
        if weights.qkv is None:
            wait_for_all(counter(_OUT_X + group))
        else:
            _, accs = multiply_item(products[3], used)
        # This product is short: squares are loaded while its sums go to other programs.
        summing = sum_own_squares()
        next(summing)
        if weights.qkv is not None:
            scaled = sum_products(products[3], accs, scratch.weights)
        next(summing, None)
        scaled = (scaled * ops.bcast(load_scale(), scaled)).astype(dtype)
        store(outputs.out, products[-1].own()[0], scaled)
        if peers is not None:

            @pl.when(group == 0)
            def _():
                how = dict(program=index, num_programs=config.num_parts * num_programs)
                device_sums.store_count(peers, numbers[-1], **how)

    @pl.when(group == num_consumers)
    def _send_weights():
        ops.set_max_registers(config.registers[1], action="decrease", interpret=interpret)
        sent = arrived = jnp.int32(0)
        for product in products:
            sent, arrived = send_weights(product, sent, arrived)
        ops.drain(scratch.free, sent)
        wait_for_weights(arrived, sent)

    @pl.when(group == num_consumers + 1)
    def _send_x():
        ops.set_max_registers(config.registers[1], action="decrease", interpret=interpret)
        ops.wait_for_previous_kernel(interpret=interpret)
        sent = send_x(o, jnp.int32(0))
        for product, first in zip(products[1:], (_MLP_X, _HIDDEN, _OUT_X), strict=False):
            plgpu.barrier_wait(scratch.ready)
            for i in range(num_consumers):
                wait_for_all(counter(first + i))
            grid_barrier.fence_async_copies(interpret=interpret)
            # Two consumers use activations too fast for this, and sum squares themselves.
            squares = squares_of(0) if product is gate_up and num_consumers == 1 else None
            sent = send_x(product, sent, squares)
        if weights.qkv is None:
            plgpu.barrier_wait(scratch.ready)


@functools.partial(jax.jit, static_argnames=("eps", "config", "interpret"))
def between_attentions(
    attended: jax.Array,  # bf16[R, A], with R a multiple of 8 up to 128, or of 16 up to 256
    residual: jax.Array,  # bf16[R, E]
    counters: tuple[jax.Array, jax.Array],  # from `new_counters` or from the call before
    weights: BlockWeights,
    *,
    eps: float,
    config: DecoderBatchConfig,
    peers: PeerMemory | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, tuple[jax.Array, jax.Array]]:
    """Return the residual, the next `qkv` or the norm, and the counters of the next call.

    It is traced and lowered once for all layers with the same sizes. Weights have no biases. If it
    is interpreted, the config is of one program. With
    `peers` devices share the columns of o and down, and the features of the other weights.
    """
    now, after = map(jax.new_ref, counters)
    inputs = BlockInputs(
        attended=attended,
        residual=residual,
        weights=weights,
        mailbox=now,
        next_mailbox=after,
        peers=peers,
    )
    in_clusters: Any = dict(cluster=(config.cluster_size,), cluster_names=("rank",))
    outputs = ops.run_kernel(
        functools.partial(_rows_kernel, eps=eps, config=config, interpret=interpret),
        inputs,
        output_types(inputs, config),
        scratch_types(config, residual.dtype),
        name="between_attentions_of_rows",
        params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=interpret,
        grid=(config.num_parts * config.num_clusters,),
        grid_names=("cluster",),
        num_threads=config.num_consumers + 2,
        thread_name="wg",
        **(in_clusters if config.cluster_size > 1 else {}),
    )
    return outputs.residual, outputs.out, (jax.freeze(after), jax.freeze(now))
