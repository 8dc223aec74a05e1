"""Quantized KV caches under the model: logits, generation, the engine, checkpoints."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from models.checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from models.config import ModelConfig
from models.engine_model import engine_model
from pallas_paged.engine import KVCacheSpec, SamplingParams
from pallas_paged.engine.kv_cache import create_pool, page_bytes, pool_bytes, pool_dtype
from pallas_paged.engine.sampler import SamplingMode
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
ON_CPU = jax.default_backend() == "cpu"
PROMPTS = [[1, 2, 3], list(range(4, 13)), [14, 15, 16, 17], list(range(20, 38))]
NEW = 14
TOKENS = np.random.default_rng(0).integers(0, CONFIG.vocab_size, 24).tolist()
GREEDY = SamplingParams(max_tokens=NEW, temperature=0.0)
# Near the scales of the tiny model's K and V. Two are equal; they still need separate buffers, or
# the pool could not be donated.
# All requests are greedy, and some want log-probabilities: one mode, so that few steps compile.
REPORTS = SamplingMode(logprobs=0, prompt_logprobs=0)
SCALES = {"k_scales": (0.004, 0.005), "v_scales": (0.004, 0.003)}
ERRORS = {"int8": 0.001, "fp8": 0.008, "fp8 calibrated": 0.008}  # relative, of logprobs


def engine_of(decoder, **sizes):
    return make_engine(*engine_model(decoder), modes=[REPORTS], **sizes)


def spec_of(decoder):
    return engine_model(decoder)[0].kv_cache_spec


@pytest.fixture(scope="module")
def calibrated():
    """The tiny model, with the scales of a float8 cache from its checkpoint."""
    return tiny_model(replace(CONFIG, **SCALES))


@pytest.fixture(scope="module", params=["int8", "fp8 calibrated", *slow(["fp8"])])
def quantized(request, model, calibrated):
    """A model, the dtype of its cache, and the largest error of its log-probabilities."""
    kv_cache_dtype, *brings_scales = request.param.split()
    return calibrated if brings_scales else model, kv_cache_dtype, ERRORS[request.param]


def test_logprobs_stay_near_those_of_an_unquantized_cache(oracle, quantized):
    """Of a prompt in chunks, and of tokens decoded one by one."""
    model, kv_cache_dtype, most = quantized
    engine = engine_of(model, kv_cache_dtype=kv_cache_dtype)
    params = SamplingParams(max_tokens=8, temperature=0.0, logprobs=0, prompt_logprobs=0)
    (output,) = engine.generate([TOKENS], params, progress=False)
    (completion,) = output.outputs
    exact = oracle.logprobs([*TOKENS, *completion.token_ids])
    for start, entries in ((0, output.prompt_logprobs[1:]), (len(TOKENS) - 1, completion.logprobs)):
        pairs = [
            (one.logprob, exact[start + i, token_id])
            for i, entry in enumerate(entries)
            for token_id, one in entry.items()
        ]
        found, wanted = np.transpose(pairs)
        error = np.linalg.norm(found - wanted) / np.linalg.norm(wanted)
        assert most / 10 < error < most


def test_calibrated_scales_reach_each_layer(calibrated):
    spec, sizes = spec_of(calibrated), dict(num_pages=3, page_size=4)
    pool = create_pool(spec, **sizes, dtype="float8_e4m3fn")
    for name, wanted in SCALES.items():
        scales = [getattr(layer, name) for layer in pool.layers]
        assert [scale.shape for scale in scales] == [()] * 2
        np.testing.assert_array_equal(np.stack(scales), np.float32(wanted))
    layers = create_pool(spec, **sizes, dtype="int8").layers
    assert {x.shape for layer in layers for x in (layer.k_scales, layer.v_scales)} == {(2, 3, 4)}
    layers = create_pool(spec, **sizes, dtype="float32").layers
    assert all(layer.k_scales is None and layer.v_scales is None for layer in layers)


def test_scales_are_counted_as_bytes(model, calibrated):
    def size(decoder, dtype):
        spec = spec_of(decoder)
        one, three = (create_pool(spec, num_pages=n, page_size=4, dtype=dtype) for n in (1, 3))
        difference = pool_bytes(three) - pool_bytes(one)
        assert page_bytes(spec, page_size=4, dtype=dtype) == difference // 2
        held = sum(array.nbytes for array in jax.tree.leaves(three))
        assert pool_bytes(three) == held
        return held

    tokens = 2 * CONFIG.num_layers * CONFIG.num_kv_heads * 3 * 4  # of K and V, in all heads
    assert size(model, "float32") == tokens * 16 * 4
    assert size(model, "bfloat16") == tokens * 16 * 2
    assert size(model, "int8") == size(model, "float8_e4m3fn") == tokens * (16 + 4)
    assert size(calibrated, "float8_e4m3fn") == tokens * 16 + 4 * 2 * CONFIG.num_layers


@pytest.mark.parametrize(
    ("kv_cache_dtype", "own", "dtype"),
    [
        (None, "bfloat16", "bfloat16"),
        ("bfloat16", "bfloat16", "bfloat16"),
        ("float16", "float16", "float16"),
        ("float32", "float32", "float32"),
        ("int8", "float16", "int8"),
        ("fp8", "bfloat16", "float8_e4m3fn"),
    ],
)
def test_pool_dtype(kv_cache_dtype, own, dtype):
    spec = KVCacheSpec(num_layers=1, num_kv_heads=1, head_dim=16, dtype=own)
    assert pool_dtype(spec, kv_cache_dtype) == jnp.dtype(dtype)


@pytest.fixture(scope="module")
def alone(quantized):
    """Greedy tokens of each prompt, alone in an engine without prefix caching."""
    model, kv_cache_dtype, _ = quantized
    engine = engine_of(model, kv_cache_dtype=kv_cache_dtype, enable_prefix_caching=False)
    return [tokens_of(serve(engine, [prompt], GREEDY))[0] for prompt in PROMPTS]


def test_most_tokens_equal_those_of_an_unquantized_cache(alone, oracle):
    exact = [oracle.continue_(prompt, NEW) for prompt in PROMPTS]
    assert np.mean(np.equal(alone, exact)) > 0.6


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
    stats = engine.stats()
    assert stats.num_preemptions > 0
    spec = spec_of(model)
    dtype = pool_dtype(spec, kv_cache_dtype)
    assert stats.kv_cache_dtype == dtype.name
    pool = create_pool(spec, num_pages=16, page_size=4, dtype=dtype)
    assert stats.pool_bytes == pool_bytes(pool)


@pytest.fixture(scope="module", params=["int8", "fp8 calibrated"])
def in_place(request):
    """A configuration and a dtype whose pool is updated in place."""
    if request.param == "int8":
        return CONFIG, "int8"
    if ON_CPU:
        pytest.skip("XLA's CPU compiler widens float8 scatters, whole operand included")
    return replace(CONFIG, **SCALES), "fp8"


def test_compiled_step_of_the_engine_copies_no_pool(in_place):
    config, kv_cache_dtype = in_place
    engine = engine_of(tiny_model(config), kv_cache_dtype=kv_cache_dtype, num_pages=MANY_PAGES)
    runner = engine.replicas[0].runner
    batch = runner.empty_batch(runner.buckets.all()[0], SamplingMode())  # of the largest shape
    compiled = runner.executor.lower(batch).compile()
    assert_copies_no_pool(compiled, runner.executor.pool_shape)


NAMES = {  # the tensor names of the tools that write such checkpoints
    "compressed-tensors": "model.layers.{0}.self_attn.{1}_scale",
    "ModelOpt": "model.layers.{0}.self_attn.{1}_proj.{1}_scale",
    "Quark": "model.layers.{0}.self_attn.{1}_proj.output_scale",
}


def save_with(folder, tensors):
    """A checkpoint of the tiny model with further tensors."""
    save_checkpoint(folder, tiny_model(), CONFIG)
    file = folder / "model.safetensors"
    save_file(load_file(file) | tensors, file)


def scale_tensors(name, make=np.float32):
    return {
        name.format(layer, kind): np.asarray(make(scale))
        for kind, scales in zip("kv", SCALES.values(), strict=True)
        for layer, scale in enumerate(scales)
    }


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
@pytest.mark.parametrize("shape", [(), (1,)])
def test_scales_of_a_checkpoint_are_read(tmp_path, name, shape):
    save_with(tmp_path, scale_tensors(name, lambda x: np.full(shape, x, np.float32)))
    _, config = load_checkpoint(tmp_path)
    for scales, wanted in SCALES.items():
        np.testing.assert_allclose(getattr(config, scales), wanted, rtol=1e-6)


def test_scales_of_a_checkpoint_are_saved_again(tmp_path):
    bf16 = scale_tensors(NAMES["ModelOpt"], ml_dtypes.bfloat16)
    save_with(tmp_path, bf16)
    model, config = load_checkpoint(tmp_path)
    assert model.config == config
    assert config.k_scales[1] == float(bf16[NAMES["ModelOpt"].format(1, "k")])
    save_checkpoint(tmp_path / "again", model, config)
    assert load_checkpoint(tmp_path / "again")[1] == config


K1 = NAMES["compressed-tensors"].format(1, "k")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({K1: None}, rf"missing tensor {K1}: other scales of the KV cache are there"),
        ({K1: np.float32(0)}, r"scales of the KV cache: k_scales\[1\]=0.0 must be a positive"),
        ({K1: np.float32(-1)}, r"k_scales\[1\]=-1.0 must be a positive number"),
        ({K1: np.float32(np.nan)}, r"k_scales\[1\]=nan must be a positive number"),
        ({K1: np.float32(np.inf)}, r"k_scales\[1\]=inf must be a positive number"),
        ({K1: np.ones(2, np.float32)}, r"expected one number of .* found='F32' of shape \(2,\)"),
        ({K1: np.int8(1)}, r"expected one number of .* found='I8' of shape \(\)"),
        ({K1.replace("1", "2"): np.float32(1)}, r"unexpected tensor model\.layers\.2\.self_attn"),
        ({NAMES["ModelOpt"].format(1, "k"): np.float32(1)}, "unexpected tensor .*k_proj.k_scale"),
    ],
)
def test_wrong_scales_are_refused(tmp_path, changes, message):
    tensors = scale_tensors(NAMES["compressed-tensors"]) | changes
    save_with(tmp_path, {name: np.asarray(x) for name, x in tensors.items() if x is not None})
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(tmp_path)


def test_quantized_weights_are_refused_with_or_without_scales_of_the_cache(tmp_path):
    name = "model.layers.0.mlp.up_proj.weight"
    for changes, message in (
        ({name: np.zeros((48, 32), ml_dtypes.float8_e4m3fn)}, f"{name}: .* found='F8_E4M3'"),
        ({name + "_scale": np.ones(1, np.float32)}, f"unexpected tensor {name}_scale"),
    ):
        save_with(tmp_path, scale_tensors(NAMES["compressed-tensors"]) | changes)
        with pytest.raises(CheckpointError, match=message):
            load_checkpoint(tmp_path)


FLOAT8_CACHE = {"type": "float", "num_bits": 8, "strategy": "tensor", "dynamic": False}


@pytest.mark.parametrize(
    ("quantization", "accepted"),
    [
        ({"quant_method": "compressed-tensors", "config_groups": {}}, False),
        ({"config_groups": {}, "kv_cache_scheme": FLOAT8_CACHE}, True),
        ({"config_groups": {"group_0": {}}, "kv_cache_scheme": FLOAT8_CACHE}, False),
        ({"quant_algo": "FP8", "kv_cache_scheme": FLOAT8_CACHE}, False),
        ({"config_groups": {}, "kv_cache_scheme": FLOAT8_CACHE | {"type": "int"}}, False),
        ({"config_groups": {}, "kv_cache_scheme": None}, False),
        ("fp8", False),
    ],
)
def test_a_config_may_quantize_only_the_cache(quantization, accepted):
    config = CONFIG.to_hugging_face() | {"quantization_config": quantization}
    if accepted:
        assert ModelConfig.from_hugging_face(config) == CONFIG
        return
    with pytest.raises(ValueError, match="quantization_config is not supported"):
        ModelConfig.from_hugging_face(config)


def test_a_model_has_scales_for_all_layers_or_none():
    with pytest.raises(ValueError, match=r"num_scales=\(2, 0\) of K and V must both be 0 or num_l"):
        replace(CONFIG, k_scales=(1.0, 1.0))
    with pytest.raises(ValueError, match=r"num_scales=\(1, 1\)"):
        replace(CONFIG, k_scales=(1.0,), v_scales=(1.0,))
