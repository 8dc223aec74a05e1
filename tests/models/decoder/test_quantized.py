"""Quantized KV caches under the model: pools, log-probabilities, generation in the engine."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.decoder import engine_model
from pallas_paged.engine import SamplingParams
from pallas_paged.engine.device.pool import create_pool, page_bytes, pool_bytes, pool_dtype
from pallas_paged.engine.sampling_params import SamplingMode
from tests.support.attention_oracle import relative_error
from tests.support.dense_oracle import CONFIG, tiny_model
from tests.support.engine_calls import (
    MANY_PAGES,
    assert_copies_no_pool,
    make_engine,
    serve,
    tokens_of,
)
from tests.support.marks import slow

pytestmark = pytest.mark.usefixtures("exact_products")
PROMPTS = [[1, 2, 3], list(range(4, 13)), [14, 15, 16, 17], list(range(20, 38))]
NEW = 14
TOKENS = np.random.default_rng(0).integers(0, CONFIG.vocab_size, 24).tolist()
GREEDY = SamplingParams(max_tokens=NEW, temperature=0.0)
# All requests are greedy, and some want log-probabilities: one mode, so that few steps compile.
REPORTS = SamplingMode(logprobs=0, prompt_logprobs=0)
# Near the scales of the tiny model's K and V. Two are equal; they still need separate buffers, or
# the pool could not be donated.
SCALES = {"k_scales": (0.004, 0.005), "v_scales": (0.004, 0.003)}
CALIBRATED = replace(CONFIG, **SCALES)
ERRORS = {"int8": 0.001, "fp8": 0.008, "fp8 calibrated": 0.008}  # relative, of logprobs


def engine_of(decoder, **sizes):
    return make_engine(*engine_model(decoder), modes=[REPORTS], **sizes)


@pytest.fixture(scope="module", params=["int8", "fp8 calibrated", *slow(["fp8"])])
def quantized(request, model):
    kv_cache_dtype, *brings_scales = request.param.split()
    decoder = tiny_model(CALIBRATED) if brings_scales else model
    return decoder, kv_cache_dtype, ERRORS[request.param]


def test_logprobs_stay_near_those_of_an_unquantized_cache(oracle, quantized):
    """Of a prompt in chunks, and of tokens decoded one by one."""
    model, kv_cache_dtype, most = quantized
    engine = engine_of(model, kv_cache_dtype=kv_cache_dtype)
    params = SamplingParams(max_tokens=8, temperature=0.0, logprobs=0, prompt_logprobs=0)
    (output,) = engine.generate([TOKENS], params, progress=False)
    (completion,) = output.outputs
    tokens = [*TOKENS, *completion.token_ids]
    exact = oracle.logprobs(tokens)[np.arange(len(tokens) - 1), tokens[1:]]
    entries = [*output.prompt_logprobs[1:], *completion.logprobs]
    found = [entry[token].logprob for entry, token in zip(entries, tokens[1:], strict=True)]
    for part in (slice(len(TOKENS) - 1), slice(len(TOKENS) - 1, None)):
        assert most / 10 < relative_error(found[part], exact[part]) < most


@pytest.mark.parametrize(
    ("config", "kv_cache_dtype", "dtype", "token_bytes", "scale_shape"),
    [
        (CONFIG, None, "float32", 16 * 4, None),
        (CALIBRATED, "float32", "float32", 16 * 4, None),
        (CALIBRATED, "int8", "int8", 16 + 4, (3, 4, 2)),
        (CONFIG, "fp8", "float8_e4m3fn", 16 + 4, (3, 4, 2)),
        (CALIBRATED, "fp8", "float8_e4m3fn", 16, ()),
    ],
)
def test_pool_has_scales_of_layers_or_of_tokens_and_counts_their_bytes(
    config, kv_cache_dtype, dtype, token_bytes, scale_shape
):
    spec = engine_model(tiny_model(config))[0].kv_cache_spec
    assert pool_dtype(spec, kv_cache_dtype) == jnp.dtype(dtype)
    pool = create_pool(spec, num_pages=3, page_size=4, dtype=dtype)
    for name, wanted in SCALES.items():
        scales = [getattr(layer, name) for layer in pool.layers]
        assert [x if x is None else x.shape for x in scales] == [scale_shape] * 2
        if scale_shape == ():
            np.testing.assert_array_equal(np.stack(scales), np.float32(wanted))
    held = sum(array.nbytes for array in jax.tree.leaves(pool))
    page = 2 * 2 * 2 * 4 * token_bytes  # of K and V, in all layers and heads
    assert page_bytes(spec, page_size=4, dtype=dtype) == page
    assert pool_bytes(pool) == held == 3 * page + (2 * 2 * 4 if scale_shape == () else 0)


@pytest.fixture(scope="module")
def alone(quantized):
    """Greedy tokens of each prompt, alone in an engine without prefix caching."""
    model, kv_cache_dtype, _ = quantized
    engine = engine_of(model, kv_cache_dtype=kv_cache_dtype, enable_prefix_caching=False)
    return [tokens_of(serve(engine, [prompt], GREEDY))[0] for prompt in PROMPTS]


def test_tokens_do_not_depend_on_other_requests(quantized, alone):
    """Not beside others, nor after preemption, with a cached prefix, or in forked samples."""
    model, kv_cache_dtype, _ = quantized
    engine = engine_of(model, kv_cache_dtype=kv_cache_dtype)
    assert tokens_of(serve(engine, PROMPTS, GREEDY)) == alone  # checks the table in every step
    longer = [*PROMPTS[3], *alone[3][:3]]
    requests = serve(engine, [PROMPTS[3], longer], GREEDY)
    assert [request.num_cached_tokens for request in requests] == [16, 20]
    again, tail = tokens_of(requests)
    assert again == alone[3] and tail[: NEW - 3] == alone[3][3:]
    (request,) = serve(engine, PROMPTS[1:2], replace(GREEDY, n=3))
    assert tokens_of([request]) == [alone[1]] * 3
    stats, spec = engine.stats(), engine_model(model)[0].kv_cache_spec
    assert stats.num_preemptions > 0
    dtype = pool_dtype(spec, kv_cache_dtype)
    assert stats.kv_cache_dtype == dtype.name
    pool = create_pool(spec, num_pages=16, page_size=4, dtype=dtype)
    assert stats.pool_bytes == pool_bytes(pool)


@pytest.mark.parametrize(("config", "kv_cache_dtype"), [(CONFIG, "int8"), (CALIBRATED, "fp8")])
def test_compiled_step_of_the_engine_copies_no_pool(config, kv_cache_dtype):
    if kv_cache_dtype == "fp8" and jax.default_backend() == "cpu":
        pytest.skip("XLA's CPU compiler widens float8 scatters and their operands")
    sizes = dict(kv_cache_dtype=kv_cache_dtype, num_pages=MANY_PAGES)
    assert_copies_no_pool(engine_of(tiny_model(config), **sizes))
