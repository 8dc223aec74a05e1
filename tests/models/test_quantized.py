"""Quantized KV caches under the model: logits, generation, the engine, checkpoints."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import pallas_paged as pp
from models.checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from models.config import ModelConfig
from models.decoder import dense_attend, paged_attend
from models.engine_step import create_engine_state
from models.generate import generate
from models.generate_state import decode, run_layers
from models.kv_cache import create_pool, page_bytes, pool_bytes, pool_dtype
from models.prefill import pack, prefill
from models.request import SamplingParams
from tests.support.dense_oracle import CONFIG, tiny_model
from tests.support.engine_calls import make_engine, serve, tokens_of
from tests.support.generate_steps import (
    CHUNK,
    MANY_PAGES,
    MAX_SEQS,
    PAGE_SIZE,
    PAGES_PER_SEQ,
    assert_copies_no_pool,
    empty_state,
)

pytestmark = pytest.mark.usefixtures("exact_products")
ON_CPU = jax.default_backend() == "cpu"
PROMPTS = [[1, 2, 3], list(range(4, 13)), [14, 15, 16, 17], list(range(20, 38))]
NEW = 14
ENOUGH_PAGES = 4 * MANY_PAGES  # as many bytes as the f32 pools, far more than any workspace
TOKENS = np.random.default_rng(0).integers(0, CONFIG.vocab_size, 24).astype(np.int32)
GREEDY = SamplingParams(max_tokens=NEW)
# Near the scales of the tiny model's K and V. Two are equal; they still need separate buffers, or
# the pool could not be donated.
SCALES = {"k_scales": (0.004, 0.005), "v_scales": (0.004, 0.003)}
ERRORS = {"int8": 0.005, "fp8": 0.04, "fp8 calibrated": 0.04}


@pytest.fixture(scope="module")
def calibrated():
    """The tiny model, with the scales of a float8 cache from its checkpoint."""
    return tiny_model(replace(CONFIG, **SCALES))


@pytest.fixture(scope="module", params=ERRORS)
def quantized(request, model, calibrated):
    """A model, the dtype of its cache, and the largest error of its logits."""
    kv_dtype, *brings_scales = request.param.split()
    return calibrated if brings_scales else model, kv_dtype, ERRORS[request.param]


def paged_logits(model, dtype):
    """Logits `f32[24, V]` of one row: a prompt in two chunks of 8, then one token at a time."""
    graphdef, params = nnx.split(model)
    table = pp.create_page_table(num_pages=16, page_size=4, max_seqs=1, pages_per_seq=16)
    pool = create_pool(model.config, num_pages=16, page_size=4, dtype=dtype)

    @jax.jit
    def chunk(table, pool, tokens):
        positions = table.seq_lens[0] + jnp.arange(tokens.size, dtype=jnp.int32)
        table, _ = pp.extend(table, jnp.full(1, tokens.size, jnp.int32))
        attend = paged_attend(
            slots=pp.slot_mapping(table, jnp.zeros(tokens.size, jnp.int32), positions),
            block_tables=table.block_tables,
            seq_lens=table.seq_lens,
            cu_q_lens=jnp.array([0, tokens.size], jnp.int32) if tokens.size > 1 else None,
            implementation="xla",
        )
        model = nnx.merge(graphdef, params)
        hidden, pool = run_layers(model, tokens, positions, attend, pool)
        return table, pool, model.logits(hidden)

    logits = []
    for piece in np.split(TOKENS, [8, *range(16, 24)]):
        table, pool, new = chunk(table, pool, jnp.asarray(piece))
        logits.append(new)
    return np.concatenate(logits), pool


@pytest.fixture(scope="module")
def exact(split):
    """Logits f32[24, V] of the same tokens without a cache."""

    @jax.jit
    def logits(params):
        model = nnx.merge(split[0], params)
        hidden, _ = model(TOKENS[None], np.arange(TOKENS.size)[None], dense_attend())
        return model.logits(hidden[0])

    return logits(split[1])


def test_logits_stay_near_those_of_an_unquantized_cache(exact, quantized):
    model, kv_dtype, most = quantized
    dtype = pool_dtype(kv_dtype, "float32")
    logits, pool = paged_logits(model, dtype)
    assert {x.dtype for layer in pool.layers for x in (layer.k_pages, layer.v_pages)} == {dtype}
    for part in (slice(0, 16), slice(16, 24)):  # prompt, and tokens decoded one by one
        error = np.linalg.norm(logits[part] - exact[part]) / np.linalg.norm(exact[part])
        assert most / 10 < error < most


def test_calibrated_scales_reach_each_layer(calibrated):
    pool = create_pool(calibrated.config, num_pages=3, page_size=4, dtype="float8_e4m3fn")
    for name, wanted in SCALES.items():
        scales = [getattr(layer, name) for layer in pool.layers]
        assert [scale.shape for scale in scales] == [()] * 2
        np.testing.assert_array_equal(np.stack(scales), np.float32(wanted))
    pool = create_pool(calibrated.config, num_pages=3, page_size=4, dtype="int8")
    assert {x.shape for layer in pool.layers for x in (layer.k_scales, layer.v_scales)} == {
        (2, 3, 4)
    }
    pool = create_pool(calibrated.config, num_pages=3, page_size=4, dtype="float32")
    assert all(layer.k_scales is None and layer.v_scales is None for layer in pool.layers)


def test_scales_are_counted_as_bytes(calibrated):
    def size(config, dtype):
        one, three = (create_pool(config, num_pages=n, page_size=4, dtype=dtype) for n in (1, 3))
        assert page_bytes(config, page_size=4, dtype=dtype) == pool_bytes(one)
        held = sum(array.nbytes for array in jax.tree.leaves(three))
        assert pool_bytes(three) == held
        return held

    tokens = 2 * CONFIG.num_layers * CONFIG.num_kv_heads * 3 * 4  # of K and V, in all heads
    assert size(CONFIG, "float32") == tokens * 16 * 4
    assert size(CONFIG, "bfloat16") == tokens * 16 * 2
    assert size(CONFIG, "int8") == size(CONFIG, "float8_e4m3fn") == tokens * (16 + 4)
    assert size(calibrated.config, "float8_e4m3fn") == tokens * 16 + 4 * 2 * CONFIG.num_layers


@pytest.mark.parametrize(
    ("kv_dtype", "own", "dtype"),
    [
        (None, "bfloat16", "bfloat16"),
        ("bf16", "bfloat16", "bfloat16"),
        ("fp16", "float16", "float16"),
        ("fp32", "float32", "float32"),
        ("int8", "float16", "int8"),
        ("fp8", "bfloat16", "float8_e4m3fn"),
    ],
)
def test_pool_dtype(kv_dtype, own, dtype):
    assert pool_dtype(kv_dtype, own) == jnp.dtype(dtype)


def test_other_dtypes_of_a_pool_are_refused(model):
    for make in (
        lambda kv_dtype: generate(model, [[1]], max_new_tokens=1, kv_dtype=kv_dtype),
        lambda kv_dtype: make_engine(model, kv_dtype=kv_dtype),
    ):
        with pytest.raises(ValueError, match="kv_dtype='int4' must be one of int8, fp8, bf16"):
            make("int4")
        with pytest.raises(ValueError, match=r"kv_dtype='bf16' must be int8, fp8 or .* float32"):
            make("bf16")


@pytest.fixture(scope="module")
def alone(quantized):
    """Greedy tokens of each prompt, alone in an engine without prefix caching."""
    model, kv_dtype, _ = quantized
    engine = make_engine(model, kv_dtype=kv_dtype, prefix_caching=False)
    return [tokens_of(serve(engine, [prompt], GREEDY))[0] for prompt in PROMPTS]


def test_most_tokens_equal_those_of_an_unquantized_cache(alone, oracle):
    exact = [oracle.continue_(prompt, NEW) for prompt in PROMPTS]
    assert np.mean(np.equal(alone, exact)) > 0.6


def test_tokens_do_not_depend_on_other_requests(quantized, alone):
    """Not beside others, nor after preemption, with a cached prefix, or in forked samples."""
    model, kv_dtype, _ = quantized
    engine = make_engine(model, kv_dtype=kv_dtype)
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
    dtype = pool_dtype(kv_dtype, "float32")
    assert stats.kv_dtype == dtype.name
    pool = create_pool(model.config, num_pages=16, page_size=4, dtype=dtype)
    assert stats.pool_bytes == pool_bytes(pool)


@pytest.mark.parametrize("quantized", ["int8", "fp8 calibrated"], indirect=True)
def test_generate_gives_the_same_tokens_in_a_small_pool(quantized, alone):
    """The pool has 8 of the 44 pages that the samples need: they wait and are preempted."""
    model, kv_dtype, _ = quantized
    sizes = dict(num_pages=8, page_size=4, max_seqs=4, prefill_chunk=16)
    options = dict(max_new_tokens=NEW, num_samples=2, kv_dtype=kv_dtype, implementation="xla")
    generation = generate(model, PROMPTS, **sizes, **options)
    for _ in generation:
        pp.check_page_table(generation.state.table)
    result = generation.result()
    tokens = [completion.tokens for completion in result.completions]
    assert tokens == [wanted for wanted in alone for _ in range(2)]
    dtype = pool_dtype(kv_dtype, "float32")
    assert result.stats.pages_used == 8 and result.stats.kv_dtype == dtype.name
    pool = create_pool(model.config, num_pages=8, page_size=4, dtype=dtype)
    assert result.stats.pool_bytes == pool_bytes(pool)
    if model.config.k_scales:  # decoding must not change them
        scales = [layer.k_scales for layer in generation.state.pool.layers]
        np.testing.assert_array_equal(np.stack(scales), np.float32(SCALES["k_scales"]))


@pytest.fixture(scope="module", params=["int8", "fp8 calibrated"])
def in_place(request):
    """A configuration and a dtype whose pool is updated in place."""
    if request.param == "int8":
        return CONFIG, "int8"
    if ON_CPU:
        pytest.skip("XLA's CPU compiler widens float8 scatters, whole operand included")
    return replace(CONFIG, **SCALES), "float8_e4m3fn"


def test_compiled_steps_copy_no_pool(split, in_place):
    config, dtype = in_place
    sizes = dict(num_pages=ENOUGH_PAGES, page_size=PAGE_SIZE, dtype=dtype)
    state = jax.eval_shape(
        lambda: replace(empty_state(num_pages=ENOUGH_PAGES), pool=create_pool(config, **sizes))
    )
    assert_copies_no_pool(decode.lower(*split, state, 5, implementation="xla").compile(), state)
    chunk = pack(PROMPTS[:2], np.zeros((2, 2), np.int32), size=CHUNK, max_prompts=MAX_SEQS)[0]
    compiled = prefill.lower(*split, state, chunk, implementation="xla").compile()
    assert_copies_no_pool(compiled, state)


def test_a_compiled_step_of_the_engine_copies_no_pool(model, in_place):
    config, dtype = in_place
    worker = make_engine(model, implementation="xla")._worker
    sizes = dict(num_pages=ENOUGH_PAGES, page_size=PAGE_SIZE, max_seqs=MAX_SEQS)
    state = jax.eval_shape(
        lambda: create_engine_state(config, pages_per_seq=PAGES_PER_SEQ, dtype=dtype, **sizes)
    )
    batch = worker._pack([], [], worker.shapes.all()[-1])
    compiled = worker._step.lower(worker._leaves, state, batch).compile()
    assert_copies_no_pool(compiled, state)


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
