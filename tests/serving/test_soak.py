"""Random requests in tiny pools: every page is free at the end, every output is right.

The slow runs take thousands of requests; SOAK_SCALE in the environment multiplies their number.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from models.engine import Engine
from models.engine_stats import Counters
from models.request import News, Request, SamplingParams
from tests.support.engine_calls import (
    assert_news_tell_all,
    assert_nothing_is_left,
    make_engine,
    run,
    serve,
    tokens_of,
)
from tests.support.marks import slow

pytestmark = pytest.mark.usefixtures("exact_products")
FEW_REQUESTS, MANY_REQUESTS = 150, 600 * int(os.environ.get("SOAK_SCALE", "1"))
NUM_PAGES = 9
TRACKED = 32  # most requests at a time, in the queue and in rows

_STEM = np.random.default_rng(0).integers(1, 40, 20).tolist()
# Shared prefixes of 0 to 5 pages, and lengths on both sides of page borders.
PROMPTS = [
    [*_STEM[:shared], *range(30, 30 + own)]
    for shared, own in [(0, 1), (0, 2), (0, 5), (4, 1), (4, 4), (8, 0), (8, 5), (12, 3), (20, 0)]
]
PARAMS = [
    SamplingParams(max_tokens=1),
    SamplingParams(max_tokens=7),
    SamplingParams(max_tokens=13),
    SamplingParams(max_tokens=9, stop_tokens=(19, 2, 7)),
    SamplingParams(max_tokens=5, n=2, temperature=1.0, seed=3),
    SamplingParams(max_tokens=9, n=3, temperature=0.8, top_k=5, seed=4, stop_tokens=range(7)),
    SamplingParams(max_tokens=7, temperature=1.0, top_p=0.8, seed=5, logprobs=2),
    SamplingParams(max_tokens=6, best_of=3, n=2, temperature=1.0, seed=6),
    SamplingParams(max_tokens=5, beam_width=2, n=2),
    SamplingParams(max_tokens=4, beam_width=3, stop_tokens=range(5)),
    SamplingParams(max_tokens=8, n=4, temperature=1.0, min_p=0.05, seed=9),
]
Case = tuple[int, int]  # indices into PROMPTS and PARAMS


def result(request: Request) -> list[tuple[list[int], str | None]]:
    return [(completion.tokens, completion.finish_reason) for completion in request.completions]


@pytest.fixture(scope="module")
def cases(model, oracle) -> dict[Case, list[tuple[list[int], str | None]]]:
    """Every case that fits into the pool, with its result alone and without prefix caching."""
    engine = make_engine(model, num_pages=NUM_PAGES, prefix_caching=False)
    alone = {}
    for i, prompt in enumerate(PROMPTS):
        for j, params in enumerate(PARAMS):
            num_pages = -(-(len(prompt) + params.max_tokens) // 4) * (params.beam_width or 1)
            if num_pages <= NUM_PAGES:
                alone[i, j] = result(*serve(engine, [prompt], params))
        assert alone[i, 2][0][0] == oracle.continue_(prompt, 13)
    assert len(alone) > 0.8 * len(PROMPTS) * len(PARAMS)
    return alone


def storm(
    engine: Engine, cases: dict[Case, object], rng: np.random.Generator, num_requests: int
) -> Iterator[tuple[Request, Case, list[News], bool]]:
    """Submits and aborts requests at random; yields requests that have ended, with their news."""
    keys = list(cases)
    live: dict[Request, Case] = {}
    news: dict[Request, list[News]] = {}
    aborted: set[Request] = set()
    num_left, num_steps = num_requests, 0
    while num_left or live:
        while num_left and len(live) < TRACKED and rng.random() < 0.45:
            i, j = keys[rng.integers(len(keys))]
            request = engine.submit(PROMPTS[i], PARAMS[j])
            live[request], news[request] = (i, j), []
            num_left -= 1
        if live and rng.random() < 0.05:
            aborted.add(request := list(live)[rng.integers(len(live))])
            engine.abort(request)
        for one in engine.step():
            news[one.request].append(one)
        engine.check()
        num_steps += 1
        assert num_steps < 60 * num_requests, "requests hang"
        for request in [request for request in live if request.finished]:
            yield request, live.pop(request), news.pop(request), request in aborted


@pytest.mark.parametrize(
    ("prefix_caching", "watermark", "num_requests"),
    [
        (False, 0.2, FEW_REQUESTS),
        (True, 0.0, FEW_REQUESTS),
        *slow((caching, mark, MANY_REQUESTS) for caching in (False, True) for mark in (0.0, 0.2)),
    ],
)
def test_soak(model, cases, prefix_caching, watermark, num_requests):
    rng = np.random.default_rng([prefix_caching, int(10 * watermark)])
    engine = make_engine(
        model, num_pages=NUM_PAGES, prefix_caching=prefix_caching, watermark=watermark
    )
    num_ended = num_aborted = 0
    for request, case, news, aborted in storm(engine, cases, rng, num_requests):
        num_ended += 1
        assert request.error is None and len(request.prompt) > request.num_cached_tokens
        assert_news_tell_all(news, [request])
        if not aborted:
            assert result(request) == cases[case]
            continue
        num_aborted += 1
        if request.params.beam_width or request.params.best_of:
            continue  # these return the best so far; some may have ended before the abort
        assert "aborted" in {completion.finish_reason for completion in request.completions}
        for (tokens, _), (whole, _) in zip(result(request), cases[case], strict=True):
            assert tokens == whole[: len(tokens)]
    run(engine)
    assert_nothing_is_left(engine)
    stats = engine.stats()
    assert num_ended == num_requests and num_aborted > num_requests // 50
    assert stats.num_finished + stats.num_aborted == num_requests and stats.num_failed == 0
    assert stats.num_preemptions > num_requests // 10
    assert (stats.cache_hit_rate > 0.1) == prefix_caching
    assert 0 < stats.pages_used <= stats.peak_pages_used <= 1
    assert 0 < stats.pool_utilization <= 1
    if prefix_caching:
        engine._scheduler._settlement.released += engine._cache.clear()
        assert_nothing_is_left(engine)
    assert int(engine.table.num_free) == NUM_PAGES


def test_more_attached_retained_and_released_pages_than_one_call_takes(model, oracle):
    engine = make_engine(model, num_pages=2048, page_size=1, max_seqs=20, token_budget=1280)
    prompts = [[first, *range(40), *range(18)] for first in range(30)]
    serve(engine, prompts, SamplingParams(max_tokens=1), check=False)
    longer = [[*prompt, 5] for prompt in prompts[:20]]
    num_steps = engine.stats().num_steps
    requests = serve(engine, longer, SamplingParams(max_tokens=1), check=False)
    assert {request.num_cached_tokens for request in requests} == {59}
    assert engine.stats().num_steps == num_steps + 1
    assert tokens_of(requests) == [oracle.continue_(prompt, 1) for prompt in longer]
    engine._scheduler._settlement.released += engine._cache.clear()
    assert_nothing_is_left(engine)
    assert int(engine.table.num_free) == 2048


def test_statistics_need_no_more_memory_after_more_requests(model, monkeypatch):
    """Only the newest times are kept, and no request after its end."""
    engine = make_engine(model, num_pages=NUM_PAGES)
    counters = engine._counters
    bound = counters._ttft.maxlen
    assert bound is not None
    params = SamplingParams(max_tokens=2)
    (request,) = serve(engine, [[1]], params)
    for _ in range(bound + 5):
        counters.count_request(replace(request, prompt=[1]))
    for times in (counters._ttft, counters._tpot, counters._latency):
        assert len(times) == bound == times.maxlen
    assert engine.stats().num_finished == bound + 6


def test_times_are_those_of_each_request(model):
    engine = make_engine(model)
    request = engine.submit([1], SamplingParams(max_tokens=4))
    while request.first_token_time is None:
        engine.step()
    first = request.first_token_time
    run(engine)
    assert request.first_token_time == first
    counters = engine._counters = Counters()
    counters.count_request(replace(request, arrival=10.0, first_token_time=11.0, finish_time=17.0))
    stats = engine.stats()
    assert (stats.ttft_p50, stats.tpot_p50, stats.latency_p50) == (1.0, 2.0, 7.0)


def test_cached_pages_do_not_count_as_used(model):
    engine = make_engine(model)
    serve(engine, [[1] * 8], SamplingParams(max_tokens=1))
    serve(engine, [[2]], SamplingParams(max_tokens=2))
    stats = engine.stats()
    assert stats.num_cached_pages == 2 and stats.peak_pages_used <= 2 / stats.num_pages


def test_pages_and_tokens_are_counted_at_the_same_time(model):
    engine = make_engine(model, prefix_caching=False)
    serve(engine, [[1]], SamplingParams(max_tokens=1))
    stats = engine.stats()
    assert stats.pages_used == stats.peak_pages_used == 1 / stats.num_pages
    assert stats.pool_utilization == 1 / engine.config.page_size


@pytest.mark.parametrize("beams", [1, 3])
def test_generated_tokens_of_beams_are_those_returned(model, beams):
    engine = make_engine(model)
    params = SamplingParams(max_tokens=5, beam_width=beams, n=beams)
    (request,) = serve(engine, [[1, 2, 3]], params)
    assert engine.stats().generated_tokens == sum(map(len, tokens_of([request])))
