"""Sampling parameters: checks at creation, stored forms, derived properties."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pallas_paged.engine.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"n": 0}, r"n=0 must be an integer in 1\.\.16384"),
        ({"n": True}, "n=True must be an integer"),
        ({"n": None}, "n=None must be an integer"),
        ({"n": 3, "best_of": 2}, r"best_of=2 must be an integer in 3\.\."),
        ({"max_tokens": -1}, r"max_tokens=-1 must be an integer in 0\.\."),
        ({"max_tokens": 1.0}, "max_tokens=1.0 must be an integer"),
        ({"min_tokens": -1}, r"min_tokens=-1 must be an integer in 0\.\."),
        ({"min_tokens": 4, "max_tokens": 3}, "min_tokens=4 must be at most max_tokens=3"),
        ({"seed": 2**32}, r"seed=4294967296 must be an integer in 0\.\.4294967295"),
        ({"logprobs": 21}, r"logprobs=21 must be an integer in 0\.\.20"),
        ({"prompt_logprobs": -1}, r"prompt_logprobs=-1 must be an integer in 0\.\.20"),
        ({"temperature": float("nan")}, "temperature=nan must be a finite number"),
        ({"temperature": 10**400}, "temperature=.* must be a finite number"),
        ({"temperature": "1"}, "temperature='1' must be a finite number"),
        ({"temperature": -1.0}, "temperature=-1.0 must be at least 0"),
        ({"top_k": -2}, r"top_k=-2 must be an integer in -1\.\."),
        ({"top_p": 0.0}, "top_p=0.0 must be above 0 and at most 1"),
        ({"top_p": 1.5}, "top_p=1.5 must be above 0 and at most 1"),
        ({"top_p": 1e-60}, "top_p=1e-60 must be above 0"),  # 0 in float32
        ({"min_p": -0.1}, "min_p=-0.1 must be at least 0 and below 1"),
        ({"min_p": 1.0}, "min_p=1.0 must be at least 0 and below 1"),
        ({"presence_penalty": 2.5}, r"presence_penalty=2.5 must be in -2\.\.2"),
        ({"frequency_penalty": -3}, r"frequency_penalty=-3 must be in -2\.\.2"),
        ({"repetition_penalty": 0}, "repetition_penalty=0 must be above 0"),
        ({"length_penalty": float("inf")}, "length_penalty=inf must be a finite number"),
        ({"length_penalty": 11}, r"length_penalty=11 must be in -10\.\.10"),
        ({"length_penalty": -11}, r"length_penalty=-11 must be in -10\.\.10"),
        ({"logit_bias": 3}, "logit_bias=3 must be a mapping"),
        ({"logit_bias": [1]}, r"logit_bias=\[1\] must be a mapping"),
        ({"logit_bias": {-1: 0}}, "logit_bias token_id=-1 must be an integer"),
        ({"logit_bias": {5: 101}}, r"logit_bias\[5\]=101 must be in -100\.\.100"),
        ({"logit_bias": {5: None}}, r"logit_bias\[5\]=None must be a finite number"),
        ({"logit_bias": dict.fromkeys(range(301), 1)}, "logit_bias has 301 tokens"),
        ({"stop": ""}, "stop='' must be a text or texts that are not empty"),
        ({"stop": ["a", ""]}, r"stop=\['a', ''\] must be a text or texts that are not empty"),
        ({"stop": 3}, "stop=3 must be a list"),
        ({"stop": b"a"}, "stop=b'a' must be a text or texts"),
        ({"stop": "a", "detokenize": False}, r"stop=\('a',\) needs detokenize=True"),
        ({"stop_token_ids": 5}, "stop_token_ids=5 must be a list"),
        ({"stop_token_ids": [3, -1]}, r"stop_token_ids\[1\]=-1 must be an integer"),
        ({"stop_token_ids": range(65)}, "stop_token_ids has 65 tokens"),
        ({"ignore_eos": 1}, "ignore_eos=1 must be a bool"),
        ({"detokenize": None}, "detokenize=None must be a bool"),
        ({"beam_width": 11}, r"beam_width=11 must be an integer in 1\.\.10"),
        ({"beam_width": 2, "n": 3}, "n=3 must be at most beam_width=2"),
        ({"beam_width": 2, "best_of": 2}, "best_of=2 is not possible with beam_width=2"),
        ({"beam_width": 2, "stop": "a"}, r"stop=\('a',\) is not possible with beam_width=2"),
        ({"beam_width": 2, "logprobs": 0}, "logprobs=0 is not possible"),
        ({"beam_width": 2, "prompt_logprobs": 0}, "prompt_logprobs=0 is not possible"),
        ({"beam_width": 2, "logit_bias": {1: 1}}, "logit_bias=.* is not possible"),
        ({"beam_width": 2, "min_tokens": 1}, "min_tokens=1 is not possible"),
        ({"beam_width": 2, "presence_penalty": 1}, "presence_penalty=1 is not possible"),
        ({"beam_width": 2, "frequency_penalty": 1}, "frequency_penalty=1 is not possible"),
        ({"beam_width": 2, "repetition_penalty": 2}, "repetition_penalty=2 is not possible"),
    ],
)
def test_bad_parameters_are_refused_at_creation(params, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**params)


def test_an_unknown_parameter_is_a_type_error():
    with pytest.raises(TypeError, match="max_new_tokens"):
        SamplingParams(max_new_tokens=3)


def test_limits_of_the_ranges_are_allowed():
    SamplingParams(n=16384, max_tokens=0, top_k=2**31 - 1, logprobs=20, prompt_logprobs=0)
    SamplingParams(seed=2**32 - 1, temperature=0, top_p=1, min_p=0, presence_penalty=-2)
    SamplingParams(stop_token_ids=range(64), logit_bias=dict.fromkeys(range(300), -100))
    SamplingParams(beam_width=10, n=10, temperature=1.0, top_k=3, stop_token_ids=[1])
    SamplingParams(min_tokens=5)  # max_tokens=None


def test_sequences_and_mappings_are_stored_hashable():
    params = SamplingParams(
        stop=(x for x in ["a"]),
        stop_token_ids=[np.int64(1), 2, 1],
        logit_bias={7: 1, np.int32(3): -2.5},
        max_tokens=np.int32(3),
        top_k=-1,
    )
    assert params.stop == ("a",) and params.stop_token_ids == (1, 2) and params.top_k == 0
    assert params.logit_bias == ((3, -2.5), (7, 1.0))
    same = SamplingParams(
        stop="a", stop_token_ids=(1, 2), logit_bias=params.logit_bias, max_tokens=3
    )
    assert params == same and hash(params) == hash(same)
    assert replace(params, n=2).logit_bias == params.logit_bias
    default = SamplingParams()
    assert (default.stop, default.stop_token_ids, default.logit_bias) == ((), (), ())
    assert SamplingParams(stop="stop").stop == ("stop",)


@pytest.mark.parametrize(
    ("params", "num_seqs"), [({"n": 3}, 3), ({"best_of": 4}, 4), ({"beam_width": 5, "n": 2}, 5)]
)
def test_num_seqs_counts_all_samples_or_beams(params, num_seqs):
    assert SamplingParams(**params).num_seqs == num_seqs


@pytest.mark.parametrize("field", [{"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}])
def test_filters_apply_to_sampling_only(field):
    assert SamplingParams(**field).filters
    assert not SamplingParams(**field, temperature=0).filters
    assert not SamplingParams(**field, beam_width=2).filters
    assert not SamplingParams().filters


def test_greedy_is_temperature_0_or_beams():
    assert not SamplingParams().greedy
    assert SamplingParams(temperature=0).greedy and SamplingParams(beam_width=1).greedy
    assert SamplingParams(temperature=1e-60).greedy  # 0 in float32


@pytest.mark.parametrize("field", [{"logprobs": 0}, {"best_of": 2}, {"beam_width": 2}])
def test_needs_logprobs_to_report_or_rank(field):
    assert SamplingParams(**field).needs_logprobs
    assert not SamplingParams(n=2, prompt_logprobs=3).needs_logprobs
