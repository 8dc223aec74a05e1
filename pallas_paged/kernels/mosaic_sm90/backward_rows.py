"""Queries as the Mosaic kernels of the backward pass read them, and the work of both kernels.

The query rows of a sequence are packed token after token, and within a token head after head of one
KV head's group. Each sequence begins at a multiple of `ROWS`, and rows past its last are zero, with
an infinite log-sum-exp: their probabilities are 0. So every tile is a matrix without gaps, and what
padding queries hold reaches none of them.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_paged.checks import pytree
from pallas_paged.kernels.call import Arrays
from pallas_paged.kernels.logits import LogitOptions

ROWS = 128  # of a tile of queries: 64 for each of two consumers


@pytree
class PackedRows:
    """Places of the packed rows of each sequence, R rows in all."""

    start: jax.Array  # i32`[B + 1]`, the first row of each sequence, a multiple of `ROWS`
    seq: jax.Array  # i32`[R]`, the sequence of each row
    token: jax.Array  # i32`[R]`, the packed query token of each row, T where there is none
    head: jax.Array  # i32`[R]`, the query head within the group
    group: int = dataclasses.field(metadata={"static": True})  # query heads of a KV head.

    @classmethod
    def of(cls, arrays: Arrays) -> PackedRows:
        """Return the places of the rows of a call."""
        num_tokens, group, num_seqs = arrays.q.shape[0], arrays.group, arrays.num_seqs
        q_lens = jnp.diff(arrays.cu_q_lens)
        tiles = pl.cdiv(q_lens * group, ROWS)
        start = jnp.append(0, jnp.cumsum(tiles)) * ROWS
        num_rows = (num_tokens * group // ROWS + min(num_seqs, num_tokens)) * ROWS
        row = jnp.arange(num_rows)
        seq = jnp.searchsorted(start[1:], row, side="right", method="compare_all")
        exists, seq = seq < num_seqs, jnp.minimum(seq, num_seqs - 1)
        place = row - start[seq]
        exists &= place // group < q_lens[seq]
        token = jnp.where(exists, arrays.cu_q_lens[seq] + place // group, num_tokens)
        return cls(start=start, seq=seq, token=token, head=place % group, group=group)

    def pack(self, x: jax.Array, num_kv_heads: int, fill_value: float = 0.0) -> jax.Array:
        """Return x `[T, Hq, ...]` as `[Hkv, R, ...]`."""
        by_head = x.reshape(x.shape[0], num_kv_heads, -1, *x.shape[2:])
        heads = jnp.arange(num_kv_heads)[:, None]
        return by_head.at[self.token, heads, self.head].get(mode="fill", fill_value=fill_value)

    def unpack(self, rows: jax.Array, cu_q_lens: jax.Array, num_tokens: int) -> jax.Array:
        """Return rows `[Hkv, R, D]` as `[T, Hq, D]`; padding tokens are 0."""
        num_kv_heads, _, head_dim = rows.shape
        token = jnp.arange(num_tokens)
        seq = jnp.searchsorted(cu_q_lens[1:], token, side="right", method="compare_all")
        exists, seq = token < cu_q_lens[-1], jnp.minimum(seq, cu_q_lens.shape[0] - 2)
        first = self.start[seq] + (token - cu_q_lens[seq]) * self.group
        first = jnp.where(exists, first, rows.shape[1])
        index = first[:, None, None] + jnp.arange(self.group)
        heads = jnp.arange(num_kv_heads)[:, None]
        found = rows.at[heads, index].get(mode="fill", fill_value=0)
        return found.reshape(num_tokens, -1, head_dim)


@pytree
class Work:
    """A tile of queries and its blocks of keys, or a tile of keys and its blocks of queries.

    The longest come first. Fields are i32`[num_tiles]`, or i32`[]` of one tile.
    """

    seq: jax.Array  # the sequence
    first: jax.Array  # of queries the first packed row, of keys the first key
    kv_len: jax.Array  # keys of the sequence; 0 where there is no tile
    before: jax.Array  # keys older than all queries of the sequence; -1 or less if they are fewer
    origin: jax.Array  # the first packed row of the sequence
    lo: jax.Array  # the blocks with a visible pair of query and key
    hi: jax.Array
    full_lo: jax.Array  # the blocks with no invisible pair
    full_hi: jax.Array

    def sorted(self) -> Work:
        """Return the tiles with the most blocks first."""
        order = jnp.argsort(self.lo - self.hi, stable=True)
        return jax.tree.map(lambda x: x[order].astype(jnp.int32), self)


def work_of_queries(
    arrays: Arrays, rows: PackedRows, *, block_k: int, options: LogitOptions
) -> Work:
    """Return the tiles of `ROWS` queries; of each, the blocks of keys that it sees."""
    first = jnp.arange(rows.token.shape[0] // ROWS) * ROWS
    seq = rows.seq[first]
    q_len = jnp.diff(arrays.cu_q_lens)[seq]
    origin = rows.start[seq]
    exists = first < rows.start[-1]
    kv_len = jnp.where(exists, arrays.seq_lens[seq], 0)
    before = kv_len - q_len
    oldest = before + (first - origin) // arrays.group
    newest = before + jnp.minimum((first - origin + ROWS - 1) // arrays.group, q_len - 1)
    seen = causal_full = kv_len
    if options.causal:
        seen, causal_full = jnp.minimum(newest + 1, kv_len), jnp.minimum(oldest + 1, kv_len)
    hi = pl.cdiv(jnp.maximum(seen, 0), block_k)
    lo = jnp.minimum(options.first_key(jnp.maximum(oldest, 0)) // block_k, hi)
    full_hi = jnp.clip(causal_full // block_k, lo, hi)
    full_lo = jnp.clip(pl.cdiv(options.first_key(jnp.maximum(newest, 0)), block_k), lo, full_hi)
    return Work(
        seq=seq, first=first, kv_len=kv_len, before=before, origin=origin,
        lo=lo, hi=hi, full_lo=full_lo, full_hi=full_hi,
    ).sorted()  # fmt: skip


def work_of_keys(
    arrays: Arrays, rows: PackedRows, *, block_q: int, block_k: int, options: LogitOptions
) -> Work:
    """Return the tiles of `block_k` keys of each row; of each, the blocks of queries."""
    tiles_per_row = pl.cdiv(arrays.max_kv_len, block_k)
    seq = jnp.repeat(jnp.arange(arrays.num_seqs), tiles_per_row)
    first = jnp.tile(jnp.arange(tiles_per_row) * block_k, arrays.num_seqs)
    q_len, kv_len, origin = jnp.diff(arrays.cu_q_lens)[seq], arrays.seq_lens[seq], rows.start[seq]
    before = kv_len - q_len
    last = jnp.minimum(first + block_k, kv_len) - 1

    # Tokens of the sequence, then blocks of its rows.
    lo, hi, full_lo, full_hi = jnp.zeros_like(seq), q_len, jnp.zeros_like(seq), q_len
    if options.causal:
        lo, full_lo = first - before, last - before
    if options.sliding_window is not None:
        hi = jnp.minimum(q_len, last - before + options.sliding_window)
        full_hi = first - before + options.sliding_window
    group = arrays.group
    end = pl.cdiv(q_len * group, block_q)
    lo = jnp.clip(lo, 0, q_len) * group // block_q
    hi = jnp.maximum(pl.cdiv(jnp.clip(hi, 0, q_len) * group, block_q), lo)
    hi = jnp.where(first < kv_len, hi, lo)
    # Rows past the last token have no probability; the last keys of a row are masked.
    full_hi = jnp.where(full_hi < q_len, jnp.maximum(full_hi, 0) * group // block_q, end)
    full_lo = pl.cdiv(jnp.clip(full_lo, 0, q_len) * group, block_q)
    full_lo = jnp.clip(jnp.where(first + block_k <= kv_len, full_lo, hi), lo, hi)
    full_hi = jnp.clip(full_hi, full_lo, hi)
    return Work(
        seq=seq, first=first, kv_len=kv_len, before=before, origin=origin,
        lo=lo, hi=hi, full_lo=full_lo, full_hi=full_hi,
    ).sorted()  # fmt: skip
