"""Thousands of requests on the host side alone; a million by `tests.support.scheduler_storm`."""

from __future__ import annotations

import pytest

from tests.support.marks import slow
from tests.support.scheduler_storm import Storm


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize(("num_requests", "checks"), [(1000, 5), *slow([(50_000, 50)])])
def test_no_page_is_lost_and_every_request_ends_once(num_requests, checks, caching, window):
    """Pages are owned once, and free ones, cached ones and used ones are all; order; budget."""
    storm = Storm(num_requests, caching=caching, window=window, checks=checks)
    storm.serve(num_requests)
    counts = storm.counts
    assert min(counts[x] for x in ("abort", "length", "stop", "preemptions")) > num_requests // 100
    assert (counts["prefix_cache_hits"] > num_requests // 10) == caching
