"""Requests that wait: without sequences, in order, and ended before they begin."""

from __future__ import annotations

import pytest

from pallas_paged.engine import EngineDeadError
from tests.support.engine_calls import (
    NumberTokenizer,
    assert_deltas_add_up,
    greedy,
    make_engine,
    reasons_of,
    run,
    serve,
    step,
    submit,
    tokens_of,
    weights,
)

PROMPTS = [[1 + number, 2, 3] for number in range(20)]


class CountingTokenizer(NumberTokenizer):
    num_decoded = 0

    def decode(self, token_ids):
        self.num_decoded += 1
        return super().decode(token_ids)


def test_requests_that_wait_have_no_sequences_and_ask_the_tokenizer_for_nothing():
    """Four run, and four more could take their slots."""
    tokenizer = CountingTokenizer()
    engine = make_engine(tokenizer=tokenizer)
    requests = submit(engine, PROMPTS, greedy(max_tokens=3))
    assert not tokenizer.num_decoded and engine.stats().num_waiting == 20
    step(engine)
    (replica,) = engine.replicas
    sizes = [len(x) for x in (replica.scheduler.running, replica.scheduler.waiting)]
    assert sizes == [4, 0] and [*replica.outputs.queue] == requests[4:]
    step(engine)
    assert len(replica.scheduler.waiting) == 4 and [*replica.outputs.queue] == requests[8:]
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting) == (4, 16)
    run(engine)
    starts = [request.start_time for request in requests]
    assert starts == sorted(starts) and reasons_of(requests) == ["length"] * 20


def test_an_urgent_request_passes_all_that_wait():
    engine = make_engine()
    waiting = submit(engine, PROMPTS, greedy(max_tokens=3))
    step(engine)
    late, urgent, first = (
        engine.submit([9, 9], greedy(max_tokens=3), priority=x) for x in (1, -1, -2)
    )
    run(engine)
    order = sorted([*waiting, late, urgent, first], key=lambda one: one.start_time)
    assert order == [*waiting[:4], first, urgent, *waiting[4:], late]


@pytest.mark.parametrize("kind", [{}, {"n": 3}, {"n": 2, "best_of": 3}, {"beam_width": 2}], ids=str)
def test_a_request_that_is_aborted_before_it_begins_ends_like_any_other(kind):
    engine = make_engine()
    served = submit(engine, PROMPTS[:5], greedy(max_tokens=3))
    first, last = submit(engine, PROMPTS[5:7], greedy(max_tokens=3, **kind))
    outputs = first.outputs
    engine.abort(first)
    deltas = step(engine)
    engine.abort(last)
    deltas += run(engine)
    assert_deltas_add_up(deltas, [*served, first, last])
    assert {*reasons_of([first, last])} == {"abort"} and not any(tokens_of([first, last]))
    assert first.params.ranks or first.outputs is outputs
    assert engine.stats().num_aborted == 2 and reasons_of(served) == ["length"] * 5


def test_requests_that_wait_are_served_after_a_sleep_and_new_weights():
    engine = make_engine()
    requests = submit(engine, PROMPTS, greedy(max_tokens=3))
    step(engine)
    engine.sleep()
    assert engine.stats().num_waiting == 20
    engine.wake_up()
    engine.update_params(weights(), restart_running=True)
    deltas = run(engine)
    assert_deltas_add_up(deltas, requests)
    assert tokens_of(requests) == tokens_of(serve(make_engine(), PROMPTS, greedy(max_tokens=3)))
    restarted = {one.request_id for one in deltas if one.restarted}
    assert restarted == {request.request_id for request in requests[:4]}


def test_requests_that_wait_end_with_an_engine_that_fails(monkeypatch):
    engine = make_engine()
    requests = submit(engine, PROMPTS, greedy(max_tokens=3))
    monkeypatch.setattr(engine.replicas[0].runner, "dispatch", lambda _: 1 / 0)
    with pytest.raises(EngineDeadError, match="division by zero"):
        engine.step()
    assert reasons_of(requests) == ["error"] * 20
    assert {request.error for request in requests} == {"division by zero"}
