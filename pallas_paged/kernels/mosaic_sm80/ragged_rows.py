"""Rows of a tile of ragged queries: their places, their values in logits, and their stores.

The rows are token after token, and within a token head after head of one KV head's group.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_paged.kernels.call import Arrays
from pallas_paged.kernels.logits import LogitOptions
from pallas_paged.kernels.mosaic import ops as wgmma_ops
from pallas_paged.kernels.mosaic.ragged_work import WorkDescriptor, tree_bits, visible_in_block
from pallas_paged.kernels.mosaic_sm80 import ops
from pallas_paged.kernels.mosaic_sm80.config import result_columns
from pallas_paged.kernels.mosaic_sm80.emitter import CHUNK, Emitter
from pallas_paged.kernels.mosaic_sm80.ragged_copies import share_chunks

ROW, ROWS = wgmma_ops.WGMMA_ROW, wgmma_ops.WGMMA


@dataclasses.dataclass(frozen=True, kw_only=True)
class RaggedRows:
    """Place of some rows of a tile among all queries.

    Attributes:
        count: rows.
        group: query heads of a KV head.
        num_q_heads: of a token.
        kv_head: their KV head.
        q_start, q_len: first token and number of tokens of the sequence in the packed queries.
        offset: the first of the rows within the sequence.
        layout: of matrices of the rows in registers.
    """

    count: int
    group: int
    num_q_heads: int
    kv_head: Any
    q_start: Any
    q_len: Any
    offset: Any
    layout: Any = ROWS

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

    def logit_operands(
        self, work: WorkDescriptor, inputs: Any, options: LogitOptions, *, causal: bool
    ) -> tuple[jax.Array, jax.Array | None, Callable[[Any, jax.Array], jax.Array]]:
        """Return positions, slopes of ALiBi, and which keys the queries of the rows see.

        Args:
            inputs: with refs to what `row_operands` returns.
            causal: whether a query sees no later key.

        Returns:
            Positions i32`[R]`, slopes f32`[R]` or None, and a function of the first of some keys
            and of their positions i32`[R, K]`, which returns bool`[R, K]`.
        """
        before = work.kv_len - work.q_len  # keys older than all queries of the sequence
        positions = before + self.tokens()
        last_seen = jnp.minimum(positions, work.kv_len - 1)
        if not causal:  # one value for all rows, but a vector: scalars have no layout to infer
            last_seen = jnp.maximum(last_seen, work.kv_len - 1)
        if inputs.positions is not None:
            positions = self.of_packed(inputs.positions)
        slopes = None if inputs.alibi_slopes is None else self.of_heads(inputs.alibi_slopes)
        tree_words = None
        if inputs.tree_words is not None:
            first = jnp.minimum(self.offset, inputs.tree_words.shape[-1] - self.count)
            tree_words = inputs.tree_words.at[work.row, :, pl.ds(first, self.count)]

        def visible(first_key: Any, keys: jax.Array) -> jax.Array:
            return visible_in_block(
                keys,
                positions,
                options,
                first_key=first_key,
                last=last_seen,
                before=before,
                tree_words=tree_words,
                layout=self.layout,
            )

        return positions, slopes, visible

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


def row_operands(
    arrays: Arrays, options: LogitOptions, *, num_tiles: int, count: int
) -> dict[str, jax.Array | None]:
    """Return what kernels read for each row: `alibi_slopes`, `sinks`, `positions`, `tree_words`.

    Args:
        num_tiles: tiles side by side that the query heads of a token take.
        count: rows of a tile.

    Returns:
        Slopes and sinks from `repeat_heads`, or None. `positions` from `repeat_tokens`; None where
        queries are the newest tokens of their sequence, or where positions do not matter.
        `tree_words` i32`[B, words, M * G + count]`, the bits of each row's tree mask, or None.
    """
    group = arrays.num_q_heads // num_tiles

    def of_heads(x: jax.Array | None) -> jax.Array | None:
        return None if x is None else repeat_heads(x, num_tiles, count)

    positions = tree_words = None
    if arrays.q_positions is not None and (
        arrays.alibi_slopes is not None or options.sliding_window is not None
    ):
        positions = repeat_tokens(arrays.q_positions, group, count)
    if arrays.tree_mask is not None:
        words = jnp.moveaxis(tree_bits(arrays.tree_mask), -1, 1)  # [B, words, M]
        tree_words = repeat_tokens(words, group, count, axis=2)
    return dict(
        alibi_slopes=of_heads(arrays.alibi_slopes),
        sinks=of_heads(arrays.sinks),
        positions=positions,
        tree_words=tree_words,
    )


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
                to = emit.address(out_ref, place)
                write = functools.partial(emit.store_device_chunk, to, words)
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
