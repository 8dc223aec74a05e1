"""The Mosaic decode kernel over int8 and fp8 pages: interpreted on a CPU, and lowered for a GPU."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import pallas_paged as pp
from pallas_paged.kernels.mosaic import support as mosaic_support
from tests.support.attention_calls import assert_close, assert_same_bits, decode
from tests.support.attention_cases import mosaic_case
from tests.support.lowering import CUSTOM_CALL, few_with_every_level, named, options_of, pairwise
from tests.support.marks import slow
from tests.support.page_layouts import call_in_layout
from tests.support.programs import Program
from tests.support.quantized_cases import Quantized

if reason := mosaic_support.why_not_jax():
    pytest.skip(reason, allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")

INT8, FP8 = "int8", "float8_e4m3fn"
# Programs that have several rows, and rows that several programs share.
CONFIG = pp.MosaicDecodeConfig(block_k=64, num_stages=2, num_programs=4)
TWO_PARTS = pp.MosaicDecodeConfig(block_k=128, num_stages=2, num_programs=4)
ROWS = mosaic_case(seq_lens=(130, 0, 64, 1), pages_per_seq=9)
ALL_OPTIONS = dict(
    sm_scale=-0.3,
    soft_cap=3.0,
    sliding_window=70,
    alibi_slopes=np.linspace(0.01, 0.3, 4, dtype=np.float32),
    sinks=np.linspace(-1, 2, 4, dtype=np.float32),
)


interpreted = functools.partial(decode, implementation="mosaic_gpu_interpret")


def rows(kv_dtype=INT8, *, per_tensor=False, **changes):
    case = dataclasses.replace(ROWS, **changes)
    return Quantized(case=case, kv_dtype=kv_dtype, per_tensor=per_tensor)


def check(case, config=CONFIG, **options):
    arrays, meant = case.make()
    assert_close(
        interpreted(*arrays, config=config, **options), meant, case.case.tolerance, **options
    )


@pytest.mark.parametrize(
    ("kv_dtype", "dtype", "per_tensor"),
    [
        (INT8, "bfloat16", False),
        *slow([(INT8, "bfloat16", True), (FP8, "float16", False), (FP8, "float16", True)]),
    ],
)
def test_dtypes_and_scales(kv_dtype, dtype, per_tensor):
    check(rows(kv_dtype, dtype=dtype, per_tensor=per_tensor))


@pytest.mark.parametrize(("kv_dtype", "dtype"), slow([(INT8, "float16"), (FP8, "bfloat16")]))
def test_other_dtypes(kv_dtype, dtype):
    check(rows(kv_dtype, dtype=dtype))


@pytest.mark.parametrize("head_dim", [192, *slow([128, 256])])
def test_head_dims(head_dim):
    case = rows(FP8, head_dim=head_dim, seq_lens=(130, 3), page_size=8, pages_per_seq=17)
    check(case, TWO_PARTS)


@pytest.mark.parametrize(
    ("page_size", "pages_per_seq"), slow([(8, 17), (2, 65), (128, 2), (256, 1)])
)
def test_page_sizes(page_size, pages_per_seq):
    check(rows(page_size=page_size, pages_per_seq=pages_per_seq), TWO_PARTS)


@pytest.mark.parametrize("kv_dtype", [FP8, *slow([INT8])])
def test_options_together(kv_dtype):
    check(rows(kv_dtype), **ALL_OPTIONS)


@pytest.mark.parametrize("kv_layout", ["NH2D", *slow(["NHD", "HND", "2NHD", "N2HD"])])
def test_layouts(kv_layout):
    arrays, meant = rows(seq_lens=(70, 9)).make()
    call = functools.partial(
        pp.paged_attention, kv_layout=kv_layout, implementation="mosaic_gpu_interpret",
        config=CONFIG, return_lse=True,
    )  # fmt: skip
    assert_close(jax.jit(call)(**call_in_layout(kv_layout, arrays)), meant, ROWS.tolerance)


@pytest.mark.parametrize("kv_dtype", slow([INT8, FP8]))
def test_data_outside_a_row_changes_no_bit(kv_dtype):
    clean = interpreted(*rows(kv_dtype).make(poison=False)[0], config=CONFIG)
    assert_same_bits(interpreted(*rows(kv_dtype).make()[0], config=CONFIG), clean)


@pytest.mark.parametrize("page_size", [16, *slow([2])])
def test_pages_left_of_the_window_are_not_read(page_size):
    case = rows(seq_lens=(130, 90), page_size=page_size, pages_per_seq=144 // page_size)
    arrays, _ = case.make()
    q, k, v, tables, lens, *scales = arrays
    others = tables.copy()
    for row, left in enumerate(lens - 70):
        others[row, : left // page_size] = np.iinfo(np.int32).max  # the interpreter refuses this
    options = dict(config=CONFIG, sliding_window=70)
    expected = interpreted(*arrays, **options)
    assert_same_bits(interpreted(q, k, v, others, lens, *scales, **options), expected)


def test_no_races(capfd):
    jax.clear_caches()  # JAX's cache key does not hold the interpreter's parameters
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        check(rows(FP8, seq_lens=(200, 0, 70), pages_per_seq=13))
    jax.clear_caches()
    assert "RACE" not in capfd.readouterr().out


ROWS_TO_LOWER = pairwise(
    group=(1, 5, 8, 40),
    page_size=(1, 4, 8, 16, 256),
    kv_dtype=(INT8, FP8),
    one_scale=(False, True),
    kv_layout=("HPND", "NHD", "2NHD"),
    block_k=(64, 128, 256),
    dtype=("bfloat16", "float16"),
    head_dim=(64, 128, 192, 256),
    soft_cap=(None, 30.0),
    sliding_window=(None, 100),
    alibi_slopes=(False, True),
    sinks=(False, True),
    return_lse=(False, True),
)
# The others do not fit into shared memory.
LOWERED = [row for row in ROWS_TO_LOWER if row["head_dim"] < 256 or row["block_k"] < 256]


@pytest.mark.parametrize("row", few_with_every_level(LOWERED), ids=named)
def test_lowers_for_cuda(row):
    num_q_heads = 2 * row["group"]
    config = pp.MosaicDecodeConfig(block_k=row["block_k"], num_stages=2, num_programs=132)
    names = ("head_dim", "page_size", "dtype", "kv_dtype", "one_scale", "kv_layout")
    text = Program(
        function="decode",
        implementation="mosaic_gpu",
        num_q_heads=num_q_heads,
        num_kv_heads=2,
        num_pages=20,
        max_kv_len=2048,
        options=dict(config=config) | options_of(row, num_q_heads),
        **{name: row[name] for name in names},
    ).text()
    assert len(CUSTOM_CALL.findall(text)) == 2 and "paged_decode_merge" in text
