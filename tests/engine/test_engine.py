"""The engine against generation without a cache: batches, prefixes, small pools, failures."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_paged as pp
from pallas_paged.engine import EngineDeadError, SamplingParams
from pallas_paged.engine.executor import Executor
from pallas_paged.engine.state import TableArrays, fork, update_table
from tests.support.engine_calls import (
    MODEL,
    PROMPTS,
    assert_deltas_add_up,
    assert_every_page_is_free,
    assert_nothing_is_left,
    greedy,
    make_engine,
    reasons_of,
    run,
    sampling,
    serve,
    step,
    steps_of,
    submit,
    tokens_of,
    weights,
)

pytestmark = pytest.mark.usefixtures("exact_products")
NEW = 14


@pytest.mark.parametrize("caching", [False, True])
def test_requests_together_equal_the_oracle(greedy_tokens, caching):
    """The first four need 20 pages, the pool has 16: some are preempted and recomputed."""
    engine = make_engine(enable_prefix_caching=caching)
    requests = serve(engine, PROMPTS, greedy())
    requests += serve(engine, PROMPTS[::-1], greedy())  # with the prefixes that are still cached
    assert tokens_of(requests) == greedy_tokens + greedy_tokens[::-1]
    assert set(reasons_of(requests)) == {"length"}
    stats = engine.stats()
    assert stats.num_preemptions == sum(request.num_preemptions for request in requests) > 0
    assert (stats.cached_tokens > 0) == caching


def test_every_implementation_equals_the_oracle(greedy_tokens, implementation):
    sizes = dict(max_num_seqs=2, max_num_batched_tokens=4)
    engine = make_engine(implementation=implementation, **sizes)
    requests = serve(engine, PROMPTS[:2], greedy(max_tokens=3))
    assert tokens_of(requests) == [tokens[:3] for tokens in greedy_tokens[:2]]


@pytest.mark.parametrize("gap", [1, 3])
def test_requests_one_after_another_equal_the_oracle(greedy_tokens, gap):
    engine = make_engine()
    requests, deltas = [], []
    for prompt in PROMPTS:
        requests.append(engine.submit(prompt, greedy()))
        for _ in range(gap):
            deltas += step(engine)
    deltas += run(engine)
    assert tokens_of(requests) == greedy_tokens
    assert_deltas_add_up(deltas, requests)


@pytest.mark.parametrize(
    ("first", "second", "num_cached"),
    [(8, 8, 4), (8, 9, 8), (9, 9, 8), (3, 3, 0), (18, 10, 8), (10, 18, 8)],
)
def test_a_cached_prefix_is_not_computed_again(oracle, first, second, num_cached):
    """The last page of a fully cached prompt is computed again, for its last query."""
    engine = make_engine()
    text = PROMPTS[4]
    serve(engine, [text[:first]], greedy(max_tokens=1))
    computed = engine.stats().computed_tokens
    (request,) = serve(engine, [text[:second]], greedy(max_tokens=4))
    assert request.num_cached_tokens == num_cached
    assert engine.stats().computed_tokens - computed == second - num_cached + 3
    assert tokens_of([request]) == [oracle.continue_(text[:second], 4)]


def test_generated_tokens_are_cached(oracle):
    engine = make_engine()
    (tokens,) = tokens_of(serve(engine, [PROMPTS[1]], greedy(max_tokens=8)))
    prompt = [*PROMPTS[1], *tokens]  # 17 tokens; the K/V of the last are not stored
    (second,) = serve(engine, [prompt], greedy(max_tokens=3))
    assert second.num_cached_tokens == 16
    assert tokens_of([second]) == [oracle.continue_(prompt, 3)]


def test_a_running_request_shares_the_prompt_it_has_computed(greedy_tokens):
    engine = make_engine()
    steps_of(engine, 1)
    first = engine.submit(PROMPTS[4], greedy())
    for _ in range(4):
        step(engine)
    second = engine.submit(PROMPTS[4], greedy())
    run(engine)
    assert second.num_cached_tokens == 16
    assert tokens_of([first, second]) == [greedy_tokens[4]] * 2


def test_the_prefix_cache_returns_its_pages(greedy_tokens):
    engine = make_engine()
    serve(engine, PROMPTS, greedy())
    assert engine.replicas[0].cache.num_evictable > 5
    assert_every_page_is_free(engine)
    for prompt in PROMPTS[:2]:
        engine.submit(prompt, greedy())
    step(engine)
    engine.reset_prefix_cache()  # while requests run
    run(engine)
    assert tokens_of(serve(engine, PROMPTS[:2], greedy())) == greedy_tokens[:2]
    assert_every_page_is_free(engine)


def test_nothing_is_compiled_after_warmup(compilations):
    engine = make_engine(modes=None)
    engine.warmup()
    num_compiled = engine.stats().compilations
    assert num_compiled == 9 and engine.idle
    jax.jit(lambda x: x + len(PROMPTS))(1)
    assert compilations, "the test must notice a compilation"
    del compilations[:]
    load = [
        *(greedy(max_tokens=n) for n in (1, 5, NEW, NEW)),
        sampling(n=3, max_tokens=9),
        sampling(max_tokens=9, top_k=3, top_p=0.9, min_p=0.1),
        sampling(max_tokens=5, best_of=3),
        greedy(max_tokens=5, beam_width=2),
        greedy(max_tokens=5, logprobs=20, stop_token_ids=range(10)),
        sampling(max_tokens=9, logit_bias={1: 2}, min_tokens=3),
        greedy(max_tokens=2, prompt_logprobs=2),
    ]
    for params in load:
        submit(engine, PROMPTS, params)
        step(engine)
    engine.abort(engine.submit([1], greedy()))
    run(engine)
    stats = engine.stats()
    assert stats.num_preemptions > 0 and stats.cached_tokens > 0
    assert not compilations and stats.compilations == num_compiled


def test_steps_are_lowered_in_order_one_after_another(monkeypatch):
    # Else their programs would depend on the timing of threads, and miss the compilation cache.
    batches = [SimpleNamespace(mode=SimpleNamespace(penalties=False)) for _ in range(8)]
    events: list[tuple[str, SimpleNamespace]] = []

    def lower(self, batch):
        events.append(("begins", batch))
        time.sleep(0.01)
        events.append(("ends", batch))
        return SimpleNamespace(compile=lambda: None)

    executor = make_engine().replicas[0].runner.executor
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(Executor, "lower", lower)
    executor.compile(batches)
    assert events == [(kind, batch) for batch in batches for kind in ("begins", "ends")]


def test_penalties_compile_nothing_after_warmup(compilations):
    engine = make_engine(replace(MODEL, vocab_size=41))  # whose steps no other test has compiled
    params = greedy(presence_penalty=1)
    engine.warmup([params])
    del compilations[:]
    serve(engine, PROMPTS[:2], params)
    assert not compilations


def test_warmup_for_greedy_requests_compiles_less_and_needs_an_idle_engine():
    engine = make_engine(modes=None)
    engine.warmup([greedy()])
    assert engine.stats().compilations == 2
    engine.submit([1], greedy())
    with pytest.raises(ValueError, match="warmup must run while the engine is awake and idle"):
        engine.warmup()
    run(engine)


def test_a_pool_may_be_smaller_than_the_longest_sequence():
    engine = make_engine(num_pages=8, max_model_len=64)
    with pytest.raises(ValueError, match="more than the 33 tokens of a sequence"):
        engine.submit([1] * 30, greedy())


def test_the_longest_sequence_may_use_the_whole_pool(oracle):
    (request,) = serve(make_engine(), [[5]], greedy(max_tokens=None))
    assert tokens_of([request]) == [oracle.continue_([5], 63)]


def test_the_last_token_needs_no_page(oracle):
    engine = make_engine(num_pages=4, max_model_len=17)
    assert tokens_of(serve(engine, [[5]], greedy(max_tokens=16))) == [oracle.continue_([5], 16)]


def test_max_tokens_0_computes_only_the_prompt():
    engine = make_engine()
    (request,) = serve(engine, [PROMPTS[1]], greedy(max_tokens=0))
    assert tokens_of([request]) == [[]] and reasons_of([request]) == ["length"]
    assert engine.stats().computed_tokens == len(PROMPTS[1])
    (after,) = serve(engine, [PROMPTS[1]], greedy(max_tokens=1))
    assert after.num_cached_tokens == 8


@pytest.mark.parametrize(("watermark", "num_running"), [(0.0, 2), (0.25, 2), (0.5, 1)])
def test_the_watermark_is_a_share_of_the_pool(watermark, num_running):
    engine = make_engine(num_pages=8, watermark=watermark)
    requests = [engine.submit([1] * length, greedy(max_tokens=1)) for length in (5, 9)]
    engine.step()  # two pages; three more only if the watermark stays free
    assert engine.stats().num_running == num_running
    run(engine)
    assert all(request.finished for request in requests)


def test_the_next_call_is_dispatched_before_the_last_is_read(monkeypatch):
    engine = make_engine()
    steps_of(engine, 1)
    log: list[str] = []
    runner = engine.replicas[0].runner
    for name in ("dispatch", "read"):
        call = getattr(runner, name)
        monkeypatch.setattr(runner, name, lambda x, c=call, n=name: log.append(n) or c(x))
    engine.submit([1, 2, 3], greedy(max_tokens=4))
    run(engine, check=False)
    assert log == ["dispatch", *["dispatch", "read"] * 3, "dispatch", "read"]
    assert engine.stats().num_steps == 4  # the last schedule was empty


def test_a_stop_token_ends_a_completion_and_is_its_last_token(greedy_tokens):
    """It is read one call late, and adds no token."""
    stop = greedy_tokens[1][5]
    tokens = greedy_tokens[1][: greedy_tokens[1].index(stop) + 1]
    engine = make_engine()
    requests = serve(engine, PROMPTS[:2], greedy(stop_token_ids=[stop]))
    assert tokens_of(requests)[1] == tokens and reasons_of(requests)[1] == "stop"
    assert requests[1].outputs[0].stop_reason == stop
    assert engine.stats().generated_tokens == sum(map(len, tokens_of(requests)))
    with_eos = make_engine(replace(MODEL, eos_token_ids=(stop,)), weights())
    (request,) = serve(with_eos, [PROMPTS[1]], greedy(stop_token_ids=[39]))  # added to EOS
    assert tokens_of([request]) == [tokens] and request.outputs[0].stop_reason is None
    (request,) = serve(with_eos, [PROMPTS[1]], greedy(ignore_eos=True))
    assert tokens_of([request]) == greedy_tokens[1:2]


def test_several_streams_can_be_read_in_turns(greedy_tokens):
    engine = make_engine()
    requests = submit(engine, PROMPTS, greedy())
    streams = {request: engine.stream(request) for request in requests}
    deltas = []
    while streams:
        for request, stream in list(streams.items()):
            if (delta := next(stream, None)) is None:
                del streams[request]
            else:
                deltas.append(delta)
    assert tokens_of(requests) == greedy_tokens
    assert_deltas_add_up(deltas, requests)
    assert len({one.request_id for one in deltas[:3]}) == 3
    (late,) = engine.stream(requests[0])  # the stream of a finished request is one piece
    assert tokens_of([late]) == greedy_tokens[:1] and late.finished


def test_a_stream_that_is_closed_aborts_its_request(greedy_tokens):
    engine = make_engine()
    other = engine.submit(PROMPTS[0], greedy())
    for _ in engine.stream(request := engine.submit(PROMPTS[1], greedy())):
        break
    assert request.finished and reasons_of([request]) == ["abort"]
    run(engine)
    assert tokens_of([other]) == greedy_tokens[:1]
    for _ in engine.stream(engine.submit(PROMPTS[1], greedy())):
        break
    stats = engine.stats()  # no call has reported the pages since
    assert stats.num_free_pages + stats.num_cached_pages == stats.num_pages


def test_generate_serves_all_or_none(greedy_tokens, capsys):
    engine = make_engine()
    waiting = engine.submit(PROMPTS[2], greedy(max_tokens=2))
    each = [greedy(max_tokens=1 + i) for i in range(len(PROMPTS))]
    outputs = engine.generate(PROMPTS, each, progress=False)
    assert tokens_of(outputs) == [tokens[: 1 + i] for i, tokens in enumerate(greedy_tokens)]
    assert [one.prompt_token_ids for one in outputs] == PROMPTS and waiting.finished
    assert tokens_of(engine.generate(PROMPTS[:1], greedy())) == greedy_tokens[:1]
    assert engine.generate([], greedy()) == []
    assert capsys.readouterr().err == "", "stderr is not a terminal"
    with pytest.raises(ValueError, match="prompt 1: the prompt is empty"):
        engine.generate([[1], []], greedy())
    with pytest.raises(ValueError, match="2 params must be one, or one for each of 1"):
        engine.generate([[1]], each[:2])
    run(engine)
    assert engine.stats().num_finished == 2 + len(PROMPTS)


def test_stats_count_the_work():
    engine = make_engine(enable_prefix_caching=False)
    requests = serve(engine, PROMPTS[:3], greedy())  # 15 pages
    stats = engine.stats()
    lens = [len(request.prompt_token_ids) for request in requests]
    assert (stats.num_waiting, stats.num_running, stats.num_finished) == (0, 0, 3)
    assert stats.prompt_tokens == sum(lens) and stats.generated_tokens == 3 * NEW
    assert stats.computed_tokens == sum(lens) + 3 * (NEW - 1)
    assert stats.num_pages == engine.num_pages
    assert stats.cache_hit_rate == stats.cached_tokens == 0
    assert stats.num_calls <= stats.num_steps
    held = sum(-(-(length + NEW - 1) // 4) for length in lens)
    assert stats.num_free_pages == stats.num_pages
    assert held / stats.num_pages >= stats.peak_pages_used >= stats.pages_used > 0.5
    assert 0.5 < stats.pool_utilization <= 1
    assert 0 < stats.ttft_p50 <= stats.ttft_p99 <= stats.latency_p99
    assert 0 < stats.tpot_p50 <= stats.tpot_p99
    assert all(r.arrival_time < r.first_token_time < r.finish_time for r in requests)


def fail(*_: object) -> None:
    raise RuntimeError("the device is gone")


@pytest.mark.parametrize("call", ["dispatch", "read", "update_table"])
def test_a_failed_step_ends_every_request_with_the_reason(monkeypatch, call):
    engine = make_engine()
    finished = engine.submit([1], greedy(max_tokens=1))
    while not finished.finished:
        engine.step()
    load = [{}, {"n": 2}, {"best_of": 2}, {"beam_width": 2}, {"n": 4}]
    requests = [engine.submit(PROMPTS[1], greedy(max_tokens=24, **params)) for params in load]
    for _ in range(4):
        engine.step()
    monkeypatch.setattr(engine.replicas[0].runner, call, fail)
    with pytest.raises(EngineDeadError, match="a step failed: the device is gone") as caught:
        for _ in range(20):  # not every step updates the table
            engine.step()
    assert str(caught.value.__cause__) == "the device is gone"
    assert reasons_of([finished]) == ["length"] and finished.error is None
    for request in requests:
        assert request.finished and request.error == "the device is gone"
        assert len(request.outputs) == request.params.n
        assert set(reasons_of([request])) == {"error"}
    stats = engine.stats()
    assert (stats.num_finished, stats.num_failed) == (1, 5)
    for use in (
        engine.step,
        engine.check,
        engine.warmup,
        engine.sleep,
        lambda: engine.update_params(weights()),
        lambda: engine.submit([1], greedy()),
        lambda: engine.abort(requests[0]),
        lambda: engine.generate([[1]], greedy()),
        lambda: engine.score([[1]], [[2]]),
    ):
        with pytest.raises(EngineDeadError, match="the engine is dead: the device is gone"):
            use()
    assert reasons_of(engine.stream(requests[0])) == ["error"]


def test_a_wrong_count_of_pages_on_the_host_is_an_error():
    """The host counts free pages itself; a wrong count must never give wrong tokens."""
    engine = make_engine()
    submit(engine, PROMPTS, greedy())
    engine.step()
    engine.replicas[0].scheduler.pages.num_free += 100
    engine.replicas[0].scheduler.pages.observe = lambda *_: None
    with pytest.raises(EngineDeadError, match="lacks pages or slots"):
        run(engine, check=False)


def test_a_failed_fork_or_attach_is_reported():
    def state():
        return (
            make_engine(num_pages=4, max_num_seqs=3, max_model_len=8)
            .replicas[0]
            .runner.executor.state
        )

    assert fork(state(), np.int32([0, 3]), np.int32([1, 3])).valid  # an empty slot, and padding
    assert not fork(state(), np.int32([0, 3]), np.int32([0, 3])).valid
    nothing = dict(retained=np.int32([4]), freed=np.zeros(3, bool), released=np.int32([4]))
    for slot, page, valid in [(3, 4, True), (0, 2, False)]:  # padding; a page that is free
        arrays = TableArrays(**nothing, slots=np.int32([slot]), pages=np.int32([[page, 4]]))
        table = pp.create_page_table(num_pages=4, page_size=4, max_seqs=3, pages_per_seq=2)
        assert update_table(table, jnp.asarray(True), arrays)[1] == valid


def test_pages_that_one_update_cannot_hold_take_several(oracle):
    sizes = dict(num_pages=2048, page_size=1, max_num_seqs=20, max_num_batched_tokens=1280)
    engine = make_engine(**sizes)
    prompts = [[first, *range(40), *range(18)] for first in range(30)]
    serve(engine, prompts, greedy(max_tokens=1), check=False)
    longer = [[*prompt, 5] for prompt in prompts[:20]]
    num_calls = engine.stats().num_calls
    requests = serve(engine, longer, greedy(max_tokens=1), check=False)
    assert {request.num_cached_tokens for request in requests} == {59}
    assert engine.stats().num_calls == num_calls + 1
    assert tokens_of(requests) == [oracle.continue_(prompt, 1) for prompt in longer]
    assert_every_page_is_free(engine)


def test_statistics_need_no_more_memory_after_more_requests():
    """Only the newest times are kept, and no request after its end."""
    engine = make_engine()
    counters = engine.replicas[0].counters
    bound = counters._ttft.maxlen
    (request,) = serve(engine, [[1]], greedy(max_tokens=2))
    for _ in range(bound + 5):
        counters.count_request(replace(request, prompt_token_ids=[1]))
    for times in (counters._ttft, counters._tpot, counters._latency):
        assert len(times) == bound == times.maxlen
    assert engine.stats().num_finished == bound + 6


def test_times_are_those_of_each_request():
    engine = make_engine()
    (request,) = serve(engine, [[1]], greedy(max_tokens=4))
    counters = engine.replicas[0].counters = type(engine.replicas[0].counters)()
    counters.count_request(
        replace(request, arrival_time=10.0, first_token_time=11.0, finish_time=17.0)
    )
    stats = engine.stats()
    assert (stats.ttft_p50, stats.tpot_p50, stats.latency_p50) == (1.0, 2.0, 7.0)


def test_cached_pages_do_not_count_as_used():
    engine = make_engine()
    serve(engine, [[1] * 8], greedy(max_tokens=1))
    serve(engine, [[2]], greedy(max_tokens=2))
    stats = engine.stats()
    assert stats.num_cached_pages == 2 and stats.peak_pages_used <= 2 / stats.num_pages


def test_pages_and_tokens_are_counted_at_the_same_time():
    engine = make_engine(enable_prefix_caching=False)
    serve(engine, [[1]], greedy(max_tokens=1))
    stats = engine.stats()
    assert stats.pages_used == stats.peak_pages_used == 1 / stats.num_pages
    assert stats.pool_utilization == 1 / engine.config.page_size


@pytest.mark.parametrize("beams", [1, 3])
def test_only_returned_tokens_of_beams_count_as_generated(beams):
    engine = make_engine()
    (request,) = serve(engine, [[1, 2, 3]], greedy(max_tokens=5, beam_width=beams, n=beams))
    assert engine.stats().generated_tokens == sum(map(len, tokens_of([request])))


@pytest.mark.parametrize("waits", [False, True])
def test_smaller_priorities_are_served_first(greedy_tokens, waits):
    """With one slot the order of the first tokens is that of priority, then of arrival."""
    engine = make_engine(max_num_seqs=1, max_num_batched_tokens=4)
    first = engine.submit(PROMPTS[4], greedy(max_tokens=3), priority=9)
    if waits:
        step(engine)
    priorities = [2, -1, 0, 2, -1]
    others = [
        engine.submit(prompt, greedy(max_tokens=2), priority=priority)
        for prompt, priority in zip(PROMPTS, priorities, strict=True)
    ]
    run(engine)
    wanted = [others[i] for i in (1, 4, 2, 0, 3)]
    wanted.insert(0 if waits else 5, first)
    assert sorted([first, *others], key=lambda x: x.first_token_time) == wanted
    assert tokens_of(others) == [tokens[:2] for tokens in greedy_tokens]


def test_the_last_by_priority_is_preempted(greedy_tokens):
    engine = make_engine(num_pages=9, watermark=0)
    low = engine.submit(PROMPTS[0], greedy(), priority=1)
    step(engine)
    high = [engine.submit(prompt, greedy()) for prompt in PROMPTS[1:3]]
    run(engine)
    assert low.num_preemptions > 0 and high[0].num_preemptions == 0
    assert tokens_of([low, *high]) == greedy_tokens[:3]


def test_an_unread_engine_keeps_its_requests_and_pages_apart(greedy_tokens):
    """Two engines of one model share compiled steps, and nothing else."""
    one, two = make_engine(), make_engine()
    a, b = one.submit(PROMPTS[0], greedy()), two.submit(PROMPTS[1], greedy())
    while not (one.idle and two.idle):
        for engine in (one, two):
            if not engine.idle:
                step(engine)
    assert tokens_of([a, b]) == greedy_tokens[:2]
    assert_nothing_is_left(one)
    assert one.replicas[0].runner.executor._step is two.replicas[0].runner.executor._step


def test_default_parameters_are_those_of_vllm():
    request = make_engine().submit([1, 2])
    assert request.params == SamplingParams() and request.max_len == 64


def test_a_waiting_request_starts_when_its_prefix_is_cached_meanwhile():
    """Two prompts have seven pages in common; the pool has 13, of which one needs 13."""
    engine = make_engine(num_pages=13, watermark=0.0)
    steps_of(engine, 1)
    prompt = list(range(1, 31))
    engine.submit(prompt, greedy(max_tokens=20))
    second = engine.submit([*prompt[:28], 33, 34, 35], greedy(max_tokens=3))
    num_steps, first_token = 0, None
    while not engine.idle:
        step(engine)
        num_steps += 1
        if first_token is None and second.first_token_time is not None:
            first_token = num_steps
    assert first_token <= 4 and num_steps <= 22
