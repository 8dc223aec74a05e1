"""The pipeline of K/V blocks through shared memory that the kernels for Hopper read.

A program is one producer warpgroup and one or two consumer warpgroups. The producer starts copies
by the tensor memory accelerator (TMA): pages of K and V, found in the block table, go to the stages
of a ring. Consumers wait until a stage is full, use it and mark it free:

    pages in device memory     ring in shared memory         consumers
    [7] [2] [9] [4] ...   -->  | k0 v0 | k1 v1 | ... |  -->  q.k, softmax, p.v
              copy               full >        < free

K and V of a stage have their own barriers, so q.k starts while V is still on its way.

Both sides count the blocks of K/V from the start of the program, across its work items, so the
ring does not run empty between two items. That count is `kv_iter`; block `kv_iter` is in stage
`kv_iter % num_stages`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_paged.checks import pytree
from pallas_paged.kernels.mosaic import ops
from pallas_paged.kernels.mosaic.pages import Pages
from pallas_paged.pages.layout import K, V

_ZEROED_ROWS = 64  # of one load: the registers of a warpgroup hold as many of up to 256 elements


@pytree
class Ring:
    """Refs of a ring, or their types."""

    k: Any  # [num_stages, block_k, head_dim] in shared memory
    v: Any  # [num_stages, block_k, v_head_dim]
    k_full: Any  # barriers [num_stages], complete when all pages of a block have arrived
    v_full: Any
    k_free: Any  # barriers [num_stages], complete when all consumers have used a block
    v_free: Any

    @property
    def num_stages(self) -> int:
        return self.k.shape[0]

    def stage_of(self, kv_iter: jax.Array) -> jax.Array:
        """Return the stage of a block."""
        return lax.rem(kv_iter, self.num_stages)

    @classmethod
    def types(
        cls,
        *,
        num_stages: int,
        block_k: int,
        head_dim: int,
        v_head_dim: int,
        page_size: int,
        dtype: Any,
        num_consumers: int,
        swizzle: int = 128,
    ) -> Ring:
        """Return the types of the refs, to rows of `swizzle` bytes or a multiple."""
        transforms = ops.swizzled_rows(dtype, swizzle)
        k, v = (
            plgpu.SMEM((num_stages, block_k, dim), dtype, transforms=transforms)
            for dim in (head_dim, v_head_dim)
        )
        full = plgpu.Barrier(num_arrivals=max(block_k // page_size, 1), num_barriers=num_stages)
        free = plgpu.Barrier(num_arrivals=num_consumers, num_barriers=num_stages)
        return cls(k=k, v=v, k_full=full, v_full=full, k_free=free, v_free=free)


def wgmma_transforms(dtype: Any) -> tuple[Any, ...]:
    """Return the transforms of wgmma operands in shared memory: swizzled rows of 128 bytes."""
    return ops.swizzled_rows(dtype, 128)


def page_to_read(page: jax.Array, first_page: jax.Array | None, last_page: jax.Array) -> jax.Array:
    """Return a page of a sequence, or in place of one that no query sees the nearest other one.

    Entries of the block table past the sequence's last page and left of its window may hold
    anything, so a page that is needed is copied again. The consumer masks its tokens.
    """
    if first_page is not None:
        page = jnp.maximum(page, first_page)
    return jnp.minimum(page, last_page)


def stream(
    ring: Ring,
    pages: Pages,
    row: jax.Array,
    kv_head: jax.Array,
    *,
    lo: jax.Array,
    hi: jax.Array,
    kv_len: jax.Array,
    kv_iter: jax.Array,
    first_key: jax.Array | None = None,
) -> jax.Array:
    """Send the blocks `[lo, hi)` of a row of `kv_len` tokens; return `kv_iter + hi - lo`.

    The producer has sent `kv_iter` blocks before. `first_key` is the first that any query sees;
    None for all.
    """
    num_stages, block_k = ring.num_stages, ring.k.shape[1]
    page_size, block_table = pages.page_size, pages.block_tables.at[row]
    tokens_per_copy = min(page_size, block_k)
    first_page = None if first_key is None else first_key // page_size
    last_page = (kv_len - 1) // page_size

    def numbers_of(block):
        return tuple(
            block_table[page_to_read((block * block_k + i) // page_size, first_page, last_page)]
            for i in range(0, block_k, tokens_per_copy)
        )

    def send(block, carry):
        kv_iter, numbers = carry
        stage = ring.stage_of(kv_iter)
        # The table is read one block ahead, so the copies need not wait for it.
        next_numbers = numbers_of(jnp.minimum(block + 1, hi - 1))
        for kv, blocks, full, free in (
            (K, ring.k, ring.k_full, ring.k_free),
            (V, ring.v, ring.v_full, ring.v_free),
        ):
            ops.wait_if(kv_iter >= num_stages, free.at[stage])
            for i, page in enumerate(numbers):
                first = lax.rem(block * block_k, page_size) if page_size > tokens_per_copy else 0
                tokens = pl.ds(first, tokens_per_copy)
                plgpu.copy_gmem_to_smem(
                    pages.box(kv, page=page, tokens=tokens, kv_head=kv_head),
                    blocks.at[stage, pl.ds(i * tokens_per_copy, tokens_per_copy)],
                    full.at[stage],
                )
        return kv_iter + 1, next_numbers

    return lax.fori_loop(lo, hi, send, (kv_iter, numbers_of(lo)))[0]


def zero_unreadable(
    ring: Ring, stage: Any, block: Any, *, first_key: Any, kv_len: Any, commit: bool
) -> None:
    """Zero V of a block but for the keys `[first_key, kv_len)`: it may be NaN, and 0 * NaN is NaN.

    With `commit` the tensor cores see the zeros.
    """
    block_k = ring.v.shape[1]
    for part in range(0, block_k, _ZEROED_ROWS):
        first = block * block_k + part

        @pl.when((first < first_key) | (first + _ZEROED_ROWS > kv_len))
        def _(part=part, first=first):
            v_ref = ring.v.at[stage, pl.ds(part, _ZEROED_ROWS)]
            v = plgpu.load(v_ref, layout=ops.WGMMA)
            keys = first + ops.iota(v.shape, 0, ops.WGMMA)
            readable = (keys >= first_key) & (keys < kv_len)
            v_ref[...] = jnp.where(readable, v, jnp.zeros_like(v))
            if commit:
                plgpu.commit_smem()


def drain(ring: Ring, kv_iter: jax.Array) -> None:
    """Wait until the consumers have used all of the `kv_iter` blocks that were sent."""

    @pl.loop(jnp.maximum(kv_iter - ring.num_stages, 0), kv_iter)
    def _(sent):
        for free in (ring.k_free, ring.v_free):
            plgpu.barrier_wait(free.at[ring.stage_of(sent)])
