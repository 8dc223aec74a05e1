"""Operands and shared memory of a program of the ragged kernel."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_paged.checks import pytree
from pallas_paged.kernels.call import Arrays
from pallas_paged.kernels.mosaic.pages import Pages
from pallas_paged.kernels.mosaic.ragged_work import DESCRIPTOR_WORDS
from pallas_paged.kernels.mosaic_sm90.config import MosaicSm90RaggedConfig
from pallas_paged.kernels.mosaic_sm90.ragged_converter import byte_ring, k_arrivals
from pallas_paged.kernels.mosaic_sm90.ragged_tile import CHUNK, WG_ROWS, TileShape, store_buffer
from pallas_paged.kernels.mosaic_sm90.ring import Ring, wgmma_transforms
from pallas_paged.kernels.mosaic_sm90.tile_scheduler import Mailbox, Work


@pytree
class RaggedInputs:
    """Operands of the kernel, or refs to them."""

    q: Any  # [T, Hq, D], padded to a multiple of a chunk of tokens
    pages: Pages
    work: Work
    alibi_slopes: Any  # f32[Hq] or None
    sinks: Any  # f32[Hq] or None
    converted: Any  # ConvertedRows, of int8 and fp8 pages; or None
    counter: Any  # i32[1], a ref, of the tile scheduler

    @classmethod
    def of(cls, arrays: Arrays, work: Work, converted: Any) -> Self:
        """Return the operands of a call."""
        return cls(
            # TMA copies chunks of 8 tokens.
            q=jnp.pad(arrays.q, ((0, -arrays.q.shape[0] % CHUNK), (0, 0), (0, 0))),
            pages=Pages.of(arrays),
            work=work,
            alibi_slopes=arrays.alibi_slopes,
            sinks=arrays.sinks,
            converted=converted,
            counter=jax.new_ref(jnp.zeros(1, jnp.int32)),
        )


@pytree
class RaggedScratch:
    """Refs in shared memory of a program, or their types."""

    out: Any  # [num_consumers, 64, width] of `store_buffer`; None where `q` has results, too
    mailbox: Mailbox
    q_free: Any  # barriers [num_q_stages], complete when consumers have used queries and mailbox
    q_full: Any  # barriers [num_q_stages], complete when queries and mailbox are there
    q: Any  # [num_q_stages, num_consumers, 64, D], or a union with results
    ring: Ring
    bytes: Any  # Ring of int8 and fp8 pages, from which the converter fills the other one; or None
    k_scales: Any  # f32[num_stages, block_k] beside `ring`; None where logits have no scales
    turn: Any  # barrier of all consumers; None for one, and if all blocks have to be converted


def scratch_types(
    config: MosaicSm90RaggedConfig,
    *,
    group: int,
    head_dim: int,
    v_head_dim: int | None = None,
    page_size: int,
    dtype: Any,
    kv_dtype: Any = None,
    scaled_logits: bool = True,
    converted: Any = None,
    interpret: bool = False,
) -> RaggedScratch:
    """Return the types of the shared memory of a program.

    Args:
        scaled_logits: whether each token has a scale of its own, if pages are int8 or fp8.
        converted: `ConvertedRows` of the call, or None.
    """
    num_consumers, num_q_stages = config.num_consumers, config.num_q_stages
    tile = TileShape.of(group, config.block_q)
    convert = kv_dtype is not None and kv_dtype != dtype
    q: Any = plgpu.SMEM(
        (num_q_stages, num_consumers, WG_ROWS, head_dim), dtype, transforms=wgmma_transforms(dtype)
    )
    of_v = head_dim if v_head_dim is None else v_head_dim
    out = store_buffer(num_warpgroups=num_consumers, head_dim=of_v, dtype=dtype)
    if convert or of_v != head_dim:  # there is no room for both
        # Queries and results of one stage and consumer have the same place and are never both in
        # use. Other consumers may still use theirs, so results have as many rows as fill that
        # place. To the interpreter's search for races a union is one buffer.
        width = out.shape[-1]
        results = plgpu.SMEM(
            (num_q_stages, num_consumers, WG_ROWS * head_dim // width, width), dtype
        )
        q, out = (q, results) if interpret else plgpu.RefUnion(q, results), None
    ring = Ring.types(
        num_stages=config.num_stages,
        block_k=config.block_k,
        head_dim=head_dim,
        v_head_dim=of_v,
        page_size=config.block_k if convert else page_size,  # the converter copies full blocks
        dtype=dtype,
        num_consumers=num_consumers,
    )
    k_scales = None
    if convert and scaled_logits:
        k_scales = plgpu.SMEM((config.num_stages, config.block_k), jnp.float32)
    if convert:
        arrivals = k_arrivals(k_scales, converted)
        full = plgpu.Barrier(num_arrivals=arrivals, num_barriers=config.num_stages)
        ring = dataclasses.replace(ring, k_full=full)
    waits = num_consumers > 1 and (not convert or converted is not None)
    return RaggedScratch(
        out=out,
        mailbox=Mailbox(buffer=plgpu.SMEM((num_q_stages + 1, DESCRIPTOR_WORDS), jnp.int32)),
        q_free=plgpu.Barrier(num_arrivals=num_consumers + convert, num_barriers=num_q_stages),
        q_full=plgpu.Barrier(num_arrivals=q_arrivals(tile), num_barriers=num_q_stages),
        q=q,
        ring=ring,
        bytes=(
            byte_ring(config, head_dim=head_dim, page_size=page_size, dtype=kv_dtype)
            if convert
            else None
        ),
        k_scales=k_scales,
        turn=plgpu.Barrier(num_arrivals=num_consumers) if waits else None,
    )


def registers_of(num_consumers: int, *, converts: bool) -> dict[str, int]:
    """Return the registers of a thread of each kind of warpgroup, multiples of 8.

    All threads of an SM have 65536. Four warpgroups of 128 threads begin with 128 for each, so with
    two consumers a converter has few to give.
    """
    if converts:
        consumer, producer, converter = (240, 40, 160) if num_consumers == 1 else (200, 32, 80)
        return dict(consumer=consumer, producer=producer, converter=converter)
    consumer, producer = (160, 32) if num_consumers == 3 else (232, 40)
    return dict(consumer=consumer, producer=producer)


def q_arrivals(tile: TileShape) -> int:
    """Return the arrivals that fill a stage of queries: work id, descriptor, copies of q."""
    return 2 + sum(len(tile.runs(h)) for h in range(tile.num_heads))
