"""AsyncEngine: clients in many threads and event loops, which leave when they like."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import functools
import gc
import random
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from pallas_paged.engine import AsyncEngine, EngineDeadError
from tests.support.engine_calls import (
    PROMPTS,
    NumberTokenizer,
    assert_deltas_add_up,
    assert_every_page_is_free,
    greedy,
    make_engine,
    reasons_of,
    sampling,
    serve,
    steps_of,
    tokens_of,
    weights,
)
from tests.support.soak import result

WATCHDOG_SECONDS = 120
LONG = 50  # tokens that take many steps
WAYS = ("abort", "close", "cancel", "drop")


def run(coroutine):
    """Run a coroutine in a new event loop, within a time limit."""
    return asyncio.run(asyncio.wait_for(coroutine, WATCHDOG_SECONDS))


def in_event_loop(test):
    """Makes a test of a coroutine."""

    @functools.wraps(test)
    def run_test(**fixtures):
        run(test(**fixtures))

    return run_test


class Gate:
    """Holds the engine's thread before each step, until `let` allows some."""

    def __init__(self, engine):
        self._step, self._passes = engine.replicas.step, threading.Semaphore(0)
        self.held = threading.Event()  # the thread is at the gate
        engine.replicas.step = self._held_step

    def _held_step(self):
        if not self._passes.acquire(blocking=False):
            self.held.set()
            self._passes.acquire()
            self.held.clear()
        return self._step()

    def let(self, num_steps=10**4):
        if num_steps:
            self._passes.release(num_steps)


@pytest.fixture(autouse=True)
def _watchdog():
    """End the process with the stacks of all threads if a test hangs."""
    faulthandler.dump_traceback_later(2 * WATCHDOG_SECONDS, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def inner():
    """The engine within; no page is left in the end."""
    inner = make_engine(tokenizer=NumberTokenizer())
    yield inner
    inner.wake()
    assert_every_page_is_free(inner)


@pytest.fixture
def engine(inner):
    engine = AsyncEngine(inner)
    engine.start()
    yield engine
    run(engine.shutdown())


@pytest.fixture
def gate(inner):
    gate = Gate(inner)
    yield gate
    gate.let()


def alone(prompt, params):
    """The tokens of all completions of a request that has the engine for itself."""
    return tokens_of(serve(make_engine(), [prompt], params, check=False))


def merged(outputs):
    """The tokens of all completions of a request, from deltas that end once."""
    found = {}
    for output in outputs:
        found = {} if output.restarted else found
        for one in output.outputs:
            found.setdefault(one.index, []).extend(one.token_ids)
    assert [one.finished for one in outputs] == [False] * (len(outputs) - 1) + [True]
    return [found[index] for index in sorted(found)]


async def collect(outputs):
    return merged([one async for one in outputs])


async def until(condition):
    while not condition():
        await asyncio.sleep(0.001)


@pytest.mark.cpu_budget(7)  # compiles programs that later tests share
@in_event_loop
async def test_outputs_add_up_to_those_of_the_engine_at_once_late_or_whole(engine):
    params = sampling(n=2, logprobs=2, prompt_logprobs=1, stop_token_ids=[7])
    (expected,) = serve(make_engine(tokenizer=NumberTokenizer()), ["1 2 3"], params)
    request_id = expected.request_id
    deltas = [one async for one in engine.generate("1 2 3", params, request_id=request_id)]
    assert len(deltas) > 1 and deltas[-1].seed == params.seed
    assert (deltas[0].prompt, deltas[0].prompt_token_ids) == ("1 2 3", [1, 2, 3])
    assert_deltas_add_up(deltas, [expected])
    whole, late, late_whole = (engine.submit("1 2 3", params) for _ in range(3))
    assert result(await whole.whole()) == result(expected)
    await collect(engine.generate([4, 5], greedy(max_tokens=LONG)))
    assert result(await late_whole.whole()) == result(expected)
    assert [result(one) async for one in late] == [result(expected)]
    assert [one async for one in late] == []


@in_event_loop
async def test_two_consumers_share_the_outputs_of_a_stream(engine):
    stream = engine.submit([1, 2, 3], greedy())

    def consume():
        return [token for one in stream for token in one.outputs[0].token_ids]

    first, second = await asyncio.gather(*[asyncio.to_thread(consume) for _ in range(2)])
    assert sorted(first + second) == sorted(alone([1, 2, 3], greedy())[0])


@pytest.mark.parametrize(
    ("way", "num_steps"),
    [*zip(WAYS, (0, 1, 2, 3), strict=True), *zip(WAYS, (5, 4, 1, 0), strict=True)],
)
@in_event_loop
async def test_an_abort_after_any_number_of_steps_frees_the_pages(
    engine, inner, gate, way, num_steps
):
    """The prompt takes two steps. A fifth request waits for a slot, and is aborted in the queue."""
    gate.let(num_steps)
    streams = [engine.submit(PROMPTS[4], greedy(max_tokens=LONG - 10)) for _ in range(5)]
    await until(gate.held.is_set)
    if way == "abort":
        tasks = [asyncio.create_task(engine.abort(one.request_id)) for one in streams]
        gate.let()
        await asyncio.gather(*tasks)
        assert reasons_of([await one.whole() for one in streams]) == ["abort"] * 5
    elif way == "close":
        for stream in streams * 2:
            stream.close()
    elif way == "cancel":
        tasks = [asyncio.create_task(collect(one)) for one in streams]
        await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(one) for one in ended} == {asyncio.CancelledError}
    else:
        streams = None
        gc.collect()
    gate.let()
    await until(lambda: inner.idle)
    assert await collect(engine.generate([1, 2, 3], greedy())) == alone([1, 2, 3], greedy())
    assert (await engine.stats()).num_aborted == 5


@in_event_loop
async def test_a_stream_that_is_left_before_its_request_is_submitted_is_aborted(engine, gate):
    first = engine.submit([1], greedy())
    await until(gate.held.is_set)  # the thread takes no commands now
    engine.submit([2], greedy()).close()
    engine.generate([3], greedy())  # never iterated
    gate.let()
    await collect(first)
    stats = await engine.stats()
    assert (stats.num_finished, stats.num_aborted) == (1, 2)


@in_event_loop
async def test_the_id_of_an_aborted_request_can_be_used_at_once(engine, gate):
    gate.let(2)
    stream = engine.submit([1, 2, 3], greedy(max_tokens=LONG), request_id="same")
    await until(gate.held.is_set)
    aborting = asyncio.create_task(engine.abort("same"))
    await asyncio.sleep(0)
    gate.let(1)
    await aborting
    again = engine.submit([1, 2, 3], greedy(), request_id="same")
    gate.let()
    assert await collect(again) == alone([1, 2, 3], greedy())
    assert reasons_of([await stream.whole()]) == ["abort"]


@in_event_loop
async def test_bad_requests_are_refused_at_the_call_and_others_have_ids_of_their_own(engine):
    given = [engine.submit([1], greedy(), request_id=f"async-{n}") for n in range(3)]
    streams = [*given, *(engine.submit([1], greedy()) for _ in range(3))]
    assert len({stream.request_id for stream in streams}) == 6
    bad = dict(prompt=[40], params={"n": 1}, priority="high", request_id="async-0")
    for name, value in bad.items():
        for method in (engine.submit, engine.generate):
            with pytest.raises(ValueError, match=name):
                method(**dict(prompt=[1]) | {name: value})
    await asyncio.gather(*map(collect, streams))
    await collect(engine.submit([1], greedy(), request_id="async-0"))  # free again
    await engine.abort("async-0")
    await engine.abort("unknown")
    given[0].close()
    stats = await engine.stats()
    assert (stats.num_finished, stats.num_aborted) == (7, 0)


@in_event_loop
async def test_drain_serves_what_was_accepted_and_refuses_more(inner, gate):
    expected = [alone(prompt, greedy()) for prompt in PROMPTS]
    engine = AsyncEngine(inner)
    gate.let(2)
    with pytest.raises(RuntimeError, match="not running"):
        engine.submit([1])
    await engine.shutdown()  # does nothing before the start
    engine.start()
    with pytest.raises(RuntimeError, match="started"):
        engine.start()
    tasks = [asyncio.create_task(collect(engine.generate(p, greedy()))) for p in PROMPTS]
    await until(gate.held.is_set)
    end = asyncio.create_task(engine.shutdown())
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="shutting down"):
        engine.generate([1])
    with pytest.raises(RuntimeError, match="shutting down"):
        await engine.score([[1]], [[2]])
    gate.let()
    await end
    assert await asyncio.gather(*tasks) == expected
    with pytest.raises(RuntimeError, match="not running"):
        await engine.stats()
    async with engine:  # it can start again
        assert await collect(engine.generate(PROMPTS[0], greedy())) == expected[0]


@pytest.mark.parametrize("ends_in_error", [False, True])
@in_event_loop
async def test_shutdown_without_drain_aborts_all(inner, gate, ends_in_error):
    gate.let(4)
    with contextlib.suppress(ZeroDivisionError):
        async with AsyncEngine(inner) as engine:
            streams = [engine.submit(prompt, greedy()) for prompt in PROMPTS * 2]
            await until(gate.held.is_set)
            if ends_in_error:
                asyncio.get_running_loop().call_later(0.05, gate.let)
                raise ZeroDivisionError
            ends = []
            for drain in (True, False):
                ends.append(asyncio.create_task(engine.shutdown(drain)))
                await asyncio.sleep(0)
            gate.let()
            await asyncio.gather(*ends)
    assert reasons_of([await one.whole() for one in streams]) == ["abort"] * len(streams)
    assert inner.stats().num_aborted == len(streams)


@in_event_loop
async def test_a_dead_engine_reaches_all_that_wait(caplog):
    inner = make_engine()
    gate = Gate(inner)
    gate.let(4)

    def read(*_):
        raise OSError("the device is lost")

    async with AsyncEngine(inner) as engine:
        streams = [engine.submit(prompt, greedy(max_tokens=LONG)) for prompt in [[1], [2], [3]]]
        waiting = collect(streams[0]), streams[1].whole(), asyncio.to_thread(list, streams[2])
        tasks = [asyncio.create_task(one) for one in waiting]
        await until(gate.held.is_set)
        inner.replicas[0].runner.read = read
        late = [engine.score([[1, 2]], [[3]]), engine.update_params(None), engine.stats()]
        tasks += [asyncio.create_task(one) for one in late]
        await asyncio.sleep(0.05)
        gate.let()
        errors = await asyncio.gather(*tasks, return_exceptions=True)
        for error in errors:
            assert isinstance(error, EngineDeadError) and isinstance(error.__cause__, OSError)
        assert len({id(error) for error in errors}) == len(errors)
        for call in (engine.submit, engine.generate):
            with pytest.raises(EngineDeadError, match="lost"):
                call([1])
        for call in (engine.stats(), engine.sleep(), engine.score([[1]], [[2]])):
            with pytest.raises(EngineDeadError, match="lost"):
                await call
    with pytest.raises(EngineDeadError, match="lost"):
        engine.start()
    assert "the device is lost" in caplog.text


@in_event_loop
async def test_an_error_of_the_tokenizer_ends_only_its_request(engine, gate, monkeypatch):
    gate.let(1)
    stream = engine.submit([1], greedy())
    await until(gate.held.is_set)
    monkeypatch.setattr(NumberTokenizer, "broken", True)
    gate.let()
    output = await stream.whole()
    assert reasons_of([output]) == ["error"] and "the tables are lost" in output.error
    with pytest.raises(OSError, match="the tables are lost"):  # it begins with the prompt
        await collect(engine.generate([1], greedy()))
    assert await collect(engine.generate([1], greedy(detokenize=False))) == alone([1], greedy())


@in_event_loop
async def test_a_closed_event_loop_aborts_its_requests_and_no_other(engine, inner, gate):
    gate.let(3)
    other = asyncio.create_task(collect(engine.generate([1, 2, 3], greedy())))

    def open_and_close():
        loop = asyncio.new_event_loop()
        stream = engine.submit(PROMPTS[4], greedy(max_tokens=LONG - 10))
        tasks = [loop.create_task(one) for one in (collect(stream), engine.stats())]
        loop.run_until_complete(until(gate.held.is_set))
        loop.close()
        return tasks

    kept = await asyncio.to_thread(open_and_close)
    gate.let()
    assert await other == alone([1, 2, 3], greedy())
    await until(lambda: inner.idle)
    assert (await engine.stats()).num_aborted == 1
    for task in kept:
        task._log_destroy_pending = False


@in_event_loop
async def test_the_idle_thread_sleeps(engine):
    async def cpu_seconds():
        before = time.clock_gettime(clock)
        await asyncio.sleep(0.3)
        return time.clock_gettime(clock) - before

    await collect(engine.generate([1], greedy()))
    (thread,) = (one for one in threading.enumerate() if one.name == "engine")
    clock = time.pthread_getcpuclockid(thread.ident)
    assert await cpu_seconds() < 0.01
    await engine.sleep()
    waiting = asyncio.create_task(collect(engine.generate([1], greedy())))
    await asyncio.sleep(0.05)
    assert await cpu_seconds() < 0.01
    await engine.wake()
    await waiting


@in_event_loop
async def test_new_weights_restart_requests_whose_unread_outputs_are_not_void(engine, inner, gate):
    new, params = weights(seed=2), greedy(max_tokens=30)
    expected = tokens_of(serve(make_engine(params=new), [[1, 2, 3]], params))
    steps_of(inner, 1)

    async def deltas(stream):
        return [one async for one in stream]

    gate.let(8)
    read, unread = (engine.submit([1, 2, 3], params) for _ in range(2))
    reading = asyncio.create_task(deltas(read))
    await until(gate.held.is_set)
    await asyncio.sleep(0.05)
    updating = asyncio.create_task(engine.update_params(new, restart_running=True))
    await asyncio.sleep(0)
    gate.let()
    await updating
    for outputs, num_restarts in ((await reading, 1), (await deltas(unread), 0)):
        assert [one.restarted for one in outputs].count(True) == num_restarts
        assert not outputs[0].restarted and merged(outputs) == expected
    assert await collect(engine.generate([1, 2, 3], params)) == expected
    with pytest.raises(ValueError, match="structure"):
        await engine.update_params({"embed": new["embed"]})


@pytest.mark.parametrize("drain", [True, False])
@in_event_loop
async def test_requests_wait_while_the_engine_sleeps(engine, inner, drain):
    tasks = [asyncio.create_task(collect(engine.generate(p, greedy()))) for p in PROMPTS]
    await asyncio.sleep(0.01)
    await engine.sleep()
    aborted = engine.submit([1, 2], greedy(), request_id="aborted")
    await engine.abort("aborted")
    assert [one.finished async for one in aborted] == [True]
    await engine.wake()
    assert await asyncio.gather(*tasks) == [alone(p, greedy()) for p in PROMPTS]
    await engine.sleep()
    last = engine.submit(PROMPTS[0], greedy())
    await engine.shutdown(drain)
    assert reasons_of([await last.whole()]) == ["length" if drain else "abort"]
    assert inner.is_sleeping == (not drain)


@in_event_loop
async def test_scores_come_beside_other_requests(engine, inner):
    prompts = PROMPTS * 2
    completions = [[5, 6, 7], [], [8], [9] * 10, [1, 2], [3], [], [4], [5], [6]]
    other = asyncio.create_task(collect(engine.generate([1, 2, 3], greedy())))
    scores = await engine.score(prompts, completions)
    np.testing.assert_allclose(scores, make_engine().score(prompts, completions), atol=1e-4)
    assert await other == alone([1, 2, 3], greedy())
    with pytest.raises(ValueError, match="sequence 1"):
        await engine.score([[1], [40]], [[1], [1]])

    async def begin():
        scoring = asyncio.create_task(engine.score(prompts * 10, completions * 10))
        await asyncio.sleep(0.05)
        return scoring

    scoring = await begin()
    scoring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await scoring
    await until(lambda: inner.idle)
    scoring = await begin()
    await engine.shutdown(drain=False)
    with pytest.raises(RuntimeError, match="ended with 'abort'"):
        await scoring


@in_event_loop
async def test_calls_run_in_order_and_their_errors_reach_the_caller(engine, gate):
    await engine.warmup([greedy()])
    compilations = (await engine.stats()).compilations
    gate.let(1)
    stream = engine.submit([1, 2, 3], greedy())
    await until(gate.held.is_set)
    warmup = asyncio.create_task(engine.warmup())
    left = asyncio.create_task(engine.update_params("cancelled before it runs"))
    await asyncio.sleep(0.01)
    left.cancel()
    gate.let()
    with pytest.raises(ValueError, match="idle"):
        await warmup
    assert await collect(stream) == alone([1, 2, 3], greedy())
    await engine.reset_prefix_cache()
    stats = await engine.stats()
    assert (stats.num_finished, stats.num_cached_pages) == (1, 0)
    assert stats.compilations == compilations


def test_clients_that_leave_at_random_disturb_no_other(engine, inner):
    """Three event loops at once, on a pool too small for all of them."""
    choices = [greedy(), greedy(n=2), sampling(), sampling(n=3), sampling(best_of=3), greedy()]
    choices += [greedy(beam_width=2, n=2), sampling(logprobs=2, prompt_logprobs=1)]
    jobs = [(PROMPTS[i % 5], choices[i % 8]) for i in range(20)]
    reference, served = make_engine(), []
    wanted = [tokens_of(serve(reference, [prompt], params, check=False)) for prompt, params in jobs]

    async def client(seed):
        rng = random.Random(seed)
        await asyncio.sleep(rng.random() * 0.2)
        job = rng.randrange(len(jobs))
        stream = engine.submit(*jobs[job], priority=rng.randrange(3))
        match rng.choice(["leave", "leave thread", "cancel", "whole", "thread", "slow", "read"]):
            case "leave":
                async for _ in stream:
                    if rng.random() < 0.4:
                        break
            case "leave thread":
                await asyncio.to_thread(lambda: next(iter(stream)))
            case "cancel":
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(collect(stream), rng.random() * 0.1)
            case "whole":
                served.append((job, tokens_of([await stream.whole()])))
            case "thread":
                served.append((job, merged(await asyncio.to_thread(list, stream))))
            case way:
                await asyncio.sleep(0.05 * (way == "slow"))
                served.append((job, await collect(stream)))

    async def clients(first):
        await asyncio.gather(*map(client, range(first, first + 15)))

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda first: run(clients(first)), (0, 1000, 2000)))
    assert len(served) > 15 and all(tokens == wanted[job] for job, tokens in served)
    stats = run(engine.stats())
    assert stats.num_failed == stats.num_running == stats.num_waiting == 0
    assert stats.num_finished >= len(served) and stats.num_aborted > 0


@pytest.mark.cpu_budget(5)  # a process of its own
def test_a_program_that_does_not_shut_down_ends():
    program = (
        "from pallas_paged.engine import AsyncEngine\n"
        "from tests.support.engine_calls import greedy, make_engine\n"
        "engine = AsyncEngine(make_engine())\n"
        "engine.start()\n"
        "stream = engine.submit([1, 2, 3], greedy(max_tokens=50))\n"
        "print(len(next(iter(stream)).outputs))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=WATCHDOG_SECONDS
    )
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
