"""Rows of a tile of ragged queries: their places, their values in logits, and their stores.

The rows are token after token, and within a token head after head of one KV head's group.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_paged.checks import pytree
from pallas_paged.kernels.call import Arrays
from pallas_paged.kernels.logits import LogitOptions
from pallas_paged.kernels.mosaic import ops as wgmma_ops
from pallas_paged.kernels.mosaic.ragged_work import (
    QueryRows,
    WorkDescriptor,
    positions_in_logits,
    tree_bits,
)
from pallas_paged.kernels.mosaic_sm80 import ops
from pallas_paged.kernels.mosaic_sm80.config import result_columns
from pallas_paged.kernels.mosaic_sm80.emitter import CHUNK, Emitter
from pallas_paged.kernels.mosaic_sm80.ragged_copies import share_chunks

ROW, ROWS = wgmma_ops.WGMMA_ROW, wgmma_ops.WGMMA


@pytree
class RowOperands:
    """What kernels read for each query row: arrays, or refs to them."""

    alibi_slopes: Any  # f32 from `repeat_heads`, of each tile of heads, or None
    sinks: Any  # f32 from `repeat_heads`, of each tile of heads, or None
    # i32 from `repeat_tokens`; None where queries are the newest tokens of their sequence, or where
    # positions do not matter.
    positions: Any
    tree_words: Any  # i32`[B, words, M * G + count]`, the bits of each row's tree mask, or None

    @classmethod
    def of(cls, arrays: Arrays, options: LogitOptions, *, num_tiles: int, count: int) -> Self:
        """Return the operands of a call.

        The query heads of a token take `num_tiles` tiles side by side, of `count` rows.
        """
        group = arrays.num_q_heads // num_tiles

        def of_heads(x: jax.Array | None) -> jax.Array | None:
            return None if x is None else repeat_heads(x, num_tiles, count)

        positions, tree_words = positions_in_logits(arrays, options), None
        if positions is not None:
            positions = repeat_tokens(positions, group, count)
        if arrays.tree_mask is not None:
            words = jnp.moveaxis(tree_bits(arrays.tree_mask), -1, 1)  # [B, words, M]
            tree_words = repeat_tokens(words, group, count, axis=2)
        return cls(
            alibi_slopes=of_heads(arrays.alibi_slopes),
            sinks=of_heads(arrays.sinks),
            positions=positions,
            tree_words=tree_words,
        )


@pytree
class RowInputs:
    """Operands of the ragged kernels, or refs to them."""

    # `[T * Hq, D]`; of latents a list, `[T * Hq, D]` and `[T * Hq, rope_dim]`. Pairs i32 where
    # one-byte pages are words.
    q: Any
    pages: Any  # with scales and block tables
    items: Any  # i32`[num_items, 16]`, packed descriptors of the work items; None in decoding
    of_rows: RowOperands  # of the query rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class RaggedRows:
    """Place of some rows of a tile among all queries."""

    count: int  # rows
    group: int  # query heads of a KV head
    num_q_heads: int  # of a token
    kv_head: Any  # their KV head
    q_start: Any  # first token of the sequence in the packed queries
    q_len: Any  # tokens of the sequence there
    offset: Any  # the first of the rows within the sequence
    layout: Any = ROWS  # of matrices of the rows in registers

    @property
    def row_layout(self) -> Any:
        """The layout of one value for each row."""
        return self.layout.reduce(1)

    def tokens(self) -> jax.Array:
        """Return the token i32`[R]` of each row within its sequence."""
        return (self.offset + wgmma_ops.iota((self.count,), 0, self.row_layout)) // self.group

    def index(self) -> jax.Array:
        """Return for each row i32`[R]` its index in `[T * Hq]`; -1 past the sequence's end."""
        packed = self.offset + wgmma_ops.iota((self.count,), 0, self.row_layout)
        token, head = packed // self.group, packed % self.group
        index = (self.q_start + token) * self.num_q_heads + self.kv_head * self.group + head
        return jnp.where(token < self.q_len, index, -1)

    def first_of_neighbours(self) -> jax.Array:
        """Return the index in `[T * Hq]` of the first row, where the others follow it.

        They do where the rows have all heads of their tokens, or are of one token.
        """
        token, head = lax.div(self.offset, self.group), lax.rem(self.offset, self.group)
        return (self.q_start + token) * self.num_q_heads + self.kv_head * self.group + head

    def num_neighbours(self) -> jax.Array:
        """Return how many of the rows are within the sequence."""
        return jnp.clip(self.q_len * self.group - self.offset, 0, self.count)

    def in_logits(
        self, work: WorkDescriptor, of_rows: RowOperands, options: LogitOptions, *, causal: bool
    ) -> QueryRows:
        """Return what the logits of the rows depend on."""
        positions = work.before + self.tokens()
        last_seen = work.last_seen(positions, causal=causal)
        if of_rows.positions is not None:
            positions = self.of_packed(of_rows.positions)
        slopes = None if of_rows.alibi_slopes is None else self.of_heads(of_rows.alibi_slopes)
        tree_words = None
        if of_rows.tree_words is not None:
            first = jnp.minimum(self.offset, of_rows.tree_words.shape[-1] - self.count)
            tree_words = of_rows.tree_words.at[work.row, :, pl.ds(first, self.count)]
        return QueryRows(
            options=options,
            before=work.before,
            positions=positions,
            last_seen=last_seen,
            slopes=slopes,
            tree_words=tree_words,
            layout=self.layout,
        )

    def of_heads(self, ref: Any) -> jax.Array:
        """Return f32`[R]` of each row's head, of a ref from `repeat_heads`."""
        first = lax.rem(self.offset, self.group)
        return wgmma_ops.load(ref.at[self.kv_head, pl.ds(first, self.count)], self.row_layout)

    def of_packed(self, ref: Any) -> jax.Array:
        """Return i32`[R]` of each row's token, of a ref from `repeat_tokens`."""
        first = self.q_start * self.group + self.offset
        return wgmma_ops.load(ref.at[pl.ds(first, self.count)], self.row_layout)


def repeat_heads(x: jax.Array, num_kv_heads: int, count: int) -> jax.Array:
    """Return values of heads `[Hq]` so that `count` rows, from any head on, are neighbours."""
    x = x.reshape(num_kv_heads, -1)
    group = x.shape[1]
    return jnp.tile(x, (1, -(-count // group) + 1))[:, : group + count]


def repeat_tokens(x: jax.Array, group: int, count: int, *, axis: int = 0) -> jax.Array:
    """Return values of tokens, one for each row, with `count` zeros at the end."""
    x = jnp.repeat(x, group, axis=axis)
    pads = [(0, 0)] * x.ndim
    pads[axis] = (0, count)
    return jnp.pad(x, pads)


def columns_of_part(part: Any, head_dim: int) -> Any:
    """Return the columns of a result that a program has; uneven parts overlap."""
    parts, count = result_columns(head_dim)
    first = 0 if parts == 1 else jnp.minimum(part * count, head_dim - count)
    return pl.ds(first, count)


def store_rows(
    out_ref: Any,  # [T * Hq, columns], of rows of head_dim
    lse_ref: Any,  # f32[T * Hq] or None
    buffer: Any,  # [R, at least columns + pad] in shared memory
    rows: Any,  # i32[R] in shared memory, from `RaggedRows.index`
    out: jax.Array,  # f32[R, columns]
    lse: jax.Array,  # f32[R]
    *,
    head_dim: int,
    interpret: bool,
) -> None:
    """Store rows to their own tokens and heads, and to no others.

    All threads must be done with the buffer. `rows` may just have been written.
    """
    out = out.astype(buffer.dtype)
    if interpret:
        _store_rows_now(out_ref, lse_ref, rows, out, lse)
        return
    pitch, (num_rows, num_columns) = 2 * buffer.shape[1], out.shape

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), ROWS))
    def put(_, buffer, out):
        emit = Emitter()
        row, column = emit.place_in_accumulator()
        at = emit.address(buffer, emit.add(emit.mul(row, pitch), emit.mul(column, 2)))
        words = emit.words(out)
        for tile, n, half in np.ndindex(words.shape):
            offset = (tile * 64 + half * 8) * pitch + 16 * n
            emit.store_word(at, words[tile, n, half], offset=offset)

    put(buffer, out)
    ops.barrier(interpret=False)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.RefType()))
    def copy(_, out_ref, buffer, rows):
        emit = Emitter()

        row, chunk, firsts, when = share_chunks(emit, num_rows, 2 * num_columns // CHUNK)
        column = emit.mul(chunk, CHUNK)
        found = emit.address(buffer, emit.add(emit.mul(row, pitch), column))
        indices = emit.address(rows, emit.mul(row, 4))

        def copy_all():
            for first in firsts:
                index = emit.load_word(indices, offset=4 * first)
                words = emit.load_chunk(found, offset=first * pitch)
                place = emit.add(emit.mul(emit.wide(index), 2 * head_dim), emit.wide(column))
                to, store = emit.address(out_ref, place), "st.global.v4.b32 [$0], {$1,$2,$3,$4};"
                write = functools.partial(emit.effect, store, to, *words)
                emit.run_if(emit.at_least(index, 0), write)

        when(copy_all)

    copy(out_ref, buffer, rows)
    if lse_ref is None:
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), ROW))
    def store_lse(_, lse_ref, rows, lse):
        emit = Emitter()
        row, column = emit.place_in_accumulator()
        at = emit.address(rows, emit.mul(row, 4))
        for i, value in enumerate(emit.row_words(lse)):
            index = emit.load_word(at, offset=4 * (i // 2 * 64 + i % 2 * 8))
            to = emit.address(lse_ref, emit.mul(emit.wide(index), 4))
            # Four threads have the same rows.
            mine = emit.both(emit.at_least(index, 0), emit.less(column, 2))
            emit.run_if(mine, lambda to=to, value=value: emit.store_device_word(to, value))

    store_lse(lse_ref, rows, lse)


def _store_rows_now(out_ref: Any, lse_ref: Any, rows: Any, out: jax.Array, lse: jax.Array) -> None:
    index = rows[...]

    @pl.loop(0, out.shape[0])
    def _(i):
        @pl.when(index[i] >= 0)
        def _():
            out_ref[index[i]] = out[i]
            if lse_ref is not None:
                lse_ref[index[i]] = lse[i]
