"""With a fixed split size the bits of a row depend on that row alone.

They do not depend on the other rows of the batch, on their lengths, number and order, nor on the
width of the block tables. Without a fixed split size they do, so these tests can fail.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import jax
import numpy as np
import pytest

import pallas_paged as pp
from tests.support import attention_calls
from tests.support.attention_calls import assert_close, jitted
from tests.support.attention_cases import Case, cumulated
from tests.support.devices import implementations_here
from tests.support.marks import slow

# Without fusion emitters, XLA's CPU code for the same sum may depend on the shapes around it.
OPTIONS_OF_XLA = {}
if jax.default_backend() == "cpu" and jax.__version_info__ < (0, 11):
    OPTIONS_OF_XLA["xla_cpu_use_fusion_emitters"] = True
decode = jitted(pp.paged_attention, OPTIONS_OF_XLA)
ragged = jitted(pp.ragged_paged_attention, OPTIONS_OF_XLA)

LOOP = dict(block_k=16, num_programs=6, num_warps=2, num_stages=2, fixed_split_size=32)
MOSAIC_LOOP = dict(block_k=64, num_stages=2, fixed_split_size=64)
CONFIGS = {
    "triton": (pp.DecodeConfig(**LOOP), pp.RaggedConfig(**LOOP, block_q=16)),
    "mosaic_gpu": (
        pp.MosaicDecodeConfig(**MOSAIC_LOOP, num_programs=6),
        pp.MosaicRaggedConfig(**MOSAIC_LOOP, num_programs=8, num_consumers=2),
    ),
    "mosaic_sm80": (
        pp.MosaicSm80DecodeConfig(**MOSAIC_LOOP, num_programs=6),
        pp.MosaicSm80RaggedConfig(
            block_q=64, block_k=64, num_warpgroups=1, num_programs=8, fixed_split_size=64
        ),
    ),
}
OPTIONS = dict(
    soft_cap=3.0,
    sliding_window=90,
    alibi_slopes=np.float32([0.05, 0.02, 0.01, 0.0]),
    sinks=np.float32([1.0, -1.0, 0.0, 2.0]),
)
SEQ_LENS = (130, 3, 64, 0, 33, 97)
# One tile of queries, several, none; with and without a prefix.
Q_LENS = (5, 3, 20, 0, 1, 8)
CASE = Case(head_dim=16, pages_per_seq=17, seq_lens=SEQ_LENS)
EMPTY_ROW = 3
EVERYTHING = tuple(range(len(SEQ_LENS)))  # rows of a batch, by their index in the case


def decode_batch(rows, arrays, shorter=False, padding=0, **call) -> Iterator[tuple[int, tuple]]:
    """Yields (index of the row in the case, its (out, lse)) for each row of a decode batch.

    Args:
        rows: the rows of the batch, by their index in the case.
        arrays: of the case.
        shorter: give rows of odd index half of their tokens.
        padding: empty rows at the end.
        call: implementation, config and options.
    """
    q, k_pages, v_pages, tables, lens = arrays
    rows = np.array([*rows, *[EMPTY_ROW] * padding])
    lens = np.where(shorter & (rows % 2 == 1), lens[rows] // 2, lens[rows])
    lens = lens.astype(np.int32)
    out, lse = map(np.asarray, decode(q[rows], k_pages, v_pages, tables[rows], lens, **call))
    for i, row in enumerate(rows):
        yield row, (out[i], lse[i])


def ragged_batch(rows, arrays, shorter=False, padding=0, **call) -> Iterator[tuple[int, tuple]]:
    """As `decode_batch`, for a ragged batch; its padding is query tokens of no row."""
    q, k_pages, v_pages, tables, lens, cu = arrays
    rows = np.array(rows)
    short = shorter & (rows % 2 == 1)
    lens = np.where(short, lens[rows] // 2, lens[rows]).astype(np.int32)
    q_lens = np.where(short, np.diff(cu)[rows] // 2, np.diff(cu)[rows])
    tokens = [cu[row] + np.arange(n) for row, n in zip(rows, q_lens, strict=True)]
    # As many tokens in all, so that shorter rows share a program.
    padding = padding + (np.diff(cu)[rows].sum() - q_lens.sum())
    packed = np.concatenate([q[np.concatenate(tokens)], np.full_like(q[:padding], np.nan)])
    cu = cumulated(q_lens)
    out, lse = map(np.asarray, ragged(packed, k_pages, v_pages, tables[rows], lens, cu, **call))
    for i, row in enumerate(rows):
        mine = slice(cu[i], cu[i + 1])
        yield row, (out[mine], lse[mine])


CALLS = {"decode": (decode_batch, CASE), "ragged": (ragged_batch, replace(CASE, q_lens=Q_LENS))}


@pytest.fixture(params=[name for name in implementations_here() if name != "xla"])
def implementation(request):
    """Every implementation on this machine that takes a config."""
    return request.param


@pytest.fixture(params=CALLS)
def kernel(request):
    return request.param


@pytest.fixture
def case(kernel, implementation):
    return CALLS[kernel][1].on(implementation)


@pytest.fixture
def call(kernel, implementation):
    """Keywords of a call with a fixed split size."""
    configs = dict(zip(CALLS, CONFIGS[implementation.removesuffix("_interpret")], strict=True))
    return dict(implementation=implementation, config=configs[kernel])


def same_bits(a, b) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def check_other_batches(kernel, case, call, **options):
    """Rows have the same bits in another order, beside shorter rows and beside empty ones."""
    batch, arrays, call = CALLS[kernel][0], case.make(), call | options
    function = {"decode": decode, "ragged": ragged}[kernel]
    assert_close(function(*arrays, **call), arrays, case.tolerance, **options)
    expected = dict(batch(EVERYTHING, arrays, **call))
    for row, state in batch(EVERYTHING[::-1], arrays, **call):
        assert same_bits(state, expected[row]), row
    for row, state in batch(EVERYTHING, arrays, shorter=True, **call):
        assert row % 2 == 1 or same_bits(state, expected[row]), row
    for row in EVERYTHING:
        *rest, lens = arrays[:5]
        lens = np.where(np.arange(len(lens)) == row, lens, 0)
        for i, state in batch(EVERYTHING, (*rest, lens, *arrays[5:]), **call):
            assert i != row or same_bits(state, expected[row]), row
    return expected


class TestBits:
    def test_do_not_depend_on_the_rest_of_the_batch(self, kernel, case, call):
        """Decoding also in another shape: more than 32 rows and a wider table at once."""
        expected = check_other_batches(kernel, case, call)
        if kernel == "decode":
            wide = replace(case, pages_per_seq=40).make()
            for row, state in decode_batch((2, 0, 0, 5, *EVERYTHING * 5), wide, padding=20, **call):
                assert same_bits(state, expected[row]), row

    @pytest.mark.slow
    def test_do_not_depend_on_it_with_every_option(self, kernel, case, call):
        check_other_batches(kernel, case, call, **OPTIONS)

    @pytest.mark.slow
    @pytest.mark.parametrize("options", [{}, OPTIONS], ids=["plain", "every option"])
    @pytest.mark.parametrize(
        ("rows", "pages_per_seq", "padding"),
        [
            ((0,), 17, 0),
            (EVERYTHING * 6, 17, 0),
            (EVERYTHING * 6, 40, 20),
            ((2, 0, 0, 5), 40, 0),
            ((2, 0, 0, 5), 17, 20),
        ],
        ids=["alone", "many rows", "all at once", "wide table", "padding"],
    )
    def test_do_not_depend_on_its_shape(
        self, kernel, case, call, rows, pages_per_seq, padding, options
    ):
        batch, call = CALLS[kernel][0], call | options
        expected = dict(batch(EVERYTHING, case.make(), **call))
        arrays = replace(case, pages_per_seq=pages_per_seq).make()
        for row, state in batch(rows, arrays, padding=padding, **call):
            assert same_bits(state, expected[row]), row

    @pytest.mark.slow
    def test_do_not_depend_on_it_without_a_config(self, kernel, case, implementation):
        call = dict(implementation=implementation, fixed_split_size=64)
        expected = check_other_batches(kernel, case, call)
        ((_, alone),) = CALLS[kernel][0]((0,), case.make(), **call)
        assert same_bits(alone, expected[0])

    @pytest.mark.parametrize("kernel", ["decode", *slow(["ragged"])], indirect=True)
    def test_depend_on_the_batch_without_a_split_size(self, kernel, case, call):
        function = {"decode": attention_calls.decode, "ragged": attention_calls.ragged}[kernel]
        call["config"] = replace(call["config"], fixed_split_size=None)
        *rest, lens = case.make()[:5]
        offsets = case.make()[5:]
        together = function(*rest, lens, *offsets, **call)
        alone = function(*rest, np.where(np.arange(len(lens)), 0, lens), *offsets, **call)
        assert not same_bits(alone[0][0], together[0][0])


@pytest.mark.slow
def test_bits_do_not_depend_on_the_batch_without_causality(implementation):
    case = Case(
        head_dim=64, dtype="bfloat16", page_size=16, seq_lens=(150, 9, 70), pages_per_seq=10,
        q_lens=(70, 12, 1), num_tokens=90,
    ).on(implementation)  # fmt: skip
    q, k, v, tables, lens, cu = case.make()
    options = dict(implementation=implementation, causal=False, fixed_split_size=64)
    together = ragged(q, k, v, tables, lens, cu, **options)
    alone = ragged(q[70:82], k, v, tables[1:2], lens[1:2], np.int32([0, 12]), **options)
    assert same_bits(alone, [x[70:82] for x in together])
