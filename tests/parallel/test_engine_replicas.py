"""Data parallelism: replicas behind one queue."""

import jax
import pytest

from pallas_paged.engine import Engine, PoolMap
from pallas_paged.engine.device.program import modes_for
from tests.support.devices import mesh
from tests.support.engine_calls import (
    MODEL,
    PROMPTS,
    SIZES,
    assert_deltas_add_up,
    assert_every_page_is_free,
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

pytestmark = pytest.mark.usefixtures("exact_products")
SAMPLES = [sampling(n=3), greedy(beam_width=3, max_tokens=6), sampling(best_of=2)]
MODE = modes_for(SAMPLES)[-1:]  # of all steps: every replica has programs of its own
NEW = weights(MODEL, seed=2)


def replicated(data_parallel_size: int = 2, tensor_parallel_size: int = 1, **options) -> Engine:
    mesh(data_parallel_size * tensor_parallel_size)  # skips where there are fewer devices
    sizes = dict(
        data_parallel_size=data_parallel_size, tensor_parallel_size=tensor_parallel_size, modes=MODE
    )
    return make_engine(MODEL, **sizes | options)


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    return tokens_of(serve(make_engine(), PROMPTS, greedy()))


@pytest.mark.parametrize("sizes", [(2, 1), *slow([((2, 2),), ((3, 1),)])], ids=str)
@pytest.mark.cpu_budget(8)  # each replica compiles its steps
def test_replicas_share_requests_and_give_the_tokens_of_one(alone, sizes):
    engine = replicated(*sizes)
    requests = submit(engine, PROMPTS, greedy())
    assert all(replica.load > 0 for replica in engine.replicas)
    deltas = run(engine)
    assert tokens_of(requests) == alone
    assert_deltas_add_up(deltas, requests)
    each = [replica.stats() for replica in engine.replicas]
    assert len(engine.replicas) == len(each) == sizes[0]
    assert all(one.num_finished for one in each)
    total = engine.stats()
    assert (total.num_finished, total.generated_tokens) == (5, sum(map(len, alone)))
    assert total.num_pages == sizes[0] * SIZES["num_pages"] == sizes[0] * engine.num_pages
    for name in ("num_finished", "generated_tokens", "num_calls", "num_pages", "pool_bytes"):
        assert getattr(total, name) == sum(getattr(one, name) for one in each)
    assert min(x.latency_p50 for x in each) <= total.latency_p50 <= max(x.latency_p99 for x in each)
    used = [replica.runner.table.seq_lens.sharding.device_set for replica in engine.replicas]
    assert sum(map(len, used)) == len(set.union(*used)) == sizes[0] * sizes[1]
    for replica, devices in zip(engine.replicas, used, strict=True):
        leaves = jax.tree.leaves((replica.weights.leaves, replica.runner.executor.state))
        assert all(leaf.sharding.device_set == devices for leaf in leaves)
    assert_every_page_is_free(engine)


def test_every_replica_has_a_map_of_its_pages():
    engine = replicated()
    numbers = [request.number for request in submit(engine, PROMPTS[:2], greedy())]
    step(engine, 2)
    owners = [{*pool_map.owners.tolist()} - {PoolMap.FREE} for pool_map in engine.pool_map()]
    assert owners == [{number} for number in numbers]
    run(engine)


def test_samples_and_beams_of_a_request_stay_on_one_replica():
    engine = replicated()
    requests = submit(engine, PROMPTS[:3], SAMPLES)
    seen: dict[int, set] = {0: set(), 1: set()}
    while not engine.idle:
        step(engine)
        for index, replica in enumerate(engine.replicas):
            scheduler = replica.scheduler
            seen[index] |= {x.request for x in (*scheduler.running, *scheduler.waiting)}
    assert seen[0] and seen[1] and not seen[0] & seen[1]
    assert tokens_of(requests) == tokens_of(serve(make_engine(), PROMPTS[:3], SAMPLES))


def test_a_request_goes_where_its_prefix_is_cached():
    engine = replicated()
    prefixes = [[*range(first, first + 12)] for first in (1, 20)]
    serve(engine, prefixes, greedy(max_tokens=2))
    assert [len(replica.cache) for replica in engine.replicas] == [3, 3]
    for prefix in prefixes * 2:
        (request,) = serve(engine, [[*prefix, 5]], greedy(max_tokens=2))
        assert request.num_cached_tokens == 12
    assert [replica.stats().prefix_cache_hits for replica in engine.replicas] == [24, 24]


@pytest.mark.parametrize("forget", ["reset_prefix_cache", "sleep"])
def test_replicas_and_their_router_forget_prefixes(forget):
    """A request may follow one that is not computed yet, but not one before the reset."""
    engine, prefix, params = replicated(), [*range(1, 13)], greedy(max_tokens=2)
    loads = lambda: [replica.load > 0 for replica in engine.replicas]  # noqa: E731
    submit(engine, [[*prefix, 5], [*prefix, 6]], params)
    assert loads() == [True, False]
    run(engine)
    getattr(engine, forget)()
    if forget == "sleep":
        engine.wake_up()
    requests = submit(engine, [[30], [*prefix, 7]], params)
    assert loads() == [True, True]
    run(engine)
    assert requests[1].num_cached_tokens == 0


def test_all_replicas_are_dispatched_before_one_is_read(monkeypatch):
    engine = replicated()
    log: list[tuple[str, int]] = []
    for index, replica in enumerate(engine.replicas):
        for name in ("dispatch", "read"):
            call, entry = getattr(replica.runner, name), (name, index)
            noted = lambda *x, call=call, entry=entry: log.append(entry) or call(*x)  # noqa: E731
            monkeypatch.setattr(replica.runner, name, noted)
    submit(engine, PROMPTS[:2], greedy(max_tokens=3))
    engine.step()
    engine.step()
    assert log == [*[("dispatch", 0), ("dispatch", 1)] * 2, ("read", 0), ("read", 1)]
    run(engine)
    (request,) = submit(engine, PROMPTS[:1], greedy())
    engine.step()
    engine.abort(request)
    assert [replica.calls_in_flight for replica in engine.replicas] == [1, 0]
    assert not engine.idle
    run(engine)


def test_weights_sleep_and_aborts_reach_every_replica(alone):
    engine = replicated()
    requests = submit(engine, PROMPTS, greedy())
    step(engine)
    pools = [replica.runner.executor.state.pool for replica in engine.replicas]
    engine.sleep()
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(pools))
    engine.update_params(NEW, restart_running=True)
    engine.wake_up()
    step(engine)
    for request in requests[:2]:
        engine.abort(request)
    run(engine)
    wanted = tokens_of(serve(make_engine(MODEL, NEW), PROMPTS, greedy()))
    assert tokens_of(requests)[2:] == wanted[2:] != alone[2:]
    assert engine.stats().num_aborted == 2
    with pytest.raises(ValueError, match="was compiled"):
        engine.update_params(NEW | {"head": NEW["head"][:, :8]})
    assert tokens_of(serve(engine, PROMPTS, greedy())) == wanted
    assert_every_page_is_free(engine)


def test_nothing_compiles_after_the_warm_up_of_replicas(compilations):
    params = sampling(logprobs=MODE[0].logprobs)
    assert modes_for([params]) == MODE
    engine = replicated(modes=None)
    engine.warmup([params])
    del compilations[:]
    serve(engine, PROMPTS, [params, greedy(), *SAMPLES])
    assert not compilations
    assert engine.stats().compilations == 2 * len(engine.replicas[0].runner.buckets.all())


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_of_one_replica_ends_the_engine(monkeypatch, failing):
    engine = replicated()
    requests = submit(engine, PROMPTS, greedy())
    step(engine)

    def fail(*_):
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(engine.replicas[failing].runner, "read", fail)
    with pytest.raises(RuntimeError, match="a step failed: the device is gone"):
        run(engine, check=False)
    assert all(request.finished for request in requests)
    assert not any(replica.calls_in_flight for replica in engine.replicas)


def test_a_closed_engine_frees_its_pools_and_ends_its_requests():
    engine = replicated()
    requests = submit(engine, PROMPTS, greedy())
    step(engine)
    pools = [replica.runner.executor.state.pool for replica in engine.replicas]
    engine.close()
    engine.close()
    assert set(reasons_of(requests)) == {"abort"}
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(pools))
    with pytest.raises(RuntimeError, match="the engine is dead: it has been closed"):
        engine.step()
