"""The decoder against values of transformers, without a cache and in the engine."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import pallas_paged as pp
from models.checkpoint import load_checkpoint
from models.config import ModelConfig
from models.decoder import Decoder, dense_attend
from models.engine_model import engine_model
from pallas_paged.engine import Engine, EngineConfig, SamplingParams

GOLDENS = Path(__file__).parent / "goldens"
NAMES = ("llama", "qwen2", "qwen3")
CONFIG = ModelConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=16,
)


@pytest.fixture(autouse=True)
def exact_matmuls():
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(scope="module")
def model():
    return Decoder(CONFIG, rngs=nnx.Rngs(0))


def relative_error(actual, expected):
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    return np.linalg.norm(actual - expected) / np.linalg.norm(expected)


def golden_of(name):
    with np.load(GOLDENS / name / "golden.npz") as golden:
        tokens = np.concatenate([golden["input_ids"], golden["greedy_tokens"]], axis=1)
        return jnp.asarray(tokens, jnp.int32), golden["logits"], golden["greedy_tokens"]


def positions_of(tokens):
    return jnp.broadcast_to(jnp.arange(tokens.shape[-1]), tokens.shape)


@partial(jax.jit, static_argnames="graphdef")
def logits_of(params, tokens, graphdef):
    model = nnx.merge(graphdef, params)
    hidden, cache = model(tokens, positions_of(tokens), dense_attend())
    assert cache is None
    return model.logits(hidden)


def dense_logits(model, tokens):
    graphdef, params = nnx.split(model)
    return logits_of(params, tokens, graphdef)


@pytest.mark.parametrize("name", NAMES)
def test_dense_logits_and_greedy_tokens_equal_transformers(name):
    model, _ = load_checkpoint(GOLDENS / name)
    tokens, expected, greedy = golden_of(name)
    logits = dense_logits(model, tokens)
    assert logits.dtype == jnp.float32
    num_known = expected.shape[1]
    assert relative_error(logits[:, :num_known], expected) <= 1e-5
    np.testing.assert_array_equal(jnp.argmax(logits[:, num_known - 1 : -1], -1), greedy)


@pytest.mark.parametrize("name", NAMES)
def test_the_engine_gives_the_log_probabilities_and_greedy_tokens_of_transformers(name):
    decoder, _ = load_checkpoint(GOLDENS / name)
    tokens, expected, greedy = golden_of(name)
    num_known = expected.shape[1]
    config = EngineConfig(
        num_pages=40,
        page_size=4,
        max_num_seqs=2,
        max_num_batched_tokens=8,  # prompts run in chunks
        implementation="xla",
    )
    engine = Engine(*engine_model(decoder), config)
    known = tokens[:, :num_known].tolist()
    scores = engine.score([row[:1] for row in known], [row[1:] for row in known])
    logprobs = jax.nn.log_softmax(expected[:, :-1].astype(np.float64), axis=-1)
    wanted = np.take_along_axis(logprobs, tokens[:, 1:num_known, None], axis=-1)[..., 0]
    np.testing.assert_allclose(scores, wanted, atol=1e-4)
    params = SamplingParams(max_tokens=greedy.shape[1], temperature=0)
    outputs = engine.generate(known, params, progress=False)
    assert [output.outputs[0].token_ids for output in outputs] == greedy.tolist()


def masked_attend(windows):
    """Attention that applies each layer's window as an explicit mask."""
    windows = iter(windows)  # equal layers are traced once

    def attend(q, k, v, cache, *, sliding_window):
        window = next(windows)
        k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
        queries, keys = np.arange(q.shape[1])[:, None], np.arange(q.shape[1])
        seen = (keys <= queries) & (keys > queries - window)
        logits = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
        weights = jax.nn.softmax(jnp.where(seen, logits, -jnp.inf), axis=-1)
        return jnp.einsum("bhqk,bkhd->bqhd", weights, v), cache

    return attend


def test_each_layer_has_its_own_window(model):
    tokens = jax.random.randint(jax.random.key(1), (2, 9), 0, CONFIG.vocab_size)
    params = jax.tree.map(lambda x: 8 * x if x.ndim > 1 else x, nnx.state(model))
    logits = {}
    for windows in ((), (1, 3), (None, 4), (2**40, 9)):
        config = replace(CONFIG, sliding_windows=windows)
        windowed = Decoder(config, rngs=nnx.Rngs(0))
        nnx.update(windowed, params)
        full = [window or 1000 for window in windows or (None, None)]
        hidden, _ = windowed(tokens, positions_of(tokens), masked_attend(full))
        logits[windows] = dense_logits(windowed, tokens)
        assert relative_error(logits[windows], windowed.logits(hidden)) <= 1e-5
    np.testing.assert_allclose(logits[(2**40, 9)], logits[()], rtol=1e-5, atol=1e-5)
    assert relative_error(logits[(1, 3)], logits[()]) > 0.1
    np.testing.assert_allclose(logits[(None, 4)][:, :4], logits[()][:, :4], rtol=1e-4, atol=1e-5)


def test_bf16_stays_near_f32(model):
    graphdef, params = nnx.split(model)
    params = jax.tree.map(lambda x: 8 * x if x.ndim > 1 else x, params)
    tokens = np.arange(24).reshape(2, 12) % CONFIG.vocab_size

    @jax.jit
    def run(params):
        half = nnx.merge(graphdef, jax.tree.map(lambda x: x.astype(jnp.bfloat16), params))
        hidden, _ = half(tokens, positions_of(tokens), dense_attend())
        return hidden, half.logits(hidden)

    hidden, logits = run(params)
    assert hidden.dtype == jnp.bfloat16
    assert logits.dtype == jnp.float32
    assert relative_error(logits, dense_logits(nnx.merge(graphdef, params), tokens)) < 0.03


def test_models_of_one_config_share_a_compilation():
    @partial(jax.jit, static_argnames="graphdef")
    @chex.assert_max_traces(1)
    def embed(params, tokens, graphdef):
        return nnx.merge(graphdef, params).embed_tokens(tokens)

    outs = []
    for seed in range(2):
        graphdef, params = nnx.split(Decoder(CONFIG, rngs=nnx.Rngs(seed)))
        outs.append(embed(params, jnp.ones(1, jnp.int32), graphdef))
    assert not np.array_equal(*outs)


def test_initial_residual_projections_shrink_with_depth(model):
    layer = model.layers[0]
    assert float(jnp.std(layer.self_attn.qkv_proj.weight[...])) == pytest.approx(0.02, rel=0.1)
    for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
        expected = 0.02 / math.sqrt(2 * CONFIG.num_layers)
        assert float(jnp.std(linear.weight[...])) == pytest.approx(expected, rel=0.15)


def test_dropout_reaches_the_embeddings_and_every_branch(model):
    tokens = jnp.ones((1, 4), jnp.int32)
    seen = []

    def dropout(x):
        seen.append(x.shape)
        return jnp.zeros_like(x)

    hidden, _ = model(tokens, positions_of(tokens), dense_attend(), dropout=dropout)
    assert seen == [(1, 4, CONFIG.hidden_size)] * (1 + 2 * CONFIG.num_layers)
    np.testing.assert_array_equal(hidden, jnp.zeros_like(hidden))


@pytest.mark.parametrize(
    ("backend", "dtype", "head_dim", "expected"),
    [
        ("gpu", jnp.bfloat16, 64, "cudnn"),
        ("gpu", jnp.float16, 128, "cudnn"),
        ("gpu", jnp.float32, 64, None),
        ("gpu", jnp.bfloat16, 192, None),
        ("gpu", jnp.bfloat16, 20, None),
        ("cpu", jnp.bfloat16, 64, None),
    ],
)
def test_cudnn_gets_only_shapes_that_it_supports(monkeypatch, backend, dtype, head_dim, expected):
    asked = []

    def attention(q, k, v, *, implementation, **_):
        asked.append(implementation)
        return q

    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(jax.nn, "dot_product_attention", attention)
    q = jnp.zeros((1, 2, 1, head_dim), dtype)
    dense_attend()(q, q, q, None, sliding_window=None)
    assert asked == [expected]


def test_mismatched_arguments_are_refused(model):
    tokens = jnp.zeros((2, 4), jnp.int32)
    with pytest.raises(
        ValueError, match=r"tokens.shape=\(2, 4\) must equal positions.shape=\(4,\)"
    ):
        model(tokens, jnp.arange(4), dense_attend())
    pages = jnp.zeros((2, 3, 4, 16))
    with pytest.raises(ValueError, match=r"len\(cache\)=1 must equal num_layers=2"):
        model(
            tokens, positions_of(tokens), dense_attend(), [pp.LayerKV(k_pages=pages, v_pages=pages)]
        )
