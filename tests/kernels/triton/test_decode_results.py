"""Rows that are not split: the decode kernel writes their results, not the merge."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_paged as pp
from pallas_paged.kernels.call import Arrays
from pallas_paged.kernels.logits import LogitOptions
from tests.support.attention_calls import assert_close
from tests.support.attention_cases import Case
from tests.support.marks import needs_triton, slow

pytestmark = needs_triton
CASE = Case(pages_per_seq=17, head_dim=24, num_pages=77)
SINKS = np.float32([1.0, -1.0, 0.5, 3.0])
WINDOW = dict(sliding_window=40, soft_cap=5.0)
# Lengths of 8 rows for 4 programs of a KV head, and the rows that are split into blocks of 16.
BATCHES = {
    "mixed": ((70, 5, 0, 130, 20, 0, 33, 0), (0, 0, 0, 1, 0, 0, 0, 0)),
    "equal, two of a program": ((30, 31, 17, 32, 30, 31, 17, 32), (0,) * 8),
    "all split": ((0, 112, 0, 128, 130, 0, 0, 0), (0, 1, 0, 1, 1, 0, 0, 0)),
    "empty": ((0,) * 8, (0,) * 8),
}


def decode(lens, num_programs, case=CASE, *, sinks=None, fixed_split_size=None, **options):
    """The call, its arrays as `Arrays`, and those of its case."""
    from pallas_paged.kernels.triton import decode, merge

    made = dataclasses.replace(case, seq_lens=lens).make()
    names = ("q", "k_pages", "v_pages", "block_tables", "seq_lens")
    arrays = Arrays(**dict(zip(names, made, strict=True)), sinks=sinks)
    loop = dict(block_k=16, num_programs=2 * num_programs, num_warps=4, num_stages=2)
    config = pp.DecodeConfig(**loop, fixed_split_size=fixed_split_size)
    options = LogitOptions(sm_scale=0.3, **options)

    def call(arrays):
        """Return the states, (out, lse), and the number of states of each row."""
        states = decode.decode_states(arrays, options=options, config=config, interpret=True)
        merged = merge.merge_decode(states, dtype=arrays.q.dtype, interpret=True)
        rows = jnp.arange(arrays.num_seqs)
        _, count = jax.vmap(states.plan.partials_of_row, (0, None))(rows, states.unit_ends)
        return states, merged, count

    return call, arrays, made


@pytest.mark.parametrize(
    ("dtype", "options"),
    [("float32", {}), ("bfloat16", WINDOW), *slow([("float32", WINDOW), ("bfloat16", {})])],
)
def test_the_kernel_has_the_results_of_rows_that_are_not_split(dtype, options):
    case, run = dataclasses.replace(CASE, dtype=dtype), None
    for name, (lens, split) in BATCHES.items():
        call, arrays, made = decode(lens, 4, case, **options)
        run = run or jax.jit(call)
        states, (out, lse), count = jax.device_get(run(arrays))
        unsplit = (np.array(lens) > 0) & ~np.array(split, bool)
        if not options:
            np.testing.assert_array_equal(count == 1, unsplit, name)
        assert states.results[0].dtype == arrays.q.dtype
        for result, merged in zip(states.results, (out, lse), strict=True):
            np.testing.assert_array_equal(result[count == 1], merged[count == 1], name)
        assert_close((out, lse), made, case.tolerance, sm_scale=0.3, **options)


@pytest.mark.parametrize("sinks", [None, *slow([(SINKS,)])], ids=["plain", "sinks"])
def test_the_end_of_a_long_line_is_in_short_ranges(sinks):
    case, run = dataclasses.replace(CASE, pages_per_seq=100, num_pages=200), None
    for lens in ((790, 0, 300, 60), (700, 650, 0, 0), (20, 800, 37, 0)):
        call, arrays, made = decode(lens, 1, case, sinks=sinks)
        run = run or jax.jit(call)
        states, merged, _ = jax.device_get(run(arrays))
        assert states.plan.num_short_programs == 1
        start, stop = states.plan.units_of_program(1, states.unit_ends[-1])
        assert 0 < stop - start <= 8
        assert_close(merged, made, case.tolerance, sm_scale=0.3, sinks=sinks)


@pytest.mark.parametrize(
    ("lens", "num_programs", "options", "has_results"),
    [
        ((64,), 1, {}, False),
        ((64, 64), 6, {}, False),
        ((64, 64), 4, {}, True),
        ((64, 64), 2, dict(sinks=SINKS), False),
        ((64, 64), 2, dict(fixed_split_size=64), False),
    ],
    ids=["one row", "few rows", "enough rows", "sinks", "fixed split size"],
)
def test_other_calls_leave_states_only(lens, num_programs, options, has_results):
    call, arrays, _ = decode(lens, num_programs, **options)
    assert (jax.eval_shape(call, arrays)[0].results is not None) == has_results
