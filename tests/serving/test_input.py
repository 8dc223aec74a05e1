"""Requests and sizes that the engine refuses."""

from __future__ import annotations

from dataclasses import replace

import jax
import pytest

from models.request import SamplingParams
from tests.support.dense_oracle import CONFIG, tiny_model
from tests.support.engine_calls import make_engine, run, tokens_of

pytestmark = pytest.mark.usefixtures("exact_products")
PROMPTS = [[1, 2, 3], list(range(4, 13))]
NEW = 14
GREEDY = SamplingParams(max_tokens=NEW)


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "the prompt is empty"),
        ([40], {}, r"the prompt has a token outside 0\.\.39"),
        ([-1], {}, r"the prompt has a token outside 0\.\.39"),
        ("text", {}, "a prompt that is a text needs a tokenizer"),
        ([1] * 51, {}, "a prompt of 51 tokens and max_tokens=14 are more than the 64 tokens"),
        ([1] * 30, {"beam_width": 2}, "may need 22 pages, of num_pages=16"),
        ([1], {"n": 5}, "5 sequences at a time are more than max_seqs=4"),
        ([1], {"best_of": 5}, "5 sequences at a time are more than max_seqs=4"),
        ([1], {"beam_width": 5}, "5 sequences at a time are more than max_seqs=4"),
        ([1], {"stop": ["a"]}, r"stop=\('a',\) needs a tokenizer"),
    ],
)
def test_requests_that_can_never_run_are_refused_without_effect(
    model, oracle, prompt, params, message
):
    engine = make_engine(model)
    other = engine.submit(PROMPTS[0], GREEDY)
    before = engine.stats()
    with pytest.raises(ValueError, match=message):
        engine.submit(prompt, replace(GREEDY, **params))
    assert engine.stats() == before
    after = engine.submit(PROMPTS[1], GREEDY)
    assert after.number == other.number + 1
    run(engine)
    assert tokens_of([other, after]) == [oracle.continue_(prompt, NEW) for prompt in PROMPTS]


def test_more_beams_than_half_the_vocabulary_are_refused():
    engine = make_engine(tiny_model(replace(CONFIG, vocab_size=7)))
    with pytest.raises(ValueError, match="beam_width=4 is more than half of vocab_size=7"):
        engine.submit([1], SamplingParams(max_tokens=1, beam_width=4))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_pages": 0}, "num_pages=0 must be an integer in 1.."),
        ({"max_seqs": 1.5}, "max_seqs=1.5 must be an integer in 1.."),
        ({"max_len": -1}, "max_len=-1 must be an integer in 1.."),
        ({"token_budget": 4}, "token_budget=4 must be more than max_seqs=4"),
        ({"watermark": 1.0}, "watermark=1.0 must be at least 0 and below 1"),
        ({"max_len": 65}, "max_len=65 must be at most 64 positions"),
        ({"page_size": 3}, "page_size=3 must be a power of two"),
    ],
)
def test_bad_sizes_are_refused(model, sizes, message):
    with pytest.raises(ValueError, match=message):
        make_engine(model, **sizes)


def test_a_request_of_another_engine_is_refused(model):
    engine, other = make_engine(model), make_engine(model)
    request = other.submit([1, 2], SamplingParams(max_tokens=1))
    for use in (engine.abort, lambda x: next(engine.stream(x))):
        with pytest.raises(ValueError, match="of another engine"):
            use(request)
    run(other)


def test_an_unsupported_implementation_is_refused_at_creation(model):
    with pytest.raises(ValueError, match="implementation='none'"):
        make_engine(model, implementation="none")
    if jax.default_backend() != "gpu":
        with pytest.raises(NotImplementedError, match="needs a GPU"):
            make_engine(model, implementation="triton")


@pytest.mark.parametrize("prompt", [b"1", [1.5], ["1"], 3, [[1]]])
def test_prompts_of_other_types_are_refused(model, prompt):
    with pytest.raises(ValueError, match="a text or integers"):
        make_engine(model).submit(prompt, GREEDY)
