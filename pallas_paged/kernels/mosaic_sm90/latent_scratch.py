"""Shared memory of a program of the kernel of latent attention."""

from __future__ import annotations

import functools
from typing import Any, Self

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_paged.checks import pytree
from pallas_paged.kernels.mosaic import ops
from pallas_paged.kernels.mosaic_sm80.ragged_products import padded

ROWS = 64  # of a tile: one wgmma
BLOCK_K = 32
NUM_CONSUMERS = 2
HEADS_MULTIPLE = 8  # rows that a swizzle pattern spans, at whose multiples tokens begin
CLUSTER = "half"  # axis of the programs of a cluster, which share a tile and all blocks of keys
SWIZZLE = 64  # bytes: the probabilities of a block are one tile wide
_NUM_STAGES = 4
_NUM_CONVERTED_STAGES, _NUM_BYTE_STAGES = 3, 2  # of one-byte pages


@pytree
class LatentScratch:
    """Refs in shared memory of a program, or their types.

    Attributes:
        q: `[64, D]` and `[64, R]`, the queries, a union with `ending`.
        ending: once both consumers have read the queries, of each its results
            `[64, D / 2 + pad]`, and i32`[2, 64]`, of each the indices of its rows in `[T * Hq]`.
        k: `[stages, 32, D + R]`, blocks of latents.
        p: of each consumer, `[64, 32]`, the probabilities of its last block.
        of_rows: f32`[2, 2, 64]`, `maxima` and `factors`.
        bytes: `[stages, 32, D + R]`, blocks of one-byte latents before their conversion, or None.
        scales: f32`[stages, 32]`, of the tokens in `k`, or None.
        q_full: barrier, complete when the queries are there.
        k_full: barriers `[stages]`, complete when a block is there.
        k_free: barriers `[stages]`, complete when both consumers have used a block; those of all
            programs of the cluster, if TMA copies to all.
        bytes_full, bytes_free: the same of `bytes`, or None; one warpgroup of a program uses them.
        cluster_done: barrier, complete when no program of the cluster signals another one any more;
            None for one program.
        p_full: barriers `[2]`, complete when the last block of a consumer is in `p`.
        meeting: barrier of both consumers.
    """

    q: Any
    ending: Any
    k: Any
    p: Any
    of_rows: Any
    bytes: Any
    scales: Any
    q_full: Any
    k_full: Any
    k_free: Any
    bytes_full: Any
    bytes_free: Any
    cluster_done: Any
    p_full: Any
    meeting: Any

    @property
    def queries(self) -> Any:
        """The queries: `[64, D]` and `[64, R]`."""
        return self.q if self.ending else self.q[0]

    @property
    def results(self) -> Any:
        return (self.ending or self.q[1])[0]

    @property
    def rows(self) -> Any:
        return (self.ending or self.q[1])[1]

    @property
    def maxima(self) -> Any:
        """The maxima f32`[2, 64]` of the rows after each consumer's last block."""
        return self.of_rows.at[0]

    @property
    def factors(self) -> Any:
        """The factors f32`[2, 64]` by which each consumer's last block changes older sums."""
        return self.of_rows.at[1]

    @classmethod
    def types(
        cls,
        *,
        head_dim: int,
        rope_dim: int,
        page_size: int,
        dtype: Any,
        kv_dtype: Any,
        cluster_size: int,
        interpret: bool,
    ) -> Self:
        """Return the types of the refs."""
        converts = kv_dtype != dtype
        of_cluster: Any = plgpu.Barrier
        if shares_blocks := cluster_size > 1 and not interpret:
            of_cluster = functools.partial(plgpu.ClusterBarrier, collective_axes=(CLUSTER,))

        def swizzled(shape, dtype):
            return plgpu.SMEM(shape, dtype, transforms=ops.swizzled_rows(dtype, SWIZZLE))

        q: Any = [swizzled((ROWS, dim), dtype) for dim in (head_dim, rope_dim)]
        width = padded(head_dim // NUM_CONSUMERS, dtype)
        results = [plgpu.SMEM((ROWS, width), dtype) for _ in range(NUM_CONSUMERS)]
        ending: Any = [results, plgpu.SMEM((NUM_CONSUMERS, ROWS), jnp.int32)]
        if not interpret:  # to the interpreter's search for races a union is one buffer
            q, ending = plgpu.RefUnion(q, ending), None
        num_stages = _NUM_CONVERTED_STAGES if converts else _NUM_STAGES
        copied = functools.partial(plgpu.Barrier, num_arrivals=max(BLOCK_K // page_size, 1))
        return cls(
            q=q,
            ending=ending,
            k=swizzled((num_stages, BLOCK_K, head_dim + rope_dim), dtype),
            p=[swizzled((ROWS, BLOCK_K), dtype) for _ in range(NUM_CONSUMERS)],
            of_rows=plgpu.SMEM((2, NUM_CONSUMERS, ROWS), jnp.float32),
            bytes=swizzled((_NUM_BYTE_STAGES, BLOCK_K, head_dim + rope_dim), kv_dtype)
            if converts
            else None,
            scales=plgpu.SMEM((num_stages, BLOCK_K), jnp.float32) if converts else None,
            q_full=plgpu.Barrier(num_arrivals=2),
            k_full=plgpu.Barrier(num_barriers=num_stages)
            if converts
            else copied(num_barriers=num_stages),
            k_free=(plgpu.Barrier if converts else of_cluster)(
                num_arrivals=NUM_CONSUMERS, num_barriers=num_stages
            ),
            bytes_full=copied(num_barriers=_NUM_BYTE_STAGES) if converts else None,
            bytes_free=of_cluster(num_barriers=_NUM_BYTE_STAGES) if converts else None,
            cluster_done=of_cluster(num_arrivals=NUM_CONSUMERS) if shares_blocks else None,
            p_full=plgpu.Barrier(num_barriers=NUM_CONSUMERS),
            meeting=plgpu.Barrier(num_arrivals=NUM_CONSUMERS),
        )
