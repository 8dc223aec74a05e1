"""The decoder against values of transformers, without a cache and in the engine."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.checkpoint import load_checkpoint
from models.config import ModelConfig
from models.decoder import Decoder, dense_attend
from models.engine_model import engine_model
from pallas_paged.engine import Engine, EngineConfig, SamplingParams
from tests.support.attention_oracle import relative_error
from tests.support.dense_oracle import dense_logits, log_softmax, logits_of, positions_of
from tests.support.marks import slow

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


pytestmark = pytest.mark.usefixtures("exact_products")


@pytest.fixture(scope="module")
def model():
    return Decoder(CONFIG, rngs=nnx.Rngs(0))


def golden_of(name):
    with np.load(GOLDENS / name / "golden.npz") as golden:
        tokens = np.concatenate([golden["input_ids"], golden["greedy_tokens"]], axis=1)
        return tokens.astype(np.int32), golden["logits"], golden["greedy_tokens"]


def scaled_up(model):
    """Weights whose logits are far apart."""
    return jax.tree.map(lambda x: np.asarray(x) * (8 if x.ndim > 1 else 1), nnx.state(model))


@pytest.mark.parametrize("name", NAMES)
def test_dense_logits_and_greedy_tokens_equal_transformers(name):
    model, _ = load_checkpoint(GOLDENS / name)
    tokens, expected, greedy = golden_of(name)
    logits = dense_logits(model, tokens)
    assert logits.dtype == np.float32
    num_known = expected.shape[1]
    assert relative_error(logits[:, :num_known], expected) <= 1e-5
    np.testing.assert_array_equal(logits[:, num_known - 1 : -1].argmax(-1), greedy)


# Plain Llamas run in the engine in test_generate.py, too.
@pytest.mark.parametrize("name", ["qwen2", "qwen3", *slow(["llama"])])
def test_engine_gives_the_log_probabilities_and_greedy_tokens_of_transformers(name):
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
    params = SamplingParams(max_tokens=greedy.shape[1], temperature=0, prompt_logprobs=0)
    outputs = engine.generate(tokens[:, :num_known].tolist(), params, progress=False)
    assert [output.outputs[0].token_ids for output in outputs] == greedy.tolist()

    for output, row, wanted in zip(outputs, tokens, log_softmax(expected), strict=True):
        entries = output.prompt_logprobs[1:]
        scores = [entry[token].logprob for entry, token in zip(entries, row[1:], strict=False)]
        own = wanted[np.arange(num_known - 1), row[1:num_known]]
        np.testing.assert_allclose(scores, own, atol=1e-4)


@partial(jax.jit, static_argnames="graphdef")
def masked_logits(params, tokens, windows, graphdef):
    """Logits where each layer's window i32[L] is a mask of its own, whatever the decoder asks."""
    layers = iter(windows)  # the layers differ, so that each is traced

    def attend(q, k, v, cache, *, sliding_window):
        k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
        queries, keys = np.arange(q.shape[1])[:, None], np.arange(q.shape[1])
        seen = (keys <= queries) & (keys > queries - next(layers))
        logits = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
        weights = jax.nn.softmax(jnp.where(seen, logits, -jnp.inf), axis=-1)
        return jnp.einsum("bhqk,bkhd->bqhd", weights, v), cache

    model = nnx.merge(graphdef, params)
    hidden, _ = model(tokens, positions_of(tokens), attend)
    return model.logits(hidden)


def test_each_layer_has_its_own_window(model):
    tokens = np.random.default_rng(1).integers(0, CONFIG.vocab_size, (2, 9), np.int32)
    params = scaled_up(model)
    logits = {}
    for windows in ((1, 3), (None, 4), (2**40, 9)):
        windowed = Decoder(replace(CONFIG, sliding_windows=windows), rngs=nnx.Rngs(0))
        logits[windows] = np.asarray(logits_of(params, tokens, nnx.graphdef(windowed)))
        sizes = np.int32([min(window or 1000, 1000) for window in windows])
        masked = masked_logits(params, tokens, sizes, nnx.graphdef(model))
        assert relative_error(logits[windows], np.asarray(masked)) <= 1e-5, windows
    whole = logits[(2**40, 9)]
    assert relative_error(logits[(1, 3)], whole) > 0.1
    np.testing.assert_allclose(logits[(None, 4)][:, :4], whole[:, :4], rtol=1e-4, atol=1e-5)


def test_bf16_stays_near_f32(model):
    params, graphdef = scaled_up(model), nnx.graphdef(model)
    tokens = np.arange(18, dtype=np.int32).reshape(2, 9) % CONFIG.vocab_size

    @jax.jit
    def run(params):
        half = nnx.merge(graphdef, jax.tree.map(lambda x: x.astype(jnp.bfloat16), params))
        hidden, _ = half(tokens, positions_of(tokens), dense_attend())
        return hidden, half.logits(hidden)

    hidden, logits = run(params)
    assert hidden.dtype == jnp.bfloat16
    assert logits.dtype == jnp.float32
    exact = np.asarray(logits_of(params, tokens, graphdef))
    assert relative_error(logits, exact) < 0.03


def test_initial_residual_projections_shrink_with_depth(model):
    def deviation(linear):
        return float(np.asarray(linear.weight[...]).std())

    layer, shrunk = model.layers[0], 0.02 / math.sqrt(2 * CONFIG.num_layers)
    assert deviation(layer.self_attn.qkv_proj) == pytest.approx(0.02, rel=0.1)
    assert deviation(layer.self_attn.o_proj) == pytest.approx(shrunk, rel=0.15)
    assert deviation(layer.mlp.down_proj) == pytest.approx(shrunk, rel=0.15)


def test_dropout_reaches_the_embeddings_and_every_branch(model):
    tokens = np.ones((1, 4), np.int32)
    seen = []

    def dropout(x):
        seen.append(x.shape)
        return 0 * x

    @jax.jit
    def run():
        return model(tokens, positions_of(tokens), dense_attend(), dropout=dropout)[0]

    hidden = np.asarray(run())
    assert seen == [(1, 4, CONFIG.hidden_size)] * (1 + 2 * CONFIG.num_layers)
    np.testing.assert_array_equal(hidden, np.zeros_like(hidden))


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
    q = np.zeros((1, 2, 1, head_dim), dtype)
    dense_attend()(q, q, q, None, sliding_window=None)
    assert asked == [expected]


def test_mismatched_arguments_are_refused(model):
    tokens = np.zeros((2, 4), np.int32)
    message = r"tokens.shape=\(2, 4\) must equal positions.shape=\(4,\)"
    with pytest.raises(ValueError, match=message):
        model(tokens, np.arange(4), dense_attend())
    with pytest.raises(ValueError, match=r"len\(cache\)=1 must equal num_layers=2"):
        model(tokens, positions_of(tokens), dense_attend(), [None])
