"""Random requests in tiny pools: every page is free in the end, every output is right."""

import numpy as np
import pytest

from tests.support.engine_calls import MODEL
from tests.support.marks import slow
from tests.support.soak import soak_engine, storm

ONE, EIGHT, ANY = [1], [8], [1, 1, 2, 3, 8]


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
