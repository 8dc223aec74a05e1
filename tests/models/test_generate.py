"""`generate` against generation without a cache, its engine's sizes, and bad input."""

import gc
from dataclasses import replace
from types import MappingProxyType

import jax
import numpy as np
import pytest
from flax import nnx

from models.decoder import Decoder, engine_config, engine_model
from models.generate import generate as generate_with_defaults
from models.text import Tokenizer, save_byte_tokenizer
from pallas_paged.engine import KVCacheSpec, SamplingParams
from tests.support.dense_oracle import CONFIG, DenseOracle, tiny_model

pytestmark = pytest.mark.usefixtures("exact_products")
# Lengths on both sides of the borders of 4-token pages.
PROMPTS = [[1, 2, 3], list(range(4, 13)), [14, 15, 16, 17], [18], list(range(20, 28))]
NEW = 14
GREEDY = SamplingParams(max_tokens=NEW, temperature=0)
# Bytes are tokens. In the first layer a token sees itself and the two before it.
WINDOWED = replace(CONFIG, vocab_size=256, sliding_windows=(3, None))


@pytest.fixture(scope="module")
def windowed():
    return tiny_model(WINDOWED)


@pytest.fixture(scope="module")
def dense(windowed):
    return DenseOracle(windowed)


def generate(model, prompts, params=GREEDY, **config):
    # Every other size would compile anew.
    defaults = dict(num_pages=12, page_size=4, max_num_seqs=4, max_num_batched_tokens=16)
    defaults |= dict(max_model_len=48, implementation="xla")
    return generate_with_defaults(model, prompts, params, **(defaults | config))


def tokens_of(outputs):
    return [completion.token_ids for output in outputs for completion in output.outputs]


def test_greedy_completions_equal_those_of_a_dense_model_with_windows(windowed, dense):
    params = [replace(GREEDY, max_tokens=NEW - index) for index in range(5)]
    outputs = generate(windowed, PROMPTS, params)  # in turns: they need 25 of the 12 pages
    wanted = [dense.continue_(prompt, NEW - index) for index, prompt in enumerate(PROMPTS)]
    assert tokens_of(outputs) == wanted
    assert [output.outputs[0].finish_reason for output in outputs] == ["length"] * 5
    assert [output.prompt_token_ids for output in outputs] == PROMPTS

    prompt = list(range(1, 31))
    (output,) = generate(windowed, [prompt], SamplingParams(temperature=0))
    assert output.outputs[0].token_ids == dense.continue_(prompt, 48 - 30)


def test_no_pool_is_left(windowed):
    """Not even one that Python has yet to collect."""
    gc.collect()
    gc.disable()
    try:
        generate(windowed, PROMPTS[:1])
        assert not [x for x in jax.live_arrays() if x.shape[:2] == (12, 4)]
    finally:
        gc.enable()


def test_texts_are_encoded_once_and_come_out_as_texts(windowed, tmp_path, monkeypatch):
    save_byte_tokenizer(tmp_path, max_length=64)
    prompts, tokenizer, encoded = ["one", "two, three"], Tokenizer(tmp_path), []
    encode = tokenizer.encode
    monkeypatch.setattr(tokenizer, "encode", lambda x: encoded.append(x) or encode(x))
    outputs = generate(windowed, prompts, tokenizer=tokenizer)
    assert encoded == prompts
    assert [output.prompt for output in outputs] == prompts
    for output in outputs:
        (completion,) = output.outputs
        assert len(completion.token_ids) == NEW
        assert completion.text == bytes(completion.token_ids).decode(errors="replace")


@pytest.mark.slow  # programs of its own
def test_a_decoder_drafts_for_another_one(windowed):
    draft = tiny_model(replace(WINDOWED, num_layers=1, sliding_windows=(3,)))
    drafts = dict(method="draft_model", model=draft, num_speculative_tokens=2)
    found = generate(windowed, PROMPTS, speculative_config=MappingProxyType(drafts))
    assert tokens_of(found) == tokens_of(generate(windowed, PROMPTS))


@pytest.mark.parametrize(
    ("prompts", "config", "message"),
    [
        ([[1] * 35], {}, "35 tokens and max_tokens=14 are more than the 48"),
        ([[1], 3], {}, "prompt 1: a prompt must be a text or a list of token ids, not 3"),
        ("abc", {}, "prompts='abc'"),
        (["abc"], {}, "needs a tokenizer"),
        ([[1] * 30], {"num_pages": 3, "max_model_len": None}, "num_pages=3"),
        ([[1]], {"num_pages": "8"}, "num_pages='8' must be an integer in 1.."),
        ([[1]], {"page_size": 16.0}, "page_size=16.0 must be an integer"),
    ],
)
def test_bad_arguments_are_refused(model, prompts, config, message):
    with pytest.raises(ValueError, match=message):
        generate(model, prompts, **config)


def test_models_of_equal_sizes_are_one_model_with_the_sizes_and_windows_of_the_decoder(model):
    ours, params = engine_model(model)
    other, other_params = engine_model(Decoder(CONFIG, rngs=nnx.Rngs(1)))
    assert other is ours and hash(other) == hash(ours)
    assert not np.array_equal(*(nnx.to_flat_state(x)[0][1][...] for x in (params, other_params)))
    half = Decoder(CONFIG, dtype="bfloat16", rngs=nnx.Rngs(0))
    with_eos = Decoder(replace(CONFIG, eos_token_ids=(3,)), rngs=nnx.Rngs(0))
    assert len({ours, engine_model(half)[0], engine_model(with_eos)[0]}) == 3
    given = dict(sliding_windows=(3, None), k_scales=(1.0, 2.0), v_scales=(3.0, 4.0))
    config = replace(CONFIG, eos_token_ids=(3, 5), **given)
    model, _ = engine_model(Decoder(config, dtype="bfloat16", rngs=nnx.Rngs(0)))
    sizes = dict(num_layers=2, num_kv_heads=2, head_dim=16)
    assert model.kv_cache_spec == KVCacheSpec(**sizes, dtype="bfloat16", **given)
    assert (model.vocab_size, model.max_model_len, model.eos_token_ids) == (40, 64, (3, 5))


THREE = SamplingParams(n=3, max_tokens=5)


@pytest.mark.parametrize(
    ("requests", "given", "wanted"),
    [
        ([], {}, (1, 1, None)),
        ([(6, THREE), (4, THREE)], {}, (8, 16, None)),
        ([(11, THREE)], {}, (4, 16, None)),
        ([(12, THREE)], {}, (4, 32, None)),
        ([(6, THREE)] * 100, {}, (64, 16, None)),
        ([(6, SamplingParams())], {}, (1, 64, None)),
        ([(6, THREE)], dict(max_num_seqs=3, max_model_len=50), (3, 50, None)),
        ([(6, SamplingParams())], dict(num_pages=5, page_size=4), (1, 20, 5)),
    ],
)
def test_engine_is_as_large_as_its_requests_need(model, requests, given, wanted):
    config = engine_config(engine_model(model)[0], requests, **given)
    assert (config.max_num_seqs, config.max_model_len, config.num_pages) == wanted
