"""The ring of K/V blocks in shared memory that every Mosaic kernel reads, and who fills it.

A program is one producer warpgroup and some consumer warpgroups. The producer has the tensor memory
accelerator (TMA) copy pages of K and V, by their numbers in the block table, into the slots of a
ring; consumers wait until a slot is full, use it and say when it is free again:

    pages in device memory     ring in shared memory         consumers
    [7] [2] [9] [4] ...   -->  | k0 v0 | k1 v1 | ... |  -->  q.k, softmax, p.v
              copy               full >        < free

K and V of a slot have barriers of their own, so that q.k starts while V is still on its way.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Ring:
    """Refs of a ring, or their types.

    Attributes:
      k, v: `[num_stages, block_k, head_dim]` in shared memory.
      k_full, v_full: barriers `[num_stages]`, complete when all pages of a block have arrived.
      k_free, v_free: barriers `[num_stages]`, complete when all consumers have used a block.
    """

    k: Any
    v: Any
    k_full: Any
    v_full: Any
    k_free: Any
    v_free: Any


def ring_types(
    *,
    num_stages: int,
    block_k: int,
    head_dim: int,
    page_size: int,
    dtype: Any,
    num_consumers: int,
) -> Ring:
    """Types of the refs of a ring, for `scratch_types`."""
    tile = plgpu.SMEM((num_stages, block_k, head_dim), dtype, transforms=matrix_transforms(dtype))
    num_copies = max(block_k // page_size, 1)
    full = plgpu.Barrier(num_arrivals=num_copies, num_barriers=num_stages)
    free = plgpu.Barrier(num_arrivals=num_consumers, num_barriers=num_stages)
    return Ring(k=tile, v=tile, k_full=full, v_full=full, k_free=free, v_free=free)


def matrix_transforms(dtype: Any) -> tuple[Any, ...]:
    """How a matrix lies in shared memory for the matrix unit: in swizzled rows of 128 bytes."""
    return (
        plgpu.TilingTransform((8, 128 // jnp.dtype(dtype).itemsize)),
        plgpu.SwizzleTransform(128),
    )


def stream(
    ring: Ring,
    k_pages: Any,  # [P, S, D], of one KV head
    v_pages: Any,  # [P, S, D]
    block_table: Any,  # i32[N], of one row
    *,
    lo: jax.Array,
    hi: jax.Array,
    kv_len: jax.Array,
    step: jax.Array,
) -> jax.Array:
    """Sends the blocks `[lo, hi)` of a row of `kv_len` tokens through the ring.

    Args:
      step: blocks that the producer has sent before.

    Returns:
      `step + hi - lo`.
    """
    num_stages, block_k, _ = ring.k.shape
    _, page_size, _ = k_pages.shape
    tokens = min(page_size, block_k)  # of one copy
    last_page = (kv_len - 1) // page_size

    def pages_of(block):
        # Entries past the row's last page may hold anything: that page again instead. What it
        # brings is masked.
        return tuple(
            block_table[jnp.minimum((block * block_k + i) // page_size, last_page)]
            for i in range(0, block_k, tokens)
        )

    def send(block, carry):
        step, pages = carry
        slot = lax.rem(step, num_stages)
        # A block ahead: the copies need not wait for the table.
        next_pages = pages_of(jnp.minimum(block + 1, hi - 1))
        for pages_ref, tile, full, free in (
            (k_pages, ring.k, ring.k_full, ring.k_free),
            (v_pages, ring.v, ring.v_full, ring.v_free),
        ):

            @pl.when(step >= num_stages)
            def _(free=free):
                plgpu.barrier_wait(free.at[slot])

            for i, page in enumerate(pages):
                first = lax.rem(block * block_k, page_size) if page_size > tokens else 0
                plgpu.copy_gmem_to_smem(
                    pages_ref.at[page, pl.ds(first, tokens)],
                    tile.at[slot, pl.ds(i * tokens, tokens)],
                    full.at[slot],
                )
        return step + 1, next_pages

    step, _ = lax.fori_loop(lo, hi, send, (step, pages_of(lo)))
    return step


def drain(ring: Ring, step: jax.Array) -> None:
    """Waits until consumers have used all of the `step` blocks that were sent."""
    num_stages = ring.k.shape[0]

    @pl.loop(jnp.maximum(step - num_stages, 0), step)
    def _(sent):
        for free in (ring.k_free, ring.v_free):
            plgpu.barrier_wait(free.at[lax.rem(sent, num_stages)])
