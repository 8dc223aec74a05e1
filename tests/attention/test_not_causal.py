"""Attention whose queries see all keys of their row, against float64 NumPy."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

import pallas_paged as pp
from pallas_paged.kernels.mosaic import support as mosaic_support
from tests.support.attention_calls import assert_close, assert_same_bits, ragged
from tests.support.attention_cases import Case
from tests.support.attention_options import chosen_options
from tests.support.marks import slow
from tests.support.quantized_cases import Quantized

rows_of_5 = partial(Case, pages_per_seq=5, num_tokens=48, num_pages=28)
MIXES = [
    rows_of_5(seq_lens=(17, 8, 1, 15, 7), q_lens=(17, 8, 1, 15, 7)),  # whole texts
    rows_of_5(seq_lens=(40, 38, 0, 9, 33), q_lens=(12, 1, 0, 8, 16)),  # parts of texts
    rows_of_5(seq_lens=(0, 3, 40, 5, 1), q_lens=(4, 20, 3, 6, 2)),  # more queries than keys
]
ALONE = [("window",), ("cap",), ("alibi",), ("sinks",)]
LONG = Case(
    head_dim=64,
    dtype="bfloat16",
    page_size=16,
    seq_lens=(150, 9, 70),
    pages_per_seq=10,
    q_lens=(70, 12, 1),
    num_tokens=90,
)


@pytest.mark.parametrize("case", MIXES, ids=str)
def test_every_query_sees_all_keys_of_its_row(case, implementation):
    case = case.on(implementation)
    arrays = case.make()
    actual = ragged(*arrays, implementation=implementation, causal=False)
    assert_close(actual, arrays, case.tolerance, causal=False)


@pytest.mark.parametrize("case", MIXES[1:], ids=str)
@pytest.mark.parametrize(
    "names", [("window", "alibi", "sinks", "split"), *slow((x,) for x in ALONE)], ids=str
)
def test_with_other_options(case, names, implementation):
    case = case.on(implementation)
    options, expected = chosen_options(names, ragged=True, implementation=implementation)
    arrays = case.make()
    actual = ragged(*arrays, **options, causal=False)
    assert_close(actual, arrays, case.tolerance, **expected, causal=False)


@pytest.mark.parametrize("kv_dtype", ["int8", *slow(["float8_e4m3fn"])])
def test_over_one_byte_pages(kv_dtype, implementation):
    case = Quantized(case=MIXES[1], kv_dtype=kv_dtype)
    arrays, meant = case.make()
    actual = ragged(*arrays, implementation=implementation, causal=False)
    assert_close(actual, meant, MIXES[1].tolerance, causal=False)


def test_data_outside_a_row_changes_no_bit(implementation):
    case = MIXES[1].on(implementation)
    call = partial(ragged, implementation=implementation, causal=False)
    assert_same_bits(call(*case.make()), call(*case.make(poison=False)))


def test_a_row_has_the_same_bits_in_any_batch(implementation):
    case = LONG.on(implementation)
    call = partial(ragged, implementation=implementation, causal=False, fixed_split_size=64)
    q, k, v, tables, lens, cu = case.make()
    together = call(q, k, v, tables, lens, cu)
    alone = call(q[70:82], k, v, tables[1:2], lens[1:2], np.int32([0, 12]))
    assert_same_bits(alone, [x[70:82] for x in together])


@pytest.mark.skipif(mosaic_support.why_not_jax() is not None, reason="needs JAX 0.11")
@pytest.mark.parametrize("names", [(), ("window", "alibi", "split")], ids=str)
def test_in_the_interpreted_mosaic_kernels(names):
    options, expected = chosen_options(names, ragged=True, implementation="mosaic_gpu_interpret")
    arrays = LONG.make()
    actual = ragged(*arrays, **options, causal=False)
    assert_close(actual, arrays, LONG.tolerance, **expected, causal=False)


@pytest.mark.parametrize("causal", [None, 0, np.bool_(False), "no"])
def test_other_values_than_bools_are_refused(causal):
    with pytest.raises(ValueError, match="must be True or False"):
        pp.ragged_paged_attention(*MIXES[0].make(), causal=causal)


def test_a_tree_mask_excludes_it():
    with pytest.raises(ValueError, match="causal=False excludes a tree_mask"):
        pp.ragged_paged_attention(*LONG.make(), causal=False, tree_mask=np.ones((3, 4, 4), bool))
