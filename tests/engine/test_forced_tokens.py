"""Tokens that a grammar forces take no steps, and are the tokens that steps would draw."""

import itertools
import random
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_paged.engine import StructuredOutputsParams
from pallas_paged.engine.requests.grammar import GrammarCompiler, empty_masks, fill_masks
from tests.support.engine_calls import (
    MODEL,
    PROMPTS,
    greedy,
    make_engine,
    sampling,
    serve,
    tokens_of,
    weights,
)
from tests.support.plain_model import PlainModel
from tests.support.structured_cases import (
    CASES,
    ENDING,
    EOS,
    MODES,
    PERSON,
    PIECES,
    PieceTokenizer,
    PlainPieceTokenizer,
    make,
    structured,
)


@pytest.fixture(scope="module")
def engine():
    pytest.importorskip("llguidance", reason="needs the extra [structured]")
    return make(PieceTokenizer())


@pytest.mark.parametrize(("fields", "holds"), CASES, ids=[next(iter(one)) for one, _ in CASES])
def test_forced_tokens_take_no_steps_and_are_those_that_steps_draw(engine, fields, holds):
    """With log-probabilities every token is drawn."""
    several = (greedy, {}), (sampling, {}), (sampling, dict(repetition_penalty=1.3, n=2))
    for make_params, more in several:
        options = structured(**fields) | dict(max_tokens=24) | more
        before = engine.stats()
        skipped = serve(engine, PROMPTS[:2], make_params(**options))
        between = engine.stats()
        drawn = serve(engine, PROMPTS[:2], make_params(**options, logprobs=0))
        after = engine.stats()
        assert tokens_of(skipped) == tokens_of(drawn)
        num_tokens = sum(len(x.token_ids) for request in skipped for x in request.outputs)
        assert between.generated_tokens - before.generated_tokens == num_tokens
        num_steps = between.num_steps - before.num_steps, after.num_steps - between.num_steps
        assert num_steps[0] <= num_steps[1]
        assert num_steps[0] <= num_steps[1] // 2 or "json" not in fields or "items" in str(fields)


class Reporting(PlainModel):
    """Reports an expert of each token and position."""

    def __call__(self, params, tokens, positions, attend, cache):
        experts = (100 * tokens + positions).astype(jnp.int32)[:, None]
        given = attend.routed_experts
        attend.record(experts if given is None else given[:, 0])
        return super().__call__(params, tokens, positions, attend, cache)


@pytest.mark.slow  # compiles a model of its own
def test_experts_of_forced_tokens_are_reported(engine):
    """A step draws each, also the last ones, which a completion without experts never computes."""
    modes = [replace(MODES[0], routed_experts=True)]
    own = make_engine(Reporting(**vars(ENDING)), weights(), PieceTokenizer(), modes=modes)
    params = sampling(**structured(json=PERSON), max_tokens=24)
    (wanted,) = tokens_of(serve(engine, [PROMPTS[0]], params))
    params = replace(params, return_routed_experts=True)
    (request,) = serve(own, [PROMPTS[0]], params)
    assert tokens_of([request]) == [wanted]
    tokens = np.array([*PROMPTS[0], *wanted])[:-1]
    experts = request.outputs[0].routed_experts[:, 0, 0]
    np.testing.assert_array_equal(experts, 100 * tokens + np.arange(len(tokens)))


def test_a_grammar_allows_one_token_where_it_forces_one(engine):
    compiler = GrammarCompiler(PieceTokenizer(), MODEL.vocab_size, (EOS,))
    num_forced = 0
    for (fields, _), seed in itertools.product(CASES, range(5)):
        rng = random.Random(seed)
        state = compiler.compile(StructuredOutputsParams(**fields)).start((EOS,))
        for _ in range(40):
            forced = state.forced_tokens()
            for token_id in forced:
                assert allowed(state) == [token_id]
                state.accept(token_id)
            num_forced += len(forced)
            if state.is_complete or (token_id := rng.choice(allowed(state))) == EOS:
                break
            state.accept(token_id)
    assert num_forced > 100


def allowed(state):
    masks = empty_masks(1, MODEL.vocab_size)
    fill_masks([(0, state)], masks)
    return [token for token in range(MODEL.vocab_size) if masks[0, token // 32] >> token % 32 & 1]


def test_a_completion_may_end_within_forced_tokens(engine):
    text = '{"a":"'
    for num_tokens in range(1, 6):
        params = greedy(**structured(json=PERSON), max_tokens=num_tokens)
        (request,) = serve(engine, [PROMPTS[0]], params)
        (output,) = request.outputs
        assert (len(output.token_ids), output.finish_reason) == (num_tokens, "length")
        assert text.startswith(output.text) and output.text
    (request,) = serve(engine, [PROMPTS[0]], greedy(**structured(json=PERSON), stop='":'))
    (output,) = request.outputs
    assert (output.text, output.stop_reason) == ('{"a', '":')
    (request,) = serve(engine, [PROMPTS[0]], greedy(**structured(choice=["ab" * 20])))
    assert request.outputs[0].text == "ab" * 7  # as many tokens as max_tokens


class Spelling(PieceTokenizer):
    """Begins texts with a special token, as tokenizers do; it never writes "ab" as one token."""

    def encode(self, text: str) -> list[int]:
        if "é" in text:
            raise ValueError(text)
        return [PIECES.index(b"<s>"), *super().encode(text)]


@pytest.mark.parametrize(
    ("tokenizer", "text", "pieces"),
    [
        (Spelling(), "cab", ["c", "a", "b"]),  # as the tokenizer spells it
        (Spelling(), "cabé", ["c", "ab", b"\xc3", b"\xa9"]),  # it fails: the longest
        (PlainPieceTokenizer(), "cab", ["c", "a", "b"]),
    ],
)
def test_forced_text_is_spelt_as_the_tokenizer_spells_it(engine, tokenizer, text, pieces):
    wanted = [PIECES.index(one if isinstance(one, bytes) else one.encode()) for one in pieces]
    (request,) = serve(make(tokenizer), [PROMPTS[0]], greedy(**structured(choice=[text])))
    assert request.outputs[0].token_ids == wanted and request.outputs[0].finish_reason == "stop"
