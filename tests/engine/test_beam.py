"""Beam search alone, over random tables in place of a model: thousands of searches, no device."""

import numpy as np
import pytest

from pallas_paged.engine import CompletionOutput, SamplingParams
from pallas_paged.engine.outputs import TokenLogprobs
from pallas_paged.engine.requests.output_processor import BeamSearch
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


def make_search(length: int = 7, stops=(), **params) -> BeamSearch:
    request = make_sequence(0, prompt=PROMPT, new=length).request
    request.params = SamplingParams(max_tokens=length, **params)
    return BeamSearch(request, None, tuple(stops))


def answer(search: BeamSearch, one: Sequence, scores: np.ndarray) -> list[Sequence]:
    """Give a sequence its one token, with the log-probabilities of all; return the next step."""
    best = np.argsort(-scores).tolist()
    ranked = TokenLogprobs(best[0], float(scores.max()), 1, best, scores[best].tolist())
    assert one.append(best[0], ranked) == "length"
    return [x for (x,) in search.finish(one, "length")]


def complete(logprobs, search: BeamSearch) -> list[CompletionOutput]:
    asked = [x for (x,) in search.start()]
    while asked:
        assert search.live == asked and len(asked) <= search.request.params.beam_width
        asked = [x for one in asked for x in answer(search, one, logprobs(one.token_ids))]
    search.finish_request()
    return search.request.outputs


@pytest.mark.parametrize("penalty", [-3.0, -1.0, 0.0, 1.0, 2.5])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_every_search_equals_brute_force(width, penalty):
    for seed in range(60):
        rng = np.random.default_rng(seed)
        stops = tuple(range(rng.integers(0, 5)))
        length = int(rng.integers(1, 7))
        logprobs = random_model(seed, float(rng.choice([0.3, 1.0, 3.0])))
        search = make_search(length, stops, beam_width=width, n=width, length_penalty=penalty)
        options = dict(width=width, n=width, length=length, stops=stops, penalty=penalty)
        wanted, got = beam_search(logprobs, PROMPT, **options), complete(logprobs, search)
        assert [output.token_ids for output in got] == [tokens for tokens, _ in wanted]
        sums = [output.cumulative_logprob for output in got]
        np.testing.assert_allclose(sums, [total for _, total in wanted])
        assert [output.index for output in got] == list(range(len(got)))


@pytest.mark.parametrize("num_answered", [0, 2])
def test_aborted_beams_are_ranked_by_their_score_so_far(num_answered):
    search = make_search(beam_width=3, n=2)
    ((first,),) = search.start()
    beams = answer(search, first, np.array([-9.0, -4.0, -9.0, -1.0, -9.0, -3.0]))
    assert [one.token_ids[len(PROMPT) :] for one in beams] == [[3], [5], [1]]
    for one in beams[:num_answered]:
        assert answer(search, one, np.zeros(VOCAB)) == []
    for one in beams[num_answered:]:
        assert search.finish(one, "abort") == []
    search.finish_request()
    best = search.request.outputs
    assert [output.cumulative_logprob for output in best] == [-1.0, -3.0]
    assert [output.finish_reason for output in best] == ["abort"] * 2
