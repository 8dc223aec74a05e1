"""Beam search alone, over random tables in place of a model: thousands of searches, no device."""

from __future__ import annotations

import numpy as np
import pytest

from pallas_paged.engine import CompletionOutput, SamplingParams
from pallas_paged.engine.outputs import TokenLogprobs
from pallas_paged.engine.requests.beam import BeamSearch
from pallas_paged.engine.requests.sequence import Sequence
from tests.support.beam_oracle import beam_search
from tests.support.scheduler_host import make_sequence

VOCAB = 9
PROMPT = [1, 2]


def random_model(seed: int, sharpness: float):
    """A deterministic function from all tokens so far to log-probabilities."""

    def logprobs(tokens: list[int]) -> np.ndarray:
        logits = sharpness * np.random.default_rng([seed, *tokens]).normal(size=VOCAB)
        return logits - np.log(np.sum(np.exp(logits)))

    return logprobs


def make_beam(length: int = 7, stops=(), **params) -> Sequence:
    more = dict(stop_token_ids=frozenset(stops), is_beam=True)
    beam = make_sequence(0, prompt=PROMPT, new=length, **more)
    beam.request.params = SamplingParams(max_tokens=length, **params)
    return beam


def search(logprobs, first: Sequence) -> list[CompletionOutput]:
    beams = BeamSearch(request=first.request, live=[first])
    goes_on = True
    while goes_on:
        for beam in list(beams.live):
            scores = logprobs(beam.token_ids)
            best = np.argsort(-scores).tolist()
            ranked = TokenLogprobs(best[0], float(scores.max()), 1, best, scores[best].tolist())
            advance = beams.report(beam, ranked)
        for beam, token in advance.chosen:
            beam.token_ids.append(token)
        for parent, child in advance.branches:
            assert child.token_ids[:-1] == parent.token_ids[:-1] and child.is_beam
            assert child.token_ids == PROMPT + child.output.token_ids
        goes_on = bool(advance.chosen)
    return beams.ranked()


@pytest.mark.parametrize("penalty", [-3.0, -1.0, 0.0, 1.0, 2.5])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_every_search_equals_brute_force(width, penalty):
    for seed in range(60):
        rng = np.random.default_rng(seed)
        stops = tuple(range(rng.integers(0, 5)))
        length = int(rng.integers(1, 7))
        logprobs = random_model(seed, float(rng.choice([0.3, 1.0, 3.0])))
        first = make_beam(length, stops, beam_width=width, n=width, length_penalty=penalty)
        options = dict(width=width, n=width, length=length, stops=stops, penalty=penalty)
        wanted, got = beam_search(logprobs, PROMPT, **options), search(logprobs, first)
        assert [output.token_ids for output in got] == [tokens for tokens, _ in wanted]
        sums = [output.cumulative_logprob for output in got]
        np.testing.assert_allclose(sums, [total for _, total in wanted])
        assert [output.index for output in got] == list(range(len(got)))


def test_aborted_beams_are_ranked_by_their_score_so_far():
    beams = [make_beam(beam_width=3, n=2) for _ in range(3)]
    for beam, (length, total) in zip(beams, [(2, -4.0), (2, -1.0), (3, -3.0)], strict=True):
        beam.output.token_ids += [5] * length
        beam.output.cumulative_logprob = total
    search = BeamSearch(request=beams[0].request, live=beams)
    for beam in beams:
        search.end(beam, "abort")
    best = search.ranked()
    assert [output.cumulative_logprob for output in best] == [-1.0, -3.0]
    assert [output.finish_reason for output in best] == ["abort"] * 2
