"""Shared memory that both forms of the kernel of latent attention have."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_paged.checks import pytree
from pallas_paged.kernels.mosaic_sm80.ragged_products import padded

ROWS = 64  # of a tile: one wgmma
NUM_CONSUMERS = 2
HEADS_MULTIPLE = 8  # rows that a swizzle pattern spans, at whose multiples tokens begin
CLUSTER = "half"  # axis of the programs of a cluster, which share a tile and all blocks of keys


@pytree
class LatentScratch:
    """Refs in shared memory of a program, or their types.

    Attributes:
        q: the queries, a union with `ending`.
        ending: once both consumers have read the queries, of each its results
            `[64, D / 2 + pad]`, and i32`[2, 64]`, of each the indices of its rows in `[T * Hq]`.
        of_rows: f32`[2, 2, 64]`, `maxima` and `factors`.
        q_full: barrier, complete when the queries are there.
        p_full: barriers `[2]`, complete when a consumer has left the probabilities of its last
            block.
        cluster_done: barrier, complete when no program of the cluster signals another one any more;
            None for one program.
        meeting: barrier of both consumers.
    """

    q: Any
    ending: Any
    of_rows: Any
    q_full: Any
    p_full: Any
    cluster_done: Any
    meeting: Any

    @property
    def queries(self) -> Any:
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

    @property
    def shared_by(self) -> str | None:
        """The axis of the programs to which TMA copies each block; None: it is one program."""
        return None if self.cluster_done is None else CLUSTER


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScratchShape:
    """What the types of a `LatentScratch` depend on: of the call, and programs of a cluster."""

    head_dim: int
    rope_dim: int
    page_size: int
    dtype: Any
    kv_dtype: Any
    cluster_size: int
    interpret: bool

    @property
    def cluster_barrier(self) -> Any:
        """The type of a barrier at which all programs of a cluster arrive."""
        if self.cluster_size > 1 and not self.interpret:
            return functools.partial(plgpu.ClusterBarrier, collective_axes=(CLUSTER,))
        return plgpu.Barrier

    def types_of_both(self, q: list[Any], *, num_copies: int) -> dict[str, Any]:
        """Return the types of the fields of `LatentScratch`.

        Args:
            q: types of the queries.
            num_copies: by which they come.
        """
        width = padded(self.head_dim // NUM_CONSUMERS, self.dtype)
        results = [plgpu.SMEM((ROWS, width), self.dtype) for _ in range(NUM_CONSUMERS)]
        queries: Any = q
        ending: Any = [results, plgpu.SMEM((NUM_CONSUMERS, ROWS), jnp.int32)]
        if not self.interpret:  # to the interpreter's search for races a union is one buffer
            queries, ending = plgpu.RefUnion(q, ending), None
        done = None
        if self.cluster_size > 1 and not self.interpret:
            done = self.cluster_barrier(num_arrivals=NUM_CONSUMERS)
        return dict(
            q=queries,
            ending=ending,
            of_rows=plgpu.SMEM((2, NUM_CONSUMERS, ROWS), jnp.float32),
            q_full=plgpu.Barrier(num_arrivals=num_copies),
            p_full=plgpu.Barrier(num_barriers=NUM_CONSUMERS),
            cluster_done=done,
            meeting=plgpu.Barrier(num_arrivals=NUM_CONSUMERS),
        )
