"""Outputs: finish reasons, log-probabilities, what is new; the engine's counters by value."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from pallas_paged.engine.outputs import (
    CompletionOutput,
    FinishReason,
    FinishReasonName,
    Logprob,
    LogprobSequence,
    TokenLogprobs,
)
from pallas_paged.engine.requests.request import Request
from pallas_paged.engine.sampling_params import SamplingParams
from pallas_paged.engine.stats import Counters
from tests.support.engine_calls import greedy, make_engine, run, sampling, serve, step, weights


def test_finish_reasons_are_numbers_with_the_words_of_outputs():
    assert tuple(map(str, FinishReason)) == get_args(FinishReasonName)
    assert [*FinishReason] == [0, 1, 2, 3]
    assert f"{FinishReason['STOP']}" == "stop"


TOKENS = [
    TokenLogprobs(3, -2.0, 5, [7, 1], [-0.5, -1.0]),
    TokenLogprobs(7, -0.5, 1, [7, 2], [-0.5, -1.5]),
    TokenLogprobs(2, -0.25, 1, [2, 7], [-0.25, -3.0]),
]


@pytest.fixture
def logprobs():
    sequence = LogprobSequence()
    for token in TOKENS:
        sequence.append(token)
    return sequence


def test_logprobs_of_a_completion_read_as_a_list_of_dicts(logprobs):
    wanted = [
        {3: Logprob(-2.0, 5), 7: Logprob(-0.5, 1), 1: Logprob(-1.0, 2)},
        {7: Logprob(-0.5, 1), 2: Logprob(-1.5, 2)},
        {2: Logprob(-0.25, 1), 7: Logprob(-3.0, 2)},
    ]
    assert logprobs == wanted and [*map(list, logprobs)] == [*map(list, wanted)]
    assert repr(logprobs) == repr(wanted) and len(logprobs) == 3
    assert [logprobs.token(index) for index in range(3)] == TOKENS
    assert logprobs[-1] == wanted[2] and logprobs[1:] == wanted[1:]
    assert logprobs[::-2] == wanted[::-2] and logprobs[3:] == LogprobSequence() == []
    assert logprobs[:1] != wanted[:2] and logprobs != 3
    with pytest.raises(IndexError):
        logprobs[3]


def test_new_parts_of_a_completion_join_to_the_completion(logprobs):
    more = dict(cumulative_logprob=-2.75, finish_reason="stop", stop_reason="x", logprobs=logprobs)
    completion = CompletionOutput(index=4, text="abcde", token_ids=[3, 7, 2], **more)
    new = completion.since(1, 2)
    assert (new.index, new.text, new.token_ids) == (4, "cde", [7, 2])
    assert new.logprobs == logprobs[1:] and new.finish_reason == "stop" and new.stop_reason == "x"
    first = CompletionOutput(index=4, text="ab", token_ids=[3], logprobs=logprobs[:1])
    first.add(new)
    assert vars(first) == vars(completion)


def ended(*outputs, first, finish, **values) -> Request:
    request = Request(
        request_id="0",
        prompt=None,
        prompt_token_ids=[1, 2, 3, 4],
        params=SamplingParams(),
        seed=0,
        priority=0,
        max_len=9,
        first_token_time=first,
        finish_time=finish,
        **(dict(arrival_time=0.0) | values),
    )
    request.outputs += [
        CompletionOutput(index=index, token_ids=[0] * num_tokens, finish_reason=reason)
        for index, (reason, num_tokens) in enumerate(outputs)
    ]
    return request


NOW = dict(num_waiting=1, num_running=2, num_preemptions=3, compilations=4, num_pages=10)
NOW |= dict(num_window_pages=0, kv_cache_dtype="int8", pool_bytes=5, num_shared_pages=6)
NOW |= dict(prefix_cache_queries=24, prefix_cache_hits=4)


def assert_stats(stats, **wanted):
    assert {name: getattr(stats, name) for name in wanted} == pytest.approx(wanted)


def test_requests_are_counted_by_how_they_ended_and_timed_by_their_tokens():
    counters = Counters(computed_tokens=7, generated_tokens=8, num_steps=9, num_calls=2)
    for request in (
        ended(("length", 5), arrival_time=10.0, first=12.0, finish=20.0),
        ended(("stop", 2), ("length", 3), first=4.0, finish=5.0),
        ended(("stop", 1), first=3.0, finish=3.0),  # one token takes no time after the first
        ended(("abort", 0), first=None, finish=9.0),
        ended(("stop", 2), ("abort", 1), first=1.0, finish=3.0),
        ended(("abort", 0), ("error", 0), first=None, finish=9.0),
    ):
        counters.count_request(request)
    stats = counters.snapshot(**NOW)
    assert_stats(stats, **NOW, num_finished=3, num_aborted=2, num_failed=1, num_calls=2)
    assert_stats(stats, cache_hit_rate=4 / 24, num_steps=9, computed_tokens=7, generated_tokens=8)
    # From arrival to the first token 1, 2, 3, 4 s; to the end 3, 3, 5, 10 s; a token 0.5, 2, 2 s.
    assert_stats(stats, ttft_p50=2.5, ttft_p99=3.97, latency_p50=4.0, latency_p99=9.85)
    assert_stats(stats, tpot_p50=2.0, tpot_p99=2.0)


def counters_of_pages(*calls, **values) -> Counters:
    """Of calls with these free, cached and empty numbers, in a pool of 10 pages of 4 tokens."""
    counters = Counters(num_free_pages=10, **values)
    for free, cached, empty in calls:
        pages = dict(num_free=free, num_cached=cached, num_unused_slots=empty)
        counters.count_pages(num_pages=10, page_size=4, **pages)
    return counters


def test_counters_begin_at_zero_and_pages_are_means_over_calls_that_hold_some():
    stats = counters_of_pages((4, 2, 3), (1, 1, 8), (6, 2, 2), (7, 3, 0)).snapshot(**NOW)
    assert_stats(stats, num_free_pages=7, num_cached_pages=3)
    assert_stats(stats, pages_used=(0.4 + 0.8 + 0.2) / 3, peak_pages_used=0.8)
    assert_stats(stats, pool_utilization=(13 / 16 + 24 / 32 + 6 / 8) / 3)
    stats = Counters().snapshot(**NOW)
    assert not any(value for name, value in vars(stats).items() if name not in NOW)
    assert replace(stats, prefix_cache_queries=0).cache_hit_rate == 0


def test_counters_of_replicas_add_up():
    """Means are over the calls of all replicas, percentiles over all their requests."""
    one = counters_of_pages((4, 2, 3), (1, 1, 8), prompt_tokens=3)
    other = counters_of_pages((8, 0, 4), num_calls=3, num_steps=4, prompt_tokens=5)
    one.count_request(ended(("length", 3), first=1.0, finish=3.0))
    other.count_request(ended(("error", 3), first=3.0, finish=7.0))
    stats = Counters.sum([one, other]).snapshot(**NOW)
    assert_stats(stats, num_finished=1, num_failed=1, num_calls=3, num_steps=4)
    assert_stats(stats, prompt_tokens=8, num_free_pages=9, num_cached_pages=1)
    assert_stats(stats, pages_used=(0.4 + 0.8 + 0.2) / 3, peak_pages_used=0.8)
    assert_stats(stats, pool_utilization=(13 / 16 + 24 / 32 + 4 / 8) / 3)
    assert_stats(stats, ttft_p50=2.0, tpot_p50=1.5, latency_p50=5.0)
    assert Counters.sum([one]) is one


def test_percentiles_are_those_of_the_newest_requests():
    counters = Counters()
    for request in [ended(("length", 1), first=1.0, finish=x) for x in (17.0, 12.0)]:
        for _ in range(10_000):
            counters.count_request(request)
    assert counters.snapshot(**NOW).latency_p99 == 12.0


def test_prompts_are_counted_when_requests_start_and_have_their_first_token_not_when_they_end():
    """Samples of a prompt count it once, and a preempted request is not counted again."""
    engine = make_engine(num_pages=13)
    prompt = [*range(20)]
    serve(engine, [prompt], greedy(max_tokens=1))
    requests = [engine.submit([*prompt, 30], sampling(n=3, max_tokens=8))]
    requests.append(engine.submit([*prompt[:9], 30], greedy(max_tokens=30)))
    step(engine)
    stats = engine.stats()
    assert_stats(stats, prefix_cache_queries=20 + 21 + 10, prefix_cache_hits=20 + 8)
    assert_stats(stats, prompt_tokens=20, num_finished=1)
    step(engine)
    assert_stats(engine.stats(), prompt_tokens=20 + 10, num_finished=1)
    run(engine)
    assert engine.stats().num_preemptions == requests[1].num_preemptions > 0
    assert_stats(engine.stats(), prefix_cache_queries=51, prefix_cache_hits=28, prompt_tokens=51)
    assert [one.num_cached_tokens for one in requests] == [20, 8]


def test_a_request_that_begins_again_with_new_weights_is_counted_again():
    engine = make_engine()
    request = engine.submit([*range(9)], greedy(max_tokens=9))
    while not request.outputs[0].token_ids:
        step(engine)
    engine.update_params(weights(), restart_running=True)
    run(engine)
    assert_stats(engine.stats(), prefix_cache_queries=18, prompt_tokens=18, num_finished=1)


def test_without_a_prefix_cache_none_is_asked():
    engine = make_engine(enable_prefix_caching=False)
    serve(engine, [[1, 2, 3]], greedy(max_tokens=2))
    assert_stats(engine.stats(), prefix_cache_queries=0, prefix_cache_hits=0, prompt_tokens=3)
