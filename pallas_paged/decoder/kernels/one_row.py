"""All products between two attentions of one row, a persistent Pallas Mosaic kernel for Hopper.

    attended = merge of the states of attention, or given
    residual += attended o^T
    hidden = swiglu(norm(residual) gate_up^T)
    residual += hidden down^T
    out = norm(residual) qkv^T

Sizes are padded to full tiles. A copy writes zeros behind the end of a weight and reads nothing
there, so sums there are zeros.

With a router each program chooses the experts of the row by the logits, which are one more product,
and gate, up and down are those of the experts: `hidden` of one after the other, and a sum of down
over them with their weights.

It takes as long as the weights take to be read, so the kernel is one pipeline of copies that is
hardly ever empty. A program is two warpgroups, and there is one program per SM. The producer sends
its blocks of all four weights through a ring in shared memory, one after the other. It does not
wait for activations: while programs wait for one another, the ring fills.

The consumer multiplies. A program has tiles of 32 to 64 features, of a size that gives all programs
as many. Weights with few such tiles are split along K, too. Results go to a mailbox in device
memory: partial sums in f32, which each program adds up in the same order, so that results have the
same bits each time.

About 64 KB per SM are on their way at once, no more: that is enough for the full rate of the
memory, and published results would have to queue behind more.

The programs wait for one another, so all must be on the device at once. They are: there are no more
of them than SMs, each SM has room for one, and the programs of kernels before end without them.
"""

from __future__ import annotations

import dataclasses
import functools
from operator import add
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_paged.decoder.kernels import device_mail
from pallas_paged.decoder.kernels.one_row_mailbox import EMPTY, publish, tile_indices, wait_for_mail
from pallas_paged.decoder.kernels.one_row_merge import merge_row
from pallas_paged.decoder.kernels.one_row_product import (
    HALF,
    multiply_by_row,
    products_of,
    send_products,
)
from pallas_paged.decoder.kernels.one_row_refs import (
    CLEARED,
    OneRowOutputs,
    OneRowScratch,
    output_types,
    padded_features,
    scratch_types,
)
from pallas_paged.decoder.kernels.one_row_router import choose, load_bias, logits_layout
from pallas_paged.decoder.kernels.operands import BlockInputs, BlockWeights, Routing
from pallas_paged.decoder.kernels.peer_memory import PeerMemory
from pallas_paged.experts.kernels.grouped import activate
from pallas_paged.kernels.decode_states import DecodeStates
from pallas_paged.kernels.mosaic import ops
from pallas_paged.kernels.mosaic.indexed import scatter
from pallas_paged.kernels.mosaic_sm90.config import LINEAR_TILE as TILE
from pallas_paged.kernels.mosaic_sm90.config import DecoderBlockConfig

_AWAITED = 16384  # elements of partial sums that the registers of a warpgroup hold at once


def _block_kernel(
    inputs: BlockInputs,
    outputs: OneRowOutputs,
    scratch: OneRowScratch,
    *,
    eps: float,
    config: DecoderBlockConfig,
    routing: Routing | None,
    num_features: dict[str, int],
    real_experts: int,
    interpret: bool,
) -> None:
    """Run one program: warpgroup 0 multiplies, warpgroup 1 sends."""
    program, weights = lax.axis_index("program"), inputs.weights
    num_stages, dtype = scratch.weights.shape[0], scratch.x.dtype
    size, hidden_size = num_features["o"], num_features["gate_up"]
    real_size = inputs.residual.shape[1]
    experts = None if routing is None else scratch.choice.experts
    products = products_of(weights, config, num_features, experts)
    vector = plgpu.Layout.WG_STRIDED((size,), vec_size=4)

    def strided(num_elements):
        vec_size = 4 if num_elements % 512 == 0 else 2
        return plgpu.Layout.WG_STRIDED((num_elements,), vec_size=vec_size)

    def load_row(ref, staging):
        """Load a row of the residual's size from device memory, by way of shared memory."""
        if ref.shape[0] == size:
            return ops.load(ref, vector)
        main = ref.shape[0] // (2 * HALF) * (2 * HALF)
        parts = [pl.ds(start, TILE) for start in range(main, ref.shape[0], TILE)]
        if main:
            parts.append(pl.ds(0, main))
        for part in parts:
            layout = ops.WGMMA_ROW if part.size == TILE else strided(main)
            staging.at[part][...] = ops.load(ref.at[part], layout)
        plgpu.commit_smem()
        row = plgpu.load(staging.at[pl.ds(0, size)], layout=vector)
        # What is behind it may be NaN.
        return jnp.where(ops.iota((size,), 0, vector) < ref.shape[0], row, jnp.zeros_like(row))

    def set_x(row):
        """Store a row, or a part of it, to shared memory."""
        scratch.x.at[pl.ds(0, row.shape[0])][...] = row.astype(dtype)
        plgpu.commit_smem()

    def multiply(product, used, *, load_x=None, finish=lambda _, sums: sums[0], store):
        """Multiply a program's items; return how many stages were used before and now.

        Without `load_x`, which stores columns of a row, x in shared memory is a full row. `finish`
        gives values of a part's sums, which are added up for an item.
        """

        def multiply_part(part, start, features, used):
            """Multiply with columns of x from `start` on; return the stages used, and sums."""
            # Loaded before the product.
            add_bias = product.add_bias(features, part, interpret=interpret)

            def multiply_block(block, carry):
                used, *accs = carry
                stage = lax.rem(used, num_stages)
                firsts = [block if product.is_pair else 2 * block + i for i in range(2)]
                xs = [scratch.x.at[pl.ds(start + first * HALF, HALF)] for first in firsts]
                halves = [scratch.weights.at[stage, pl.ds(i * TILE, TILE)] for i in range(2)]
                plgpu.barrier_wait(scratch.full.at[stage])
                accs = multiply_by_row(accs, halves, xs, interpret=interpret)
                plgpu.barrier_arrive(scratch.free.at[stage])
                return used + 1, *accs

            zeros = [ops.full((TILE, 8), 0.0, ops.WGMMA) for _ in range(2)]
            used, *accs = lax.fori_loop(0, product.num_blocks, multiply_block, (used, *zeros))
            if not product.is_pair:
                accs = [accs[0] + accs[1]]
            is_x = ops.iota((TILE, 8), 1, ops.WGMMA) == 0
            return used, add_bias([jnp.sum(jnp.where(is_x, acc, 0.0), axis=1) for acc in accs])

        def multiply_item(index, used):
            features, split = product.item(program, index)
            parts, start = product.parts(split), 0
            if load_x is not None:
                num_columns = len(parts) * product.num_columns
                load_x(pl.ds(split * num_columns, num_columns))
            elif product.experts is None:
                start = split * product.num_columns
            results = []
            for i, part in enumerate(parts):
                used, sums = multiply_part(part, start + i * product.num_columns, features, used)
                results.append(finish(part, sums))
            store(features.start, product.count(features), split, functools.reduce(add, results))
            return used

        return lax.fori_loop(0, product.num_items(program), multiply_item, used)

    o_start = hidden_size * (1 if routing is None else config.experts_per_token)
    down_start = o_start + config.o_splits * size
    attended_start = down_start + config.down_splits * size
    logits_start = attended_start + weights.o.shape[1]
    peers, num_devices = inputs.peers, 1
    if peers is not None:  # partial sums are in the mailbox of each device
        num_devices = peers.num_devices
        o_start, down_start = 0, num_devices * config.o_splits * size

    def publish_part(start, first, count, split, values, size=size):
        place = start + split * size + first
        publish(inputs.mailbox, place, values, count, interpret=interpret)

    def publish_sums(buffer, start, num_splits, first, count, split, values):
        """Publish partial sums of o or down, to all devices if there are several."""
        if peers is None:
            publish_part(start, first, count, split, values)
        else:
            indices = tile_indices(start + split * size + first, count)
            device_mail.publish(peers, buffer, indices, values, per_rank=num_splits * size)

    def rounded(x):
        """Round as separate products do."""
        return x.astype(dtype).astype(jnp.float32)

    def hidden_of(_, sums):
        limit = None if routing is None else routing.swiglu_limit
        return rounded(activate(*map(rounded, sums), limit))

    def down_of(part, sums):
        return sums[0] if routing is None else rounded(sums[0]) * scratch.choice.weights[part]

    def wait_for_row(first, columns):
        (row,) = wait_for_mail(
            inputs.mailbox,
            [first + columns.start],
            strided(columns.size),
            columns.size,
            interpret=interpret,
        )
        set_x(row)

    def load_attended(columns):
        if isinstance(inputs.attended, DecodeStates):
            wait_for_row(attended_start, columns)
        else:
            set_x(ops.load(inputs.attended.at[0, columns], strided(columns.size)))

    def store_out(first, count, _, values):
        indices = tile_indices(first, count)
        values = values.astype(dtype)
        scatter(outputs.out, indices, values, ops.WGMMA_ROW, interpret=interpret)

    def sum_of_parts(start, num_splits, size, layout, buffer=None):
        total = None
        at_once = max(_AWAITED // size, 1)
        for first in range(0, num_splits, at_once):
            splits = range(first, min(first + at_once, num_splits))
            starts = [start + split * size for split in splits]
            if buffer is None:
                parts = wait_for_mail(inputs.mailbox, starts, layout, size, interpret=interpret)
            else:
                parts = device_mail.wait(peers, buffer, starts, layout, size)
            for part in parts:
                total = part if total is None else total + part
        return total

    def add_and_norm(residual, start, num_splits, weight, buffer):
        """Add a product to the residual and norm it; return both, in shared memory too."""
        total = sum_of_parts(start, num_devices * num_splits, size, vector, buffer)
        x = (residual.astype(jnp.float32) + rounded(total)).astype(dtype)
        x32 = x.astype(jnp.float32)
        scale = lax.rsqrt(jnp.sum(x32 * x32) / real_size + eps)
        normed = (x32 * scale * weight.astype(jnp.float32)).astype(dtype)
        scratch.residual[...] = x
        set_x(normed)
        return x, normed

    def clear(mailbox):
        """Clear this program's part of a mailbox."""

        @pl.loop(0, (mailbox.shape[0] // CLEARED - 1 - program) // config.num_programs + 1)
        def _clear(i):
            start = (program + i * config.num_programs) * CLEARED
            empty = ops.full((CLEARED,), EMPTY, strided(CLEARED), jnp.int32)
            ops.store(mailbox.at[pl.ds(start, CLEARED)], empty)

    @pl.when(lax.axis_index("wg") == 0)
    def _multiply():
        if isinstance(inputs.attended, DecodeStates):
            merge_row(
                inputs.attended,
                program=program,
                num_programs=config.num_programs,
                publish=lambda start, values: publish(
                    inputs.mailbox,
                    attended_start + start,
                    rounded(values),
                    interpret=interpret,
                ),
                interpret=interpret,
            )
        else:
            ops.wait_for_previous_kernel(interpret=interpret)
        clear(inputs.next_mailbox)
        buffer = None
        if peers is not None:
            in_grid = dict(program=program, num_programs=config.num_programs)
            buffer = device_mail.begin(peers, **in_grid)
        store = functools.partial(publish_sums, buffer, o_start, config.o_splits)
        used = multiply(products["o"], 0, load_x=load_attended, store=store)
        # Loaded before the results of other programs: then nothing waits for them after these.
        residual = load_row(inputs.residual.at[0], scratch.residual)
        norm = load_row(weights.mlp_norm, scratch.x)
        add_and_norm(residual, o_start, config.o_splits, norm, buffer)
        if routing is not None:
            num_experts = num_features["router"]
            bias = load_bias(weights.router_bias, num_experts, interpret=interpret)
            store = functools.partial(publish_part, logits_start, size=num_experts)
            used = multiply(products["router"], used, store=store)
            layout = logits_layout(num_experts)
            logits = sum_of_parts(logits_start, config.router_splits, num_experts, layout)
            how = dict(real_experts=real_experts, interpret=interpret)
            choose(logits + bias, scratch.choice, routing, **how)

            @pl.when(program == 0)
            def _():
                chosen = ops.load_shared(scratch.choice.experts, ops.WGMMA_ROW)
                ops.store(outputs.experts, chosen)

        store = functools.partial(publish_part, 0, size=hidden_size)
        used = multiply(products["gate_up"], used, finish=hidden_of, store=store)
        load_hidden = functools.partial(wait_for_row, 0)
        store = functools.partial(publish_sums, buffer, down_start, config.down_splits)
        used = multiply(products["down"], used, load_x=load_hidden, finish=down_of, store=store)
        residual = plgpu.load(scratch.residual, layout=vector)
        norm = load_row(weights.out_norm, scratch.x)
        residual, normed = add_and_norm(residual, down_start, config.down_splits, norm, buffer)
        if buffer is not None:
            device_mail.end(peers, buffer, **in_grid)

        if size == real_size:

            @pl.when(program == 0)
            def _():
                ops.store(outputs.residual.at[0], residual)
                if "qkv" not in products:
                    ops.store(outputs.out.at[0], normed)

        else:
            n = config.num_programs

            @pl.loop(0, lax.div(real_size // TILE - 1 - program + n, n))
            def _(i):
                tile = pl.ds((program + i * n) * TILE, TILE)
                rows = [(outputs.residual, scratch.residual), (outputs.out, scratch.x)]
                for to, row in rows[:1] if "qkv" in products else rows:
                    ops.store(to.at[0, tile], ops.load_shared(row.at[tile], ops.WGMMA_ROW))

        if "qkv" in products:
            multiply(products["qkv"], used, store=store_out)

    @pl.when(lax.axis_index("wg") == 1)
    def _send():
        send_products(products, scratch, program)


def between_attentions(
    attended: jax.Array | DecodeStates,  # [1, A] of 16 bits, or states of one row to merge
    residual: jax.Array,  # [1, E]
    mailboxes: tuple[jax.Array, jax.Array],  # from `new_mailboxes` or from the call before
    weights: BlockWeights,  # of the dtype of the residual
    *,
    eps: float,
    config: DecoderBlockConfig,
    routing: Routing | None = None,
    peers: PeerMemory | None = None,
    interpret: bool = False,
) -> tuple[Any, ...]:
    """Return the residual, the next `qkv` or the norm, and the mailboxes of the next call.

    With `routing`, which is for weights with a router, the chosen experts i32`[1, k]` are before
    the mailboxes. If it is interpreted, the config is of one program. With
    `peers` devices share the columns of o and down, and the features of the other weights.
    """
    mailbox, next_mailbox = map(jax.new_ref, mailboxes)
    num_features, given = padded_features(weights), weights
    if interpret:
        experts = None if routing is None else ()
        products = products_of(weights, config, num_features, experts)
        given = dataclasses.replace(
            weights, **{name: product.padded_weight() for name, product in products.items()}
        )
    inputs = BlockInputs(
        attended=attended,
        residual=residual,
        weights=given,
        mailbox=mailbox,
        next_mailbox=next_mailbox,
        peers=peers,
    )
    real_experts = 0 if weights.router is None else len(weights.router)
    how: Any = dict(
        eps=eps,
        config=config,
        routing=routing,
        num_features=num_features,
        real_experts=real_experts,
    )
    outputs = ops.run_kernel(
        functools.partial(_block_kernel, **how, interpret=interpret),
        inputs,
        output_types(weights, residual.dtype),
        scratch_types(weights, config, residual.dtype),
        name="between_attentions",
        params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        grid=(config.num_programs,),
        grid_names=("program",),
        num_threads=2,
        thread_name="wg",
    )
    mailboxes = jax.freeze(next_mailbox), jax.freeze(mailbox)
    if routing is None:
        return outputs.residual, outputs.out, mailboxes
    experts = outputs.experts[None, : routing.num_experts_per_tok]
    return outputs.residual, outputs.out, experts, mailboxes
