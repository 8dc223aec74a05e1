"""The Mosaic GPU kernel of ragged queries and its merge, interpreted on a CPU."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import pallas_paged as pp
from pallas_paged.kernels.mosaic import converted_rows
from pallas_paged.kernels.mosaic import support as mosaic_support
from tests.support.attention_calls import assert_close, assert_same_bits, ragged
from tests.support.attention_cases import mosaic_case
from tests.support.marks import slow
from tests.support.page_layouts import call_in_layout
from tests.support.quantized_cases import Quantized

if reason := mosaic_support.why_not_jax():
    pytest.skip(reason, allow_module_level=True)

# The interpreter multiplies the poisoned values too.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")

CONFIG = dict(block_k=64, num_consumers=2, num_stages=2, num_programs=3)
rows = partial(mosaic_case, num_kv_heads=1, pages_per_seq=26)
SINKS = np.linspace(-1, 2, 20, dtype=np.float32)
TREE = np.random.default_rng(0).random((2, 5, 5)) < 0.5
group_of_20 = mosaic_case(
    num_q_heads=20, num_kv_heads=1, seq_lens=(70, 9), pages_per_seq=5, q_lens=(5, 3)
)
group_of_5 = mosaic_case(
    num_q_heads=5, num_kv_heads=1, page_size=8, seq_lens=(100, 20), pages_per_seq=13, q_lens=(30, 9)
)


@pytest.mark.parametrize(
    ("case", "config", "options"),
    [
        (
            rows(num_kv_heads=2, seq_lens=(40, 100, 5, 17), q_lens=(40, 3, 0, 17)),
            {},
            {},
        ),
        (rows(seq_lens=(400,), q_lens=(9,)), {"num_programs": 8}, {}),
        (rows(seq_lens=(100, 180), q_lens=(40, 20)), {"num_consumers": 1}, {"sliding_window": 30}),
        (group_of_20, {}, {"tree_mask": TREE, "sinks": SINKS}),
        *slow(
            [
                (rows(seq_lens=(400, 100), q_lens=(9, 3)), {"fixed_split_size": 128}, {}),
                (group_of_5, {}, {}),
            ]
        ),
    ],
    ids=["mixed", "split", "window", "group of 20, tree, sinks", "split size", "group of 5"],
)
def test_matches_the_oracle(case, config, options):
    config = pp.MosaicRaggedConfig(**{**CONFIG, **config})
    arrays = case.make()
    actual = ragged(*arrays, implementation="mosaic_gpu_interpret", config=config, **options)
    assert_close(actual, arrays, case.tolerance, **options)


def quantized(kv_dtype, *, per_tensor=False, **case):
    shape = dict(num_kv_heads=1, seq_lens=(100, 70, 17), q_lens=(40, 3, 17), pages_per_seq=7)
    return Quantized(case=mosaic_case(**shape | case), kv_dtype=kv_dtype, per_tensor=per_tensor)


ALL = dict(
    sliding_window=30, soft_cap=5.0, sinks=SINKS[:4], alibi_slopes=np.full(4, 0.1, np.float32)
)


@pytest.mark.parametrize(
    ("case", "kv_layout", "config", "options"),
    [
        (quantized("int8"), "HPND", {}, ALL),
        (
            quantized(
                "float8_e4m3fn", num_kv_heads=2, page_size=128, pages_per_seq=1
            ),
            "NH2D",
            {},
            {},
        ),
        *slow(
            [
                (quantized("int8", per_tensor=True, dtype="float16"), "NHD", {"num_consumers": 1},
                 {}),
                (quantized("int8", dtype="float16", seq_lens=(400,), q_lens=(9,), pages_per_seq=26),
                 "HND", {"num_programs": 8}, {"causal": False}),
                (quantized("float8_e4m3fn", dtype="float16"), "2NHD", {}, ALL),
                (quantized("float8_e4m3fn", per_tensor=True), "N2HD", {},
                 {"tree_mask": np.random.default_rng(0).random((3, 5, 5)) < 0.5}),
            ]
        ),
    ],
    ids=lambda x: str(x) if isinstance(x, Quantized) else None,
)  # fmt: skip
def test_int8_and_fp8_pages_match_the_oracle(case, kv_layout, config, options):
    arrays, meant = case.make()
    call = partial(
        pp.ragged_paged_attention,
        kv_layout=kv_layout,
        implementation="mosaic_gpu_interpret",
        config=pp.MosaicRaggedConfig(**CONFIG | {"num_q_stages": 1} | config),
        return_lse=True,
        **options,
    )
    actual = jax.jit(call)(**call_in_layout(kv_layout, arrays))
    assert_close(actual, meant, case.case.tolerance, **options)


@pytest.mark.parametrize(
    ("case", "kv_layout", "options"),
    [
        (quantized("int8"), "HPND", ALL),
        *slow(
            [
                (quantized("float8_e4m3fn", page_size=128, pages_per_seq=1), "NH2D", {}),
                (quantized("int8", per_tensor=True, dtype="float16"), "NHD", {}),
            ]
        ),
    ],
    ids=["int8, all options", "fp8, K and V in one array", "one scale"],
)
def test_rows_that_are_converted_before_match_the_oracle(case, kv_layout, options, monkeypatch):
    # 40 tokens of the first row; the others are left to the converter of the kernel.
    monkeypatch.setattr(converted_rows, "MIN_TILES", 1)
    monkeypatch.setattr(converted_rows, "MIN_LOGITS", 1)
    arrays, meant = case.make()
    call = partial(
        pp.ragged_paged_attention,
        kv_layout=kv_layout,
        implementation="mosaic_gpu_interpret",
        config=pp.MosaicRaggedConfig(**CONFIG),
        return_lse=True,
        **options,
    )
    actual = jax.jit(call)(**call_in_layout(kv_layout, arrays))
    assert_close(actual, meant, case.case.tolerance, **options)


@pytest.mark.slow
def test_which_rows_are_converted_before_changes_no_bit(monkeypatch):
    case = quantized("int8", seq_lens=(150, 130, 30), q_lens=(20, 40, 7), pages_per_seq=10)
    arrays, _ = case.make()
    config = pp.MosaicRaggedConfig(**CONFIG | {"num_consumers": 1})
    monkeypatch.setattr(converted_rows, "MIN_TILES", 1)
    monkeypatch.setattr(converted_rows, "MIN_LOGITS", 1)
    results = []
    for num_blocks in (0, 3, 100):  # of no row, of the first, of the first two
        room = 4 * arrays[1].shape[0] * 64 * arrays[0].shape[-1] * num_blocks
        monkeypatch.setattr(converted_rows, "MOST_BYTES", room)
        jax.clear_caches()  # the key of the cache does not hold the constants
        results.append(ragged(*arrays, implementation="mosaic_gpu_interpret", config=config))
    assert_same_bits(results[1], results[0])
    assert_same_bits(results[2], results[0])


@pytest.mark.slow
def test_slots_outside_a_row_change_no_bit_of_int8_results():
    case = quantized("int8")
    options = dict(implementation="mosaic_gpu_interpret", config=pp.MosaicRaggedConfig(**CONFIG))
    clean = ragged(*case.make(poison=False)[0], **options)
    assert_same_bits(ragged(*case.make()[0], **options), clean)


def test_no_races_with_int8_pages(capfd):
    case = quantized("int8", seq_lens=(100, 30), q_lens=(9, 7), pages_per_seq=7)
    arrays, meant = case.make()
    config = pp.MosaicRaggedConfig(**CONFIG | {"num_programs": 2})
    jax.clear_caches()  # JAX's cache key does not hold the interpreter's parameters
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        actual = ragged(*arrays, implementation="mosaic_gpu_interpret", config=config)
        assert_close(actual, meant, case.case.tolerance)
    jax.clear_caches()
    assert "RACE" not in capfd.readouterr().out


def test_keys_left_of_the_window_are_not_read():
    arrays = rows(seq_lens=(180,), q_lens=(9,)).make()
    q, k_pages, v_pages, tables, *rest = arrays
    k, v = k_pages.copy(), v_pages.copy()
    left = np.arange(180 - 9 - 30 + 1)
    k[:, tables[0, left // 16], left % 16] = v[:, tables[0, left // 16], left % 16] = np.nan
    others = tables.copy()
    others[0, : len(left) // 16] = np.iinfo(np.int32).max  # the interpreter refuses this
    options = dict(
        implementation="mosaic_gpu_interpret",
        config=pp.MosaicRaggedConfig(**CONFIG),
        sliding_window=30,
    )
    expected = ragged(*arrays, **options)
    assert_same_bits(ragged(q, k, v, others, *rest, **options), expected)
