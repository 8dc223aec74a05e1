"""Data parallelism: replicas behind one queue."""

from __future__ import annotations

import asyncio

import jax
import numpy as np
import pytest

from pallas_paged.engine import AsyncEngine, Engine
from tests.support.devices import mesh
from tests.support.engine_calls import (
    PROMPTS,
    WIDE,
    assert_deltas_add_up,
    assert_every_page_is_free,
    greedy,
    make_engine,
    run,
    sample_as,
    sampling,
    serve,
    step,
    submit,
    tokens_of,
    weights,
)
from tests.support.marks import slow

pytestmark = pytest.mark.usefixtures("exact_products")
SIZES = dict(data_parallel=2, tensor_parallel=2)
NEW = weights(WIDE, seed=2)


def replicated(**sizes) -> Engine:
    sizes = SIZES | sizes
    mesh(sizes["data_parallel"] * sizes["tensor_parallel"])  # skips where there are fewer devices
    return make_engine(WIDE, weights(WIDE), **sizes)


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    return tokens_of(serve(make_engine(WIDE, weights(WIDE)), PROMPTS, greedy()))


@pytest.mark.parametrize("sizes", [(2, 2), *slow([((3, 1),)])], ids=str)
def test_replicas_share_requests_and_give_the_tokens_of_one(alone, sizes):
    engine = replicated(data_parallel=sizes[0], tensor_parallel=sizes[1])
    requests = submit(engine, PROMPTS, greedy())
    deltas = run(engine)
    assert tokens_of(requests) == alone
    assert_deltas_add_up(deltas, requests)
    each = [replica.stats() for replica in engine.replicas]
    assert len(each) == sizes[0] and all(one.num_finished for one in each)
    total = engine.stats()
    for name in ("num_finished", "generated_tokens", "num_calls", "num_pages", "pool_bytes"):
        assert getattr(total, name) == sum(getattr(one, name) for one in each)
    assert min(x.latency_p50 for x in each) <= total.latency_p50 <= max(x.latency_p99 for x in each)
    used = [replica.runner.table.seq_lens.sharding.device_set for replica in engine.replicas]
    assert sum(map(len, used)) == len(set.union(*used)) == sizes[0] * sizes[1]
    assert_every_page_is_free(engine)


def test_samples_and_beams_of_a_request_stay_on_one_replica():
    load = [sampling(n=3), greedy(beam_width=3, max_tokens=6), sampling(best_of=2)]
    engine = sample_as(replicated(), load)
    requests = submit(engine, PROMPTS[:3], load)
    while not engine.idle:
        step(engine)
        for replica in engine.replicas:
            running = {x.request for x in (*replica.scheduler.running, *replica.scheduler.waiting)}
            assert not running & {
                x.request
                for other in engine.replicas
                if other is not replica
                for x in (*other.scheduler.running, *other.scheduler.waiting)
            }
    wanted = serve(make_engine(WIDE, weights(WIDE)), PROMPTS[:3], load)
    assert tokens_of(requests) == tokens_of(wanted)


def test_a_request_goes_where_its_prefix_is_cached():
    engine = replicated()
    prefixes = [[*range(first, first + 12)] for first in (1, 20)]
    serve(engine, prefixes, greedy(max_tokens=2))
    sizes = [len(replica.cache) for replica in engine.replicas]
    assert sizes[0] == sizes[1] > 0
    for prefix in prefixes * 2:
        (request,) = serve(engine, [[*prefix, 5]], greedy(max_tokens=2))
        assert request.num_cached_tokens == 12
    engine.reset_prefix_cache()
    (request,) = serve(engine, [[*prefixes[0], 5]], greedy(max_tokens=2))
    assert request.num_cached_tokens == 0


def test_all_replicas_are_dispatched_before_one_is_read(monkeypatch):
    engine = replicated()
    log: list[tuple[str, int]] = []
    for index, replica in enumerate(engine.replicas):
        for name in ("dispatch", "read"):
            call = getattr(replica.runner, name)
            monkeypatch.setattr(
                replica.runner, name, lambda x, c=call, n=name, i=index: log.append((n, i)) or c(x)
            )
    submit(engine, PROMPTS[:2], greedy(max_tokens=3))
    engine.step()
    engine.step()
    assert log == [*[("dispatch", 0), ("dispatch", 1)] * 2, ("read", 0), ("read", 1)]
    run(engine)


def test_weights_sleep_and_aborts_reach_every_replica(alone):
    engine = replicated()
    requests = submit(engine, PROMPTS, greedy())
    step(engine)
    engine.sleep()
    engine.update_params(NEW, restart_running=True)
    engine.wake()
    step(engine)
    for request in requests[:2]:
        engine.abort(request)
    run(engine)
    wanted = tokens_of(serve(make_engine(WIDE, NEW), PROMPTS, greedy()))
    assert tokens_of(requests)[2:] == wanted[2:] != alone[2:]
    assert engine.stats().num_aborted == 2
    scores = engine.score(PROMPTS, wanted)
    np.testing.assert_allclose(scores, make_engine(WIDE, NEW).score(PROMPTS, wanted), atol=1e-4)
    assert_every_page_is_free(engine)


def test_nothing_compiles_after_the_warm_up_of_replicas(compilations):
    engine = replicated()
    engine.warmup([greedy()])
    del compilations[:]
    serve(engine, PROMPTS, greedy())
    assert not compilations and engine.stats().compilations == 2 * len(
        engine.replicas[0].runner.buckets.all()
    )


def test_clients_share_replicas(alone):
    async def main():
        async with AsyncEngine(replicated()) as server:

            async def tokens(prompt):
                outputs = [output async for output in server.generate(prompt, greedy())]
                return [x for output in outputs for x in output.outputs[0].token_ids]

            return await asyncio.gather(*map(tokens, PROMPTS))

    assert asyncio.run(main()) == alone


def test_a_failure_of_one_replica_ends_the_engine(monkeypatch):
    engine = replicated()
    requests = submit(engine, PROMPTS, greedy())
    step(engine)

    def fail(*_):
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(engine.replicas[1].runner, "read", fail)
    with pytest.raises(RuntimeError, match="a step failed: the device is gone"):
        run(engine, check=False)
    assert all(request.finished for request in requests)
    assert not any(replica.core.in_flight for replica in engine.replicas)


def test_weights_are_on_the_devices_of_every_replica():
    engine = replicated(data_parallel=2, tensor_parallel=1)
    for replica, device in zip(engine.replicas, jax.devices(), strict=False):
        leaves = jax.tree.leaves((replica.weights.leaves, replica.runner.executor.state))
        assert all(leaf.sharding.device_set == {device} for leaf in leaves)
