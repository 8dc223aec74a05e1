"""Random requests in tiny pools: every page is free in the end, every output is right."""

import gc
import os
from pathlib import Path

import numpy as np
import pytest

from tests.support.draft_calls import NGRAM
from tests.support.engine_calls import MODEL, drafts_of
from tests.support.marks import slow
from tests.support.soak import soak_engine, storm

ONE, EIGHT, ANY = [1], [8], [1, 1, 2, 3, 8]


@pytest.mark.cpu_budget(8)  # compiles programs that later tests share
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


@pytest.mark.slow
@pytest.mark.parametrize("caching", [False, True])
def test_a_storm_with_drafts_gives_what_requests_get_alone_without(caching):
    """Calls have drafts at random, where no request of theirs has penalties."""
    rng = np.random.default_rng(caching)
    sizes = dict(enable_prefix_caching=caching, watermark=0.0, speculative_config=NGRAM)
    engine = soak_engine(MODEL, **sizes)
    drafts_of(engine, lambda: 3 * int(rng.random() < 0.7))
    num_steps = lambda: int(rng.choice(ANY))  # noqa: E731
    storm(engine, MODEL, rng, num_requests=300, num_steps=num_steps)
    stats = engine.stats()
    assert stats.spec_decode_num_drafts > 30 and stats.spec_decode_num_accepted_tokens > 0


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="Linux tells the memory")
def test_memory_stays_flat_over_storms():
    """Everything is compiled, and everything alone is known, after the first ones."""
    sizes = []
    for number in range(16):
        rng = np.random.default_rng(number)
        engine = soak_engine(MODEL, watermark=0.0)
        storm(engine, MODEL, rng, num_requests=200, num_steps=lambda rng=rng: int(rng.choice(ANY)))
        engine.close()
        sizes.append(resident_bytes())
    assert sizes[-1] - sizes[5] < 16 << 20, sizes
