"""Rows that one program has as a whole: the decode kernel writes their results, not the merge."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_paged as pp
from pallas_paged.kernels import xla
from pallas_paged.kernels.call import Arrays
from pallas_paged.kernels.logits import LogitOptions
from tests.support.attention_cases import Case
from tests.support.marks import needs_triton

pytestmark = needs_triton
CASE = Case(pages_per_seq=17, head_dim=24)
SINKS = np.float32([1.0, -1.0, 0.5, 3.0])
# Lengths, programs of a KV head, and which rows are split, in blocks of 16 tokens.
BATCHES = {
    "mixed": ((70, 5, 0, 130, 20, 0, 33, 0), 3, (0, 0, 0, 1, 0, 0, 0, 0)),
    "equal": ((60, 64, 50, 49), 4, (0, 0, 0, 0)),
    "two of a program": ((30, 31, 17, 32), 2, (0, 0, 0, 0)),
    "all split": ((80, 128, 130), 6, (1, 1, 1)),
    "empty": ((0, 0), 1, (0, 0)),
}


def call_of(lens, num_programs, case=CASE, **more):
    """The arrays of a call and its config."""
    case = dataclasses.replace(case, seq_lens=lens)
    q, k_pages, v_pages, tables, seq_lens = map(jnp.asarray, case.make())
    names = dict(q=q, k_pages=k_pages, v_pages=v_pages, block_tables=tables, seq_lens=seq_lens)
    arrays = Arrays(**names, **more)
    loop = dict(block_k=16, num_programs=2 * num_programs, num_warps=4, num_stages=2)
    return arrays, loop


def run(function, arrays, config, **options):
    """A function of this family, interpreted."""
    options = LogitOptions(sm_scale=0.3, **options)

    def call(arrays):
        return function(arrays, options=options, config=config, interpret=True)

    return jax.jit(call)(arrays)


def assert_same(actual, expected):
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))


@pytest.mark.parametrize(
    ("name", "dtype"), [("mixed", "bfloat16"), *((name, "float32") for name in BATCHES)]
)
def test_the_kernel_has_the_results_of_rows_that_are_not_split(name, dtype):
    from pallas_paged.kernels.triton import decode

    lens, num_programs, split = BATCHES[name]
    arrays, loop = call_of(lens, num_programs, dataclasses.replace(CASE, dtype=dtype))
    config = pp.DecodeConfig(**loop)
    states = run(decode.decode_states, arrays, config)
    out, lse = run(decode.paged_decode, arrays, config)
    whole = [n > 0 and not is_split for n, is_split in zip(lens, split, strict=True)]
    rows = jnp.arange(len(lens))
    _, count = jax.vmap(states.plan.partials_of_row, (0, None))(rows, states.unit_ends)
    np.testing.assert_array_equal(count == 1, whole)
    assert states.results[0].dtype == arrays.q.dtype
    assert_same(
        [x[np.array(whole)] for x in states.results], [out[np.array(whole)], lse[np.array(whole)]]
    )
    expected = xla.paged_decode(arrays, options=LogitOptions(sm_scale=0.3))
    for x, y in zip((out, lse), expected, strict=True):
        np.testing.assert_allclose(
            np.asarray(x, np.float32),
            np.asarray(y, np.float32),
            atol=CASE.tolerance if dtype == "float32" else 0.02,
        )


@pytest.mark.parametrize("name", ["mixed", "two of a program"])
def test_the_merge_of_all_rows_has_the_same_results(monkeypatch, name):
    from pallas_paged.kernels.triton import decode

    lens, num_programs, _ = BATCHES[name]
    arrays, loop = call_of(lens, num_programs)
    config = pp.DecodeConfig(**loop)
    options = dict(sliding_window=40, soft_cap=5.0)
    actual = run(decode.paged_decode, arrays, config, **options)
    monkeypatch.setattr(decode, "writes_results", lambda *_: False)
    assert run(decode.decode_states, arrays, config).results is None
    expected = run(decode.paged_decode, arrays, config, **options)
    # Not bit for bit: XLA contracts products and sums of an interpreted kernel, or not.
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("lens", "sinks"),
    [((790, 0, 300, 60), None), ((20, 800, 37), SINKS), ((700, 650), None)],
    ids=["4 rows", "3 rows, sinks", "2 rows"],
)
def test_the_end_of_a_long_line_is_in_short_ranges(lens, sinks):
    from pallas_paged.kernels.triton import decode

    case = dataclasses.replace(CASE, pages_per_seq=100)
    arrays, loop = call_of(lens, 1, case, sinks=sinks)
    config = pp.DecodeConfig(**loop)
    states = run(decode.decode_states, arrays, config)
    assert states.plan.num_short_programs == 1
    start, stop = states.plan.units_of_program(1, states.unit_ends[-1])
    assert 0 < stop - start <= 8
    expected = xla.paged_decode(arrays, options=LogitOptions(sm_scale=0.3))
    for x, y in zip(run(decode.paged_decode, arrays, config), expected, strict=True):
        np.testing.assert_allclose(x, y, atol=CASE.tolerance)


@pytest.mark.parametrize(
    ("lens", "num_programs", "sinks", "fixed_split_size"),
    [
        ((64,), 1, None, None),
        ((64, 64), 6, None, None),
        ((64, 64), 2, SINKS, None),
        ((64, 64), 2, None, 64),
    ],
    ids=["one row", "few rows", "sinks", "fixed split size"],
)
def test_other_calls_leave_states_only(lens, num_programs, sinks, fixed_split_size):
    from pallas_paged.kernels.triton import decode

    arrays, loop = call_of(lens, num_programs, sinks=sinks)
    config = pp.DecodeConfig(**loop, fixed_split_size=fixed_split_size)
    states = run(decode.decode_states, arrays, config)
    assert states.results is None and jnp.isfinite(states.lse).any()
