"""Packing a step: shapes, padding, and the sampling values of each row."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.batch import Drawing, RowValues, Shapes, pack


@pytest.mark.parametrize(
    ("max_seqs", "token_budget", "decode_rows", "chunk_tokens"),
    [
        (4, 16, [4], [16]),
        (8, 128, [8], [128]),
        (9, 129, [8, 9], [128, 129]),
        (64, 2048, [8, 16, 32, 64], [128, 256, 512, 1024, 2048]),
        (100, 1000, [8, 16, 32, 64, 100], [128, 256, 512, 1000]),
    ],
)
def test_shapes_are_few_and_end_with_the_largest(max_seqs, token_budget, decode_rows, chunk_tokens):
    shapes = Shapes(max_seqs=max_seqs, token_budget=token_budget)
    assert shapes.decode_rows == decode_rows and shapes.chunk_tokens == chunk_tokens
    wanted = [(rows, 0) for rows in decode_rows] + [(max_seqs, tokens) for tokens in chunk_tokens]
    assert shapes.all() == wanted


@given(st.integers(1, 80), st.integers(2, 700), st.data())
def test_every_plan_gets_the_smallest_shape_that_fits(max_seqs, budget, data):
    shapes = Shapes(max_seqs=max_seqs, token_budget=max_seqs + budget)
    num_decodes = data.draw(st.integers(0, max_seqs))
    room = shapes.token_budget - num_decodes
    most = min(room, shapes.max_chunks(shapes.token_budget))
    lens = data.draw(st.lists(st.integers(1, max(room // max(most, 1), 1)), max_size=most))
    if not num_decodes and not lens:
        return
    rows, tokens = shapes.fit(num_decodes, lens)
    assert (rows, tokens) in shapes.all()

    def has_room(rows, tokens):
        chunks = shapes.max_chunks(tokens) if tokens else 0
        return rows >= num_decodes and tokens >= sum(lens) and chunks >= len(lens)

    assert has_room(rows, tokens)
    assert not any(has_room(*shape) for shape in shapes.all() if shape < (rows, tokens))


SHAPES = Shapes(max_seqs=10, token_budget=32)


def fill(values: RowValues) -> RowValues:
    for row in range(10):
        values.set(
            row,
            seeds=(row, 10 + row, 20 + row),
            temperature=row / 10,
            top_k=row,
            top_p=1 - row / 20,
            min_p=row / 40,
        )
    return values


def packed(decode_rows, chunks, drawing=Drawing.GREEDY):
    return pack(
        decode_rows,
        chunks,
        shape=SHAPES.fit(len(decode_rows), [len(tokens) for _, tokens in chunks]),
        shapes=SHAPES,
        values=fill(RowValues(10)),
        drawing=drawing,
        num_ranked=7,
    )


def test_a_batch_that_only_decodes():
    batch = packed([3, 1], [])
    assert batch.decode_rows.tolist() == [3, 1] + [10] * 6  # 10 is padding
    assert batch.chunks is None and batch.draws is None and batch.num_ranked == -1


def test_a_batch_with_chunks():
    batch = packed([4], [(2, [7, 8, 9]), (0, [5])])
    chunks = batch.chunks
    assert batch.decode_rows.tolist() == [4] + [10] * 9
    assert chunks.tokens.tolist() == [7, 8, 9, 5] + [0] * 28
    assert chunks.rows.tolist() == [2, 0] + [10] * 6
    assert chunks.cu_q_lens.tolist() == [0, 3] + [4] * 7


def test_an_empty_batch_is_all_padding():
    batch = pack(
        [],
        [],
        shape=(10, 32),
        shapes=SHAPES,
        values=RowValues(10),
        drawing=Drawing.FULL,
        num_ranked=7,
    )
    assert set(batch.decode_rows) == set(batch.chunks.rows) == {10}
    assert not batch.chunks.cu_q_lens.any()
    assert batch.draws.sampling.temperature.shape == (18,)


def test_rows_draw_with_their_own_values_and_padding_is_greedy():
    batch = packed([4], [(2, [7]), (9, [5])], Drawing.FULL)
    draws, sampling = batch.draws, batch.draws.sampling
    held = np.asarray([0, 10, 11])  # the decoding row, and those of the chunks
    np.testing.assert_array_equal(draws.seeds[:, held], [[4, 2, 9], [14, 12, 19], [24, 22, 29]])
    np.testing.assert_allclose(sampling.temperature[held], [0.4, 0.2, 0.9])
    assert sampling.top_k[held].tolist() == [4, 2, 9]
    np.testing.assert_allclose(sampling.top_p[held], [0.8, 0.9, 0.55])
    np.testing.assert_allclose(sampling.min_p[held], [0.1, 0.05, 0.225])
    assert not np.delete(sampling.temperature, held).any()
    assert batch.num_ranked == 7


def test_a_batch_carries_no_more_than_its_drawing_needs():
    batch = packed([4, 5], [], Drawing.TEMPERATURE)
    assert batch.num_ranked == -1
    sampling = batch.draws.sampling
    assert sampling.temperature.shape == (8,)
    assert sampling.top_k is sampling.top_p is sampling.min_p is None
    assert max(Drawing.GREEDY, Drawing.FULL, Drawing.TEMPERATURE) is Drawing.FULL
