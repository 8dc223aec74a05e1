"""Ragged paged attention "v3" against a float64 oracle, on caches as callers have them."""

import dataclasses
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_paged.interop import get_kv_cache_shape, ragged_paged_attention
from tests.support import raw
from tests.support.devices import implementations_here, lower_for_cuda
from tests.support.marks import slow, slow_if_interpreted
from tests.support.promotion import strict_promotion
from tests.support.rpa_cases import RpaCase, assert_equal_results, expected

CASE = RpaCase()
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 4e-3}
SINKS = np.float32([0.5, -1.0, 2.0, 0.0])
ALL = dict(sm_scale=0.3, sliding_window=9, soft_cap=3.0, sinks=SINKS, k_scale=0.5, v_scale=3.0)
# Other shapes of the cache [P, N, 2 * Hkv, D]. Padding is zeros where new tokens are written.
PADDED = {
    "pairs of K and V": lambda x: x.reshape(*x.shape[:2], -1, 2, x.shape[3]),
    "K and V on one axis": lambda x: x.reshape(*x.shape[:2], -1, 1, 2 * x.shape[3]),
    "wide heads": lambda x: np.pad(x, [(0, 0)] * 3 + [(0, 112)]),
    "more heads": lambda x: PADDED["pairs of K and V"](np.pad(x, [(0, 0)] * 2 + [(0, 2), (0, 0)])),
}


def call(arrays, **options):
    return jax.jit(partial(ragged_paged_attention, **options))(**arrays)


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        ("float32", ALL),
        *slow([("float32", {}), ("float32", dict(use_causal_mask=False))]),
        *slow([("bfloat16", {}), ("float16", {})]),
    ],
    ids=lambda x: x if isinstance(x, str) else " ".join(x) or "plain",
)
@pytest.mark.parametrize("implementation", slow_if_interpreted(implementations_here()))
def test_equals_the_oracle(dtype, options, implementation):
    arrays = dataclasses.replace(CASE, dtype=dtype).make()
    results = call(arrays, **options, return_lse=True, **raw.by(implementation))
    assert results[0].dtype == dtype
    assert_equal_results(results, expected(arrays, **options), TOLERANCE[dtype])
    assert not np.asarray(results[0])[sum(CASE.q_lens) :].any()


def test_call_that_is_not_causal_and_writes_no_cache_with_dead_rows_only_too():
    arrays, options = CASE.make(), dict(use_causal_mask=False, update_kv_cache=False)
    step = jax.jit(partial(ragged_paged_attention, **options, return_lse=True))
    assert_equal_results(step(**arrays), expected(arrays, **options), TOLERANCE["float32"])
    out, cache, lse = step(**(arrays | dict(distribution=np.zeros(3, np.int32))))
    assert not np.asarray(out).any() and np.isneginf(lse).all()
    np.testing.assert_array_equal(cache, arrays["kv_cache"])


@pytest.mark.parametrize("shape", PADDED)
def test_caches_of_other_shapes(shape):
    arrays = CASE.make()
    options = dict(sinks=SINKS, return_lse=True) if shape == "more heads" else {}
    out, cache, lse = expected(arrays, sinks=options.get("sinks"))
    given = PADDED[shape](arrays["kv_cache"])
    actual = call(arrays | dict(kv_cache=given), **options)
    assert actual[1].shape == given.shape
    assert_equal_results(actual, (out, PADDED[shape](cache), lse), TOLERANCE["float32"])


@pytest.mark.parametrize("kv_dtype", ["int8", *slow(["float8_e4m3fn"])])
def test_one_byte_keys_go_as_they_are_into_the_cache(kv_dtype, implementation):
    case = dataclasses.replace(CASE, dtype="bfloat16", kv_dtype=kv_dtype)
    arrays, scales = case.make(), dict(k_scale=0.25, v_scale=2.0)
    results = call(arrays, **scales, **raw.by(implementation))
    assert results[0].dtype == "bfloat16"
    assert_equal_results(results, expected(arrays, **scales), TOLERANCE["bfloat16"])


def test_keys_are_quantized_by_the_scales():
    case = dataclasses.replace(CASE, dtype="bfloat16", kv_dtype="float8_e4m3fn")
    arrays, scales = case.make(), dict(k_scale=0.25, v_scale=2.0)
    wide = {name: arrays[name].astype(jnp.bfloat16) for name in ("keys", "values")}
    for name, scale in (("keys", 0.25), ("values", 2.0)):
        arrays[name] = (wide[name].astype(np.float32) / scale).astype(arrays[name].dtype)
    results = call(arrays | wide, **scales, out_dtype=np.float32)
    assert results[0].dtype == np.float32
    assert_equal_results(results, expected(arrays, **scales), TOLERANCE["bfloat16"])


def test_queries_are_rounded_to_the_dtype_of_a_cache_of_the_stated_shape():
    arrays = dataclasses.replace(CASE, kv_dtype="bfloat16").make()
    with strict_promotion():
        results = call(arrays)
    assert results[0].dtype == np.float32
    assert_equal_results(results, expected(arrays), TOLERANCE["bfloat16"])
    assert get_kv_cache_shape(100, 16, 3, 80, jnp.bfloat16) == (100, 16, 3, 2, 80)
    with pytest.raises(ValueError, match="page_size=12 must be a power of two"):
        get_kv_cache_shape(100, 12, 3, 80, jnp.bfloat16)


@pytest.mark.parametrize(
    ("options", "same"),
    [
        (dict(q_scale=0.125), {}),  # it cancels
        (dict(d_block_sizes=(1, 2, 3, 4), vmem_limit_bytes=7, debug_mode=True), {}),
        (dict(k_scale=1, v_scale=None, sm_scale=1.0), {}),
        (dict(skip_kv_update=True), dict(update_kv_cache=False)),
        (dict(attention_sink=SINKS), dict(sinks=SINKS)),
    ],
    ids=lambda options: " ".join(options),
)
def test_options_of_other_names_or_without_effect_make_the_same_program(options, same):
    arrays = CASE.make().values()
    calls = [partial(ragged_paged_attention, **each) for each in (options, same)]
    one, other = (str(jax.make_jaxpr(call)(*arrays)) for call in calls)
    assert one == other


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


VIEWS = r"func\.func|^ *return|call @|stablehlo\.(reshape|bitcast_convert|custom_call)|sdy\.shardin"


@pytest.mark.parametrize(
    ("elements", "kv_dtype"),
    [(64, "float8_e4m3fn"), (128, "bfloat16"), *slow([(64, "bfloat16"), (128, "float8_e4m3fn")])],
)
def test_on_a_gpu_one_scatter_writes_the_cache_and_all_else_views_it(elements, kv_dtype):
    def of(*shape, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    tokens = of(40, 2, 64, dtype=kv_dtype)
    cache = of(4099, 16, 2, 2, elements, dtype=kv_dtype)
    q = of(40, 8, 64, dtype="bfloat16")
    integers = of(4), of(4 * 32), of(5), of(3)
    program = lower_for_cuda(ragged_paged_attention, q, tokens, tokens, cache, *integers)
    lines = program.as_text().splitlines()
    large = [line for line in lines if re.search("<(4099x16|65584)x", line)]
    others = [line for line in large if not re.search(VIEWS, line)]
    assert len(others) == 1 and others[0].lstrip().startswith("})"), others  # the scatter's end


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(kv_cache=np.zeros((4, 8, 3, 16))), "kv_cache.shape=.* must have an even number of h"),
        (dict(kv_cache=np.zeros((4, 8, 16))), "kv_cache.shape=.* must be"),
        (dict(keys=np.zeros((24, 2, 8))), "queries.shape=.* must be"),
        (dict(page_indices=np.zeros(31, np.int32)), "page_indices.shape=.* with S=6 rows"),
        (dict(cu_q_lens=np.zeros(4, np.int32)), "cu_q_lens must be int32"),
        (dict(distribution=np.zeros(2, np.int32)), "distribution must be int32"),
        (dict(kv_lens=[], cu_q_lens=np.int32([0])), "page_indices.shape=.* with S=0 rows"),
        (dict(queries=np.zeros((24, 4, 16), np.int32)), "queries.dtype=int32 must be floating"),
        (dict(k_scale="1"), "k_scale"),
        (dict(cp_rank=0), "cp_rank"),
        (dict(attention_sink=SINKS, sinks=SINKS), "attention_sink twice"),
    ],
)
def test_wrong_input(change, message):
    with pytest.raises((ValueError, TypeError), match=message):
        ragged_paged_attention(**(CASE.make() | change))
