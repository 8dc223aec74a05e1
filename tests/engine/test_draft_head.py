"""Requests served with the drafts of a head have the tokens that they have without."""

import itertools
from functools import partial

import numpy as np
import pytest

from pallas_paged.engine import EngineConfig
from pallas_paged.engine.sampling_params import SamplingMode
from tests.support.draft_calls import accepted_and_drafted
from tests.support.draft_heads import BlindHead, MeanHead, MeanModel
from tests.support.engine_calls import (
    MODEL,
    PROMPTS,
    assert_every_page_is_free,
    drafts_of,
    greedy,
    make_engine,
    sampling,
    serve,
    tokens_of,
    weights,
)

K = 3
MODES = [SamplingMode(draws=True)]
MEAN, HEAD = MeanModel(), MeanHead()
WEIGHTS = weights(MEAN)
own_programs = pytest.mark.cpu_budget(14)


def config_of(head, num_drafts=K):
    return dict(method="eagle", model=head, num_speculative_tokens=num_drafts)


def drafting(model=MEAN, params=WEIGHTS, head=HEAD, draft_params=WEIGHTS, calls=None, **options):
    """An engine that verifies drafts whenever it can, or where `calls` say so."""
    options = dict(num_pages=22, modes=MODES, speculative_config=config_of(head)) | options
    engine = make_engine(model, params, draft_params=draft_params, num_steps=4, **options)
    drafts_of(engine, K if calls is None else partial(next, calls))
    return engine


def without_drafts(*models):
    """Steps without drafts are those of an engine that may draft: it has no programs of its own."""
    return drafting(*models, calls=itertools.repeat(0))


def greedy_of_mean(prompt, num_tokens):
    """What `MeanModel` says, in NumPy."""
    tokens = [*prompt]
    while len(tokens) < len(prompt) + num_tokens:
        sums = np.cumsum(np.asarray(WEIGHTS["embed"])[tokens], axis=0)
        means = sums / np.arange(1, len(tokens) + 1)[:, None]
        hidden = np.concatenate([means[-1], means.mean(axis=0)])
        tokens.append(int(np.argmax(np.sin(60 * hidden) @ np.asarray(WEIGHTS["head"]))))
    return tokens[len(prompt) :]


def mixed():
    return [greedy(max_tokens=30), sampling(n=2, max_tokens=25), greedy(max_tokens=40), sampling()]


@own_programs
def test_a_head_gets_the_hidden_states_of_the_tokens_before():
    """All of its drafts are right then: in chunks, forks, after a preemption, between calls."""
    engine = drafting(calls=iter([K, K, 0, K] * 200))
    prompts = [[*range(1, 23)], *PROMPTS[1:4]]
    requests = serve(engine, prompts, mixed())
    plain = without_drafts()
    assert tokens_of(requests) == tokens_of(serve(plain, prompts, mixed()))
    assert accepted_and_drafted(plain) == (0, 0)
    assert tokens_of(requests[:1]) == [greedy_of_mean(prompts[0], 30)]
    accepted, drafted = accepted_and_drafted(engine)
    assert accepted == drafted > 40 and engine.stats().num_preemptions > 0
    for _ in range(2):  # the second finds the prompt in the prefix cache
        again = serve(engine, prompts[:1], greedy(max_tokens=30))
        assert tokens_of(again) == tokens_of(requests[:1])
    assert engine.stats().prefix_cache_hits > 0
    assert_every_page_is_free(engine)


def test_a_head_with_other_weights_costs_no_token():
    """Weights that are noisy, or no numbers; then those with which all drafts are right."""
    rng = np.random.default_rng(0)
    noise = 0.1 * rng.standard_normal(WEIGHTS["embed"].shape, np.float32)
    wanted = tokens_of(serve(without_drafts(), PROMPTS[:4], mixed()))
    for embed, most in ((WEIGHTS["embed"] + noise, 0.9), (WEIGHTS["embed"] * np.nan, 0.1)):
        engine = drafting(draft_params=dict(WEIGHTS, embed=np.asarray(embed)))
        assert tokens_of(serve(engine, PROMPTS[:4], mixed())) == wanted
        accepted, drafted = before = accepted_and_drafted(engine)
        assert accepted < most * drafted
        engine.update_params(WEIGHTS, draft_params=WEIGHTS)
        assert tokens_of(serve(engine, PROMPTS[:4], mixed())) == wanted
        accepted, drafted = np.subtract(accepted_and_drafted(engine), before)
        assert accepted == drafted > 40


@pytest.mark.slow  # programs of its own
def test_a_head_has_k_and_v_of_its_own():
    """It drafts by these alone, with the layers of the model: all of its drafts are right."""
    models = MODEL, weights(), BlindHead(**vars(MODEL)), weights()
    engine = drafting(*models)
    requests = serve(engine, PROMPTS[:4], mixed())
    assert tokens_of(requests) == tokens_of(serve(without_drafts(*models), PROMPTS[:4], mixed()))
    accepted, drafted = accepted_and_drafted(engine)
    assert accepted == drafted > 50
    assert_every_page_is_free(engine)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(config_of(HEAD), method="draft_model"), "is a draft head: its method is 'eagle'"),
        (config_of(MODEL), "must have read_hidden"),
        (config_of(None), "method='eagle' must have a 'model'"),
    ],
)
def test_a_config_without_a_usable_head_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(speculative_config=given)


def test_a_head_that_takes_hidden_states_of_another_size_is_refused():
    class Wide(MeanHead):
        def read_hidden(self, params, hidden):
            return hidden

    with pytest.raises(ValueError, match=r"must return \[T=16, hidden_size=32\], not \(16, 33\)"):
        drafting(head=Wide())
