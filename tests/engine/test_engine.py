"""The engine against generation without a cache: batches, prefixes, small pools, failures."""

import gc
import weakref
from dataclasses import replace

import numpy as np
import pytest

from pallas_paged.engine import EngineDeadError, SamplingParams
from pallas_paged.engine.device.program import modes_for
from pallas_paged.engine.sampling_params import SamplingMode
from pallas_paged.engine.schedule.kv_cache_manager import TableUpdate
from tests.support import raw
from tests.support.engine_calls import (
    MODEL,
    PROMPTS,
    assert_deltas_add_up,
    assert_nothing_is_left,
    greedy,
    make_engine,
    reasons_of,
    run,
    sampling,
    serve,
    step,
    submit,
    tokens_of,
    weights,
)
from tests.support.marks import slow
from tests.support.oracle import Oracle

NEW = 14


@pytest.mark.smoke
@pytest.mark.parametrize("caching", [False, True])
def test_requests_together_equal_the_oracle(greedy_tokens, caching):
    """The first four need 20 pages, the pool has 16: some are preempted and recomputed."""
    engine = make_engine(enable_prefix_caching=caching)
    requests = submit(engine, PROMPTS, greedy())
    assert_deltas_add_up(run(engine), requests)
    requests += serve(engine, PROMPTS[::-1], greedy())  # with the prefixes that are still cached
    assert tokens_of(requests) == greedy_tokens + greedy_tokens[::-1]
    assert set(reasons_of(requests)) == {"length"}
    stats = engine.stats()
    assert stats.num_preemptions == sum(request.num_preemptions for request in requests) > 0
    assert (stats.prefix_cache_hits > 0) == caching


def test_every_implementation_equals_the_oracle(implementation):
    model = replace(MODEL, num_layers=1)
    engine = make_engine(model, **raw.by(implementation), num_scheduler_steps=1)
    oracle = Oracle(model, weights(model))
    requests = serve(engine, PROMPTS[:2], greedy(max_tokens=3))
    assert tokens_of(requests) == [oracle.continue_(prompt, 3) for prompt in PROMPTS[:2]]


@pytest.mark.parametrize(
    ("first", "new", "second", "num_cached"),
    [
        *[(8, 1, 8, 4), (8, 1, 9, 8), (9, 1, 9, 8), (3, 1, 3, 0), (18, 1, 10, 8), (10, 1, 18, 8)],
        (9, 8, 17, 16),  # generated tokens, without the last, whose K/V are not stored
    ],
)
def test_a_cached_prefix_is_not_computed_again(
    oracle, greedy_tokens, first, new, second, num_cached
):
    """The last page of a fully cached prompt is computed again, for its last query."""
    engine = make_engine()
    text = [*PROMPTS[1], *greedy_tokens[1]]
    serve(engine, [text[:first]], greedy(max_tokens=new))
    computed = engine.stats().computed_tokens
    (request,) = serve(engine, [text[:second]], greedy(max_tokens=4))
    assert request.num_cached_tokens == num_cached
    assert engine.stats().computed_tokens - computed == second - num_cached + 3
    assert tokens_of([request]) == [oracle.continue_(text[:second], 4)]


def mixed_load() -> list[SamplingParams]:
    return [
        *(greedy(max_tokens=n) for n in (1, 5, NEW, NEW)),
        sampling(n=3, max_tokens=9),
        sampling(max_tokens=9, top_k=3, top_p=0.9, min_p=0.1),
        sampling(max_tokens=5, best_of=3),
        greedy(max_tokens=5, beam_width=2),
        greedy(max_tokens=5, logprobs=20, stop_token_ids=range(10)),
        sampling(max_tokens=9, logit_bias={1: 2}, min_tokens=3),
        greedy(max_tokens=2, prompt_logprobs=2),
    ]


@pytest.mark.parametrize(
    ("params", "load", "num_compiled"),
    [
        ([greedy(presence_penalty=1)], [greedy(n=2, presence_penalty=1), *[greedy()] * 4], 2),
        *slow([(None, mixed_load(), 9)]),  # 10 s
    ],
    ids=["penalties", "any"],
)
def test_nothing_is_compiled_after_warmup(compilations, params, load, num_compiled):
    engine = make_engine(replace(MODEL, vocab_size=41), modes=None)  # that no other test compiles
    engine.warmup(params)
    assert engine.stats().compilations == num_compiled and engine.idle
    assert compilations, "the test must notice a compilation"
    del compilations[:]
    for one in load:
        submit(engine, PROMPTS, one)
        step(engine)
    with pytest.raises(ValueError, match="warmup must run while the engine is idle"):
        engine.warmup()
    engine.abort(engine.submit([1], greedy()))
    run(engine)
    stats = engine.stats()
    assert stats.num_preemptions > 0 and stats.prefix_cache_hits > 0
    assert not compilations and stats.compilations == num_compiled


def test_modes_for_any_request_cover_each_request():
    modes = modes_for(None)
    for params in mixed_load():
        mode = SamplingMode.of(params)
        assert any(one.covers(mode) for one in modes)
        assert modes_for([params])[-1].covers(mode)


@pytest.mark.parametrize(("watermark", "num_running"), [(0.0, 2), (11.9 / 16, 2), (12 / 16, 1)])
def test_the_watermark_is_a_share_of_the_pool(watermark, num_running):
    engine = make_engine(watermark=watermark)
    requests = [engine.submit([1] * length, greedy(max_tokens=1)) for length in (9, 5)]
    engine.step()  # three pages of 16; two more only if the watermark stays free
    assert engine.stats().num_running == num_running
    run(engine)
    assert all(request.finished for request in requests)


def test_the_next_call_is_dispatched_before_the_last_is_read(monkeypatch):
    engine = make_engine(num_steps=1)
    log: list[str] = []
    runner = engine.replicas[0].runner
    for name in ("dispatch", "read"):
        call = getattr(runner, name)
        monkeypatch.setattr(runner, name, lambda *x, c=call, n=name: log.append(n) or c(*x))
    engine.submit([1, 2, 3], greedy(max_tokens=4))
    run(engine, check=False)
    assert log == ["dispatch", *["dispatch", "read"] * 3, "dispatch", "read"]
    assert engine.stats().num_steps == 4  # the last schedule was empty


@pytest.mark.smoke
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


def test_a_closed_stream_aborts_its_request_and_leaves_the_outputs_of_others_to_step(greedy_tokens):
    engine = make_engine()
    other = engine.submit(PROMPTS[0], greedy())
    for _ in engine.stream(request := engine.submit(PROMPTS[1], greedy())):
        break
    assert request.finished and reasons_of([request]) == ["abort"]
    read = engine.submit(PROMPTS[2], greedy(max_tokens=5))
    assert_deltas_add_up([*engine.stream(read)], [read])
    deltas = [one for one in run(engine) if one.request_id != request.request_id]
    assert_deltas_add_up(deltas, [other])
    assert tokens_of([other, read]) == [greedy_tokens[0], greedy_tokens[2][:5]]
    for _ in engine.stream(engine.submit(PROMPTS[1], greedy())):
        break
    stats = engine.stats()  # no call has reported the pages since
    assert stats.num_free_pages + stats.num_cached_pages == stats.num_pages


def test_generate_serves_all_beside_other_requests(greedy_tokens, capsys):
    engine = make_engine()
    waiting = engine.submit(PROMPTS[2], greedy(max_tokens=2))
    each = [greedy(max_tokens=1 + i) for i in range(len(PROMPTS))]
    outputs = engine.generate(PROMPTS, each)
    assert capsys.readouterr().err == "", "stderr is not a terminal"
    assert tokens_of(outputs) == [tokens[: 1 + i] for i, tokens in enumerate(greedy_tokens)]
    assert [one.prompt_token_ids for one in outputs] == PROMPTS and waiting.finished
    assert engine.generate([], greedy()) == []
    run(engine)
    assert engine.stats().num_finished == 1 + len(PROMPTS)


def test_stats_count_the_work_and_the_pages_of_running_requests():
    engine = make_engine(enable_prefix_caching=False)
    requests = serve(engine, PROMPTS[:3], greedy())  # 15 pages
    stats, lens = engine.stats(), [len(request.prompt_token_ids) for request in requests]
    assert (stats.num_waiting, stats.num_running, stats.num_finished) == (0, 0, 3)
    assert stats.prompt_tokens == sum(lens) and stats.generated_tokens == 3 * NEW
    assert stats.computed_tokens == sum(lens) + 3 * (NEW - 1)
    assert stats.num_free_pages == stats.num_pages == engine.num_pages
    assert stats.cache_hit_rate == stats.prefix_cache_hits == 0 < stats.num_calls <= stats.num_steps
    held = sum(-(-(length + NEW - 1) // 4) for length in lens)
    assert held / stats.num_pages >= stats.peak_pages_used >= stats.pages_used > 0.5
    assert 0.5 < stats.pool_utilization <= 1
    assert 0 < stats.ttft_p50 <= stats.ttft_p99 <= stats.latency_p99
    assert 0 < stats.tpot_p50 <= stats.tpot_p99
    assert all(r.arrival_time < r.first_token_time < r.finish_time for r in requests)
    engine = make_engine()
    serve(engine, [[1]], greedy(max_tokens=1))
    stats = engine.stats()
    assert stats.pages_used == stats.peak_pages_used == 1 / stats.num_pages
    assert stats.pool_utilization == 1 / engine.config.page_size
    serve(engine, [[1] * 8], greedy(max_tokens=1))
    serve(engine, [[2]], greedy(max_tokens=2))  # beside two cached pages
    stats = engine.stats()
    assert stats.num_cached_pages == 2 and stats.peak_pages_used <= 2 / stats.num_pages
    before = stats.generated_tokens
    (request,) = serve(engine, [[1, 2, 3]], greedy(max_tokens=5, beam_width=3, n=2))
    # Of beams only tokens that are returned count as generated.
    assert engine.stats().generated_tokens - before == sum(map(len, tokens_of([request])))


def fail(*_: object) -> None:
    raise RuntimeError("the device is gone")


@pytest.mark.parametrize("call", ["dispatch", "read", "update_table"])
def test_a_failed_step_ends_every_request_with_the_reason(monkeypatch, call):
    engine = make_engine()
    finished = engine.submit([1], greedy(max_tokens=1))
    while not finished.finished:
        engine.step()
    load = [{}, {"n": 2}, {"best_of": 2}, {"beam_width": 2}, {"n": 4}]
    requests = submit(engine, PROMPTS[1:2] * 5, [greedy(max_tokens=24, **one) for one in load])
    for _ in range(4):
        engine.step()
    monkeypatch.setattr(engine.replicas[0].runner, call, fail)
    with pytest.raises(EngineDeadError, match="a step failed: the device is gone") as caught:
        for _ in range(20):  # not every step updates the table
            engine.step()
    assert str(caught.value.__cause__) == "the device is gone"
    assert reasons_of([finished]) == ["length"] and finished.error is None
    assert [len(one.outputs) for one in requests] == [1, 2, 1, 1, 4]
    assert {one.error for one in requests} == {"the device is gone"}
    assert set(reasons_of(requests)) == {"error"} and all(one.finished for one in requests)
    stats = engine.stats()
    assert (stats.num_finished, stats.num_failed) == (1, 5)
    for method, *arguments in (
        *[["step"], ["check"], ["warmup"], ["sleep"], ["update_params", weights()]],
        *[["submit", [1]], ["abort", requests[0]], ["generate", [[1]]], ["score", [[1]], [[2]]]],
    ):
        with pytest.raises(EngineDeadError, match="the engine is dead: the device is gone"):
            getattr(engine, method)(*arguments)
    assert reasons_of(engine.stream(requests[0])) == ["error"]


def test_more_pages_than_one_update_holds_take_several(monkeypatch):
    """All are retained first; slots are freed once, and before any slot attaches pages."""
    runner, calls = make_engine().replicas[0].runner, []
    monkeypatch.setattr(runner.executor, "update_table", calls.append)
    retained, released = [*range(3000, 5500)], [*range(6000, 8100)]
    attachments = [(slot % 4, (100 + slot, 200 + slot)) for slot in range(20)]
    update = TableUpdate(retained=retained, freed=[1, 3], released=released)
    runner.update_table(update, attachments)

    def given(name, padding):
        return [[x for x in getattr(one, name).flat if x != padding] for one in calls]

    assert [one.retained.size + one.released.size for one in calls] == [2048] * 5
    pieces = [retained[:1024], retained[1024:2048], retained[2048:], [], []]
    assert given("retained", 16) == pieces
    assert given("released", 16) == [[], [], released[:1024], released[1024:2048], released[2048:]]
    assert [np.flatnonzero(one.freed).tolist() for one in calls] == [[], [], [1, 3], [], []]
    assert given("slots", 4) == [[], [], [0, 1, 2, 3] * 4, [0, 1, 2, 3], []]
    pages = [page for _, entry in attachments for page in entry]
    assert given("pages", 16) == [[], [], pages[:32], pages[32:], []]


def test_a_wrong_count_of_pages_on_the_host_is_an_error():
    """The host counts free pages itself; a wrong count must never give wrong tokens."""
    engine = make_engine()
    submit(engine, PROMPTS, greedy())
    engine.step()
    engine.replicas[0].scheduler.pages.num_free += 100
    engine.replicas[0].scheduler.pages.observe = lambda *_: None
    with pytest.raises(EngineDeadError, match="lacks pages or slots"):
        run(engine, check=False)


def test_two_engines_of_a_model_share_compiled_steps_and_nothing_else(greedy_tokens, compilations):
    engines = one, two = make_engine(), make_engine()
    serve(one, PROMPTS[:1], greedy())
    del compilations[:]
    requests = [one.submit(PROMPTS[0], greedy()), two.submit(PROMPTS[1], greedy())]
    while not (one.idle and two.idle):
        for engine in engines:
            if not engine.idle:
                step(engine)
    assert tokens_of(requests) == greedy_tokens[:2]
    assert_nothing_is_left(one)
    assert not compilations


def test_an_engine_keeps_no_request_after_its_end():
    engine = make_engine()
    requests = submit(engine, PROMPTS, [greedy(), greedy(n=2), greedy(), sampling(), greedy()])
    step(engine)
    engine.abort(requests[2])
    engine.update_params(weights(), restart_running=True)
    run(engine)
    remembered = [weakref.ref(request) for request in requests]
    del requests[:]
    gc.collect()
    assert not any(one() for one in remembered)


def test_default_parameters_are_those_of_vllm():
    request = make_engine().submit([1, 2])
    assert request.params == SamplingParams() and request.max_len == 64
