"""The engine against generation without a cache: batches, caches, small pools, ends, failures."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import pallas_paged as pp
from models.engine import Engine, EngineConfig, EngineDeadError
from models.engine_step import Changes, create_engine_state, fork, settle
from models.request import SamplingParams
from tests.support.dense_oracle import CONFIG, DenseOracle, tiny_model
from tests.support.engine_calls import (
    SIZES,
    assert_news_tell_all,
    assert_nothing_is_left,
    make_engine,
    reasons_of,
    run,
    serve,
    tokens_of,
)

pytestmark = pytest.mark.usefixtures("exact_products")
# Lengths on both sides of the borders of 4-token pages; the longest takes two steps.
PROMPTS = [[1, 2, 3], list(range(4, 13)), [14, 15, 16, 17], [18], list(range(20, 38))]
NEW = 14
GREEDY = SamplingParams(max_tokens=NEW)


@pytest.fixture(scope="module")
def greedy(oracle):
    return [oracle.continue_(prompt, NEW) for prompt in PROMPTS]


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_requests_together_equal_the_oracle(model, greedy, prefix_caching):
    """The first four need 20 pages, the pool has 16: some are preempted and recomputed."""
    engine = make_engine(model, prefix_caching=prefix_caching)
    requests = serve(engine, PROMPTS, GREEDY)
    requests += serve(engine, PROMPTS[::-1], GREEDY)  # with the prefixes that are still cached
    assert tokens_of(requests) == greedy + greedy[::-1]
    assert set(reasons_of(requests)) == {"max_tokens"}
    stats = engine.stats()
    assert stats.num_preemptions == sum(request.num_preemptions for request in requests) > 0
    assert (stats.cached_tokens > 0) == prefix_caching


def test_every_implementation_equals_the_oracle(model, greedy, implementation):
    engine = make_engine(model, implementation=implementation, max_seqs=2, token_budget=4)
    requests = serve(engine, PROMPTS[:2], replace(GREEDY, max_tokens=3))
    assert tokens_of(requests) == [tokens[:3] for tokens in greedy[:2]]


@pytest.mark.parametrize("gap", [1, 3])
def test_requests_one_after_another_equal_the_oracle(model, greedy, gap):
    engine = make_engine(model)
    requests, news = [], []
    for prompt in PROMPTS:
        requests.append(engine.submit(prompt, GREEDY))
        for _ in range(gap):
            news += engine.step()
            engine.check()
    news += run(engine)
    assert tokens_of(requests) == greedy
    assert_news_tell_all(news, requests)


def test_a_model_with_windows_equals_its_dense_self(model, greedy):
    windowed = tiny_model(replace(CONFIG, sliding_windows=(3, None)))
    wanted = [DenseOracle(windowed).continue_(prompt, 5) for prompt in PROMPTS[:2]]
    assert wanted != [tokens[:5] for tokens in greedy[:2]]
    requests = serve(make_engine(windowed), PROMPTS[:2], replace(GREEDY, max_tokens=5))
    assert tokens_of(requests) == wanted


@pytest.mark.parametrize(
    ("first", "second", "num_cached"),
    [(8, 8, 4), (8, 9, 8), (9, 9, 8), (3, 3, 0), (18, 10, 8), (10, 18, 8)],
)
def test_a_cached_prefix_is_not_computed_again(model, oracle, first, second, num_cached):
    """The last page of a fully cached prompt is computed again, for its last query."""
    engine = make_engine(model)
    text = PROMPTS[4]
    serve(engine, [text[:first]], SamplingParams(max_tokens=1))
    computed = engine.stats().computed_tokens
    (request,) = serve(engine, [text[:second]], SamplingParams(max_tokens=4))
    assert request.num_cached_tokens == num_cached
    assert engine.stats().computed_tokens - computed == second - num_cached + 3
    assert tokens_of([request]) == [oracle.continue_(text[:second], 4)]


def test_generated_tokens_are_found_in_the_cache_too(model, oracle):
    engine = make_engine(model)
    (first,) = serve(engine, [PROMPTS[1]], SamplingParams(max_tokens=8))
    (tokens,) = tokens_of([first])
    prompt = [*PROMPTS[1], *tokens]  # 17 tokens; the K/V of the last are not stored
    (second,) = serve(engine, [prompt], SamplingParams(max_tokens=3))
    assert second.num_cached_tokens == 16
    assert tokens_of([second]) == [oracle.continue_(prompt, 3)]


def test_a_running_request_shares_the_prompt_it_has_computed(model, greedy):
    engine = make_engine(model)
    first = engine.submit(PROMPTS[4], GREEDY)
    for _ in range(4):
        engine.step()
    second = engine.submit(PROMPTS[4], GREEDY)
    run(engine)
    assert second.num_cached_tokens == 16
    assert tokens_of([first, second]) == [greedy[4]] * 2


def test_the_cache_gives_its_pages_back(model):
    engine = make_engine(model)
    serve(engine, PROMPTS, GREEDY)
    assert engine._cache.num_evictable > 5
    engine._scheduler._settlement.released += engine._cache.clear()
    assert_nothing_is_left(engine)
    assert int(engine.table.num_free) == engine.config.num_pages


@pytest.fixture
def compilations():
    """A list with an entry for every compilation so far."""
    seen: list[str] = []

    def listen(event: str, duration: float, **_: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


def test_nothing_is_compiled_after_warmup(model, compilations):
    engine = make_engine(model)
    engine.warmup()
    assert engine.stats().compilations == 6 and engine.idle
    jax.jit(lambda x: x + len(PROMPTS))(1)
    assert compilations, "the test must notice a compilation"
    del compilations[:]
    load = [
        *(SamplingParams(max_tokens=n) for n in (1, 5, NEW, NEW)),
        SamplingParams(max_tokens=9, n=3, temperature=0.7),
        SamplingParams(max_tokens=9, temperature=0.7, top_k=3, top_p=0.9, min_p=0.1, seed=1),
        SamplingParams(max_tokens=5, best_of=3, temperature=1.0),
        SamplingParams(max_tokens=5, beam_width=2),
        SamplingParams(max_tokens=5, logprobs=20, stop_tokens=range(10)),
    ]
    for params in load:
        for prompt in PROMPTS:
            engine.submit(prompt, params)
        engine.step()
    engine.abort(engine.submit([1], GREEDY))
    run(engine)
    stats = engine.stats()
    assert stats.num_preemptions > 0 and stats.cached_tokens > 0
    assert not compilations and stats.compilations == 6


def test_greedy_warmup_compiles_less_and_needs_an_idle_engine(model):
    engine = make_engine(model)
    engine.warmup([GREEDY])
    assert engine.stats().compilations == 2
    engine.submit([1], GREEDY)
    with pytest.raises(ValueError, match="warmup must run while the engine is idle"):
        engine.warmup()
    run(engine)


def test_a_sequence_may_be_shorter_than_max_len_and_larger_than_the_pool(model):
    engine = make_engine(model, num_pages=8, max_len=64)
    with pytest.raises(ValueError, match="may need 11 pages, of num_pages=8"):
        engine.submit([1] * 30, GREEDY)


def test_the_longest_sequence_and_the_whole_pool_can_be_used(model, oracle):
    (request,) = serve(make_engine(model), [[5]], SamplingParams(max_tokens=63))
    assert tokens_of([request]) == [oracle.continue_([5], 63)]


def test_the_last_token_needs_no_page(model, oracle):
    (request,) = serve(
        make_engine(model, num_pages=4, max_len=17), [[5]], SamplingParams(max_tokens=16)
    )
    assert tokens_of([request]) == [oracle.continue_([5], 16)]


@pytest.mark.parametrize(("watermark", "num_running"), [(0.0, 2), (0.25, 2), (0.5, 1)])
def test_the_watermark_is_a_share_of_the_pool(model, watermark, num_running):
    engine = make_engine(model, num_pages=8, watermark=watermark)
    requests = [engine.submit([1] * length, SamplingParams(max_tokens=1)) for length in (5, 9)]
    engine.step()  # two pages; three more only if the watermark stays free
    assert engine.stats().num_running == num_running
    run(engine)
    assert all(request.finished for request in requests)


def test_the_next_step_is_dispatched_before_the_last_is_read(model, monkeypatch):
    engine = make_engine(model)
    log: list[str] = []
    worker = engine._worker
    for name in ("dispatch", "read"):
        call = getattr(worker, name)
        monkeypatch.setattr(worker, name, lambda x, c=call, n=name: log.append(n) or c(x))
    engine.submit([1, 2, 3], SamplingParams(max_tokens=4))
    run(engine, check=False)
    assert log == ["dispatch", *["dispatch", "read"] * 3, "dispatch", "read"]
    assert engine.stats().num_steps == 4  # the last plan was empty


def test_a_stop_read_one_step_late_adds_no_token(model, greedy):
    stop = greedy[1][5]
    tokens = greedy[1][: greedy[1].index(stop)]
    engine = make_engine(model)
    requests = serve(engine, PROMPTS[:2], replace(GREEDY, stop_tokens=[stop]))
    assert tokens_of(requests)[1] == tokens and reasons_of(requests)[1] == "stopped"
    assert engine.stats().generated_tokens == sum(map(len, tokens_of(requests)))

    graphdef, params = nnx.split(model)
    with_end = nnx.merge(graphdef, params)
    with_end.config = replace(CONFIG, eos_token_ids=(stop,))
    (request,) = serve(make_engine(with_end), [PROMPTS[1]], GREEDY)
    assert tokens_of([request]) == [tokens]
    requests = serve(make_engine(with_end), [PROMPTS[1]], replace(GREEDY, stop_tokens=()))
    assert tokens_of(requests) == [greedy[1]]


def test_several_streams_can_be_read_in_turns(model, greedy):
    engine = make_engine(model)
    requests = [engine.submit(prompt, GREEDY) for prompt in PROMPTS]
    streams = {request: engine.stream(request) for request in requests}
    news = []
    while streams:
        for request, stream in list(streams.items()):
            one = next(stream, None)
            if one is None:
                del streams[request]
            else:
                news.append(one)
    assert tokens_of(requests) == greedy
    assert_news_tell_all(news, requests)
    assert len({one.request for one in news[:3]}) == 3
    late = list(engine.stream(requests[0]))  # the stream of a finished request is one piece
    assert [one.tokens for one in late] == [greedy[0]]


def test_generate_serves_all_or_none(model, greedy, capsys):
    engine = make_engine(model)
    waiting = engine.submit(PROMPTS[2], replace(GREEDY, max_tokens=2))
    each = [replace(GREEDY, max_tokens=1 + i) for i in range(len(PROMPTS))]
    requests = engine.generate(PROMPTS, each)
    assert tokens_of(requests) == [tokens[: 1 + i] for i, tokens in enumerate(greedy)]
    assert "5/5" in capsys.readouterr().err
    assert waiting.finished
    assert tokens_of(engine.generate(PROMPTS[:1], GREEDY, progress=False)) == greedy[:1]
    assert capsys.readouterr().err == "" and engine.generate([], GREEDY, progress=False) == []
    with pytest.raises(ValueError, match="prompt 1: the prompt is empty"):
        engine.generate([[1], []], GREEDY)
    with pytest.raises(ValueError, match="2 params must be one, or one for each of 1"):
        engine.generate([[1]], each[:2])
    run(engine)
    assert engine.stats().num_aborted == 1


def test_stats_count_what_was_done(model):
    engine = make_engine(model, prefix_caching=False)
    requests = serve(engine, PROMPTS[:3], GREEDY)  # 15 pages
    stats = engine.stats()
    lengths = [len(request.prompt) for request in requests]
    assert (stats.num_queued, stats.num_running, stats.num_finished) == (0, 0, 3)
    assert stats.prompt_tokens == sum(lengths) and stats.generated_tokens == 3 * NEW
    assert stats.computed_tokens == sum(lengths) + 3 * (NEW - 1)
    assert stats.num_pages == engine.config.num_pages
    assert stats.cache_hit_rate == stats.cached_tokens == 0
    held = sum(-(-(length + NEW - 1) // 4) for length in lengths)
    assert stats.num_free_pages == stats.num_pages - held  # as of the last step
    assert stats.peak_pages_used == held / stats.num_pages
    assert 0 < stats.pages_used <= stats.peak_pages_used
    assert 0.5 < stats.pool_utilization <= 1
    assert 0 < stats.ttft_p50 <= stats.ttft_p99 <= stats.latency_p99
    assert 0 < stats.tpot_p50 <= stats.tpot_p99
    assert all(r.arrival < r.first_token_time < r.finish_time for r in requests)


def test_the_engine_uses_the_given_weights(model, greedy):
    params = nnx.state(model)
    other = nnx.merge(nnx.graphdef(model), jax.tree.map(np.zeros_like, params))
    engine = Engine(other, params, None, EngineConfig(**SIZES))
    assert tokens_of(serve(engine, PROMPTS[:1], GREEDY)) == greedy[:1]


def fail(*_: object) -> None:
    raise RuntimeError("the device is gone")


@pytest.mark.parametrize("call", ["dispatch", "read", "settle"])
def test_a_failed_step_ends_every_request_with_the_reason(model, monkeypatch, call):
    engine = make_engine(model)
    finished = engine.submit([1], SamplingParams(max_tokens=1))
    while not finished.finished:
        engine.step()
    load = [{}, {"n": 2}, {"best_of": 2}, {"beam_width": 2}, {"n": 4}]
    requests = [engine.submit(PROMPTS[1], replace(GREEDY, **params)) for params in load]
    for _ in range(4):
        engine.step()
    monkeypatch.setattr(engine._worker, call, fail)
    with pytest.raises(EngineDeadError, match="a step failed: the device is gone") as caught:
        engine.step()
    assert str(caught.value.__cause__) == "the device is gone"
    assert reasons_of([finished]) == ["max_tokens"] and finished.error is None
    for request in requests:
        assert request.finished and request.error == "the device is gone"
        assert len(request.completions) == request.params.n
        assert set(reasons_of([request])) == {"failed"}
    stats = engine.stats()
    assert (stats.num_finished, stats.num_failed) == (1, 5)
    for use in (
        engine.step,
        engine.check,
        engine.warmup,
        lambda: engine.submit([1], GREEDY),
        lambda: engine.abort(requests[0]),
        lambda: engine.generate([[1]], GREEDY),
    ):
        with pytest.raises(EngineDeadError, match="the engine is dead: the device is gone"):
            use()
    assert [one.finish_reason for one in engine.stream(requests[0])] == ["failed"]
    assert engine.idle


def test_an_interrupt_stays_an_interrupt(model, monkeypatch):
    engine = make_engine(model)
    request = engine.submit([1], GREEDY)
    engine.step()

    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine._worker, "read", interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert reasons_of([request]) == ["failed"] and request.error == "KeyboardInterrupt"
    with pytest.raises(EngineDeadError):
        engine.step()


def test_a_wrong_page_count_on_the_host_is_an_error(model):
    """The host counts free pages itself; a wrong count must never give wrong tokens."""
    engine = make_engine(model)
    for prompt in PROMPTS:
        engine.submit(prompt, GREEDY)
    engine.step()
    engine._scheduler.num_free += 100
    engine._scheduler.observe = lambda *_: None
    with pytest.raises(EngineDeadError, match="lacks pages or rows"):
        run(engine, check=False)


def test_a_failed_fork_or_attach_is_reported():
    sizes = dict(num_pages=4, page_size=4, max_seqs=3, pages_per_seq=2)
    state = create_engine_state(CONFIG, **sizes, dtype="float32")
    assert fork(state, np.int32([0, 3]), np.int32([1, 3])).sound  # an empty row, and padding
    state = create_engine_state(CONFIG, **sizes, dtype="float32")
    assert not fork(state, np.int32([0, 3]), np.int32([0, 3])).sound
    nothing = dict(retained=np.int32([4]), freed=np.zeros(3, bool), released=np.int32([4]))
    for row, page, sound in [(3, 4, True), (0, 2, False)]:  # padding; a page that is free
        changes = Changes(**nothing, rows=np.int32([row]), pages=np.int32([[page, 4]]))
        table = pp.create_page_table(**sizes)
        assert settle(table, jnp.asarray(True), changes)[1] == sound
