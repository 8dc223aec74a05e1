"""Calls of several decode steps: how many they take, and the loop on the device."""

import re
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from pallas_paged.engine.device.batch import NOT_SAMPLED
from pallas_paged.engine.device.program import modes_for
from pallas_paged.engine.device.state import TableArrays
from pallas_paged.engine.schedule.calls import Decode, SchedulerOutput
from tests.support.engine_calls import (
    MANY_PAGES,
    MODEL,
    PROMPTS,
    assert_copies_no_pool,
    greedy,
    make_engine,
    run,
    serve,
    step,
    submit,
)
from tests.support.marks import slow


def watch_calls(engine, monkeypatch) -> list[SchedulerOutput]:
    calls: list[SchedulerOutput] = []
    runner = engine.replicas[0].runner
    dispatch = runner.dispatch

    def dispatch_and_note(scheduled):
        if (in_flight := dispatch(scheduled)) is not None:
            calls.append(scheduled)
        return in_flight

    monkeypatch.setattr(runner, "dispatch", dispatch_and_note)
    return calls


@pytest.mark.parametrize(
    ("seconds", "is_late", "sizes"),
    [
        (1.0, False, [1, 1, 1, 1, 1]),
        (0.004, False, [1, 1, 1, 2, 2]),
        (0.002, False, [1, 1, 1, 5, 5]),
        (1e-9, False, [1, 1, 1, 8, 8]),  # num_scheduler_steps
        (0.0, False, [1, 1, 1, 8, 8]),
        (1.0, True, [1, 1, 1, 2, 4, 8, 8]),  # the device waited for the host
    ],
)
def test_the_number_of_steps_follows_the_time_of_a_step(monkeypatch, seconds, is_late, sizes):
    engine = make_engine()
    calls, read = watch_calls(engine, monkeypatch), []

    def clock() -> float:
        read.append(calls[len(read)].num_steps)
        return seconds * sum(read)

    monkeypatch.setattr(
        "pallas_paged.engine.replica.replica.time", SimpleNamespace(perf_counter=clock)
    )
    monkeypatch.setattr(type(engine.table.num_free), "is_ready", lambda self: is_late)
    serve(engine, PROMPTS[:1], greedy(max_tokens=40), check=False)
    assert [call.num_steps for call in calls][: len(sizes)] == sizes


def test_rows_that_end_do_not_shorten_calls_but_a_request_that_waits_for_a_slot_does(monkeypatch):
    engine = make_engine(num_steps=8)
    serve(engine, PROMPTS[2:4] * 2, [greedy(max_tokens=n, ignore_eos=True) for n in (6, 8, 11, 18)])
    stats = engine.stats()
    assert stats.num_calls == 1 + 3 and stats.num_steps == 1 + 17
    engine = make_engine(num_steps=8)
    calls = watch_calls(engine, monkeypatch)
    *_, last = submit(engine, PROMPTS[3:4] * 5, [greedy(max_tokens=n) for n in (9, 9, 9, 9, 20)])
    while last.start_time is None:
        step(engine)
        assert {call.num_steps for call in calls} == {1}
    run(engine)
    assert max(call.num_steps for call in calls) == 8


# On the device: calls that the scheduler would not make.


PAIR = [[1, 2, 3, 4], [5, 6, 7, 8]]


def started(max_tokens: list[int], num_cached: int = 0):
    """A replica whose requests of PAIR are prefilled, with nothing in flight and cached pages."""
    engine = make_engine(num_steps=1)
    if num_cached:
        serve(engine, [[9] * 4 * num_cached], greedy(max_tokens=1))
    submit(engine, PAIR, [greedy(max_tokens=n) for n in max_tokens])
    engine.step()
    replica = engine.replicas[0]
    replica.drain()
    return replica


def call(replica, num_steps):
    """Run decode steps on the device without the scheduler; return the tokens [K, R]."""
    decodes = [Decode(sequence=one, num_tokens=num_steps) for one in replica.scheduler.running]
    nothing = dict(attachments=[], forks=[], resumed=[], chunks=[])
    scheduled = SchedulerOutput(**nothing, decodes=decodes, num_steps=num_steps)
    output = replica.runner.dispatch(scheduled)
    return np.asarray(output.token_ids), output


def test_the_loop_runs_as_many_steps_as_asked_or_until_its_last_row_has_ended(oracle):
    tokens, output = call(started([20, 20]), 5)
    assert tokens.shape == (8, 4) and output.packed[-1] == 1  # valid
    for row, prompt in enumerate(PAIR):
        assert tokens[:5, row].tolist() == oracle.continue_(prompt, 6)[1:]
    assert (tokens[5:] == NOT_SAMPLED).all() and (tokens[:, 2:] == NOT_SAMPLED).all()
    assert output.packed[-2] == 16 - 2 * 3  # free pages
    replica = started([20, 4])
    tokens = np.concatenate([call(replica, 8)[0], call(replica, 8)[0]])
    assert tokens[:, 0].tolist() == oracle.continue_(PAIR[0], 17)[1:]
    assert (tokens[:, 1] != NOT_SAMPLED).tolist() == [True] * 3 + [False] * 13
    tokens, output = call(replica, 8)
    assert (tokens[:, 0] != NOT_SAMPLED).tolist() == [True] * 3 + [False] * 5
    slots = np.reshape(output.packed[:-2], tokens.shape)
    assert (slots[3:] == 0).all()  # as before the loop


def test_the_loop_ends_when_the_pages_do(oracle):
    """Each row holds one page; one of two has a page for its next token, for four steps."""
    replica = started([8, 8], num_cached=13)
    tokens, output = call(replica, 8)
    served = tokens[0] != NOT_SAMPLED
    assert served.sum() == 1 and (tokens[1:] == NOT_SAMPLED).all()
    assert output.packed[-2:].tolist() == [0, 1]  # free pages, valid
    row = int(np.argmax(served))
    assert tokens[0, row] == oracle.continue_(PAIR[row], 2)[1]
    replica.update_table()
    replica.check()


def test_any_number_of_steps_runs_in_one_compiled_call(compilations):
    replica = started([20, 20])
    state = replica.runner.executor.state
    _, output = call(replica, 2)
    del compilations[:]
    for num_steps in (3, 0, 1, 8):
        call(replica, num_steps)
    assert not compilations
    # Outputs outlive the state, which is donated.
    assert state.table.num_free.is_deleted() and output.packed[-1] == 1


@pytest.mark.parametrize(
    ("call", "valid"),
    [
        (dict(slots=[4], pages=[16]), True),  # padding
        (dict(slots=[0], pages=[2]), False),  # a page that is free
        (dict(retained=[2]), False),
        (dict(src=[0, 4], dst=[1, 4]), True),  # an empty slot, and padding
        (dict(src=[0, 4], dst=[0, 4]), False),
    ],
    ids=str,
)
def test_a_failed_fork_attach_or_retain_is_noted(call, valid):
    def padded(name, padding, *shape):
        array = np.full(shape, padding, np.int32)
        array.flat[: len(call.get(name, []))] = call.get(name, [])
        return array

    executor = make_engine().replicas[0].runner.executor
    if "src" in call:
        executor.fork(padded("src", 4, 4), padded("dst", 4, 4))
    else:
        arrays = dict(retained=padded("retained", 16, 1024), released=padded("released", 16, 1024))
        arrays |= dict(slots=padded("slots", 4, 16), pages=padded("pages", 16, 16, 16))
        executor.update_table(TableArrays(**arrays, freed=np.zeros(4, bool)))
    assert bool(executor.state.valid) == valid


# The compiled programs.


@pytest.fixture(scope="module")
def looping():
    model = replace(MODEL, vocab_size=640)
    sizes = dict(num_pages=MANY_PAGES, max_num_seqs=16, max_num_batched_tokens=32)
    return make_engine(model, **sizes)


def test_a_compiled_step_copies_no_pool_and_the_condition_of_its_loop_computes(looping):
    assert_copies_no_pool(looping, (16, 32))
    # In a CUDA graph a loop waits for what its condition waits for, and for nothing without it.
    text = assert_copies_no_pool(looping, (16, 0)).as_text()
    loops = re.findall(r"\bwhile\(.*condition=%?([\w.\-]+).*step", text)
    assert loops
    for name in loops:
        (condition,) = re.findall(rf"\n%?{re.escape(name)} \(.*?\n}}", text, re.DOTALL)
        (root,) = re.findall(r"ROOT .*", condition)
        assert "get-tuple-element(" not in root


@pytest.mark.parametrize("mode", [*modes_for(None)[:-1:3], *slow(modes_for(None)[1:3])], ids=str)
def test_a_loop_holds_no_sort_no_branch_and_no_other_loop(looping, mode):
    """A CUDA graph can't hold a sort, and a loop or branch in its loop would give wrong tokens."""
    runner = looping.replicas[0].runner
    lowered = runner.executor.compilation(runner.empty_batch((16, 0), mode)).lower()
    if jax.default_backend() == "cpu":  # XLA makes loops of scatters there
        text, loop = lowered.as_text(), r"stablehlo\.while"
        breaks_graphs = r"stablehlo\.(?:sort|case|if)\b|chlo\.top_k|callback"
    else:
        text, loop = lowered.compile().as_text().lower(), r"\bwhile\("
        breaks_graphs = r"sort\(|topk|top_k\(|callback|conditional\("
    lines = text.splitlines()
    assert not [line for line in lines if re.search(breaks_graphs, line)]
    assert len([line for line in lines if re.search(loop, line)]) == 1
