"""The producer of the kernel of one row: blocks of all weights, through a ring in shared memory."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_paged.decoder.kernels.one_row_product import Product
from pallas_paged.decoder.kernels.one_row_refs import OneRowScratch
from pallas_paged.kernels.mosaic import ops
from pallas_paged.kernels.mosaic_sm90.config import LINEAR_TILE as TILE


def send_products(products: dict[str, Product], scratch: OneRowScratch, program: Any) -> None:
    """Send a program's blocks of each weight, those of experts once they are chosen."""
    num_stages = scratch.weights.shape[0]

    def wait_for_blocks(arrived: Any, end: Any) -> Any:
        """Wait until blocks before `end` have arrived; return how many have."""

        @pl.loop(arrived, end)
        def _(block):
            plgpu.barrier_wait(scratch.full.at[lax.rem(block, num_stages)])

        return jnp.maximum(arrived, end)

    def send_block(product: Product, features: Any, part: Any, block: Any, counts: Any) -> Any:
        sent, arrived = counts
        stage = ops.free_stage(scratch.free, sent)
        arrived = wait_for_blocks(arrived, sent + 1 - product.num_in_flight)
        for i, half in enumerate(product.halves(features, part, block)):
            to = scratch.weights.at[stage, pl.ds(i * TILE, product.tile)]
            plgpu.copy_gmem_to_smem(half, to, scratch.full.at[stage])
        return sent + 1, arrived

    counts: Any = jnp.int32(0), jnp.int32(0)  # blocks that were sent, and that have arrived
    for name, product in products.items():

        def send_item(index: Any, counts: Any, product: Product = product) -> Any:
            features, split = product.item(program, index)
            for part in product.parts(split):
                send = functools.partial(send_block, product, features, part)
                counts = lax.fori_loop(0, product.num_blocks, send, counts)
            return counts

        counts = lax.fori_loop(0, product.num_items(program), send_item, counts)
        if name == "router":
            plgpu.barrier_wait(scratch.choice.chosen)
    sent, arrived = counts
    ops.drain(scratch.free, sent)
    wait_for_blocks(arrived, sent)
