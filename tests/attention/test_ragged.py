"""One suite for every implementation of `ragged_paged_attention`, against float64 NumPy."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_paged as pp
from tests.support.attention_calls import (
    assert_close,
    assert_same_bits,
    decode,
    ragged,
)
from tests.support.attention_cases import Case, cumulated
from tests.support.attention_oracle import attend, relative_error
from tests.support.marks import slow

# All of these have the same shapes, so they share one compiled program.
rows_of_5 = partial(Case, pages_per_seq=5, num_tokens=48, num_pages=28)
MIXES = [
    rows_of_5(seq_lens=(17, 8, 1, 15, 20), q_lens=(17, 8, 1, 15, 7)),  # prompts
    rows_of_5(seq_lens=(40, 38, 20, 9, 33), q_lens=(12, 1, 8, 8, 16)),  # chunks on a prefix
    rows_of_5(seq_lens=(40, 38, 20, 9, 33), q_lens=(4, 5, 4, 3, 4)),  # a few tokens each
    rows_of_5(seq_lens=(40, 38, 20, 9, 33), q_lens=(1, 1, 1, 1, 1)),  # decode
    rows_of_5(seq_lens=(40, 38, 20, 9, 33), q_lens=(1, 0, 5, 1, 33)),  # a mix of these
    rows_of_5(seq_lens=(0, 40, 0, 9, 0), q_lens=(0, 30, 0, 9, 0)),  # empty rows
    rows_of_5(seq_lens=(0, 3, 40, 5, 1), q_lens=(4, 20, 3, 6, 2)),  # more queries than keys
    rows_of_5(seq_lens=(0, 0, 40, 0, 0), q_lens=(0, 0, 40, 0, 0)),  # one row has everything
    rows_of_5(seq_lens=(40, 38, 20, 9, 33), q_lens=(0, 0, 0, 0, 0)),  # padding tokens only
    rows_of_5(seq_lens=(8, 8, 16, 8, 8), q_lens=(8, 8, 16, 8, 8)),  # ends on borders of pages
]
# Groups of 1, 3, 7, 16 and 40 heads; odd and large head dims; the smallest and the largest pages.
SHAPES = [
    Case(num_q_heads=2, num_kv_heads=2, head_dim=80, q_lens=(37, 3, 9)),
    Case(num_q_heads=6, num_kv_heads=2, head_dim=96, q_lens=(5, 5, 20), dtype="bfloat16"),
    Case(
        num_q_heads=7,
        num_kv_heads=1,
        head_dim=8,
        page_size=1,
        pages_per_seq=40,
        seq_lens=(40, 9),
        q_lens=(12, 9),
    ),
    # shapes that the Mosaic kernels take
    Case(
        num_q_heads=8,
        num_kv_heads=2,
        head_dim=128,
        page_size=16,
        seq_lens=(150, 9, 70),
        pages_per_seq=10,
        dtype="bfloat16",
        q_lens=(70, 9, 1),
        num_tokens=83,
    ),
    Case(head_dim=384, q_lens=(9, 5, 1), seq_lens=(19, 5, 33)),
    Case(head_dim=512, q_lens=(9, 5, 1), seq_lens=(19, 5, 33), dtype="bfloat16"),
    # fewer tokens than rows
    Case(seq_lens=(9, 0, 0, 64, 7, 30), q_lens=(0, 0, 0, 2, 0, 0)),
]
SLOW_SHAPES = [
    Case(num_q_heads=16, num_kv_heads=1, head_dim=192, q_lens=(3, 0, 7), dtype="float16"),
    Case(
        num_q_heads=40,
        num_kv_heads=1,
        head_dim=256,
        page_size=256,
        pages_per_seq=2,
        seq_lens=(257, 3),
        q_lens=(5, 3),
        dtype="bfloat16",
    ),
    Case(
        num_q_heads=5,
        num_kv_heads=1,
        head_dim=64,
        page_size=256,
        seq_lens=(257, 3),
        pages_per_seq=2,
        dtype="float16",
        q_lens=(5, 3),
    ),
]


@pytest.mark.parametrize("case", [*MIXES, *SHAPES, *slow(SLOW_SHAPES)], ids=str)
def test_matches_the_oracle(case, implementation):
    case = case.on(implementation)
    arrays = case.make()
    assert_close(ragged(*arrays, implementation=implementation), arrays, case.tolerance)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda q, k, v, *rest: (q, k, v * v.dtype.type(1.02), *rest),
        lambda q, k, v, tables, lens, cu: (q, k, v, tables, lens - 1, cu),
        lambda q, k, v, tables, lens, cu: (q, k, v, tables, lens, np.append(cu[:-1], cu[-1] - 1)),
    ],
    ids=["V", "seq_lens", "cu_q_lens"],
)
def test_a_wrong_input_fails(wrong, implementation):
    case = MIXES[1].on(implementation)
    arrays = case.make()
    actual = ragged(*wrong(*arrays), implementation=implementation)
    with pytest.raises(AssertionError):
        assert_close(actual, arrays, case.tolerance)


@pytest.mark.parametrize("case", [MIXES[4], MIXES[6], SHAPES[1]], ids=str)
def test_data_outside_a_row_changes_no_bit(case, implementation):
    case = case.on(implementation)
    clean = ragged(*case.make(poison=False), implementation=implementation)
    assert_same_bits(ragged(*case.make(), implementation=implementation), clean)


def test_the_order_of_pages_changes_no_bit(implementation):
    case = MIXES[1].on(implementation)
    first = ragged(*case.make(order=0), implementation=implementation)
    assert_same_bits(ragged(*case.make(order=1), implementation=implementation), first)


def test_same_inputs_same_bits(implementation):
    arrays = [jnp.asarray(x) for x in SHAPES[1].on(implementation).make()]
    first = ragged(*arrays, implementation=implementation)
    for _ in range(3):
        assert_same_bits(ragged(*arrays, implementation=implementation), first)


def test_large_logits_do_not_overflow(implementation):
    case = MIXES[1].on(implementation)
    q, *rest = case.make()
    arrays = (q * 1000, *rest)
    assert_close(ragged(*arrays, implementation=implementation), arrays, case.tolerance)


def test_lengths_beyond_the_table_count_as_its_size(implementation):
    case = dataclasses.replace(MIXES[1].on(implementation), seq_lens=(40, 40, 40, 9, 40))
    q, k, v, tables, _, cu = case.make()
    lens = np.int32([40, 2**31 - 1, 41, -7, 40])
    expected = q, k, v, tables, np.clip(lens, 0, 40), cu
    actual = ragged(q, k, v, tables, lens, cu, implementation=implementation)
    assert_close(actual, expected, case.tolerance)


@pytest.mark.parametrize(
    "cu_q_lens",
    [
        (0, 20, 10, 40, 40, 41),  # falls
        (0, 20, 21, 2**31 - 1, 50, 100),  # exceeds T
        (-5, -3, 7, 7, 8, 30),  # begins below 0
        (3, 9, 9, 20, 21, 22),  # begins above 0
    ],
    ids=str,
)
def test_cu_q_lens_are_clamped_to_rise_within_the_tokens(cu_q_lens, implementation):
    case = dataclasses.replace(MIXES[1].on(implementation), q_lens=(48, 0, 0, 0, 0))
    q, k, v, tables, lens, _ = case.make()
    taken = np.clip(np.maximum.accumulate([0, *cu_q_lens[1:]]), 0, len(q)).astype(np.int32)
    actual = ragged(q, k, v, tables, lens, np.int32(cu_q_lens), implementation=implementation)
    assert_close(actual, (q, k, v, tables, lens, taken), case.tolerance)


def test_64_bit_mode_changes_nothing(implementation):
    arrays = [jnp.asarray(x) for x in MIXES[1].on(implementation).make()]
    expected = ragged(*arrays, implementation=implementation)
    with jax.enable_x64(True):
        actual = ragged(*arrays, implementation=implementation)
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_jitted_without_options_returns_out_alone():
    arrays = MIXES[0].make()
    out = jax.jit(pp.ragged_paged_attention)(*arrays)
    assert isinstance(out, jax.Array)
    assert relative_error(out, attend(*arrays)[0]) <= MIXES[0].tolerance


@pytest.mark.parametrize(
    ("block_q", "block_k", "num_programs", "fixed_split_size"),
    [  # with programs for each of 2 KV heads
        (16, 16, 30, None),
        (64, 16, 2, None),
        (16, 16, 5, 16),
        (64, 64, 1, 128),
        *slow([(16, 16, 1, None), (16, 64, 7, None), (32, 16, 30, 32)]),
    ],
)
def test_every_config_matches_the_oracle(block_q, block_k, num_programs, fixed_split_size):
    config = pp.RaggedConfig(
        block_q=block_q,
        block_k=block_k,
        num_programs=2 * num_programs,
        fixed_split_size=fixed_split_size,
        num_warps=2,
        num_stages=2,
    )
    for case in (MIXES[1], MIXES[4]):
        arrays = case.make()
        actual = ragged(*arrays, implementation="triton_interpret", config=config)
        assert_close(actual, arrays, case.tolerance)


def test_the_plan_is_made_once_for_all_layers():
    arrays = [jnp.asarray(x) for x in Case(q_lens=(3, 1, 2)).make()]

    def layers(q, *rest, num_layers):
        for _ in range(num_layers):
            q = pp.ragged_paged_attention(q, *rest, implementation="triton_interpret")
        return q

    def count(num_layers):
        lowered = jax.jit(partial(layers, num_layers=num_layers)).lower(*arrays)
        return lowered.compile().as_text().count("ragged_plan")

    assert 0 < count(2) < 1.2 * count(1)


def test_a_prompt_whole_in_chunks_and_token_by_token_gives_the_same(implementation):
    case = Case(seq_lens=(13, 6), q_lens=(13, 6)).on(implementation)
    q, k, v, tables, lens, cu = arrays = case.make()
    whole = ragged(*arrays, implementation=implementation)
    assert_close(whole, arrays, case.tolerance)
    for chunk in (1, 5):
        out, lse = np.zeros(q.shape, q.dtype), np.full(q.shape[:2], -np.inf, np.float32)
        for begin in range(0, max(case.q_lens), chunk):
            ends = np.minimum(begin + chunk, lens)
            q_lens = np.maximum(ends - begin, 0)
            tokens = np.concatenate([cu[b] + np.arange(begin, ends[b]) for b in range(2)])
            packed = np.full_like(q, np.nan)
            packed[: tokens.size] = q[tokens]
            now = ragged(
                packed, k, v, tables, ends, cumulated(q_lens), implementation=implementation
            )
            out[tokens], lse[tokens] = (np.asarray(x)[: tokens.size] for x in now)
        assert relative_error(out, np.asarray(whole[0], np.float64)) <= case.tolerance
        np.testing.assert_allclose(lse, whole[1], rtol=1e-5, atol=1e-5)


def test_one_query_per_row_equals_decode(implementation):
    case = Case(seq_lens=(0, 1, 8, 9, 64), q_lens=(1, 1, 1, 1, 1)).on(implementation)
    arrays = case.make()
    out, lse = ragged(*arrays, implementation=implementation)
    expected_out, expected_lse = decode(*arrays[:5], implementation=implementation)
    assert relative_error(out, np.asarray(expected_out, np.float64)) <= case.tolerance
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5)


def test_decode_rows_beside_prompts_equal_decode_alone(implementation):
    case, rows = MIXES[4].on(implementation), [0, 3]
    q, k, v, tables, lens, cu = arrays = case.make()
    out, lse = (x[cu[rows]] for x in ragged(*arrays, implementation=implementation))
    alone = decode(q[cu[rows]], k, v, tables[rows], lens[rows], implementation=implementation)
    assert relative_error(out, np.asarray(alone[0], np.float64)) <= case.tolerance
    np.testing.assert_allclose(lse, alone[1], rtol=1e-5)


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU with 9 GB free")
def test_a_pool_of_more_than_2_31_elements():
    case = Case(
        head_dim=64,
        page_size=256,
        pages_per_seq=2,
        seq_lens=(300, 17),
        q_lens=(40, 17),
        dtype="bfloat16",
    )
    arrays = case.make()
    large = case.in_a_large_pool(arrays, num_pages=70_000)
    assert large[1].size > 2**31
    assert_close(ragged(*large, implementation="triton"), arrays, case.tolerance)
