"""A tile of ragged queries in the Hopper kernels: its rows, and their loads and stores.

The rows of a tile are head after head, and the rows of a head in chunks of 8 tokens:

    row   0 ..  7   head 0, tokens  0 ..  7        64 rows to a warpgroup; with 4 heads
    row   8 .. 15   head 0, tokens  8 .. 15        to a KV head a tile of 128 rows
    ...                                            has 32 tokens
    row  32 .. 39   head 1, tokens  0 ..  7
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_paged.kernels.logits import LogitOptions
from pallas_paged.kernels.mosaic import ops
from pallas_paged.kernels.mosaic.indexed import scatter
from pallas_paged.kernels.mosaic.ragged_work import QueryRows, RaggedOutputs, WorkDescriptor

WG_ROWS = 64  # rows of a warpgroup: one wgmma
CHUNK = 8  # tokens of one head: a swizzle pattern spans 8 rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class TileShape:
    """Division of the rows of a tile among heads and tokens.

    Attributes:
        group: query heads of a KV head.
        num_heads: query heads of a tile.
        num_tokens: tokens of each head, a multiple of 8.
        num_head_tiles: tiles side by side that the group of a KV head takes.
    """

    group: int
    num_heads: int
    num_tokens: int
    num_head_tiles: int

    @classmethod
    def of(cls, group: int, num_rows: int) -> TileShape:
        """Return the tile of `num_rows` rows: with all heads of a group, or a chunk of each."""
        num_chunks = num_rows // CHUNK
        num_heads = min(group, num_chunks)
        return cls(
            group=group,
            num_heads=num_heads,
            num_tokens=num_chunks // num_heads * CHUNK,
            num_head_tiles=-(-group // num_heads),
        )

    def runs(self, head: int) -> list[tuple[int, int]]:
        """Return `(first row, rows)` of each warpgroup's rows of a head."""
        start, stop = head * self.num_tokens, (head + 1) * self.num_tokens
        bounds = [start, *range((start // WG_ROWS + 1) * WG_ROWS, stop, WG_ROWS), stop]
        return [(a, b - a) for a, b in itertools.pairwise(bounds)]

    def place(self, row: Any) -> tuple[Any, Any]:
        """Return `(head, token)` of a row within the tile, both from 0."""
        chunk = row // CHUNK
        chunks_per_head = self.num_tokens // CHUNK
        return chunk // chunks_per_head, chunk % chunks_per_head * CHUNK + row % CHUNK


@dataclasses.dataclass(frozen=True, kw_only=True)
class TileRows:
    """Place of a warpgroup's rows among all queries.

    Attributes:
        tile: shape of the tile.
        wg: the rows are the tile's `[64 * wg, 64 * wg + 64)`.
        q_start, q_len: first token and number of tokens of the sequence in the packed queries.
        offset: first token of the tile within the sequence; negative if the tile begins before it.
        first_head: first query head of the tile.
        num_heads: query heads of the tile that exist.
    """

    tile: TileShape
    wg: Any
    q_start: jax.Array
    q_len: jax.Array
    offset: jax.Array
    first_head: jax.Array
    num_heads: jax.Array

    def in_logits(
        self,
        work: WorkDescriptor,
        options: LogitOptions,
        *,
        causal: bool,
        alibi_slopes: Any,  # ref to f32[Hq], or None
        given_positions: Any,  # ref to i32[64]; None where queries are the newest tokens
        tree_words: Any,  # ref to i32[words, 64], or None
    ) -> QueryRows:
        """Return what the logits of the rows depend on."""
        before = work.before
        row = self.wg * WG_ROWS + ops.iota((WG_ROWS,), 0, ops.WGMMA_ROW)
        _, token = self.tile.place(row)
        positions = before + self.offset + token
        last_seen = work.last_seen(positions, causal=causal)
        if given_positions is not None:
            positions = ops.load(given_positions, ops.WGMMA_ROW)
        return QueryRows(
            options=options,
            before=before,
            positions=positions,
            last_seen=last_seen,
            slopes=None if alibi_slopes is None else self.per_head(alibi_slopes),
            tree_words=tree_words,
        )

    def per_head(self, ref: Any) -> jax.Array:
        """Return f32`[64]`: for each row the value of `ref` f32`[Hq]` for its head."""
        row = ops.iota((WG_ROWS,), 0, ops.WGMMA_ROW)
        head, _ = self.tile.place(self.wg * WG_ROWS + row)
        values = ops.full((WG_ROWS,), 0.0, ops.WGMMA_ROW)
        for h in range(self.tile.num_heads):
            value = ref[self.first_head + jnp.minimum(h, self.num_heads - 1)]
            values = jnp.where(head == h, value, values)
        return values


def store_buffer(*, num_warpgroups: int, head_dim: int, dtype: Any) -> Any:
    """Return the type of the shared memory `[warpgroups, 64, width]` that results pass through.

    One copy stores `width` elements of a row.
    """
    return plgpu.SMEM((num_warpgroups, WG_ROWS, min(head_dim, 128)), dtype)


def store_rows(
    outputs: RaggedOutputs,
    buffer: Any,  # [64, width] in shared memory
    rows: TileRows,
    out: jax.Array,  # f32[64, D]
    lse: jax.Array,  # f32[64]
    *,
    interpret: bool,
) -> None:
    """Store a warpgroup's rows to their own tokens and heads, and to no others."""
    if outputs.lse is not None:
        _store_lse(outputs.lse, rows, lse, interpret=interpret)
    width = buffer.shape[1]
    # Rows of one head in one warpgroup, a power of two: one copy where all are the sequence's own.
    run = math.gcd(rows.tile.num_tokens, WG_ROWS)
    for dim in range(0, out.shape[1], width):
        # Copies of earlier stores may still read the buffer.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        buffer[...] = out[:, dim : dim + width].astype(buffer.dtype)
        plgpu.commit_smem()

        @pl.loop(0, WG_ROWS // run)
        def _(i, dim=dim):
            local_head, token = rows.tile.place(rows.wg * WG_ROWS + i * run)
            token += rows.offset
            # The first and last tile of a sequence may hold tokens of others.
            lo = jnp.clip(-token, 0, run)
            hi = jnp.clip(rows.q_len - token, lo, run)
            count = jnp.where(local_head < rows.num_heads, hi - lo, 0)

            def copy(first, num_rows):
                plgpu.copy_smem_to_gmem(
                    buffer.at[pl.ds(i * run + first, num_rows)],
                    outputs.out.at[
                        pl.ds(rows.q_start + token + first, num_rows),
                        rows.first_head + local_head,
                        pl.ds(dim, width),
                    ],
                    commit_group=False,
                )

            @pl.when(count == run)
            def _():
                copy(0, run)

            @pl.when(count < run)
            def _():
                size = run // 2
                while size:  # the bits of the count
                    first = lo + (count & -2 * size)
                    pl.when(count & size != 0)(functools.partial(copy, first, size))
                    size //= 2

        plgpu.commit_smem_to_gmem_group()


def _store_lse(ref: Any, rows: TileRows, lse: jax.Array, *, interpret: bool) -> None:
    """Store the log-sum-exps f32`[64]` of a warpgroup to `ref` f32`[T, Hq]` from its registers."""
    row = rows.wg * WG_ROWS + ops.iota((WG_ROWS,), 0, ops.WGMMA_ROW)
    head, token = rows.tile.place(row)
    token += rows.offset
    exists = (token >= 0) & (token < rows.q_len) & (head < rows.num_heads)
    index = (rows.q_start + token) * ref.shape[1] + rows.first_head + head
    scatter(ref, jnp.where(exists, index, -1), lse, ops.WGMMA_ROW, interpret=interpret)
