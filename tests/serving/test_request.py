"""Invalid sampling parameters are refused at creation."""

from __future__ import annotations

import numpy as np
import pytest

from models.request import SamplingParams


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"max_tokens": 0}, "max_tokens=0 must be an integer in 1.."),
        ({"n": True}, "n=True must be an integer"),
        ({"n": 3, "best_of": 2}, "best_of=2 must be an integer in 3.."),
        ({"seed": 2**32}, "seed=4294967296 must be an integer in 0..4294967295"),
        ({"logprobs": 21}, "logprobs=21 must be an integer in 0..20"),
        ({"temperature": float("nan")}, "temperature=nan must be a finite number"),
        ({"temperature": -1.0}, "temperature=-1.0 must not be negative"),
        ({"top_k": -1}, "top_k=-1"),
        ({"top_p": 0.0}, "top_p=0.0 must be above 0"),
        ({"top_p": 1.5}, "top_p=1.5 must be above 0 and at most 1"),
        ({"min_p": -0.1}, "min_p=-0.1 must be at least 0"),
        ({"min_p": 1.0}, "min_p=1.0 must be at least 0 and below 1"),
        ({"length_penalty": float("inf")}, "length_penalty=inf must be a finite number"),
        ({"stop": "text"}, "stop='text' must be texts that are not empty"),
        ({"stop": [""]}, r"stop=\[''\] must be texts that are not empty"),
        ({"stop": 3}, "stop=3 must be a list"),
        ({"temperature": 10**400}, "temperature=.* must be a finite number"),
        ({"temperature": "1"}, "temperature='1' must be a finite number"),
        ({"top_p": 1e-60}, "top_p=1e-60 must be above 0"),  # 0 in f32
        ({"length_penalty": 11}, "length_penalty=11 must be in -10..10"),
        ({"length_penalty": -11}, "length_penalty=-11 must be in -10..10"),
        ({"stop_tokens": 5}, "stop_tokens=5 must be a list"),
        ({"stop_tokens": [-1]}, "stop token=-1 must be an integer"),
        ({"beam_width": 11}, "beam_width=11 must be an integer in 1..10"),
        ({"beam_width": 2, "n": 3}, "beam_width=2 must be an integer in 3..10"),
        ({"beam_width": 2, "temperature": 1.0}, "beam_width=2 excludes temperature=1.0"),
        ({"beam_width": 2, "best_of": 2}, "beam_width=2 excludes .* best_of=2"),
        ({"beam_width": 2, "stop": ["a"]}, "beam_width=2 excludes stop="),
        ({"beam_width": 2, "logprobs": 0}, "beam_width=2 excludes .* logprobs=0"),
    ],
)
def test_bad_parameters_are_refused_at_creation(params, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**params)


def test_iterables_become_tuples():
    params = SamplingParams(
        stop=(x for x in ["a"]), stop_tokens=[np.int64(1)], max_tokens=np.int32(3)
    )
    assert params.stop == ("a",) and params.stop_tokens == (1,)
    assert hash(params) == hash(SamplingParams(stop=["a"], stop_tokens=[1], max_tokens=3))
