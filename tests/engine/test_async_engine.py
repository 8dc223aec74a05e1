"""AsyncEngine: clients in many threads and event loops, which leave when they like."""

import asyncio
import contextlib
import gc
import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.support.async_calls import alone, collect, merged
from tests.support.engine_calls import (
    PROMPTS,
    NumberTokenizer,
    assert_deltas_add_up,
    greedy,
    make_engine,
    reasons_of,
    sampling,
    serve,
    steps_of,
    tokens_of,
    weights,
)
from tests.support.event_loops import in_loop, run, until
from tests.support.soak import result

LONG = 50  # tokens that take many steps
WAYS = ("abort", "close", "cancel", "drop")


@pytest.mark.cpu_budget(7)  # compiles programs that later tests share
@in_loop
async def test_outputs_add_up_to_those_of_the_engine_at_once_late_or_whole(engine):
    params = sampling(n=2, logprobs=2, prompt_logprobs=1, stop_token_ids=[7])
    (expected,) = serve(make_engine(tokenizer=NumberTokenizer()), ["1 2 3"], params)
    request_id = expected.request_id
    deltas = [one async for one in engine.generate("1 2 3", params, request_id=request_id)]
    assert len(deltas) > 1 and deltas[-1].seed == params.seed
    assert (deltas[0].prompt, deltas[0].prompt_token_ids) == ("1 2 3", [1, 2, 3])
    assert_deltas_add_up(deltas, [expected])
    first, late, last = (engine.submit("1 2 3", params) for _ in range(3))
    assert result(await first.complete()) == result(expected)
    await collect(engine.generate([4, 5], greedy(max_tokens=LONG)))
    assert result(await last.complete()) == result(expected)
    assert [result(one) async for one in late] == [result(expected)]
    assert [one async for one in late] == []
    assert result(await late.complete()) == result(expected)
    async for one in (half := engine.submit("1 2 3", params)):
        if one.outputs:
            assert result(await half.complete()) == result(expected)


@pytest.mark.parametrize(("way", "num_steps"), [*zip(WAYS * 2, (0, 1, 2, 3, 5, 4, 1, 0))])  # noqa: B905
@in_loop
async def test_an_abort_after_any_step_frees_the_pages(engine, inner, gate, way, num_steps):
    """The prompt takes two steps. A fifth request waits for a slot, and is aborted in the queue."""
    gate.let(num_steps)
    streams = [engine.submit(PROMPTS[4], greedy(max_tokens=LONG - 10)) for _ in range(5)]
    await until(gate.held.is_set)
    if way == "abort":
        tasks = [asyncio.create_task(engine.abort(one.request_id)) for one in streams]
        gate.let()
        await asyncio.gather(*tasks)
        assert reasons_of([await one.complete() for one in streams]) == ["abort"] * 5
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


@in_loop
async def test_a_stream_that_is_left_before_its_request_is_submitted_is_aborted(engine, gate):
    first = engine.submit([1], greedy())
    await until(gate.held.is_set)  # the thread takes no commands now
    engine.submit([2], greedy()).close()
    engine.generate([3], greedy())  # never iterated
    gate.let()
    await collect(first)
    stats = await engine.stats()
    assert (stats.num_finished, stats.num_aborted) == (1, 2)


@in_loop
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


@in_loop
async def test_a_client_may_keep_the_outputs_of_its_request_from_the_first_moment(engine, gate):
    streams = [engine.submit([1, 2], greedy(n=n, max_tokens=3)) for n in (1, 2, 4)]
    outputs = [stream.request.outputs for stream in streams]
    gate.let()
    for stream, kept in zip(streams, outputs, strict=True):
        await stream.complete()
        assert stream.request.outputs is kept and {len(one.token_ids) for one in kept} == {3}


@in_loop
async def test_an_error_of_the_tokenizer_ends_only_its_request(engine, monkeypatch):
    monkeypatch.setattr(NumberTokenizer, "broken", True)
    output = await engine.submit([1], greedy()).complete()
    assert output.error == "OSError: the tables are lost"
    assert await collect(engine.generate([1], greedy(detokenize=False))) == alone([1], greedy())


@in_loop
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


@in_loop
async def test_scores_come_beside_other_requests(engine, inner):
    prompts = PROMPTS * 2
    completions = [[5, 6, 7], [], [8], [9] * 10, [1, 2], [3], [], [4], [5], [6]]
    other = asyncio.create_task(collect(engine.generate([1, 2, 3], greedy())))
    scores = await engine.score(prompts, completions)
    np.testing.assert_allclose(scores, make_engine().score(prompts, completions), atol=1e-4)
    assert await other == alone([1, 2, 3], greedy())
    with pytest.raises(ValueError, match="sequence 1"):
        await engine.score([[1], [40]], [[1], [1]])
    with pytest.raises(ValueError, match="the model reports no experts"):
        await engine.score([[1]], [[1]], [np.zeros((1, 1, 1), np.int32)])

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
        match rng.choice(["leave", "leave thread", "cancel", "complete", "thread", "slow", "read"]):
            case "leave":
                async for _ in stream:
                    if rng.random() < 0.4:
                        break
            case "leave thread":
                await asyncio.to_thread(lambda: next(iter(stream)))
            case "cancel":
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(collect(stream), rng.random() * 0.1)
            case "complete":
                served.append((job, tokens_of([await stream.complete()])))
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
