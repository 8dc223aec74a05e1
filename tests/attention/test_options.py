"""The options of attention, alone and in pairs, on every implementation."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

import pallas_paged as pp
from tests.support.attention_calls import assert_close, assert_same_bits, decode, ragged
from tests.support.attention_cases import Case
from tests.support.attention_options import OPTIONS, SINKS, SLOPES, chosen_options
from tests.support.attention_oracle import relative_error
from tests.support.marks import slow

DECODE = Case(head_dim=16, seq_lens=(37, 5, 0, 61))
RAGGED = Case(head_dim=16, seq_lens=(37, 5, 0, 61), q_lens=(11, 5, 1, 2), num_tokens=20)
CALLS = [(decode, DECODE), (ragged, RAGGED)]
IDS = ["decode", "ragged"]

ALONE = [(name,) for name in OPTIONS]
# Seven triples of the seven options, such that every pair of options is in one triple.
THREES = [tuple(np.roll(list(OPTIONS), -i)[[0, 1, 3]].tolist()) for i in range(7)]
# Decode needs fewer sets: it shares the code that turns scores into logits with ragged attention,
# and only the choice of the blocks that it visits is its own.
DECODE_SETS = [
    *(names for names in ALONE if names != ("tree",)),
    ("window", "split"),
    tuple(name for name in OPTIONS if name != "tree"),
]


def test_every_pair_of_options_is_in_one_triple():
    met = [pair for names in THREES for pair in itertools.combinations(sorted(names), 2)]
    assert sorted(met) == sorted(itertools.combinations(sorted(OPTIONS), 2))


@pytest.mark.parametrize("names", DECODE_SETS, ids="+".join)
def test_decode_options_match_the_oracle(names, implementation):
    call, oracle = chosen_options(names, ragged=False, implementation=implementation)
    case = DECODE.on(implementation)
    arrays = case.make()
    assert_close(decode(*arrays, **call), arrays, case.tolerance, **oracle)


@pytest.mark.parametrize(
    "names", [*THREES, tuple(OPTIONS), *slow((x,) for x in ALONE)], ids="+".join
)
def test_ragged_options_match_the_oracle(names, implementation):
    call, oracle = chosen_options(names, ragged=True, implementation=implementation)
    case = RAGGED.on(implementation)
    arrays = case.make()
    assert_close(ragged(*arrays, **call), arrays, case.tolerance, **oracle)


@pytest.mark.parametrize(("function", "case"), CALLS, ids=IDS)
class TestBoth:
    @pytest.mark.parametrize("soft_cap", [50.0, *slow([1e4])])
    def test_any_cap(self, function, case, soft_cap, implementation):
        case = case.on(implementation)
        arrays = case.make()
        actual = function(*arrays, soft_cap=soft_cap, implementation=implementation)
        assert_close(actual, arrays, case.tolerance, soft_cap=soft_cap)

    def test_logits_far_beyond_the_cap(self, function, case, implementation):
        case = case.on(implementation)
        q, *rest = case.make()
        arrays = (q * 1000, *rest)
        actual = function(*arrays, soft_cap=50.0, implementation=implementation)
        assert_close(actual, arrays, case.tolerance, soft_cap=50.0)

    @pytest.mark.parametrize(
        "window", [61, *slow([2**40])], ids=["the longest row", "beyond int32"]
    )
    def test_a_window_larger_than_the_rows_changes_no_bit(
        self, function, case, window, implementation
    ):
        case = case.on(implementation)
        arrays = case.make()
        plain = function(*arrays, implementation=implementation)
        windowed = function(*arrays, sliding_window=window, implementation=implementation)
        assert_same_bits(windowed, plain)

    def test_a_window_of_one_sees_its_own_token_only(self, function, case, implementation):
        case = case.on(implementation)
        arrays = case.make()
        actual = function(*arrays, sliding_window=1, implementation=implementation)
        assert_close(actual, arrays, case.tolerance, sliding_window=1)

    @pytest.mark.parametrize("page_size", [8, *slow([1])])
    def test_pages_left_of_the_window_are_not_read(self, function, case, page_size, implementation):
        case = dataclasses.replace(case, page_size=page_size, pages_per_seq=64 // page_size)
        case = case.on(implementation)
        window = 11
        clean = q, k_pages, v_pages, tables, lens, *rest = case.make()
        k_pages, v_pages, tables = k_pages.copy(), v_pages.copy(), tables.copy()
        for b, length in enumerate(lens):
            num_queries = 1 if case.q_lens is None else case.q_lens[b]
            first = max(length - num_queries - window + 1, 0)
            left = slice(0, first // page_size)
            k_pages[:, tables[b, left]] = v_pages[:, tables[b, left]] = np.nan
            tables[b, left] = np.iinfo(np.int32).min
        poisoned = (q, k_pages, v_pages, tables, lens, *rest)
        options = dict(sliding_window=window, implementation=implementation)
        assert_same_bits(function(*poisoned, **options), function(*clean, **options))

    def test_a_sink_of_minus_infinity_changes_nothing(self, function, case, implementation):
        case = case.on(implementation)
        arrays = case.make()
        sinks = np.full(4, -np.inf, np.float32)
        assert_close(
            function(*arrays, sinks=sinks, implementation=implementation), arrays, case.tolerance
        )

    def test_a_huge_sink_takes_all_the_weight(self, function, case, implementation):
        case = case.on(implementation)
        sinks = np.full(4, 1e4, np.float32)
        out, lse = map(
            np.asarray, function(*case.make(), sinks=sinks, implementation=implementation)
        )
        np.testing.assert_array_equal(out, 0)
        # A query without keys has no sink either.
        assert set(np.unique(lse)) == {-np.inf, np.float32(1e4)}

    def test_low_precision_with_every_option(self, function, case, implementation):
        case = dataclasses.replace(case, dtype="bfloat16").on(implementation)
        arrays = case.make()
        options = dict(soft_cap=3.0, sliding_window=20, alibi_slopes=SLOPES, sinks=SINKS)
        actual = function(*arrays, implementation=implementation, **options)
        assert_close(actual, arrays, case.tolerance, **options)


def test_a_window_is_attention_over_the_end_of_the_row(implementation):
    case = Case(seq_lens=(45, 61)).on(implementation)
    q, k_pages, v_pages, tables, lens = arrays = case.make()
    window, first = 21, np.array([24, 40])  # both on the border of a page
    windowed = decode(*arrays, sliding_window=window, implementation=implementation)
    ends = np.stack([np.roll(t, -f // case.page_size) for t, f in zip(tables, first, strict=True)])
    alone = decode(q, k_pages, v_pages, ends, lens - first, implementation=implementation)
    assert relative_error(windowed[0], np.asarray(alone[0], np.float64)) <= case.tolerance
    np.testing.assert_allclose(windowed[1], alone[1], rtol=1e-5)


def test_merged_states_may_have_the_sinks_in_one_of_them(implementation):
    case = Case(seq_lens=(64, 40)).on(implementation)
    q, k_pages, v_pages, tables, lens = arrays = case.make()
    cut = 24
    left = decode(q, k_pages, v_pages, tables, np.int32([cut, cut]), implementation=implementation)
    right = decode(
        q,
        k_pages,
        v_pages,
        np.roll(tables, -cut // case.page_size, axis=1),
        lens - cut,
        sinks=SINKS,
        implementation=implementation,
    )
    outs, lses = (np.stack(x) for x in zip(left, right, strict=True))
    merged = pp.merge_attention_states(outs, lses)
    assert_close(merged, arrays, case.tolerance, sinks=SINKS)


class TestTree:
    def test_of_all_earlier_tokens_equals_causality(self, implementation):
        case = RAGGED.on(implementation)
        arrays = case.make()
        mask = np.broadcast_to(np.tri(11, dtype=bool), (4, 11, 11))
        actual = ragged(*arrays, tree_mask=mask, implementation=implementation)
        assert_close(actual, arrays, case.tolerance)

    @pytest.mark.parametrize("size", [1, 11, 30])
    def test_of_any_size(self, size, implementation):
        case = RAGGED.on(implementation)
        arrays = case.make()
        mask = np.random.default_rng(size).random((4, size, size)) < 0.5
        actual = ragged(*arrays, tree_mask=mask, implementation=implementation)
        assert_close(actual, arrays, case.tolerance, tree_mask=mask)

    @pytest.mark.parametrize("value", [False, True])
    def test_all_false_and_all_true(self, value, implementation):
        # rows with older keys, without any, of length 0, of length 1
        case = dataclasses.replace(RAGGED, seq_lens=(37, 5, 0, 1)).on(implementation)
        arrays = case.make()
        mask = np.full((4, 11, 11), value)
        actual = ragged(*arrays, tree_mask=mask, implementation=implementation)
        assert_close(actual, arrays, case.tolerance, tree_mask=mask)

    def test_entries_past_a_rows_queries_change_no_bit(self, implementation):
        case = RAGGED.on(implementation)
        arrays = case.make()
        mask = np.random.default_rng(3).random((4, 12, 12)) < 0.5
        other = mask.copy()
        for b, n in enumerate(RAGGED.q_lens):
            other[b, n:], other[b, :, n:] = ~mask[b, n:], ~mask[b, :, n:]
        first, second = (
            ragged(*arrays, tree_mask=m, implementation=implementation) for m in (mask, other)
        )
        assert_same_bits(first, second)
