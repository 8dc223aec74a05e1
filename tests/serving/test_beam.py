"""Beam search alone, over random tables in place of a model: thousands of searches, no device."""

from __future__ import annotations

import numpy as np
import pytest

from models.beam import BeamSearch
from models.request import Completion, Request, SamplingParams
from models.seq import Seq
from tests.support.beam_oracle import beam_search

VOCAB = 9
PROMPT = [1, 2]


def random_model(seed: int, sharpness: float):
    """A deterministic function from all tokens so far to log-probabilities."""

    def logprobs(tokens: list[int]) -> np.ndarray:
        logits = sharpness * np.random.default_rng([seed, *tokens]).normal(size=VOCAB)
        return logits - np.log(np.sum(np.exp(logits)))

    return logprobs


def search(logprobs, params: SamplingParams) -> list[Completion]:
    """Runs the beams as the engine does."""
    request = Request(number=0, prompt=PROMPT, params=params, seed=0)
    first = Seq(
        request=request,
        completion=Completion(index=0),
        tokens=list(PROMPT),
        limit=len(PROMPT) + params.max_tokens,
        stop_tokens=frozenset(params.stop_tokens),
        steered=True,
    )
    beams = BeamSearch(request=request, live=[first])
    goes_on = True
    while goes_on:
        for beam in list(beams.live):
            scores = logprobs(beam.tokens)
            ranked = [(int(token), float(scores[token])) for token in np.argsort(-scores)]
            advance = beams.report(beam, ranked)
        goes_on = bool(advance.goes_on)
        for beam, token in advance.goes_on:
            beam.tokens.append(token)
        for parent, child in advance.branches:
            assert child.tokens[:-1] == parent.tokens[:-1] and child.steered
            assert child.tokens == PROMPT + child.completion.tokens
    return beams.ranked()


@pytest.mark.parametrize("penalty", [-3.0, -1.0, 0.0, 1.0, 2.5])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_every_search_equals_brute_force(width, penalty):
    for seed in range(60):
        rng = np.random.default_rng(seed)
        stops = tuple(range(rng.integers(0, 5)))
        length = int(rng.integers(1, 7))
        logprobs = random_model(seed, float(rng.choice([0.3, 1.0, 3.0])))
        params = SamplingParams(
            max_tokens=length,
            beam_width=width,
            n=width,
            length_penalty=penalty,
            stop_tokens=stops,
        )
        wanted = beam_search(
            logprobs, PROMPT, width=width, n=width, length=length, stops=stops, penalty=penalty
        )
        got = search(logprobs, params)
        assert [completion.tokens for completion in got] == [tokens for tokens, _ in wanted]
        sums = [completion.cumulative_logprob for completion in got]
        np.testing.assert_allclose(sums, [total for _, total in wanted])
        assert [completion.index for completion in got] == list(range(len(got)))


def test_aborted_beams_are_ranked_by_their_score_so_far():
    request = Request(number=0, prompt=PROMPT, params=SamplingParams(beam_width=3, n=2), seed=0)
    beams = [
        Seq(
            request=request,
            completion=Completion(index=i, tokens=[5] * length, cumulative_logprob=total),
            tokens=[*PROMPT, *[5] * length],
            limit=9,
        )
        for i, (length, total) in enumerate([(2, -4.0), (2, -1.0), (3, -3.0)])
    ]
    search = BeamSearch(request=request, live=beams)
    for beam in beams:
        search.end(beam, "aborted")
    best = search.ranked()
    assert [completion.cumulative_logprob for completion in best] == [-1.0, -3.0]
    assert [completion.finish_reason for completion in best] == ["aborted"] * 2
