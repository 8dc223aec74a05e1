"""The packed batch of one engine step: decoding rows, then chunks of prompts, in few shapes."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import jax
import numpy as np

from models.sampling import RowSampling

_MIN_ROWS = 8
_MIN_CHUNK = 128  # tokens; fewer take as long, for a step reads all weights
_TOKENS_PER_CHUNK = 32  # the most chunks of a batch are its tokens over this


Array = Any  # of NumPy on the host, of JAX in the compiled step


class Drawing(enum.IntEnum):
    """What sampling the compiled step has in it; a batch takes the least that serves its rows."""

    GREEDY = 0
    TEMPERATURE = 1
    FULL = 2  # filters, and log-probabilities of the tokens and of the best


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, eq=False)
class Chunks:
    """The next tokens of P rows that are not decoding, one row after another.

    Attributes:
        tokens: i32[T], padded at the end.
        cu_q_lens: i32[P + 1], rising from 0: where the tokens of each row begin and end.
        rows: i32[P], padded with max_seqs.
    """

    tokens: Array
    cu_q_lens: Array
    rows: Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, eq=False)
class Draws:
    """How each of the S = D + P rows of a batch draws its token.

    Attributes:
        seeds: u32[3, S]: seed, hash of the prompt, number of the sample. The key is made of them
            and of the token's position, so that it is the same whatever else runs.
        sampling: leaves of shape [S].
    """

    seeds: Array
    sampling: RowSampling


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """What one step computes.

    Attributes:
        decode_rows: i32[D], rows that go on from their last token; padded with max_seqs.
        chunks: None in a step that only decodes.
        draws: None where all rows are greedy.
        num_ranked: static, alternatives that the report tells of each token; -1: no
            log-probabilities at all.
    """

    decode_rows: Array
    chunks: Chunks | None
    draws: Draws | None
    num_ranked: int = field(default=-1, metadata=dict(static=True))


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """The shapes that batches have, so that all of them can be compiled before they are needed.

    A batch that only decodes has a power of two of rows; one with chunks has max_seqs decoding rows
    and a power of two of tokens in chunks.
    """

    max_seqs: int
    token_budget: int

    @property
    def decode_rows(self) -> list[int]:
        return _powers(min(_MIN_ROWS, self.max_seqs), self.max_seqs)

    @property
    def chunk_tokens(self) -> list[int]:
        return _powers(min(_MIN_CHUNK, self.token_budget), self.token_budget)

    def max_chunks(self, num_tokens: int) -> int:
        """Rows of the chunks of so many tokens."""
        return min(self.max_seqs, max(_MIN_ROWS, num_tokens // _TOKENS_PER_CHUNK))

    def all(self) -> list[tuple[int, int]]:
        """(decoding rows, tokens in chunks) of every shape."""
        decoding = [(rows, 0) for rows in self.decode_rows]
        return decoding + [(self.max_seqs, tokens) for tokens in self.chunk_tokens]

    def fit(self, num_decodes: int, chunk_lens: Sequence[int]) -> tuple[int, int]:
        """The smallest shape with room for so many decoding rows and such chunks."""
        if not chunk_lens:
            return next(rows for rows in self.decode_rows if rows >= num_decodes), 0
        num_tokens, num_chunks = sum(chunk_lens), len(chunk_lens)
        fitting = (
            tokens
            for tokens in self.chunk_tokens
            if tokens >= num_tokens and self.max_chunks(tokens) >= num_chunks
        )
        return self.max_seqs, next(fitting)


class RowValues:
    """What the host knows of every row's sampling, to pick the rows of a batch from."""

    def __init__(self, max_seqs: int):
        size = max_seqs + 1  # the last is what padding draws with
        self._seeds = np.zeros((3, size), np.uint32)
        self._temperature = np.zeros(size, np.float32)
        self._top_k = np.zeros(size, np.int32)
        self._top_p = np.ones(size, np.float32)
        self._min_p = np.zeros(size, np.float32)

    def set(
        self,
        row: int,
        *,
        seeds: tuple[int, int, int],
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float,
    ) -> None:
        """Sets the values of a row; `Draws` and `RowSampling` say what they mean."""
        self._seeds[:, row] = seeds
        self._temperature[row] = temperature
        self._top_k[row], self._top_p[row], self._min_p[row] = top_k, top_p, min_p

    def draws(self, rows: np.ndarray, drawing: Drawing) -> Draws | None:
        """The values of rows, as much of them as the drawing needs."""
        if drawing is Drawing.GREEDY:
            return None
        filters = {}
        if drawing is Drawing.FULL:
            filters = dict(
                top_k=self._top_k[rows], top_p=self._top_p[rows], min_p=self._min_p[rows]
            )
        sampling = RowSampling(temperature=self._temperature[rows], **filters)
        return Draws(seeds=self._seeds[:, rows], sampling=sampling)


def pack(
    decode_rows: Sequence[int],
    chunks: Sequence[tuple[int, Sequence[int]]],
    *,
    shape: tuple[int, int],
    shapes: Shapes,
    values: RowValues,
    drawing: Drawing,
    num_ranked: int,
) -> Batch:
    """Packs rows into a batch.

    Args:
        decode_rows: rows that go on from their last token.
        chunks: row and next tokens of each row that does not.
        shape: one of `shapes.all()` that has room for them.
        shapes: what shapes there are.
        values: the sampling of all rows.
        drawing: what the batch must have in it.
        num_ranked: alternatives to tell of each token where the drawing tells any.
    """
    lens = [len(tokens) for _, tokens in chunks]
    num_decodes, num_tokens = shape
    decoding = np.full(num_decodes, shapes.max_seqs, np.int32)
    decoding[: len(decode_rows)] = decode_rows
    packed, rows = None, decoding
    if num_tokens:
        width = shapes.max_chunks(num_tokens)
        tokens = np.zeros(num_tokens, np.int32)
        tokens[: sum(lens)] = np.fromiter(chain.from_iterable(x for _, x in chunks), np.int32)
        ends = np.cumsum([0, *lens], dtype=np.int32)
        chunk_rows = np.full(width, shapes.max_seqs, np.int32)
        chunk_rows[: len(chunks)] = [row for row, _ in chunks]
        packed = Chunks(
            tokens=tokens,
            cu_q_lens=np.pad(ends, (0, width - len(chunks)), mode="edge"),
            rows=chunk_rows,
        )
        rows = np.concatenate([decoding, chunk_rows])
    return Batch(
        decode_rows=decoding,
        chunks=packed,
        draws=values.draws(rows, drawing),
        num_ranked=num_ranked if drawing is Drawing.FULL else -1,
    )


def _powers(least: int, most: int) -> list[int]:
    """Powers of two times least, and most as the last."""
    sizes = []
    while least < most:
        sizes.append(least)
        least *= 2
    return [*sizes, most]
