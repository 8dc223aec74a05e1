"""`generate` against generation without a cache: small pools, samples, stops, bad input."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from flax import nnx

from models.decoder import Decoder
from models.engine_model import engine_config, engine_model
from models.generate import generate as generate_with_defaults
from models.tokenizer import Tokenizer, save_byte_tokenizer
from pallas_paged.engine import SamplingParams
from tests.support.dense_oracle import CONFIG, DenseOracle, tiny_model
from tests.support.marks import slow

pytestmark = pytest.mark.usefixtures("exact_products")
# Lengths on both sides of the borders of 4-token pages.
PROMPTS = [[1, 2, 3], list(range(4, 13)), [14, 15, 16, 17], [18], list(range(20, 28))]
NEW = 14
GREEDY = SamplingParams(max_tokens=NEW, temperature=0)


@pytest.fixture(scope="module")
def greedy(oracle):
    return [oracle.continue_(prompt, NEW) for prompt in PROMPTS]


def generate(model, prompts, params=GREEDY, **config):
    # Small steps, so that few shapes compile.
    defaults = dict(page_size=4, max_num_seqs=8, max_num_batched_tokens=16, implementation="xla")
    return generate_with_defaults(model, prompts, params, **(defaults | config))


def tokens_of(outputs):
    return [completion.token_ids for output in outputs for completion in output.outputs]


def reasons_of(outputs):
    return [completion.finish_reason for output in outputs for completion in output.outputs]


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"num_scheduler_steps": 1},
        {"num_pages": 8},  # of the 25 that the prompts need: some are preempted
        *slow([{"max_num_seqs": 2}, {"enable_prefix_caching": False}]),
        *slow([{"max_num_batched_tokens": 9}, {"max_num_batched_tokens": 2048}, {"page_size": 1}]),
    ],
    ids=str,
)
def test_greedy_completions_equal_the_dense_ones(model, greedy, config):
    outputs = generate(model, PROMPTS, **config)
    assert tokens_of(outputs) == greedy
    assert reasons_of(outputs) == ["length"] * len(PROMPTS)
    assert [output.prompt_token_ids for output in outputs] == PROMPTS


def test_without_max_tokens_a_completion_fills_the_context(model, oracle):
    prompt = list(range(1, 31))
    (output,) = generate(model, [prompt], SamplingParams(temperature=0))
    assert output.outputs[0].token_ids == oracle.continue_(prompt, 64 - 30)


def test_a_model_with_windows_equals_its_dense_self(greedy):
    for windows in ((3, None), (3, 5)):
        model = tiny_model(replace(CONFIG, sliding_windows=windows))
        dense = DenseOracle(model)
        wanted = [dense.continue_(prompt, NEW) for prompt in PROMPTS[:2]]
        assert wanted != greedy[:2]
        assert tokens_of(generate(model, PROMPTS[:2])) == wanted


SAMPLED = SamplingParams(max_tokens=NEW, n=3, seed=5)


@pytest.fixture(scope="module")
def sampled(model):
    return tokens_of(generate(model, PROMPTS[:2], SAMPLED))


def test_samples_differ_and_their_seed_repeats_them(model, sampled):
    assert len(set(map(tuple, sampled))) == 6
    assert tokens_of(generate(model, PROMPTS[:2], SAMPLED)) == sampled
    assert tokens_of(generate(model, PROMPTS[:2], replace(SAMPLED, seed=6))) != sampled
    outputs = [generate(model, PROMPTS[:2], replace(SAMPLED, seed=None)) for _ in range(2)]
    assert tokens_of(outputs[0]) != tokens_of(outputs[1])
    again = [replace(SAMPLED, seed=output.seed) for output in outputs[0]]
    assert tokens_of(generate(model, PROMPTS[:2], again)) == tokens_of(outputs[0])


@pytest.mark.parametrize(
    "config",
    [{"num_pages": 8}, {"num_scheduler_steps": 3}, *slow([{"num_pages": 7}, {"max_num_seqs": 2}])],
    ids=str,
)
def test_samples_do_not_depend_on_how_they_are_run(model, sampled, config):
    assert tokens_of(generate(model, PROMPTS[:2], SAMPLED, **config)) == sampled
    alone = generate(model, [PROMPTS[1]], replace(SAMPLED, n=2), **config)
    assert tokens_of(alone) == sampled[3:5]


def test_each_prompt_has_its_own_parameters(model, greedy):
    params = [GREEDY, SamplingParams(max_tokens=NEW - 1, top_k=1)]
    assert tokens_of(generate(model, PROMPTS[:2], params)) == [greedy[0], greedy[1][:-1]]


def test_a_completion_ends_with_a_stop_token_or_eos(model, greedy):
    stop = greedy[1][5]
    ends = [tokens.index(stop) if stop in tokens else NEW for tokens in greedy]
    wanted = [tokens[: end + 1] for tokens, end in zip(greedy, ends, strict=True)]
    outputs = generate(model, PROMPTS, replace(GREEDY, stop_token_ids=[stop]))
    assert tokens_of(outputs) == wanted
    assert reasons_of(outputs)[1] == "stop" and outputs[1].outputs[0].stop_reason == stop

    with_eos = nnx.merge(*nnx.split(model))
    with_eos.config = replace(CONFIG, eos_token_ids=(stop,))
    outputs = generate(with_eos, PROMPTS)
    assert tokens_of(outputs) == wanted and outputs[1].outputs[0].stop_reason is None
    assert tokens_of(generate(with_eos, PROMPTS, replace(GREEDY, ignore_eos=True))) == greedy


def test_texts_go_in_and_come_out_with_a_tokenizer(tmp_path):
    config = replace(CONFIG, vocab_size=256)
    save_byte_tokenizer(tmp_path, max_length=64)
    prompts, tokenizer = ["one", "two, three"], Tokenizer(tmp_path)
    outputs = generate(tiny_model(config), prompts, tokenizer=tokenizer)
    assert [output.prompt for output in outputs] == prompts
    for output in outputs:
        (completion,) = output.outputs
        assert len(completion.token_ids) == NEW
        assert completion.text == bytes(completion.token_ids).decode(errors="replace")


def test_texts_are_encoded_once(tmp_path, monkeypatch):
    save_byte_tokenizer(tmp_path, max_length=64)
    prompts, tokenizer, encoded = ["one", "two"], Tokenizer(tmp_path), []
    encode = tokenizer.encode
    monkeypatch.setattr(tokenizer, "encode", lambda x: encoded.append(x) or encode(x))
    model = tiny_model(replace(CONFIG, vocab_size=256))
    generate(model, prompts, SamplingParams(max_tokens=1), tokenizer=tokenizer)
    assert encoded == prompts


def test_random_prompts_in_a_tiny_pool(model, oracle):
    rng = np.random.default_rng(0)
    for _ in range(2):
        prompts = [rng.integers(1, 40, rng.integers(1, 15)).tolist() for _ in range(7)]
        outputs = generate(model, prompts, num_pages=8, max_num_seqs=4)
        assert tokens_of(outputs) == [oracle.continue_(prompt, NEW) for prompt in prompts]


@pytest.mark.parametrize(
    ("prompts", "config", "message"),
    [
        ([[1], []], {}, "the prompt is empty"),
        ([[1] * 51], {}, "51 tokens and max_tokens=14 are more than the 64"),
        ([[40]], {}, r"prompt 0: .*=40 must be an integer in 0\.\.39"),
        ([[-1]], {}, r"=-1 must be an integer in 0\.\.39"),
        ([[1.9]], {}, r"=1\.9 must be an integer"),
        ([[True]], {}, "=True must be an integer"),
        ([[1], 3], {}, "prompt 1: a prompt must be a text or a list of token ids, not 3"),
        ("abc", {}, "prompts='abc'"),
        (["abc"], {}, "needs a tokenizer"),
        ([[1] * 30], {"num_pages": 3}, "num_pages=3"),
        ([[1]], {"num_pages": 0}, "num_pages=0 must be an integer in 1.."),
        ([[1]], {"num_pages": "8"}, "num_pages='8' must be an integer in 1.."),
        ([[1]], {"page_size": 3}, "page_size=3 must be a power of two"),
        ([[1]], {"page_size": 16.0}, "page_size=16.0 must be an integer"),
        ([[1]], {"max_num_seqs": 0}, "max_num_seqs=0 must be an integer in 1.."),
        ([[1]], {"implementation": "nonsense"}, "implementation='nonsense'"),
    ],
)
def test_bad_arguments_are_refused(model, prompts, config, message):
    with pytest.raises(ValueError, match=message):
        generate(model, prompts, **config)


def test_models_of_equal_sizes_are_one_model_and_others_are_not(model):
    ours, params = engine_model(model)
    other, other_params = engine_model(Decoder(CONFIG, rngs=nnx.Rngs(1)))
    assert other is ours and hash(other) == hash(ours)
    assert not np.array_equal(*(nnx.to_flat_state(x)[0][1][...] for x in (params, other_params)))
    half = Decoder(CONFIG, dtype="bfloat16", rngs=nnx.Rngs(0))
    with_eos = Decoder(replace(CONFIG, eos_token_ids=(3,)), rngs=nnx.Rngs(0))
    assert len({ours, engine_model(half)[0], engine_model(with_eos)[0]}) == 3


def test_the_cache_spec_has_the_sizes_windows_and_scales_of_the_model():
    config = replace(CONFIG, sliding_windows=(3, None), k_scales=(1.0, 2.0), v_scales=(3.0, 4.0))
    model, _ = engine_model(Decoder(config, dtype="bfloat16", rngs=nnx.Rngs(0)))
    spec = model.kv_cache_spec
    assert (spec.num_layers, spec.num_kv_heads, spec.head_dim, spec.dtype) == (2, 2, 16, "bfloat16")
    assert spec.sliding_windows == (3, None)
    assert (spec.k_scales, spec.v_scales) == ((1.0, 2.0), (3.0, 4.0))
    assert (model.vocab_size, model.max_model_len, model.eos_token_ids) == (40, 64, ())


def test_an_engine_is_as_large_as_its_requests_need(model):
    ours, _ = engine_model(model)
    three = SamplingParams(n=3, max_tokens=5)

    def sizes(requests, **given):
        config = engine_config(ours, requests, **given)
        return config.max_num_seqs, config.max_model_len, config.num_pages

    assert sizes([]) == (1, 1, None)
    assert sizes([(6, three), (4, three)]) == (8, 16, None)
    assert sizes([(6, three)] * 100) == (64, 16, None)
    assert sizes([(6, SamplingParams())]) == (1, 64, None)
    assert sizes([(6, three)], max_num_seqs=3, max_model_len=50) == (3, 50, None)
    assert sizes([(6, SamplingParams())], num_pages=5, page_size=4) == (1, 20, 5)
