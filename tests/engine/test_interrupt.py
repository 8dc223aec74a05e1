"""Ctrl-C in a step: the step is completed, and the engine goes on."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from pallas_paged.engine import EngineDeadError
from pallas_paged.engine.interrupt import interrupts_held
from tests.support.engine_calls import (
    PROMPTS,
    greedy,
    make_engine,
    reasons_of,
    run,
    submit,
    tokens_of,
    weights,
)


def press_ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("method", ["read", "dispatch", "update_table"])
@pytest.mark.parametrize("at", [1, 3])
def test_an_interrupted_engine_goes_on(monkeypatch, greedy_tokens, method, at):
    engine = make_engine()
    requests = submit(engine, PROMPTS, greedy())
    call, calls, interrupts = getattr(engine.replicas[0].runner, method), [], 0

    def interrupted(*args):
        calls.append(args)
        if len(calls) == at:
            press_ctrl_c()
        return call(*args)

    monkeypatch.setattr(engine.replicas[0].runner, method, interrupted)
    while not engine.idle:
        try:
            engine.step()
            engine.check()
        except KeyboardInterrupt:
            interrupts += 1
            assert len(calls) >= at, "the step is not complete"
            assert engine.replicas[0].core.calls_in_flight <= 1, "the step is not complete"
    assert interrupts == 1
    assert tokens_of(requests) == greedy_tokens


def test_outputs_of_an_interrupted_step_are_in_the_next(monkeypatch):
    engine = make_engine()
    request = engine.submit(PROMPTS[0], greedy())
    read = engine.replicas[0].runner.read
    monkeypatch.setattr(engine.replicas[0].runner, "read", lambda x: (press_ctrl_c(), read(x))[1])
    tokens = []
    while not engine.idle:
        try:
            for delta in engine.step():
                tokens += delta.outputs[0].token_ids
        except KeyboardInterrupt:
            continue
    assert tokens == request.outputs[0].token_ids and len(tokens) == 14


def test_an_interrupted_generate_leaves_the_engine_usable(monkeypatch, greedy_tokens):
    engine = make_engine()
    read = engine.replicas[0].runner.read
    with monkeypatch.context() as patch:
        patch.setattr(engine.replicas[0].runner, "read", lambda x: (press_ctrl_c(), read(x))[1])
        with pytest.raises(KeyboardInterrupt):
            engine.generate(PROMPTS, greedy(), progress=False)
    run(engine)
    assert tokens_of(engine.generate(PROMPTS, greedy(), progress=False)) == greedy_tokens


def test_an_interrupted_drain_leaves_the_engine_usable(monkeypatch, greedy_tokens):
    engine = make_engine()
    requests = submit(engine, PROMPTS[:2], greedy())
    engine.step()
    read = engine.replicas[0].runner.read
    with monkeypatch.context() as patch:
        patch.setattr(engine.replicas[0].runner, "read", lambda x: (press_ctrl_c(), read(x))[1])
        with pytest.raises(KeyboardInterrupt):
            engine.sleep()
    engine.sleep()
    engine.wake()
    run(engine)
    assert tokens_of(requests) == greedy_tokens[:2]


def test_a_second_interrupt_is_raised_at_once():
    reached = []
    with pytest.raises(KeyboardInterrupt), interrupts_held():
        press_ctrl_c()
        reached.append(1)
        press_ctrl_c()
        reached.append(2)
    assert reached == [1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_is_raised_before_a_held_interrupt():
    with pytest.raises(ValueError, match="first"), interrupts_held():
        press_ctrl_c()
        raise ValueError("first")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_handlers_of_others_and_other_threads_are_left_alone():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interrupts_held():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    seen = []

    def work():
        with interrupts_held():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]


def test_a_second_ctrl_c_in_a_step_ends_the_engine(monkeypatch):
    """The step is cut short, so later tokens would be wrong."""
    engine = make_engine()
    request = engine.submit([1, 2, 3], greedy(max_tokens=9))
    for _ in range(2):
        engine.step()
    monkeypatch.setattr(
        engine.replicas[0].runner, "read", lambda _: (press_ctrl_c(), press_ctrl_c())
    )
    with pytest.raises(KeyboardInterrupt):
        while True:
            engine.step()
    assert request.outputs[0].finish_reason == "error"
    with pytest.raises(EngineDeadError, match="KeyboardInterrupt"):
        engine.step()


def test_an_interrupted_generate_leaves_no_request(monkeypatch):
    engine = make_engine()
    other = engine.submit([1, 2, 3], greedy(max_tokens=9))
    read = engine.replicas[0].runner.read
    with monkeypatch.context() as patch:
        patch.setattr(engine.replicas[0].runner, "read", lambda x: (press_ctrl_c(), read(x))[1])
        with pytest.raises(KeyboardInterrupt):
            engine.generate(PROMPTS, greedy(max_tokens=9), progress=False)
    run(engine)
    assert other.outputs[0].finish_reason == "length"
    assert engine.stats().num_aborted == len(PROMPTS)


@pytest.mark.parametrize("call", ["sleep", "update_params"])
def test_ctrl_c_between_steps_waits_for_the_end_of_the_call(monkeypatch, greedy_tokens, call):
    engine = make_engine()
    requests = submit(engine, PROMPTS, greedy())
    for _ in range(3):
        engine.step()
    replica = engine.replicas[0]
    owner, method = (
        (replica.runner, "update_table") if call == "sleep" else (replica.weights, "put")
    )
    held = getattr(owner, method)
    with monkeypatch.context() as patch:
        patch.setattr(owner, method, lambda *args: (press_ctrl_c(), held(*args))[1])
        with pytest.raises(KeyboardInterrupt):
            getattr(engine, call)(*([weights()] if call == "update_params" else []))
    engine.wake()
    run(engine)
    assert tokens_of(requests) == greedy_tokens


@pytest.mark.parametrize("num_steps", [0, 3])
def test_an_interrupted_abort_is_complete(monkeypatch, greedy_tokens, num_steps):
    engine = make_engine()
    request, *others = submit(engine, PROMPTS, greedy(n=2))
    for _ in range(num_steps):
        engine.step()
    scheduler, presses = engine.replicas[0].scheduler, [press_ctrl_c]
    remove = scheduler.remove
    with monkeypatch.context() as patch:
        patch.setattr(scheduler, "remove", lambda x: (presses and presses.pop()(), remove(x)))
        with pytest.raises(KeyboardInterrupt):
            engine.abort(request)
    assert request.finished and reasons_of([request]) == ["abort"] * 2
    run(engine)
    assert tokens_of(others) == [tokens for tokens in greedy_tokens[1:] for _ in range(2)]
