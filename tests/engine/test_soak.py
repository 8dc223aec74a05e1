"""Random requests in tiny pools: every page is free in the end, every output is right."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.engine_calls import MODEL, serve, steps_of, tokens_of
from tests.support.marks import slow
from tests.support.soak import CASES, PARAMS, PROMPTS, result, result_alone, soak_engine, storm

ONE, EIGHT, ANY = [1], [8], [1, 1, 2, 3, 8]


@pytest.mark.parametrize("index", range(len(PARAMS)))
def test_several_steps_and_a_cache_change_no_result(oracle, index):
    engine = soak_engine(MODEL)
    steps_of(engine, 8)
    for case in CASES:
        if case[1] == index:
            (request,) = serve(engine, [PROMPTS[case[0]]], PARAMS[index])
            assert result(request) == result_alone(MODEL, case)
            if index == 3:  # 33 greedy tokens
                assert tokens_of([request]) == [oracle.continue_(PROMPTS[case[0]], 33)]


@pytest.mark.parametrize(
    ("caching", "watermark", "steps", "num_requests"),
    [
        (False, 0.2, ANY, 60),
        (True, 0.0, ANY, 100),
        *slow((c, w, s, 300) for c in (False, True) for w, s in ((0.0, ONE), (0.2, EIGHT))),
        *slow((c, 0.0, ANY, 300) for c in (False, True)),
    ],
)
def test_requests_in_a_storm_get_what_they_get_alone(caching, watermark, steps, num_requests):
    rng = np.random.default_rng([num_requests, caching, int(10 * watermark)])
    engine = soak_engine(MODEL, enable_prefix_caching=caching, watermark=watermark)
    num_steps = lambda: int(rng.choice(steps))  # noqa: E731
    storm(engine, MODEL, rng, num_requests=num_requests, num_steps=num_steps)
