"""The life of an `AsyncEngine`: its thread, sleep, shutdown, death, and closed event loops."""

import asyncio
import contextlib
import subprocess
import sys
import threading
import time

import pytest

from pallas_paged.engine import AsyncEngine, EngineDeadError
from tests.support.async_calls import Gate, alone, collect
from tests.support.engine_calls import PROMPTS, greedy, make_engine, reasons_of, weights
from tests.support.event_loops import SECONDS, in_loop, until

LONG = 50  # tokens that take many steps


@in_loop
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
@in_loop
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
    assert reasons_of([await one.complete() for one in streams]) == ["abort"] * len(streams)
    assert inner.stats().num_aborted == len(streams)


@pytest.mark.usefixtures("watchdog")
@in_loop
async def test_a_dead_engine_reaches_all_that_wait(caplog):
    inner = make_engine()
    gate = Gate(inner)
    gate.let(4)

    def read(*_):
        raise OSError("the device is lost")

    async with AsyncEngine(inner) as engine:
        streams = [engine.submit(prompt, greedy(max_tokens=LONG)) for prompt in [[1], [2], [3]]]
        waiting = collect(streams[0]), streams[1].complete(), asyncio.to_thread(list, streams[2])
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


@pytest.mark.parametrize("call", ["sleep", "update_params"])
@pytest.mark.usefixtures("watchdog")
@in_loop
async def test_an_engine_that_dies_between_steps_reaches_all_that_wait(call, caplog):
    inner = make_engine()
    gate = Gate(inner)
    gate.let(2)

    def drain():
        raise OSError("the device is lost")

    async with AsyncEngine(inner) as engine:
        reading = asyncio.create_task(engine.submit([1], greedy(max_tokens=LONG)).complete())
        await until(gate.held.is_set)
        inner.replicas.drain = drain
        args = [weights()] if call == "update_params" else []
        dying = asyncio.create_task(getattr(engine, call)(*args))
        await asyncio.sleep(0.05)
        gate.let(1)
        for error in await asyncio.gather(reading, dying, return_exceptions=True):
            assert isinstance(error, EngineDeadError) and isinstance(error.__cause__, OSError)
    assert "the device is lost" in caplog.text


@in_loop
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


@in_loop
async def test_the_idle_thread_sleeps(engine):
    async def cpu_seconds():
        before = time.clock_gettime(clock)
        await asyncio.sleep(0.3)
        return time.clock_gettime(clock) - before

    await collect(engine.generate([1], greedy()))
    *_, thread = (one for one in threading.enumerate() if one.name == "engine")  # the newest
    clock = time.pthread_getcpuclockid(thread.ident)
    assert await cpu_seconds() < 0.01
    await engine.sleep()
    waiting = asyncio.create_task(collect(engine.generate([1], greedy())))
    await asyncio.sleep(0.05)
    assert await cpu_seconds() < 0.01
    await engine.wake_up()
    await waiting


@pytest.mark.parametrize("drain", [True, False])
@in_loop
async def test_requests_wait_while_the_engine_sleeps(engine, inner, drain):
    tasks = [asyncio.create_task(collect(engine.generate(p, greedy()))) for p in PROMPTS]
    await asyncio.sleep(0.01)
    await engine.sleep()
    aborted = engine.submit([1, 2], greedy(), request_id="aborted")
    await engine.abort("aborted")
    assert [one.finished async for one in aborted] == [True]
    await engine.wake_up()
    assert await asyncio.gather(*tasks) == [alone(p, greedy()) for p in PROMPTS]
    await engine.sleep()
    last = engine.submit(PROMPTS[0], greedy())
    await engine.shutdown(drain)
    assert reasons_of([await last.complete()]) == ["length" if drain else "abort"]
    assert inner.is_sleeping == (not drain)


@in_loop
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


@pytest.mark.cpu_budget(5)  # a process of its own
def test_a_program_that_does_not_shut_down_ends():
    program = """
from pallas_paged.engine import AsyncEngine
from tests.support.engine_calls import greedy, make_engine
engine = AsyncEngine(make_engine())
engine.start()
print(len(next(iter(engine.submit([1, 2, 3], greedy(max_tokens=50)))).outputs))
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
