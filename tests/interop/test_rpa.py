"""Ragged paged attention "v3" against a float64 oracle, on caches as callers have them."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_paged.interop import get_kv_cache_shape, ragged_paged_attention
from tests.support.devices import lower_for_cuda
from tests.support.marks import slow
from tests.support.promotion import strict_promotion
from tests.support.rpa_cases import RpaCase, assert_equal_results, expected

CASE = RpaCase()
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 4e-3}
SINKS = np.float32([0.5, -1.0, 2.0, 0.0])
OPTIONS = {
    "plain": {},
    "scale": dict(sm_scale=0.25),
    "window": dict(sliding_window=7),
    "cap": dict(soft_cap=2.0),
    "sinks": dict(sinks=SINKS),
    "scales of K and V": dict(k_scale=0.5, v_scale=3.0, soft_cap=5.0),
    "not causal": dict(use_causal_mask=False),
    "all": dict(sm_scale=0.3, sliding_window=9, soft_cap=3.0, sinks=SINKS, v_scale=0.5),
}
PADDED = {
    "as it is": lambda x: x,
    "pairs of K and V": lambda x: x.reshape(*x.shape[:2], -1, 2, x.shape[3]),
    "K and V on one axis": lambda x: x.reshape(*x.shape[:2], -1, 1, 2 * x.shape[3]),
    "wide heads": lambda x: np.pad(x, ((0, 0), (0, 0), (0, 0), (0, 112))),
    "more heads": lambda x: np.pad(x, ((0, 0), (0, 0), (0, 2), (0, 0))).reshape(
        *x.shape[:2], -1, 2, x.shape[3]
    ),
}


QUICK = ("scales of K and V", "not causal", "all")


@pytest.mark.parametrize("name", [*QUICK, *slow(x for x in OPTIONS if x not in QUICK)])
def test_equals_the_oracle(name, implementation):
    arrays, options = CASE.make(), OPTIONS[name]
    results = ragged_paged_attention(
        **arrays, **options, return_lse=True, implementation=implementation
    )
    assert_equal_results(results, expected(arrays, **options), TOLERANCE["float32"])
    assert not np.asarray(results[0])[sum(CASE.q_lens) :].any()


@pytest.mark.parametrize("shape", PADDED)
def test_caches_of_other_shapes(shape):
    """Padding of the cache is zeros where new tokens are, and what it was elsewhere."""
    arrays = CASE.make()
    out, cache, _ = expected(arrays)
    given = PADDED[shape](arrays["kv_cache"])
    actual = jax.jit(ragged_paged_attention)(**(arrays | dict(kv_cache=given)))
    assert actual[1].shape == given.shape
    assert_equal_results(actual, (out, PADDED[shape](cache)), TOLERANCE["float32"])


@pytest.mark.parametrize("dtype", ["bfloat16", *slow(["float16"])])
def test_dtypes(dtype, implementation):
    arrays = dataclasses.replace(CASE, dtype=dtype).make()
    results = ragged_paged_attention(**arrays, implementation=implementation)
    assert results[0].dtype == dtype
    assert_equal_results(results, expected(arrays), TOLERANCE[dtype])


@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "int8"])
def test_one_byte_keys_go_as_they_are_into_the_cache(kv_dtype, implementation):
    case = dataclasses.replace(CASE, dtype="bfloat16", kv_dtype=kv_dtype)
    arrays, scales = case.make(), dict(k_scale=0.25, v_scale=2.0)
    results = ragged_paged_attention(**arrays, **scales, implementation=implementation)
    assert_equal_results(results, expected(arrays, **scales), TOLERANCE["bfloat16"])


def test_keys_are_quantized_by_the_scales():
    case = dataclasses.replace(CASE, dtype="bfloat16", kv_dtype="float8_e4m3fn")
    arrays, scales = case.make(), dict(k_scale=0.25, v_scale=2.0)
    wide = {name: arrays[name].astype(jnp.bfloat16) for name in ("keys", "values")}
    for name, scale in (("keys", 0.25), ("values", 2.0)):
        arrays[name] = (wide[name].astype(np.float32) / scale).astype(arrays[name].dtype)
    results = ragged_paged_attention(**(arrays | wide), **scales)
    assert_equal_results(results, expected(arrays, **scales), TOLERANCE["bfloat16"])


def test_queries_are_rounded_to_the_dtype_of_the_cache():
    case = dataclasses.replace(CASE, kv_dtype="bfloat16")
    arrays = case.make()
    results = ragged_paged_attention(**arrays)
    assert results[0].dtype == np.float32
    assert_equal_results(results, expected(arrays), TOLERANCE["bfloat16"])


@pytest.mark.parametrize("option", [dict(update_kv_cache=False), dict(skip_kv_update=True)])
def test_a_cache_that_is_not_updated(option):
    arrays = CASE.make()
    results = ragged_paged_attention(**arrays, **option)
    meant = expected(arrays, update_kv_cache=False)
    assert_equal_results(results, meant, TOLERANCE["float32"])


def test_no_live_row():
    arrays = CASE.make() | dict(distribution=np.zeros(3, np.int32))
    out, cache, lse = ragged_paged_attention(**arrays, return_lse=True)
    assert not np.asarray(out).any() and np.isneginf(lse).all()
    np.testing.assert_array_equal(cache, arrays["kv_cache"])


def test_the_scale_of_queries_cancels():
    arrays = CASE.make()
    plain, scaled = (ragged_paged_attention(**arrays, q_scale=x)[0] for x in (None, 0.125))
    np.testing.assert_array_equal(plain, scaled)


def test_tuning_changes_nothing():
    arrays = CASE.make()
    plain = ragged_paged_attention(**arrays)
    tuned = ragged_paged_attention(
        **arrays, d_block_sizes=(1, 2, 3, 4), vmem_limit_bytes=7, debug_mode=True
    )
    for a, b in zip(plain, tuned, strict=True):
        np.testing.assert_array_equal(a, b)


def test_strict_promotion_rules():
    arrays = CASE.make()
    with strict_promotion():
        results = jax.jit(ragged_paged_attention)(**arrays)
    assert_equal_results(results, expected(arrays), TOLERANCE["float32"])


@pytest.mark.parametrize("wide", [False, True], ids=["cache as it is", "padded cache"])
def test_the_cache_is_not_copied(wide):
    """Memory for temporary arrays, beside the donated cache."""
    big = dataclasses.replace(CASE, head_dim=64, num_q_heads=8).make()
    heads = (2, 2, 128) if wide else (4, 64)
    cache = jax.ShapeDtypeStruct((4096, 8, *heads), np.float32)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), big)
    shapes |= dict(kv_cache=cache)
    step = jax.jit(ragged_paged_attention, donate_argnames="kv_cache")
    compiled = step.lower(**shapes).compile()
    memory = compiled.memory_analysis()
    pool = cache.size * 4
    assert memory.alias_size_in_bytes == pool
    assert memory.temp_size_in_bytes < pool // 8
    for line in compiled.as_text().splitlines():
        copies = any(f" {op}(" in line for op in ("copy", "transpose", "concatenate"))
        assert not copies or "4096" not in line.split("=")[1], line


VIEWS = re.compile(
    r"func\.func|^ *return|call @|stablehlo\.(reshape|bitcast_convert|custom_call)|sdy\.sharding"
)


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("elements", [64, 128], ids=["cache as it is", "padded cache"])
def test_on_a_gpu_one_scatter_writes_the_cache_and_all_else_views_it(elements, kv_dtype):
    def of(*shape, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    tokens = of(40, 2, 64, dtype=kv_dtype)
    cache = of(4099, 16, 2, 2, elements, dtype=kv_dtype)
    q = of(40, 8, 64, dtype="bfloat16")
    integers = of(4), of(4 * 32), of(5), of(3)
    program = lower_for_cuda(ragged_paged_attention, q, tokens, tokens, cache, *integers)
    large = [
        line for line in program.as_text().splitlines() if re.search("<(4099x16|65584)x", line)
    ]
    others = [line for line in large if not VIEWS.search(line)]
    assert len(others) == 1 and others[0].lstrip().startswith("})"), others  # the scatter's end


def test_the_shape_of_a_cache():
    assert get_kv_cache_shape(100, 16, 3, 80, jnp.bfloat16) == (100, 16, 3, 2, 80)
    with pytest.raises(ValueError, match="page_size=12 must be a power of two"):
        get_kv_cache_shape(100, 12, 3, 80, jnp.bfloat16)


BAD = {
    "kv_cache.shape=.* must have an even number of heads": dict(
        kv_cache=np.zeros((4, 8, 3, 16), np.float32)
    ),
    "kv_cache.shape=.* must be": dict(kv_cache=np.zeros((4, 8, 16), np.float32)),
    "queries.shape=.* must be": dict(keys=np.zeros((24, 2, 8), np.float32)),
    "page_indices.shape=.* with S=6 rows": dict(page_indices=np.zeros(31, np.int32)),
    "cu_q_lens must be int32": dict(cu_q_lens=np.zeros(4, np.int32)),
    "distribution must be int32": dict(distribution=np.zeros(2, np.int32)),
    "k_scale": dict(k_scale="1"),
}


@pytest.mark.parametrize("message", BAD)
def test_wrong_input(message):
    with pytest.raises(ValueError, match=message):
        ragged_paged_attention(**(CASE.make() | BAD[message]))


def test_unknown_keywords():
    with pytest.raises(TypeError, match="cp_rank"):
        ragged_paged_attention(**CASE.make(), cp_rank=0)
    with pytest.raises(TypeError, match="attention_sink twice"):
        ragged_paged_attention(**CASE.make(), attention_sink=SINKS, sinks=SINKS)
