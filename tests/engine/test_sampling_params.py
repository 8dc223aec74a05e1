"""Sampling parameters: checks at creation, stored forms, derived properties and modes."""

import re
from dataclasses import replace

import numpy as np
import pytest

from pallas_paged.engine.sampling_params import MAX_LOGPROBS, SamplingMode, SamplingParams

REFUSED = {  # by the rule that the last parameter breaks
    "must be an integer in 1..16384": [dict(n=0), dict(n=True), dict(n=None), dict(n=16385)],
    "must be an integer in 3..16384": [dict(n=3, best_of=2)],
    "must be an integer in 0..": [
        *[dict(max_tokens=-1), dict(max_tokens=1.0), dict(min_tokens=-1)],
        *[dict(seed=2**32), dict(logprobs=21), dict(prompt_logprobs=-1)],
        *[dict(stop_token_ids=[-1]), dict(logit_bias={-1: 0})],
    ],
    "must be an integer in -1..": [dict(top_k=-2)],
    "must be an integer in 1..10": [dict(beam_width=11)],
    "must be at most max_tokens=3": [dict(max_tokens=3, min_tokens=4)],
    "must be a finite number": [
        *[dict(temperature=float("nan")), dict(temperature=10**400), dict(temperature="1")],
        *[dict(length_penalty=float("inf")), dict(logit_bias={5: None})],
    ],
    "must be at least 0": [dict(temperature=-1.0)],
    # 1e-60 is 0 in float32, and 1e-40 is subnormal.
    "must be above 0 and at most 1": [dict(top_p=x) for x in (0.0, 1.5, 1e-60, 1e-40)],
    "must be at least 0 and below 1": [dict(min_p=-0.1), dict(min_p=1.0)],
    "must be in -2..2": [dict(presence_penalty=2.5), dict(frequency_penalty=-2.1)],
    "must be above 0": [dict(repetition_penalty=0), dict(repetition_penalty=1e-40)],
    "must be in -10..10": [dict(length_penalty=11), dict(length_penalty=-11)],
    "must be a mapping of token ids to numbers": [dict(logit_bias=3), dict(logit_bias=[1])],
    "must be in -100..100": [dict(logit_bias={5: 101})],
    "has 301 tokens, must have at most 300": [dict(logit_bias=dict.fromkeys(range(301), 1))],
    "must be a text or texts that are not empty": [dict(stop=x) for x in ("", ["a", ""], b"a")],
    "must be a list": [dict(stop=3), dict(stop={"a": 1}), dict(stop_token_ids=5)],
    "needs detokenize=True": [dict(detokenize=False, stop="a")],
    "has 65 tokens, must have at most 64": [dict(stop_token_ids=x) for x in (range(65), [1] * 65)],
    "must be a bool": [dict(ignore_eos=1), dict(detokenize=None)],
    "must be at most beam_width=2": [dict(beam_width=2, n=3)],
    "is not possible with beam_width=2": [
        dict(beam_width=2) | one
        for one in (
            *[dict(max_tokens=0), dict(best_of=2), dict(stop="a"), dict(logprobs=0)],
            *[dict(prompt_logprobs=0), dict(logit_bias={1: 1}), dict(min_tokens=1)],
            *[dict(presence_penalty=1), dict(frequency_penalty=1), dict(repetition_penalty=2)],
        )
    ],
}


@pytest.mark.parametrize("rule", REFUSED)
def test_bad_parameters_are_refused_by_name_and_rule(rule):
    for params in REFUSED[rule]:
        *_, name = params
        with pytest.raises(ValueError, match=rf"^{name}\b.*{re.escape(rule)}"):
            SamplingParams(**params)


def test_limits_of_ranges_are_allowed_and_sequences_stored_hashable():
    SamplingParams(n=16384, max_tokens=0, top_k=2**31 - 1, logprobs=20, prompt_logprobs=0)
    SamplingParams(seed=2**32 - 1, temperature=0, top_p=1, min_p=0, presence_penalty=-2)
    SamplingParams(stop_token_ids=range(64), logit_bias=dict.fromkeys(range(300), -100))
    SamplingParams(beam_width=10, n=10, temperature=1.0, top_k=3, stop_token_ids=[1])
    SamplingParams(min_tokens=5)  # max_tokens=None
    tokens = dict(stop_token_ids=[np.int64(1), 2, 1], logit_bias={7: 1, np.int32(3): -2.5})
    params = SamplingParams(stop=(x for x in ["a"]), max_tokens=np.int32(3), top_k=-1, **tokens)
    assert params.stop == ("a",) and params.stop_token_ids == (1, 2) and params.top_k == 0
    assert params.logit_bias == ((3, -2.5), (7, 1.0))
    given = dict(stop="a", stop_token_ids=(1, 2), logit_bias=params.logit_bias, max_tokens=3)
    same = SamplingParams(**given)
    assert params == same and hash(params) == hash(same)
    assert replace(params, n=2).logit_bias == params.logit_bias
    default = SamplingParams()
    assert (default.stop, default.stop_token_ids, default.logit_bias) == ((), (), ())


@pytest.mark.parametrize(
    ("params", "num_seqs", "num_logprobs", "wanted"),
    [
        ({}, 1, None, ""),
        ({"n": 3, "prompt_logprobs": 3}, 3, None, ""),
        ({"best_of": 4}, 4, 0, "needs_logprobs"),
        ({"logprobs": 2}, 1, 2, "needs_logprobs"),
        ({"logprobs": 0}, 1, 0, "needs_logprobs"),
        ({"beam_width": 5, "n": 2, "top_k": 3}, 5, 10, "greedy needs_logprobs"),
        ({"beam_width": 1}, 1, 2, "greedy needs_logprobs"),
        ({"temperature": 0, "top_p": 0.5}, 1, None, "greedy"),
        ({"temperature": 1e-60}, 1, None, "greedy"),  # 0 in float32
        ({"temperature": 1e-40, "top_k": 3}, 1, None, "greedy"),  # subnormal
        ({"temperature": 1.2e-38, "top_k": 3}, 1, None, ""),
    ],
    ids=str,
)
def test_properties_say_what_a_request_needs(params, num_seqs, num_logprobs, wanted):
    params = SamplingParams(**params)
    names = ("greedy", "needs_logprobs")
    assert {name for name in names if getattr(params, name)} == set(wanted.split())
    assert (params.num_seqs, params.num_logprobs) == (num_seqs, num_logprobs)


@pytest.mark.parametrize(
    ("params", "wanted"),
    [
        ({}, {"draws": True}),
        ({"temperature": 0.0, "top_k": 5, "top_p": 0.5}, {}),
        ({"top_k": 5, "top_p": 0.5}, {"draws": True, "filters": 2}),
        ({"top_k": 65}, {"draws": True, "filters": 1}),
        ({"top_p": 0.5, "min_p": 0.1}, {"draws": True, "filters": 1}),
        ({"min_p": 0.1}, {"draws": True}),
        ({"temperature": 0.0, "logit_bias": {3: 1.0}}, {"processors": True}),
        ({"temperature": 0.0, "min_tokens": 1}, {"processors": True}),
        ({"temperature": 0.0, "presence_penalty": -0.5}, {"penalties": True}),
        ({"temperature": 0.0, "frequency_penalty": 0.5}, {"penalties": True}),
        ({"temperature": 0.0, "repetition_penalty": 1.1}, {"penalties": True}),
        ({"temperature": 0.0, "logprobs": 0}, {"logprobs": 0}),
        ({"temperature": 0.0, "logprobs": 1}, {"logprobs": MAX_LOGPROBS}),
        ({"temperature": 0.0, "prompt_logprobs": 0}, {"prompt_logprobs": 0}),
        ({"temperature": 0.0, "prompt_logprobs": 2}, {"prompt_logprobs": MAX_LOGPROBS}),
        ({"best_of": 2}, {"draws": True, "logprobs": 0}),
        ({"beam_width": 2}, {"logprobs": MAX_LOGPROBS}),
    ],
)
def test_the_mode_of_parameters_has_only_what_they_need(params, wanted):
    assert SamplingMode.of(SamplingParams(**params)) == SamplingMode(**wanted)


def test_a_join_covers_both_modes():
    one, other = SamplingMode(draws=True, logprobs=0), SamplingMode(penalties=True)
    both = one | other
    assert both == SamplingMode(draws=True, penalties=True, logprobs=0)
    assert both.covers(one) and both.covers(other) and not one.covers(both)
    assert not one.covers(replace(one, logprobs=MAX_LOGPROBS)) and one.covers(SamplingMode())
