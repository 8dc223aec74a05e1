"""Attention over int8 and float8_e4m3fn pages, against float64 NumPy on the dequantized values."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_paged as pp
from tests.support.attention_calls import assert_close, assert_same_bits, cascade, decode, ragged
from tests.support.attention_cases import Case
from tests.support.attention_options import CASCADE_OPTIONS, OPTIONS, chosen_options
from tests.support.attention_oracle import attend, relative_error
from tests.support.marks import needs_triton, slow
from tests.support.page_tables import extend
from tests.support.quantized_cases import Quantized

INT8, FP8 = "int8", "float8_e4m3fn"
SMALL = Case(head_dim=16, seq_lens=(37, 5, 0, 61))
RAGGED = dataclasses.replace(SMALL, q_lens=(11, 5, 1, 2), num_tokens=20)
DTYPES = ("float32", "bfloat16", "float16")
MANY_HEADS = Case(
    num_q_heads=8,
    num_kv_heads=2,
    head_dim=128,
    page_size=16,
    seq_lens=(130, 1, 0, 64),
    pages_per_seq=9,
    dtype="bfloat16",
)
of_one_token = dict(page_size=1, seq_lens=(19, 33), pages_per_seq=40)
of_256_tokens = dict(page_size=256, seq_lens=(257, 3), pages_per_seq=2)


def small(dtype, kv_dtype, *, per_tensor=False):
    case = dataclasses.replace(SMALL, dtype=dtype)
    return Quantized(case=case, kv_dtype=kv_dtype, per_tensor=per_tensor)


CASES = [
    small("float32", FP8),
    small("bfloat16", INT8),
    small("float16", INT8, per_tensor=True),
    Quantized(case=MANY_HEADS, kv_dtype=INT8),
    Quantized(case=Case(num_q_heads=3, num_kv_heads=1, head_dim=10, **of_256_tokens), kv_dtype=FP8),
    *slow(
        [
            small("float32", INT8),
            small("bfloat16", FP8),
            small("float16", INT8),
            small("float16", FP8),
            small("float32", INT8, per_tensor=True),
            small("float32", FP8, per_tensor=True),
            Quantized(
                case=Case(
                    num_q_heads=6, num_kv_heads=2, head_dim=80, dtype="bfloat16", **of_one_token
                ),
                kv_dtype=INT8,
            ),
            Quantized(
                case=dataclasses.replace(MANY_HEADS, num_q_heads=4, num_kv_heads=4, head_dim=96),
                kv_dtype=FP8,
            ),
        ]
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_decode_matches_the_oracle(case, implementation):
    case = case.on(implementation)
    arrays, meant = case.make()
    actual = decode(*arrays, implementation=implementation)
    assert_close(actual, meant, case.case.tolerance)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ragged_matches_the_oracle(case, implementation):
    lens = case.case.seq_lens
    q_lens = tuple(min(n, m) for n, m in zip(lens, (11, 5, 1, 2), strict=False))
    case = dataclasses.replace(case, case=dataclasses.replace(case.case, q_lens=q_lens))
    arrays, meant = case.make()
    actual = ragged(*arrays, implementation=implementation)
    assert_close(actual, meant, case.case.tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tiles_of_many_rows(dtype, implementation):
    """Such tiles scale each query by its largest element; here queries of all sizes of bf16."""
    if implementation not in ("triton", "triton_interpret"):
        pytest.skip("its tiles cannot be chosen")
    case = dataclasses.replace(RAGGED, dtype=dtype)
    (q, *arrays), (_, *meant) = Quantized(case=case, kv_dtype=INT8).make()
    if dtype == "bfloat16":
        sizes = 2.0 ** np.linspace(-120, 4, q.shape[0]).round()
        q = q * sizes.astype(q.dtype)[:, None, None]
    config = pp.RaggedConfig(block_q=64, block_k=32, num_programs=8, num_warps=4, num_stages=2)
    actual = ragged(q, *arrays, implementation=implementation, config=config)
    assert_close(actual, (q, *meant), case.tolerance)


@pytest.mark.parametrize(
    ("function", "case", "kv_dtype"),
    [
        (decode, SMALL, INT8),
        (ragged, RAGGED, FP8),
        *slow([(decode, SMALL, FP8), (ragged, RAGGED, INT8)]),
    ],
)
def test_all_options_together(function, case, kv_dtype, implementation):
    case = case.on(implementation)
    names = [name for name in OPTIONS if function is ragged or name != "tree"]
    call, oracle = chosen_options(names, ragged=function is ragged, implementation=implementation)
    arrays, meant = Quantized(case=case, kv_dtype=kv_dtype).make()
    assert_close(function(*arrays, **call), meant, case.tolerance, **oracle)


@pytest.mark.parametrize(
    ("per_tensor", "options"),
    [(False, CASCADE_OPTIONS["all"]), *slow([(True, {})])],
    ids=["all", "plain"],
)
def test_cascade(per_tensor, options, implementation):
    arrays, meant = Quantized(case=SMALL, kv_dtype=INT8, per_tensor=per_tensor).make()
    (q, k, v, tables, lens, *scales), shared = arrays, 32
    tables[3, : shared // SMALL.page_size] = tables[0, : shared // SMALL.page_size]
    swapped = [np.asarray(x)[[0, 3, 1, 2]] for x in (q, tables, lens)]
    q, tables, lens = swapped
    groups = np.int32([shared]), np.int32([0, 2])
    actual = cascade(
        q, k, v, tables, lens, *groups, *scales, implementation=implementation, **options
    )
    assert_close(actual, (q, *meant[1:3], tables, lens), SMALL.tolerance, **options)


@pytest.mark.parametrize("kv_dtype", [INT8, FP8])
@pytest.mark.parametrize(("function", "case"), [(decode, SMALL), (ragged, RAGGED)])
def test_data_outside_a_row_changes_no_bit(function, case, kv_dtype, implementation):
    case = Quantized(case=case.on(implementation), kv_dtype=kv_dtype)
    clean = function(*case.make(poison=False)[0], implementation=implementation)
    assert_same_bits(function(*case.make()[0], implementation=implementation), clean)


@pytest.mark.parametrize("wrong", ["k", "v", "both"])
def test_wrong_scales_fail(wrong, implementation):
    case = SMALL.on(implementation)
    arrays, meant = Quantized(case=case, kv_dtype=INT8, v_size=1.1).make()
    *rest, k_scales, v_scales = arrays
    scales = {"k": (v_scales, v_scales), "v": (k_scales, k_scales), "both": (v_scales, k_scales)}
    actual = decode(*rest, *scales[wrong], implementation=implementation)
    with pytest.raises(AssertionError):
        assert_close(actual, meant, case.tolerance)


@pytest.mark.parametrize(("function", "case"), [(decode, SMALL), (ragged, RAGGED)])
def test_scales_of_all_sizes_leave_f16_its_precision(function, case, implementation):
    """One token has by far the largest V and almost no weight; the other V underflow in f16."""
    case = dataclasses.replace(case, dtype="float16", seq_lens=(37, 25, 40, 61))
    case = case.on(implementation)
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
    actual = function(
        q, k_pages, v_pages, tables, lens, *rest, k_scales, sizes, implementation=implementation
    )
    assert_close(actual, (q, meant_k, meant_v, tables, lens, *rest), case.tolerance)


@pytest.mark.parametrize("per_tensor", [False, *slow([True])])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("function", "case"), [(decode, SMALL), (ragged, RAGGED)])
def test_zero_tiny_and_huge_queries(function, case, dtype, per_tensor, implementation):
    case = dataclasses.replace(case, dtype=dtype).on(implementation)
    dtype = case.dtype
    (q, *arrays), (_, *meant) = Quantized(case=case, kv_dtype=INT8, per_tensor=per_tensor).make()
    # XLA's CPU compiler fuses the product of a logit and its factor, which a GPU rounds.
    large = 1e3 if dtype == "float16" or implementation == "triton_interpret" else 1e10
    sizes = np.float32([0, 1e-39 if dtype != "float16" else 1e-7, large, 1])
    q = (q * np.resize(sizes, q.shape[:2])[..., None]).astype(q.dtype)
    actual = function(q, *arrays, implementation=implementation)
    # Where logits are very large, their rounding decides which key has the weight.
    ordinary = np.resize(sizes, q.shape[1]) <= 1
    out, lse = actual
    assert not np.isnan(np.asarray(out, np.float32)).any() and not np.isnan(lse).any()
    expected, expected_lse = attend(q, *meant)
    error = relative_error(np.asarray(out)[:, ordinary], expected[:, ordinary])
    assert error <= case.tolerance
    finite = np.isfinite(expected_lse)
    np.testing.assert_array_equal(np.isfinite(lse), finite)
    np.testing.assert_allclose(np.asarray(lse)[finite], expected_lse[finite], rtol=0.02, atol=0.02)


@pytest.mark.parametrize("per_tensor", [False, *slow([True])])
@pytest.mark.parametrize(("function", "q_lens"), [(decode, None), (ragged, (3, 2))])
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
    case = dataclasses.replace(SMALL, dtype=dtype).on(implementation)
    (q, k, v, *rest), meant = Quantized(case=case, kv_dtype=INT8).make()
    *rest, k_scales, v_scales = rest
    sizes = 2.0 ** np.random.default_rng(0).integers(low, high, v_scales.shape)
    sizes[:, :, ::3] = 0
    v_scales = np.float32(sizes)
    meant = (*meant[:2], v.astype(np.float64) * sizes[..., None], *meant[3:])
    actual = decode(q, k, v, *rest, k_scales, v_scales, implementation=implementation)
    assert_close(actual, meant, case.tolerance)


def test_scales_may_be_negative(implementation):
    for dtype in DTYPES:
        case = dataclasses.replace(SMALL, dtype=dtype).on(implementation)
        *arrays, v_scales = Quantized(case=case, kv_dtype=INT8).make()[0]
        out, _ = decode(*arrays, v_scales, implementation=implementation)
        negative, _ = decode(*arrays, -v_scales, implementation=implementation)
        assert_same_bits(negative, -out)


def test_a_scale_of_nan_reaches_its_head_only(implementation):
    arrays, _ = Quantized(case=SMALL.on(implementation), kv_dtype=INT8).make()
    *rest, k_scales, v_scales = arrays
    tables = rest[3]
    k_scales[1, tables[0, 0], 3] = v_scales[0, tables[1, 0], 2] = np.nan
    out, _ = decode(*rest, k_scales, v_scales, implementation=implementation)
    nan = np.isnan(out).all(axis=-1)
    np.testing.assert_array_equal(nan[0], [False, False, True, True])
    np.testing.assert_array_equal(nan[1], [True, True, False, False])
    assert np.isfinite(out[2:]).all()


@pytest.mark.parametrize("outliers", [False, True])
@pytest.mark.parametrize(("kv_dtype", "error"), [(INT8, 0.02), (FP8, 0.05)])
def test_quantization_by_write_kv_costs_little(kv_dtype, error, outliers, implementation):
    """From tokens to attention; without outliers the result is near the unquantized one."""
    heads, head_dim, lens = 2, 64, np.int32([120, 64, 7])
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, lens.sum(), heads, head_dim))
    v *= 0.01
    if outliers:
        k[..., 5] *= 20
        v[..., 9] *= 20
        v[3::7] = 0
    q = rng.standard_normal((3, 2 * heads, head_dim)).astype(np.float32)
    table = pp.create_page_table(num_pages=16, page_size=16, max_seqs=3, pages_per_seq=8)
    pool = pp.create_kv_pool(
        num_layers=1, num_pages=16, num_kv_heads=heads, page_size=16, head_dim=head_dim,
        dtype=kv_dtype,
    )  # fmt: skip
    table, _ = extend(table, lens)
    rows = np.repeat(np.arange(3, dtype=np.int32), lens)
    positions = np.concatenate([np.arange(n, dtype=np.int32) for n in lens])
    slots = np.asarray(jax.jit(pp.slot_mapping)(table, rows, positions))
    new = (np.float32(x) for x in (k, v))
    layer = jax.jit(pp.write_kv)(pool.layers[0], *new, slots)
    pages, k_scales, v_scales = (layer.k_pages, layer.v_pages), layer.k_scales, layer.v_scales
    out, lse = decode(
        q, *pages, table.block_tables, table.seq_lens, k_scales, v_scales,
        implementation=implementation,
    )  # fmt: skip

    def paged(x):
        dense = np.zeros((heads, 16 * 16, head_dim))
        dense[:, slots] = x.swapaxes(0, 1)
        return dense.reshape(heads, 16, 16, head_dim)

    rest = np.asarray(table.block_tables), lens
    scales = (np.asarray(x, np.float64)[..., None] for x in (k_scales, v_scales))
    meant = [np.asarray(x).astype(np.float64) * s for x, s in zip(pages, scales, strict=True)]
    assert_close((out, lse), (q, *meant, *rest), 1e-5)
    if not outliers:
        assert relative_error(out, attend(q, paged(k), paged(v), *rest)[0]) <= error


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", *slow(["float32"])])
@pytest.mark.parametrize("kv_dtype", [INT8, FP8])
def test_every_byte_is_converted_exactly(kv_dtype, dtype, implementation):
    """All 256 bytes, each as V of the only token of a row."""
    page_size, head_dim = (8, 64) if implementation.startswith("mosaic_gpu") else (1, 16)
    values = np.arange(256, dtype=np.uint8).view(jnp.dtype(kv_dtype))
    v_pages = np.repeat(values, page_size * head_dim).reshape(1, 256, page_size, head_dim)
    q = np.ones((256, 1, head_dim), jnp.dtype(dtype))
    tables = np.arange(256, dtype=np.int32)[:, None]
    lens, ones = np.ones(256, np.int32), np.ones((1, 256, page_size), np.float32)
    k_pages = np.zeros_like(v_pages)
    out, _ = decode(q, k_pages, v_pages, tables, lens, ones, ones, implementation=implementation)
    expected = np.repeat(values.astype(np.float32)[:, None, None], head_dim, axis=2)
    np.testing.assert_array_equal(np.asarray(out, np.float32), expected)


def test_the_gradient_of_q():
    arrays, meant = Quantized(case=SMALL, kv_dtype=INT8).make()

    @jax.jit
    @jax.grad
    def gradient(q, *rest):
        return jnp.sin(pp.paged_attention(q, *rest, implementation="xla")).sum()

    expected = gradient(arrays[0], *(np.float32(x) for x in meant[1:3]), *arrays[3:5])
    np.testing.assert_allclose(gradient(*arrays), expected, rtol=1e-3, atol=1e-4)


BAD = [
    (lambda k, v: (None, None), "pages of int8 need k_scales and v_scales"),
    (lambda k, v: (k, None), "pages of int8 need v_scales"),
    (lambda k, v: (None, v), "pages of int8 need k_scales"),
    (lambda k, v: (k[:1], v), r"k_scales must be float32\[2, .*\], got float32\[1, "),
    (lambda k, v: (k, v.astype(np.float16)), "v_scales must be float32.*, got float16"),
    (lambda k, v: (k, v.astype(np.float64)), "v_scales must be float32.*, got float64"),
    (lambda k, v: (k, np.float32(1)), r"v_scales must be float32\[2, .*\], got float32\[\]"),
    (lambda k, v: (k[..., None], v), "k_scales must be float32"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[m for _, m in BAD])
def test_bad_scales_are_refused_by_name(change, message):
    for function, case in ((pp.paged_attention, SMALL), (pp.ragged_paged_attention, RAGGED)):
        *rest, k_scales, v_scales = Quantized(case=case, kv_dtype=INT8).make()[0]
        with pytest.raises(ValueError, match=message):
            scales = dict(zip(("k_scales", "v_scales"), change(k_scales, v_scales), strict=True))
            function(*rest, **scales)
    *rest, k_scales, v_scales = Quantized(case=SMALL, kv_dtype=INT8).make()[0]
    groups = np.int32([8]), np.int32([0, 2])
    with pytest.raises(ValueError, match=message):
        pp.cascade_attention(*rest, *groups, **scales)


def test_scales_of_unquantized_pages_are_refused():
    arrays = SMALL.make()
    with pytest.raises(
        ValueError, match="k_scales and v_scales must be None with pages of float32"
    ):
        pp.paged_attention(*arrays, np.ones((2, 8, 8), np.float32))


def test_k_and_v_of_two_dtypes_are_refused():
    q, k_pages, v_pages, *rest = Quantized(case=SMALL, kv_dtype=INT8).make()[0]
    fp8 = v_pages.astype(jnp.float8_e4m3fn)
    with pytest.raises(
        ValueError, match=r"k_pages.dtype=int8 must equal v_pages.dtype=float8_e4m3"
    ):
        pp.paged_attention(q, k_pages, fp8, *rest)


@needs_triton
def test_triton_refuses_an_odd_head_dim():
    arrays, meant = Quantized(case=dataclasses.replace(SMALL, head_dim=7), kv_dtype=INT8).make()
    with pytest.raises(
        NotImplementedError, match="needs an even head_dim with pages of int8, not 7"
    ):
        pp.paged_attention(*arrays, implementation="triton_interpret")
    assert_close(decode(*arrays, implementation="xla"), meant, SMALL.tolerance)
