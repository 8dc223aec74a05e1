"""The decode kernel with one loop over the blocks of many rows, beside that with one for each."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_paged as pp
from pallas_paged.kernels.call import Arrays
from pallas_paged.kernels.decode_plan import DecodePlan
from pallas_paged.kernels.logits import LogitOptions
from pallas_paged.kernels.triton.decode_line import blocks_of
from tests.support.attention_calls import assert_close, assert_same_bits, decode
from tests.support.attention_cases import Case
from tests.support.attention_options import chosen_options
from tests.support.marks import slow
from tests.support.page_layouts import call_in_layout
from tests.support.quantized_cases import Quantized

CONFIG = pp.DecodeConfig(block_k=16, num_programs=6, num_warps=2, num_stages=2, one_loop=True)
ROWS = Case(seq_lens=(100, 0, 3, 64, 16, 1, 0), pages_per_seq=13)


def run(arrays, config, **options):
    return decode(*arrays, implementation="triton_interpret", config=config, **options)


@pytest.mark.parametrize("num_programs", [1, 3, 100, *slow([2, 5])])  # for each of 2 KV heads
def test_any_number_of_programs_matches_the_oracle(num_programs):
    arrays = ROWS.make()
    config = dataclasses.replace(CONFIG, num_programs=2 * num_programs)
    assert_close(run(arrays, config), arrays, ROWS.tolerance)


@pytest.mark.parametrize(
    "case",
    [
        ROWS,
        Case(seq_lens=(0, 0)),
        Case(page_size=1, pages_per_seq=50, seq_lens=(50, 1, 0, 17)),
        Case(page_size=64, pages_per_seq=3, seq_lens=(129, 64, 192)),
        Case(head_dim=80, dtype="bfloat16", num_q_heads=6),
        *slow([Case(num_q_heads=40, num_kv_heads=1), Case(seq_lens=tuple(range(1, 41)))]),
    ],
    ids=str,
)
def test_one_loop_gives_the_bits_of_a_loop_for_each_row(case):
    arrays = case.make()
    found = run(arrays, CONFIG)
    assert_same_bits(found, run(arrays, dataclasses.replace(CONFIG, one_loop=False)))
    assert_close(found, arrays, case.tolerance)


def test_a_row_of_nan_leaves_others_as_they_are():
    q, *rest = ROWS.make()
    wrong = q.copy()
    wrong[2] = np.nan
    found, clean = run((wrong, *rest), CONFIG), run((q, *rest), CONFIG)
    others = np.array([0, 1, 3, 4, 5, 6])
    assert_same_bits([x[others] for x in found], [x[others] for x in clean])
    assert np.isnan(np.asarray(found[0])[2]).all()


@pytest.mark.parametrize("names", [["window"], ["window", "cap", "alibi", "sinks"]], ids=str)
def test_options(names):
    call, oracle = chosen_options(names, ragged=False, implementation="triton_interpret")
    arrays = ROWS.make()
    found = decode(*arrays, **call | dict(config=CONFIG))
    assert_close(found, arrays, ROWS.tolerance, **oracle)


def test_a_layout_whose_pages_are_not_neighbours():
    arrays = ROWS.make()
    how = dict(implementation="triton_interpret", config=CONFIG, return_lse=True)
    found = pp.paged_attention(**call_in_layout("NHD", arrays), kv_layout="NHD", **how)
    assert_same_bits(found, run(arrays, CONFIG))


def test_one_byte_pages_and_fixed_splits_keep_a_loop_for_each_row():
    arrays, _ = Quantized(case=dataclasses.replace(ROWS, dtype="bfloat16"), kv_dtype="int8").make()
    plain = dataclasses.replace(CONFIG, one_loop=False)
    how = dict(implementation="triton_interpret", return_lse=True)
    call = call_in_layout("HPND", arrays)
    found = pp.paged_attention(**call, **how, config=CONFIG)
    assert_same_bits(found, pp.paged_attention(**call, **how, config=plain))
    arrays = ROWS.make()
    split = dataclasses.replace(CONFIG, fixed_split_size=32)
    assert_same_bits(
        run(arrays, split), run(arrays, dataclasses.replace(plain, fixed_split_size=32))
    )


def test_blocks_of_rows_are_described_in_their_order():
    case = Case(seq_lens=(5, 0, 9), page_size=2, pages_per_seq=6)
    q, k_pages, v_pages, tables, lens = map(jnp.asarray, case.make(poison=False))
    arrays = Arrays(q=q, k_pages=k_pages, v_pages=v_pages, block_tables=tables, seq_lens=lens)
    options = LogitOptions(sm_scale=1.0)
    config = pp.DecodeConfig(block_k=16, num_programs=2, num_warps=1, num_stages=1)
    plan = DecodePlan.of(config, options, num_seqs=3, num_kv_heads=2, max_kv_len=12)
    plan = dataclasses.replace(plan, block_k=4)
    words, slots = blocks_of(arrays, plan, plan.unit_ends(lens))
    word, num_left = np.asarray(words[:5]).T
    assert (word >> 2).tolist() == [0, 0, 2, 2, 2]
    assert (word & 3).tolist() == [1, 2, 1, 0, 2]  # the first of a row has 1, its last 2
    assert num_left.tolist() == [5, 1, 9, 5, 1]
    table = np.asarray(tables)
    assert np.asarray(slots)[:2].tolist() == (2 * table[0, :4].reshape(2, 2)).tolist()
    assert np.asarray(slots)[2:4].tolist() == (2 * table[2, :4].reshape(2, 2)).tolist()


def test_blocks_are_described_once_for_all_layers():
    arrays = [jnp.asarray(x) for x in ROWS.make()]

    def layers(q, *rest, num_layers):
        for _ in range(num_layers):
            q = pp.paged_attention(q, *rest, implementation="triton_interpret", config=CONFIG)
        return q

    def count(num_layers):
        function = jax.jit(layers, static_argnames="num_layers")
        text = function.lower(*arrays, num_layers=num_layers).compile().as_text()
        return text.count("blocks_of_line")

    assert 0 < count(1) == count(3)
