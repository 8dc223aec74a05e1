"""The decoder against values of transformers, without a cache and in the engine."""

import math
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.decoder import Decoder, dense_attend, engine_model, load_checkpoint
from pallas_paged.engine import Engine, EngineConfig, SamplingParams
from tests.support.attention_oracle import relative_error
from tests.support.dense_oracle import CONFIG, DenseOracle, dense_logits, positions_of, tiny_model
from tests.support.marks import slow
from tests.support.oracle import log_softmax

GOLDENS = Path(__file__).parents[1] / "goldens"
SHAKESPEARE = Path(__file__).parents[3] / "models" / "checkpoints" / "shakespeare"
NAMES = ["llama", "qwen2", "qwen3", "deepseek_v2", "deepseek_v3", "qwen3_moe", "mixtral"]
NAMES += ["phi3", "olmo2", "olmo3", "gemma2", "gemma3", "gpt_oss", "gpt_oss_mxfp4"]
NAMES += ["gemma4", "gemma4_untied"]
# Those that run in the engine by default: latents, windows, sinks, experts. Plain Llamas do so in
# test_generate.py, and Gemma 4 in tests/parallel.
IN_ENGINE = ["deepseek_v3", "gpt_oss"]
# Those that run without a cache by default: not those of the engine, nor one much like another.
DENSE = ["qwen2", "qwen3", "deepseek_v2", "qwen3_moe", "mixtral", "phi3", "olmo3", "gemma2"]
DENSE += ["gemma3", "gemma4", "gpt_oss_mxfp4", "shakespeare"]
TOKENS = np.arange(18, dtype=np.int32).reshape(2, 9)
pytestmark = pytest.mark.usefixtures("exact_products")


def golden_of(name):
    with np.load(GOLDENS / name / "golden.npz") as golden:
        tokens = np.concatenate([golden["input_ids"], golden["greedy_tokens"]], axis=1)
        return tokens.astype(np.int32), golden["logits"], golden["greedy_tokens"]


@pytest.mark.parametrize("name", [*DENSE, *slow(sorted({*NAMES} - {*DENSE}))])
def test_dense_logits_and_greedy_tokens_equal_transformers(name):
    folder = SHAKESPEARE if name == "shakespeare" else GOLDENS / name
    model, _ = load_checkpoint(folder, dtype=jnp.float32)
    tokens, expected, greedy = golden_of(name)
    logits = dense_logits(model, tokens)
    assert logits.dtype == np.float32
    num_known = expected.shape[1]
    assert relative_error(logits[:, :num_known], expected) <= 1e-5
    np.testing.assert_array_equal(logits[:, num_known - 1 : -1].argmax(-1), greedy)


@pytest.mark.cpu_budget(6)  # models whose layers differ compile for longer
@pytest.mark.parametrize("name", [*IN_ENGINE, *slow(sorted({*NAMES} - {*IN_ENGINE}))])
def test_engine_gives_the_log_probabilities_and_greedy_tokens_of_transformers(name):
    decoder, _ = load_checkpoint(GOLDENS / name)
    tokens, expected, greedy = golden_of(name)
    num_known = expected.shape[1]
    sizes = dict(num_pages=40, page_size=4, max_num_seqs=2)
    sizes |= dict(max_num_batched_tokens=8)  # prompts run in chunks
    engine = Engine(*engine_model(decoder), EngineConfig(**sizes, implementation="xla"))
    params = SamplingParams(max_tokens=greedy.shape[1], temperature=0, prompt_logprobs=0)
    outputs = engine.generate(tokens[:, :num_known].tolist(), params, progress=False)
    assert [output.outputs[0].token_ids for output in outputs] == greedy.tolist()

    for output, row, wanted in zip(outputs, tokens, log_softmax(expected), strict=True):
        entries = output.prompt_logprobs[1:]
        scores = [entry[token].logprob for entry, token in zip(entries, row[1:], strict=False)]
        own = wanted[np.arange(num_known - 1), row[1:num_known]]
        np.testing.assert_allclose(scores, own, atol=1e-4)


@pytest.mark.parametrize(("windows", "equal"), [((1, 3), (1, 3)), ((2**40, None), ())], ids=str)
def test_each_layer_has_its_own_window(windows, equal):
    model = tiny_model(replace(CONFIG, sliding_windows=windows))
    asked = []

    def attend(*args, sliding_window):
        asked.append(sliding_window)
        return dense_attend()(*args, sliding_window=sliding_window)

    @jax.jit
    def logits_of():
        return model.logits(model(TOKENS, positions_of(TOKENS), attend)[0])

    found = np.asarray(logits_of())
    assert asked == [*windows]
    oracle = DenseOracle(tiny_model(replace(CONFIG, sliding_windows=equal)))
    for row, logits in zip(TOKENS, found, strict=True):
        assert relative_error(logits, oracle.logits(row)) <= 1e-5


def test_bf16_stays_near_f32(model):
    half = nnx.clone(model)
    nnx.update(half, jax.tree.map(lambda x: x.astype(jnp.bfloat16), nnx.state(model)))
    hidden, _ = jax.eval_shape(lambda: half(TOKENS, positions_of(TOKENS), dense_attend()))
    assert hidden.dtype == jnp.bfloat16
    logits = dense_logits(half, TOKENS)
    assert logits.dtype == np.float32
    assert 1e-4 < relative_error(logits, dense_logits(model, TOKENS)) < 0.03


def test_initial_residual_projections_shrink_with_depth():
    (layer, _), shrunk = Decoder(CONFIG, rngs=nnx.Rngs(0)).layers, 0.02 / math.sqrt(4)
    for linear, deviation in (
        (layer.self_attn.qkv_proj, 0.02),
        (layer.self_attn.o_proj, shrunk),
        (layer.mlp.gate_up_proj, 0.02),
        (layer.mlp.down_proj, shrunk),
    ):
        assert np.asarray(linear.weight[...]).std() == pytest.approx(deviation, rel=0.1)


def test_dropout_reaches_the_embeddings_and_every_branch(model):
    seen = []

    def dropout(x):
        seen.append(x.shape)
        return 0 * x

    @jax.jit
    def run():
        return model(TOKENS, positions_of(TOKENS), dense_attend(), dropout=dropout)[0]

    assert not np.any(run())
    assert seen == [(2, 9, CONFIG.hidden_size)] * (1 + 2 * CONFIG.num_layers)


def test_cudnn_gets_only_shapes_that_it_supports(monkeypatch):
    asked = []

    def attention(q, k, v, *, implementation, **_):
        asked.append(implementation)
        return q

    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(jax.nn, "dot_product_attention", attention)
    supported = [("gpu", jnp.bfloat16, 64), ("gpu", jnp.float16, 128)]
    others = [("gpu", jnp.float32, 64), ("gpu", jnp.bfloat16, 192), ("gpu", jnp.bfloat16, 20)]
    for backend, dtype, head_dim in [*supported, *others, ("cpu", jnp.bfloat16, 64)]:  # noqa: B007
        q = np.zeros((1, 2, 1, head_dim), dtype)
        dense_attend()(q, q, q, None, sliding_window=None)
    assert asked == ["cudnn"] * 2 + [None] * 4


def test_mismatched_arguments_are_refused(model):
    with pytest.raises(ValueError, match=r"shape=\(2, 9\) must equal positions.shape=\(9,\)"):
        model(TOKENS, np.arange(9), dense_attend())
    with pytest.raises(ValueError, match=r"len\(cache\)=1 must equal num_layers=2"):
        model(TOKENS, positions_of(TOKENS), dense_attend(), [None])


def abstract_decoder(dtype="float32", **sizes):
    config = replace(CONFIG, **sizes)
    return nnx.eval_shape(lambda: Decoder(config, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0)))


def test_the_cache_key_follows_from_sizes_dtype_and_structure():
    keys = [
        engine_model(abstract_decoder(**change))[0].cache_key
        for change in ({}, {}, dict(dtype="bfloat16"), dict(num_layers=CONFIG.num_layers + 1))
    ]
    assert keys[0] and keys[0] == keys[1]
    assert len(set(keys)) == 3


class Scaled(nnx.Module):
    """A module that the sources of the decoder do not have."""

    def __call__(self, x):
        return 2 * x


def test_a_decoder_with_modules_from_elsewhere_has_no_cache_key():
    decoder = abstract_decoder()
    decoder.norm = Scaled()
    model = engine_model(decoder)[0]
    assert model.cache_key is None

    class Other(type(model)):
        pass

    known = engine_model(abstract_decoder())[0]
    assert Other(config=known.config, dtype=known.dtype, graphdef=known.graphdef).cache_key is None
