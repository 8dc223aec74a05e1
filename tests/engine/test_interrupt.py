"""Ctrl-C in a call of the engine: the call is completed, and the engine goes on."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from pallas_paged.engine import EngineDeadError
from pallas_paged.engine.device.processes import interrupts_held
from tests.support.engine_calls import (
    PROMPTS,
    assert_deltas_add_up,
    greedy,
    make_engine,
    run,
    submit,
    tokens_of,
    weights,
)


def press_ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@contextmanager
def ctrl_c_in(owner, method, at=1):
    """Press Ctrl-C before the call of this number; yield a list that gets the calls."""
    call, calls = getattr(owner, method), []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == at:
            press_ctrl_c()
        return call(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, method, interrupted)
        yield calls


@pytest.mark.parametrize("method", ["read", "dispatch", "update_table"])
@pytest.mark.parametrize("at", [1, 3])
def test_an_interrupted_step_ends_and_its_outputs_are_in_the_next(greedy_tokens, method, at):
    engine = make_engine()
    requests = submit(engine, PROMPTS, greedy())
    deltas, interrupts = [], 0
    with ctrl_c_in(engine.replicas[0].runner, method, at) as calls:
        while not engine.idle:
            try:
                deltas += engine.step()
                engine.check()
            except KeyboardInterrupt:
                interrupts += 1
                assert len(calls) >= at and engine.replicas[0].calls_in_flight <= 1
    assert interrupts == 1
    assert tokens_of(requests) == greedy_tokens
    assert_deltas_add_up(deltas, requests)


@pytest.mark.parametrize(
    ("num_steps", "call", "interrupted", "num_aborted"),
    [
        (3, lambda x, _: x.generate(PROMPTS, greedy(), progress=False), "runner.read", 5),
        (1, lambda x, _: x.sleep(), "runner.read", 0),
        (3, lambda x, _: x.sleep(), "runner.update_table", 0),
        (3, lambda x, _: x.update_params(weights()), "weights.put", 0),
        (3, lambda x, request: x.abort(request), "scheduler.remove", 1),
        (0, lambda x, request: x.abort(request), "scheduler.remove", 1),
    ],
    ids=["generate", "drain", "sleep", "update_params", "abort", "abort_waiting"],
)
def test_an_interrupted_call_is_complete_and_the_engine_goes_on(
    greedy_tokens, num_steps, call, interrupted, num_aborted
):
    engine = make_engine()
    first, *others = submit(engine, PROMPTS, greedy(n=2))
    for _ in range(num_steps):
        engine.step()
    owner, method = interrupted.split(".")
    owner = getattr(engine.replicas[0], owner)
    with ctrl_c_in(owner, method), pytest.raises(KeyboardInterrupt):
        call(engine, first)
    engine.wake_up()
    run(engine)
    assert first.finished and engine.stats().num_aborted == num_aborted
    assert tokens_of(others) == [tokens for tokens in greedy_tokens[1:] for _ in range(2)]


def test_a_ctrl_c_that_comes_before_it_is_held_back_ends_nothing(greedy_tokens, monkeypatch):
    engine = make_engine()
    requests = submit(engine, PROMPTS, greedy())
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(signal, "signal", lambda *_: press_ctrl_c())
        engine.step()
    run(engine)
    assert tokens_of(requests) == greedy_tokens


def test_a_second_ctrl_c_in_a_step_ends_the_engine(monkeypatch):
    """The step is not completed, so later tokens would be wrong."""
    engine = make_engine()
    request = engine.submit([1, 2, 3], greedy(max_tokens=9))
    for _ in range(2):
        engine.step()
    read_interrupted = lambda *_: (press_ctrl_c(), press_ctrl_c())  # noqa: E731
    monkeypatch.setattr(engine.replicas[0].runner, "read", read_interrupted)
    with pytest.raises(KeyboardInterrupt):
        while True:
            engine.step()
    assert request.outputs[0].finish_reason == "error"
    with pytest.raises(EngineDeadError, match="KeyboardInterrupt"):
        engine.step()


def test_a_second_interrupt_and_an_error_are_raised_before_a_held_one():
    reached = []
    with pytest.raises(KeyboardInterrupt), interrupts_held():
        press_ctrl_c()
        reached.append(1)
        press_ctrl_c()
        reached.append(2)
    assert reached == [1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(ValueError, match="first"), interrupts_held():
        press_ctrl_c()
        raise ValueError("first")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_handlers_of_others_and_other_threads_are_left_alone():
    def handler_while_held():
        with interrupts_held():
            return signal.getsignal(signal.SIGINT)

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(handler_while_held).result() is signal.default_int_handler
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert handler_while_held() is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
