"""Attention over int8 and float8_e4m3fn pages, against float64 NumPy on the dequantized values."""

import dataclasses
import itertools
from functools import partial

import numpy as np
import pytest

import pallas_paged as pp
from tests.support.attention_calls import assert_close, assert_same_bits, decode, ragged
from tests.support.attention_cases import Case
from tests.support.attention_oracle import attend, relative_error
from tests.support.marks import slow
from tests.support.quantized_cases import Quantized

INT8, FP8 = "int8", "float8_e4m3fn"
DTYPES = ("float32", "bfloat16", "float16")
SMALL = Case(head_dim=16, seq_lens=(37, 5, 0, 61), num_pages=25)
RAGGED = dataclasses.replace(SMALL, q_lens=(11, 5, 1, 2), num_tokens=20)
CALLS = pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *itertools.product(["decode"], DTYPES),
        ("ragged", "bfloat16"),
        *slow([("ragged", "float16"), ("ragged", "float32")]),
    ],
)


def call_of(name, dtype, implementation, **changes):
    """(the function, the case) of a call; tiles of bf16 queries have many rows, where they can.

    Such tiles scale each query by its largest element, before the kernel.
    """
    case = dataclasses.replace(RAGGED if name == "ragged" else SMALL, dtype=dtype, **changes)
    case, options = case.on(implementation), dict(implementation=implementation)
    if name == "ragged" and dtype == "bfloat16" and implementation.startswith("triton"):
        loop = dict(block_k=32, num_programs=8, num_warps=4, num_stages=2)
        options["config"] = pp.RaggedConfig(block_q=64, **loop)
    return partial(ragged if name == "ragged" else decode, **options), case


@pytest.mark.parametrize(
    ("kv_dtype", "per_tensor"), [(INT8, False), *slow([(INT8, True), (FP8, False), (FP8, True)])]
)
@CALLS
def test_matches_the_oracle(name, dtype, kv_dtype, per_tensor, implementation):
    """Bytes and scales outside of the rows change no bit; queries may have all sizes of bf16."""
    function, case = call_of(name, dtype, implementation)
    quantized = Quantized(case=case, kv_dtype=kv_dtype, per_tensor=per_tensor)
    (q, *arrays), (_, *meant) = quantized.make()
    if case.dtype == "bfloat16":
        sizes = 2.0 ** np.linspace(-120, 4, q.shape[0]).round()
        q = q * sizes.astype(q.dtype)[:, None, None]
    actual = function(q, *arrays)
    assert_close(actual, (q, *meant), case.tolerance)
    assert_same_bits(function(q, *quantized.make(poison=False)[0][1:]), actual)


@pytest.mark.parametrize("name", ["decode", *slow(["ragged"])])
def test_scales_of_all_sizes_leave_f16_its_precision(name, implementation):
    """One token has by far the largest V and almost no weight; the other V underflow in f16."""
    function, case = call_of(name, "float16", implementation, seq_lens=(37, 25, 40, 61))
    arrays, meant = Quantized(case=case, kv_dtype=INT8).make()
    q, k_pages, v_pages, tables, lens, *rest, k_scales, v_scales = arrays
    row, place = np.array([0, 1, 2, 3]), np.array([3, 9, 20, 31])
    where = (slice(None), tables[row, place // case.page_size], place % case.page_size)
    sizes = np.full_like(v_scales, 4e-6)
    sizes[where] = 4e-3
    k_pages[where] = 0  # a logit of 0, where the other logits are large
    k_scales = k_scales * 8
    meant_k, meant_v = meant[1] * 8, v_pages.astype(np.float64) * sizes[..., None]
    meant_k[where] = 0
    v_pages[where] = 0
    meant_v[where] = 0
    actual = function(q, k_pages, v_pages, tables, lens, *rest, k_scales, sizes)
    assert_close(actual, (q, meant_k, meant_v, tables, lens, *rest), case.tolerance)


@pytest.mark.parametrize("per_tensor", [False, *slow([True])])
@CALLS
def test_zero_tiny_and_huge_queries(name, dtype, per_tensor, implementation):
    function, case = call_of(name, dtype, implementation)
    dtype = case.dtype
    (q, *arrays), (_, *meant) = Quantized(case=case, kv_dtype=INT8, per_tensor=per_tensor).make()
    # XLA's CPU compiler fuses the product of a logit and its factor, which a GPU rounds.
    large = 1e3 if dtype == "float16" or implementation == "triton_interpret" else 1e10
    sizes = np.float32([0, 1e-39 if dtype != "float16" else 1e-7, large, 1])
    q = (q * np.resize(sizes, q.shape[:2])[..., None]).astype(q.dtype)
    out, lse = map(np.asarray, function(q, *arrays))
    # Where logits are very large, their rounding decides which key has the weight.
    ordinary = np.resize(sizes, q.shape[1]) <= 1
    assert not np.isnan(out.astype(np.float32)).any() and not np.isnan(lse).any()
    expected, expected_lse = attend(q, *meant)
    error = relative_error(out[:, ordinary], expected[:, ordinary])
    assert error <= case.tolerance
    finite = np.isfinite(expected_lse)
    np.testing.assert_array_equal(np.isfinite(lse), finite)
    np.testing.assert_allclose(lse[finite], expected_lse[finite], rtol=0.02, atol=0.02)


@pytest.mark.parametrize("per_tensor", [False, *slow([True])])
@pytest.mark.parametrize(
    ("function", "q_lens"), [(decode, None), *slow([(ragged, (3, 2))])], ids=["decode", "ragged"]
)
def test_huge_queries_of_rows_that_are_split(function, q_lens, per_tensor, implementation):
    lens = dict(seq_lens=(200, 70), q_lens=q_lens, pages_per_seq=25)
    case = Case(head_dim=16, dtype="bfloat16", **lens).on(implementation)
    (q, *arrays), (_, *meant) = Quantized(case=case, kv_dtype=INT8, per_tensor=per_tensor).make()
    q = (q * (1e3 if implementation == "triton_interpret" else 1e10)).astype(q.dtype)
    out, lse = function(q, *arrays, fixed_split_size=64, implementation=implementation)
    assert np.isfinite(np.asarray(out, np.float32)).all()
    np.testing.assert_allclose(lse, attend(q, *meant)[1], rtol=0.02)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("low", "high"), [(-30, 30), (-60, -50), (30, 50)])
def test_scales_of_v_of_any_size(low, high, dtype, implementation):
    """Beside tokens with V of 0, which count in the sum of the weights only."""
    function, case = call_of("decode", dtype, implementation)
    (q, k, v, *rest), meant = Quantized(case=case, kv_dtype=INT8).make()
    *rest, k_scales, v_scales = rest
    sizes = 2.0 ** np.random.default_rng(0).integers(low, high, v_scales.shape)
    sizes[:, :, ::3] = 0
    v_scales = np.float32(sizes)
    meant = (*meant[:2], v.astype(np.float64) * sizes[..., None], *meant[3:])
    assert_close(function(q, k, v, *rest, k_scales, v_scales), meant, case.tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_scales_may_be_negative(dtype, implementation):
    function, case = call_of("decode", dtype, implementation)
    *arrays, v_scales = Quantized(case=case, kv_dtype=INT8).make()[0]
    out, negative = (function(*arrays, scales)[0] for scales in (v_scales, -v_scales))
    assert_same_bits([negative], [-np.asarray(out)])


def test_a_scale_of_nan_reaches_its_head_only(implementation):
    function, case = call_of("decode", "float32", implementation)
    *rest, k_scales, v_scales = Quantized(case=case, kv_dtype=INT8).make()[0]
    tables = rest[3]
    k_scales[1, tables[0, 0], 3] = v_scales[0, tables[1, 0], 2] = np.nan
    out = np.asarray(function(*rest, k_scales, v_scales)[0])
    nan = np.isnan(out).all(axis=-1)
    np.testing.assert_array_equal(nan[0], [False, False, True, True])
    np.testing.assert_array_equal(nan[1], [True, True, False, False])
    assert np.isfinite(out[2:]).all()


@pytest.mark.parametrize("dtype", ["bfloat16", *slow(["float16", "float32"])])
@pytest.mark.parametrize("kv_dtype", [INT8, FP8])
def test_every_byte_is_converted_exactly(kv_dtype, dtype, implementation):
    """All 256 bytes, as the elements of V of the only token of each row and head."""
    function, case = call_of("decode", dtype, implementation, seq_lens=(1, 1, 1, 1))
    arrays, _ = Quantized(case=case, kv_dtype=kv_dtype).make()
    q, k_pages, v_pages, tables, lens, k_scales, v_scales = arrays
    values = np.arange(256, dtype=np.uint8).view(v_pages.dtype)
    for first in range(0, 256, 8 * case.head_dim):
        some = np.resize(values[first:], (2, 4, case.head_dim))  # of heads and rows
        v_pages[:, tables[:, 0], 0], v_scales[:, tables[:, 0], 0] = some, 1
        out, _ = function(q, k_pages, v_pages, tables, lens, k_scales, v_scales)
        expected = np.repeat(some.astype(np.float32).swapaxes(0, 1), 2, axis=1)
        np.testing.assert_array_equal(np.asarray(out, np.float32), expected)
