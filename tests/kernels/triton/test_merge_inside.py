"""The decode kernel of the Triton family that merges its own partial states."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_paged as pp
from pallas_paged.kernels.triton.config import decode_config
from tests.support.attention_calls import assert_close, assert_same_bits, decode
from tests.support.attention_cases import Case
from tests.support.devices import lower_for_cuda

# 5 programs to a KV head: some have several rows, and some rows several programs.
CONFIG = pp.DecodeConfig(block_k=16, num_programs=10, num_warps=4, num_stages=2, merge_inside=True)
ROWS = (0, 5, 64, 64, 0, 33, 0)
INTERPRETED = dict(implementation="triton_interpret")


@pytest.mark.parametrize("fixed_split_size", [None, 32])
@pytest.mark.parametrize(
    "options",
    [{}, {"sinks": np.ones(6, np.float32)}, {"sliding_window": 20}],
    ids=["plain", "sinks", "window"],
)
def test_results_are_those_of_attention(options, fixed_split_size):
    case = Case(num_q_heads=6, head_dim=24, seq_lens=ROWS)
    arrays = case.make()
    config = dataclasses.replace(CONFIG, fixed_split_size=fixed_split_size)
    actual = decode(*arrays, config=config, **INTERPRETED, **options)
    assert_close(actual, arrays, case.tolerance, **options)


@pytest.mark.parametrize("rows", [(0, 0), (64,), (1,) * 12, (0, 0, 0, 0, 0, 0, 0, 9)])
def test_rows_that_one_program_has_alone_and_rows_of_no_program(rows):
    case = Case(seq_lens=rows)
    arrays = case.make()
    assert_close(decode(*arrays, config=CONFIG, **INTERPRETED), arrays, case.tolerance)


def test_a_row_has_the_same_bits_in_every_batch_under_a_fixed_split():
    config = dataclasses.replace(CONFIG, fixed_split_size=32)
    arrays = Case(seq_lens=ROWS).make()
    whole = decode(*arrays, config=config, **INTERPRETED)
    q, k_pages, v_pages, tables, lens = arrays
    for row in (2, 5):
        rows = np.s_[row : row + 1]
        alone = q[rows], k_pages, v_pages, tables[rows], lens[rows]
        found = decode(*alone, config=config, **INTERPRETED)
        assert_same_bits([x[row] for x in whole], [x[0] for x in found])


def test_rows_under_vmap():
    arrays = [np.stack([x, x[::-1]]) for x in Case(seq_lens=ROWS).make(poison=False)]
    q, k_pages, v_pages, tables, lens = arrays
    k_pages, v_pages = k_pages[:, ::-1][:1].repeat(2, 0), v_pages[:, ::-1][:1].repeat(2, 0)

    def call(*arrays):
        return pp.paged_attention(*arrays, config=CONFIG, return_lse=True, **INTERPRETED)

    batched = jax.vmap(call)(q, k_pages, v_pages, tables, lens)
    for i in range(2):
        alone = call(q[i], k_pages[i], v_pages[i], tables[i], lens[i])
        assert_same_bits([x[i] for x in batched], alone)


def test_a_call_is_one_kernel_for_cuda():
    config = decode_config(
        num_q_heads=32,
        num_kv_heads=8,
        head_dim=128,
        page_size=16,
        max_kv_len=4096,
        num_seqs=64,
        itemsize=2,
        num_sms=132,
    )
    pages = jax.ShapeDtypeStruct((8, 1000, 16, 128), jnp.bfloat16)
    shapes = [jax.ShapeDtypeStruct((64, 32, 128), jnp.bfloat16), pages, pages]
    shapes += [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((64, 256), (64,))]

    def count(merge_inside):
        chosen = dataclasses.replace(config, merge_inside=merge_inside)
        lowered = lower_for_cuda(lambda *x: pp.paged_attention(*x, config=chosen), *shapes)
        return lowered.as_text().count("custom_call @__gpu$xla.gpu.triton")

    assert (count(True), count(False)) == (1, 2)
