"""A tile of ragged queries as Mosaic kernels hold it: which rows it has, and how they are stored.

The rows of a tile lie head after head, and a head's in chunks of 8 tokens:

    row   0 ..  7   head 0, tokens  0 ..  7        64 rows to a warpgroup; with 4 heads
    row   8 .. 15   head 0, tokens  8 .. 15        to a KV head a tile of 128 rows
    ...                                            has 32 tokens
    row  32 .. 39   head 1, tokens  0 ..  7
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_paged.kernels.logits import LN_2, LOG2_E
from pallas_paged.kernels.mosaic.ops import along

WG_ROWS = 64  # of a warpgroup: what one wgmma takes
CHUNK = 8  # tokens of one head, as many rows as a swizzle pattern spans

State = tuple[jax.Array, jax.Array, jax.Array]  # m f32[64], l f32[64], acc f32[64, D]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TileShape:
    """How the rows of a tile are shared out among heads and tokens.

    Attributes:
      num_heads: query heads of a tile.
      num_tokens: of each head, a multiple of 8.
      num_blocks: tiles side by side that a KV head's group takes.
    """

    num_heads: int
    num_tokens: int
    num_blocks: int

    @classmethod
    def of(cls, group: int, num_rows: int) -> TileShape:
        """The tile of `num_rows` rows with all heads of a group, or as many as it has chunks."""
        num_chunks = num_rows // CHUNK
        num_heads = min(group, num_chunks)
        return cls(
            num_heads=num_heads,
            num_tokens=num_chunks // num_heads * CHUNK,
            num_blocks=-(-group // num_heads),
        )

    def runs(self, head: int) -> list[tuple[int, int]]:
        """`(first row, rows)` of a head, cut where the rows of another warpgroup begin."""
        start, stop = head * self.num_tokens, (head + 1) * self.num_tokens
        cuts = [start, *range((start // WG_ROWS + 1) * WG_ROWS, stop, WG_ROWS), stop]
        return [(a, b - a) for a, b in itertools.pairwise(cuts)]

    def place(self, row: Any) -> tuple[Any, Any]:
        """`(head, token)` of a row within the tile, both from 0."""
        chunk = row // CHUNK
        per_head = self.num_tokens // CHUNK
        return chunk // per_head, chunk % per_head * CHUNK + row % CHUNK


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
    """Where the rows of a warpgroup stand among all queries.

    Attributes:
      tile: shape of the tile.
      wg: which 64 of the tile's rows these are.
      q_start, q_len: first token and number of tokens of the sequence in the packed queries.
      offset: the tile's first token within the sequence, negative if others' tokens come first.
      first_head: the tile's first query head.
      num_heads: query heads that there are from it on, at most the tile's.
    """

    tile: TileShape
    wg: Any
    q_start: jax.Array
    q_len: jax.Array
    offset: jax.Array
    first_head: jax.Array
    num_heads: jax.Array


def finish(state: State, sinks: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """`(out, lse)` of a state of base 2; sinks f32[64] join in where a row saw any key."""
    m_i, l_i, acc = state
    empty = l_i == 0.0
    if sinks is not None:
        m_new = jnp.where(empty, 0.0, jnp.maximum(m_i, sinks * LOG2_E))
        alpha = jnp.exp2(m_i - m_new)
        l_i = jnp.where(empty, 0.0, l_i * alpha + jnp.exp2(sinks * LOG2_E - m_new))
        m_i, acc = m_new, acc * along(alpha, acc)
    l_safe = jnp.where(empty, 1.0, l_i)
    lse = jnp.where(empty, -jnp.inf, m_i * LN_2 + jnp.log(l_safe))
    return acc * along(1.0 / l_safe, acc), lse


def store_types(*, num_warpgroups: int, head_dim: int, dtype: Any, with_lse: bool) -> dict:
    """Shared memory that `store_tile` passes rows through."""
    types = {"o_smem": plgpu.SMEM((num_warpgroups, WG_ROWS, min(head_dim, 128)), dtype)}
    if with_lse:
        types["lse_smem"] = plgpu.SMEM((num_warpgroups, WG_ROWS), jnp.float32)
    return types


def store_tile(
    refs: Mapping[str, Any],  # out [T, Hq, D], lse f32[T, Hq] if wanted, and `store_types`
    smem_index: Any,
    rows: Rows,
    out: jax.Array,  # f32[64, D]
    lse: jax.Array,  # f32[64]
) -> None:
    """Stores a warpgroup's rows to the tokens and heads that they are of, and to no others."""
    o_smem = refs["o_smem"].at[smem_index]
    width = o_smem.shape[1]
    if "lse" in refs:
        refs["lse_smem"][smem_index] = lse
    for dim in range(0, out.shape[1], width):
        # What was stored before may still be on its way.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        o_smem[...] = out[:, dim : dim + width].astype(o_smem.dtype)
        plgpu.commit_smem()

        @pl.loop(0, WG_ROWS // CHUNK)
        def _(c, dim=dim):
            local_head, token = rows.tile.place(rows.wg * WG_ROWS + c * CHUNK)
            token += rows.offset
            head = rows.first_head + local_head
            # Of a sequence's first and last chunk some tokens are others'.
            lo = jnp.clip(-token, 0, CHUNK)
            hi = jnp.clip(rows.q_len - token, lo, CHUNK)
            hi = jnp.where(local_head < rows.num_heads, hi, lo)

            def copy(first, num_rows):
                start = rows.q_start + token + first
                plgpu.copy_smem_to_gmem(
                    o_smem.at[pl.ds(c * CHUNK + first, num_rows)],
                    refs["out"].at[pl.ds(start, num_rows), head, pl.ds(dim, width)],
                    commit_group=False,
                )

            @pl.when(hi - lo == CHUNK)
            def _():
                copy(0, CHUNK)

            @pl.when(hi - lo < CHUNK)
            def _():
                pl.loop(lo, hi)(lambda i: copy(i, 1))

            if "lse" in refs and dim == 0:

                @pl.loop(lo, hi)
                def _(i):
                    lse = refs["lse_smem"][smem_index, c * CHUNK + i]
                    refs["lse"][rows.q_start + token + i, head] = lse

        plgpu.commit_smem_to_gmem_group()


def per_head(ref: Any, rows: Rows, layout: Any) -> jax.Array:
    """f32[64]: for each row what `ref` f32[Hq] has for its head."""
    row = plgpu.broadcasted_iota(jnp.int32, (WG_ROWS,), 0, layout=layout)
    head, _ = rows.tile.place(rows.wg * WG_ROWS + row)
    values = plgpu.layout_cast(jnp.zeros((WG_ROWS,), jnp.float32), layout)
    for h in range(rows.tile.num_heads):
        value = ref[rows.first_head + jnp.minimum(h, rows.num_heads - 1)]
        values = jnp.where(head == h, value, values)
    return values
