"""Which rows a call has, and where their pages stand: `num_seqs`, and tables that are flat."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_paged.kernels.mosaic import support as mosaic_support
from tests.support.attention_calls import (
    assert_close,
    assert_same_bits,
    cascade,
    decode,
    ragged,
)
from tests.support.attention_cases import Case
from tests.support.marks import slow

DECODE = Case(seq_lens=(37, 5, 64, 20, 9))
RAGGED = dataclasses.replace(DECODE, q_lens=(11, 1, 30, 5, 9), num_tokens=64)
GROUPS = (np.int32([16, 8]), np.int32([0, 2, 5]))
CALLS = [(decode, DECODE), (ragged, RAGGED), (cascade, DECODE)]
IDS = ["decode", "ragged", "cascade"]
NEEDS_MOSAIC = pytest.mark.skipif(mosaic_support.why_not_jax() is not None, reason="needs JAX 0.11")
MOSAIC = dict(head_dim=64, page_size=16, pages_per_seq=5, dtype="bfloat16")


def arrays_of(function, case):
    """Arrays of a call; the rows of a group of cascades begin with the same pages."""
    arrays = case.make()
    if function is not cascade:
        return arrays
    q, k_pages, v_pages, tables, lens = arrays
    tables = tables.copy()
    tables[1, :1], tables[3:, :1] = tables[0, :1], tables[2, :1]
    return q, k_pages, v_pages, tables, lens, *GROUPS


def with_dead_rows(function, arrays, num_seqs):
    """(the call with anything in rows from num_seqs on, the arrays that are meant)."""
    q, k_pages, v_pages, tables, lens, *rest = (np.array(x) for x in arrays)
    tables[num_seqs:] = np.int32([-1, 2**31 - 1, -(2**31)])[: len(tables[num_seqs:, 0]), None]
    lens[num_seqs:] = np.int32([2_000_000, -7, 63])[: len(lens[num_seqs:])]
    if function is ragged:
        rest[0][num_seqs + 1 :] = np.int32([2_000_000, -3, 1])[: len(rest[0][num_seqs + 1 :])]
    meant = [q, k_pages, v_pages, tables, np.where(np.arange(len(lens)) < num_seqs, lens, 0)]
    if function is ragged:
        meant.append(rest[0][np.minimum(np.arange(len(lens) + 1), num_seqs)])
    return (q, k_pages, v_pages, tables, lens, *rest), meant


@pytest.mark.parametrize(("function", "case"), CALLS, ids=IDS)
class TestNumSeqs:
    @pytest.mark.parametrize("num_seqs", [3, 5, *slow([2])])
    def test_rows_from_there_on_are_empty(self, function, case, num_seqs, implementation):
        case = case.on(implementation)
        arrays, meant = with_dead_rows(function, arrays_of(function, case), num_seqs)
        actual = function(*arrays, implementation=implementation, num_seqs=np.int32(num_seqs))
        assert_close(actual, meant, case.tolerance)

    def test_beyond_the_rows_it_is_all_rows(self, function, case):
        arrays = arrays_of(function, case)
        expected = function(*arrays, implementation="xla")
        for num_seqs in (5, 2**31 - 1):
            actual = function(*arrays, implementation="xla", num_seqs=np.int32(num_seqs))
            assert_same_bits(actual, expected)

    def test_without_rows_all_is_zero(self, function, case, implementation):
        arrays = arrays_of(function, case.on(implementation))
        for num_seqs in (0, -4):
            out, lse = function(*arrays, implementation=implementation, num_seqs=np.int32(num_seqs))
            assert not np.asarray(out, np.float32).any()
            assert np.isneginf(lse).all()

    @pytest.mark.parametrize("bad", [1.0, np.int64(2), np.int32([2]), True])
    def test_other_values_are_refused_by_name(self, function, case, bad):
        with pytest.raises(ValueError, match=r"num_seqs .* must be int32"):
            function.__wrapped__(*arrays_of(function, case), num_seqs=bad)


def test_a_program_serves_all_numbers_of_rows():
    arrays = [jnp.asarray(x) for x in RAGGED.make()]
    traces = 0

    @jax.jit
    def call(num_seqs):
        nonlocal traces
        traces += 1
        return ragged(*arrays, implementation="xla", num_seqs=num_seqs)

    lses = [call(num_seqs)[1] for num_seqs in (1, 2, 4)]
    assert traces == 1
    assert np.isfinite(lses).all(axis=-1).sum(axis=-1).tolist() == [11, 12, 47]


@NEEDS_MOSAIC
@pytest.mark.parametrize(("function", "case"), CALLS[:2], ids=IDS[:2])
def test_num_seqs_in_the_interpreted_mosaic_kernels(function, case):
    case = dataclasses.replace(case, **MOSAIC)
    arrays, meant = with_dead_rows(function, case.make(), 3)
    actual = function(*arrays, implementation="mosaic_gpu_interpret", num_seqs=np.int32(3))
    assert_close(actual, meant, case.tolerance)


@pytest.mark.parametrize(("function", "case"), CALLS, ids=IDS)
class TestFlatTables:
    def test_mean_the_same(self, function, case):
        q, k_pages, v_pages, tables, *rest = arrays_of(function, case)
        expected = function(q, k_pages, v_pages, tables, *rest, implementation="xla")
        actual = function(q, k_pages, v_pages, tables.reshape(-1), *rest, implementation="xla")
        assert_same_bits(actual, expected)

    @pytest.mark.parametrize("size", [0, 7, 41])
    def test_of_another_length_are_refused(self, function, case, size):
        q, k_pages, v_pages, _, *rest = arrays_of(function, case)
        with pytest.raises(ValueError, match=r"block_tables.shape=\(\d+,\) must be .* with B=5"):
            function.__wrapped__(q, k_pages, v_pages, np.zeros(size, np.int32), *rest)


@pytest.mark.parametrize("junk", [-1, *slow([-(2**31), 2**31 - 1, 2_000_000])])
@pytest.mark.parametrize(("function", "case"), CALLS[:2], ids=IDS[:2])
class TestEntriesPastTheBlocksOfARow:
    def check(self, function, case, junk, implementation):
        arrays = list(case.make())
        blocks = -(-arrays[4] // case.page_size)
        tables = arrays[3]
        arrays[3] = np.where(np.arange(tables.shape[1]) < blocks[:, None], tables, junk)
        assert (arrays[3] == junk).any()
        actual = function(*arrays, implementation=implementation)
        assert_close(actual, arrays, case.tolerance)

    def test_may_hold_any_integer(self, function, case, junk, implementation):
        self.check(function, case.on(implementation), junk, implementation)

    @NEEDS_MOSAIC
    def test_may_hold_any_integer_in_interpreted_mosaic_kernels(self, function, case, junk):
        self.check(function, dataclasses.replace(case, **MOSAIC), junk, "mosaic_gpu_interpret")


@pytest.mark.parametrize(("function", "case"), CALLS, ids=IDS)
class TestQScale:
    def test_is_a_factor_of_the_logits(self, function, case):
        arrays = arrays_of(function, case)
        call = partial(function, *arrays, implementation="xla")
        assert_same_bits(call(q_scale=-0.25, sm_scale=2.0), call(sm_scale=-0.5))

    @pytest.mark.parametrize(
        ("scales", "message"),
        [
            (dict(q_scale=np.inf), "q_scale=inf must be finite"),
            (dict(q_scale="1"), "q_scale='1' must be a number"),
            (dict(q_scale=1e30, sm_scale=1e30), r"sm_scale \* q_scale=.* must be finite"),
        ],
    )
    def test_bad_values_are_refused_by_name(self, function, case, scales, message):
        with pytest.raises(ValueError, match=message):
            function.__wrapped__(*arrays_of(function, case), **scales)


def test_num_seqs_under_vmap():
    call = partial(ragged, *map(jnp.asarray, RAGGED.make()), implementation="xla")
    numbers = jnp.int32([2, 5])
    mapped = jax.vmap(lambda num_seqs: call(num_seqs=num_seqs))(numbers)
    for i, number in enumerate(numbers):
        for x, expected in zip(mapped, call(num_seqs=number), strict=True):
            np.testing.assert_allclose(x[i], expected, rtol=1e-5, atol=1e-5)
