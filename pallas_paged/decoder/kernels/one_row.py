"""All products between two attentions of one row, a persistent Pallas Mosaic kernel for Hopper.

    attended = merge of the states of attention, or given
    residual += attended o^T
    hidden = swiglu(norm(residual) gate_up^T)
    residual += hidden down^T
    out = norm(residual) qkv^T

With a router each program chooses the experts of the row by the logits, which are one more product,
and gate, up and down are those of the experts: `hidden` of one after the other, and a sum of down
over them with their weights.

It takes as long as the weights take to be read, so the kernel is one pipeline of copies that is
hardly ever empty. A program is two warpgroups, and there is one program per SM. The producer sends
its blocks of all four weights through a ring in shared memory, one after the other. It does not
wait for activations: while programs wait for one another, the ring fills.

The consumer multiplies. A program has tiles of 64 features. Weights with few such tiles are split
along K, too. Results go to a mailbox in device memory: partial sums in f32, which each program adds
up in the same order, so that results have the same bits each time.

Two blocks of 32 KB per SM are on their way at once, no more: that is enough for the full rate of
the memory, and published results would have to queue behind more.

The programs wait for one another, so all must be on the device at once. They are: there are no more
of them than SMs, each SM has room for one, and the programs of kernels before end without them.
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

from pallas_paged.checks import pytree
from pallas_paged.decoder.kernels.one_row_mailbox import EMPTY, publish, wait_for_mail
from pallas_paged.decoder.kernels.one_row_merge import merge_row
from pallas_paged.decoder.kernels.one_row_product import HALF, Product, multiply_by_row
from pallas_paged.decoder.kernels.one_row_router import SLOTS, ChoiceScratch, choose, logits_layout
from pallas_paged.decoder.kernels.operands import BlockInputs, BlockWeights, Routing
from pallas_paged.kernels.call import result_shape
from pallas_paged.kernels.decode_states import DecodeStates
from pallas_paged.kernels.mosaic import ops
from pallas_paged.kernels.mosaic_sm90.config import LINEAR_TILE as TILE
from pallas_paged.kernels.mosaic_sm90.config import DecoderBlockConfig
from pallas_paged.kernels.mosaic_sm90.ring import wgmma_transforms

_CLEARED = 256  # elements of a mailbox that a program clears at once
_PADDING = 64  # elements that are read behind a row
_AWAITED = 16384  # elements of partial sums that the registers of a warpgroup hold at once


@pytree
class OneRowOutputs:
    """Refs to device memory, or their types."""

    residual: Any  # [1, E]
    out: Any  # [1, N], or the norm [1, E]
    experts: Any = None  # i32[SLOTS]


@pytree
class OneRowScratch:
    """Refs in shared memory, or their types."""

    weights: Any  # [num_stages, 2 * TILE, HALF], one half below the other
    x: Any  # [columns of the longest part of a row + _PADDING]
    residual: Any  # [E]
    full: Any  # barriers [num_stages], complete when both halves have arrived
    free: Any  # barriers [num_stages], complete when they were used
    choice: Any = None  # `ChoiceScratch`


def _block_kernel(
    inputs: BlockInputs,
    outputs: OneRowOutputs,
    scratch: OneRowScratch,
    *,
    eps: float,
    config: DecoderBlockConfig,
    routing: Routing | None,
    interpret: bool,
) -> None:
    """Run one program: warpgroup 0 multiplies, warpgroup 1 sends."""
    program, weights = lax.axis_index("program"), inputs.weights
    num_stages, size = scratch.weights.shape[0], scratch.residual.shape[0]
    dtype, num_in_flight = scratch.x.dtype, config.num_in_flight
    product_of = functools.partial(Product, num_programs=config.num_programs)
    o = product_of(weight=weights.o, num_splits=config.o_splits)
    gate_up = product_of(weight=weights.gate_up)
    down = product_of(weight=weights.down, num_splits=config.down_splits)
    if routing is not None:
        router = product_of(weight=weights.router, num_splits=config.router_splits)
        of_experts = dict(num_splits=config.down_splits, experts=scratch.choice.experts)
        gate_up, down = (dataclasses.replace(x, **of_experts) for x in (gate_up, down))
    qkv = None if weights.qkv is None else product_of(weight=weights.qkv)
    vector = plgpu.Layout.WG_STRIDED((size,), vec_size=4)

    def send(product, sent):
        def send_item(index, sent):
            features, split = product.item(program, index)

            def send_block(block, sent):
                stage = ops.free_stage(scratch.free, sent)

                @pl.when(sent >= num_in_flight)
                def _():
                    plgpu.barrier_wait(scratch.full.at[lax.rem(sent - num_in_flight, num_stages)])

                for i, half in enumerate(product.halves(features, split, block)):
                    plgpu.copy_gmem_to_smem(
                        half,
                        scratch.weights.at[stage, pl.ds(i * TILE, TILE)],
                        scratch.full.at[stage],
                    )
                return sent + 1

            return lax.fori_loop(0, product.num_blocks, send_block, sent)

        return lax.fori_loop(0, product.num_items(program), send_item, sent)

    def strided(num_elements):
        return plgpu.Layout.WG_STRIDED((num_elements,), vec_size=_vec_size(num_elements))

    def set_x(row):
        """Store a row, or a part of it, to shared memory."""
        scratch.x.at[pl.ds(0, row.shape[0])][...] = row.astype(dtype)
        plgpu.commit_smem()

    def multiply(product, used, *, load_x=None, store):
        """Multiply a program's items; return how many stages were used before and now.

        Without `load_x`, which stores columns of a row, x in shared memory is a full row.
        """

        def multiply_item(index, used):
            features, split = product.item(program, index)
            start = 0 if product.experts is not None else split * product.num_columns
            if load_x is not None:
                load_x(pl.ds(split * product.num_columns, product.num_columns))
                start = 0

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
            sums = [jnp.sum(jnp.where(is_x, acc, 0.0), axis=1) for acc in accs]
            store(features, split, sums)
            return used

        return lax.fori_loop(0, product.num_items(program), multiply_item, used)

    hidden_size = weights.gate_up.shape[-3]
    o_start = hidden_size if routing is None else hidden_size * config.down_splits
    down_start = o_start + config.o_splits * size
    attended_start = down_start + config.down_splits * size
    logits_start = attended_start + weights.o.shape[1]

    def publish_part(start, features, split, sums, size=size):
        publish(inputs.mailbox, start + split * size + features.start, sums[0], interpret=interpret)

    def publish_down(features, split, sums):
        if routing is not None:  # rounded as the rows of experts are
            row = sums[0].astype(dtype).astype(jnp.float32)
            sums = [row * scratch.choice.weights[split]]
        publish_part(down_start, features, split, sums)

    def publish_hidden(features, split, sums):
        # Rounded as separate products are.
        gate, up = (x.astype(dtype).astype(jnp.float32) for x in sums)
        hidden = (gate * (1.0 / (1.0 + jnp.exp(-gate))) * up).astype(dtype).astype(jnp.float32)
        start = 0 if routing is None else split * hidden_size
        publish(inputs.mailbox, start + features.start, hidden, interpret=interpret)

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

    def store_out(features, split, sums):
        ops.store(outputs.out.at[0, features], sums[0].astype(dtype))

    def sum_of_parts(start, num_splits, size, layout):
        total = None
        at_once = max(_AWAITED // size, 1)
        for first in range(0, num_splits, at_once):
            splits = range(first, min(first + at_once, num_splits))
            starts = [start + split * size for split in splits]
            for part in wait_for_mail(inputs.mailbox, starts, layout, size, interpret=interpret):
                total = part if total is None else total + part
        return total

    def add_and_norm(residual, start, num_splits, weight):
        """Add a product to the residual and norm it; return both, in shared memory too."""
        total = sum_of_parts(start, num_splits, size, vector)
        x = (residual.astype(jnp.float32) + total.astype(dtype).astype(jnp.float32)).astype(dtype)
        x32 = x.astype(jnp.float32)
        scale = lax.rsqrt(jnp.sum(x32 * x32) / size + eps)
        normed = (x32 * scale * weight.astype(jnp.float32)).astype(dtype)
        scratch.residual[...] = x
        set_x(normed)
        return x, normed

    def clear(mailbox):
        """Clear this program's part of a mailbox."""

        @pl.loop(0, (mailbox.shape[0] // _CLEARED - 1 - program) // config.num_programs + 1)
        def _clear(i):
            start = (program + i * config.num_programs) * _CLEARED
            empty = ops.full((_CLEARED,), EMPTY, strided(_CLEARED), jnp.int32)
            ops.store(mailbox.at[pl.ds(start, _CLEARED)], empty)

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
                    values.astype(dtype).astype(jnp.float32),
                    interpret=interpret,
                ),
                interpret=interpret,
            )
        else:
            ops.wait_for_previous_kernel(interpret=interpret)
        clear(inputs.next_mailbox)
        used = multiply(o, 0, load_x=load_attended, store=functools.partial(publish_part, o_start))
        # Loaded before the results of other programs: then nothing waits for them after these.
        residual, norm = ops.load(inputs.residual.at[0], vector), ops.load(weights.mlp_norm, vector)
        add_and_norm(residual, o_start, config.o_splits, norm)
        if routing is not None:
            num_experts = weights.router.shape[0]
            store = functools.partial(publish_part, logits_start, size=num_experts)
            used = multiply(router, used, store=store)
            layout = logits_layout(num_experts)
            logits = sum_of_parts(logits_start, config.router_splits, num_experts, layout)
            experts = choose(logits, scratch.choice, routing)

            @pl.when(program == 0)
            def _():
                ops.store(outputs.experts, experts)

        used = multiply(gate_up, used, store=publish_hidden)
        used = multiply(
            down,
            used,
            load_x=functools.partial(wait_for_row, 0),
            store=publish_down,
        )
        residual = plgpu.load(scratch.residual, layout=vector)
        norm = ops.load(weights.out_norm, vector)
        residual, normed = add_and_norm(residual, down_start, config.down_splits, norm)

        @pl.when(program == 0)
        def _():
            ops.store(outputs.residual.at[0], residual)
            if qkv is None:
                ops.store(outputs.out.at[0], normed)

        if qkv is not None:
            multiply(qkv, used, store=store_out)

    @pl.when(lax.axis_index("wg") == 1)
    def _send():
        sent = send(o, jnp.int32(0))
        if routing is not None:
            sent = send(router, sent)
            plgpu.barrier_wait(scratch.choice.chosen)
        for product in (gate_up, down, *(() if qkv is None else (qkv,))):
            sent = send(product, sent)
        ops.drain(scratch.free, sent)
        ops.drain(scratch.full, sent, num_in_flight)


def between_attentions(
    attended: jax.Array | DecodeStates,
    residual: jax.Array,
    mailboxes: tuple[jax.Array, jax.Array],
    weights: BlockWeights,
    *,
    eps: float,
    config: DecoderBlockConfig,
    routing: Routing | None = None,
    interpret: bool = False,
) -> tuple[Any, ...]:
    """Return the residual, the next `qkv` or the norm, and the mailboxes of the next call.

    With `routing`, the chosen experts i32`[1, k]` are before the mailboxes.

    Args:
        attended: `[1, A]` of 16-bit elements, or the states of one row, which are merged here.
        residual: `[1, E]`.
        mailboxes: from `new_mailboxes` or from the call before.
        weights: without biases.
        eps: epsilon of the norms.
        config: the config; of one program if interpreted.
        routing: how experts are chosen, of weights with a router.
    """
    (_, size), dtype, qkv = residual.shape, residual.dtype, weights.qkv
    mailbox, next_mailbox = map(jax.new_ref, mailboxes)
    inputs = BlockInputs(
        attended=attended,
        residual=residual,
        weights=weights,
        mailbox=mailbox,
        next_mailbox=next_mailbox,
    )
    outputs = OneRowOutputs(
        residual=result_shape((1, size), dtype),
        out=result_shape((1, size if qkv is None else qkv.shape[0]), dtype),
        experts=None if routing is None else result_shape((SLOTS,), jnp.int32),
    )
    attended_size, hidden_size = weights.o.shape[1], weights.gate_up.shape[-3]
    if routing is None:
        hidden_size //= config.down_splits
    columns = max(size, attended_size // config.o_splits, hidden_size)
    scratch = OneRowScratch(
        weights=plgpu.SMEM(
            (config.num_stages, 2 * TILE, HALF), dtype, transforms=wgmma_transforms(dtype)
        ),
        x=plgpu.SMEM((columns + _PADDING,), dtype),
        residual=plgpu.SMEM((size,), dtype),
        full=plgpu.Barrier(num_arrivals=2, num_barriers=config.num_stages),
        free=plgpu.Barrier(num_barriers=config.num_stages),
        choice=None if weights.router is None else ChoiceScratch.types(len(weights.router)),
    )
    kernel = functools.partial(_block_kernel, eps=eps, config=config, routing=routing)
    outputs = ops.run_kernel(
        functools.partial(kernel, interpret=interpret),
        inputs,
        outputs,
        scratch,
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


def new_mailboxes(config: DecoderBlockConfig, weights: BlockWeights) -> tuple[jax.Array, jax.Array]:
    """Return two cleared mailboxes, for the first of several calls with weights of these sizes."""
    (size, attended_size), hidden_size = weights.o.shape, weights.gate_up.shape[-3]
    num_elements = (config.o_splits + config.down_splits) * size + attended_size
    if weights.router is None:
        num_elements += hidden_size
    else:
        num_elements += config.down_splits * hidden_size
        num_logits = config.router_splits * len(weights.router)
        num_elements += -(-num_logits // _CLEARED) * _CLEARED
    empty = jnp.full(num_elements, EMPTY, jnp.int32)
    return empty, empty


def _vec_size(size: int) -> int:
    """Return how many elements of a vector a thread takes at once."""
    return 4 if size % 512 == 0 else 2
