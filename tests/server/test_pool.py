"""`GET /pool`: who holds which page, as the page draws it."""

import asyncio
import json
from types import SimpleNamespace

import numpy as np
import pytest
from starlette.testclient import TestClient

from pallas_paged.engine import EngineDeadError, PoolMap, SamplingParams
from pallas_paged.server.app import app_of
from pallas_paged.server.page import pool
from pallas_paged.server.page.pool import MAX_CELLS, PoolView, pool_json
from tests.support.event_loops import in_loop
from tests.support.servers import make_service

FREE, CACHED, SHARED = PoolMap.FREE, PoolMap.CACHED, PoolMap.SHARED


def map_of(owners, num_tokens=None):
    return PoolMap(owners=np.array(owners, np.int32), num_tokens=num_tokens or {})


def test_a_small_pool_has_a_cell_for_each_page_of_each_replica():
    first = map_of([7, 7, SHARED, SHARED, CACHED, FREE, FREE, 0], {1: 3})
    assert pool_json([first, map_of([FREE] * 8)], 16) == {
        "page_size": 16,
        "pages_per_cell": 1,
        "replicas": [
            {
                "num_pages": 8,
                "counts": {"free": 2, "cached": 1, "shared": 2, "used": 3},
                "runs": [(7, 2), ("shared", 2), ("cached", 1), ("free", 2), (0, 1)],
                "num_tokens": {1: 3},
            },
            {
                "num_pages": 8,
                "counts": {"free": 8, "cached": 0, "shared": 0, "used": 0},
                "runs": [("free", 8)],
                "num_tokens": {},
            },
        ],
    }


@pytest.mark.parametrize("num_replicas", [1, 3])
@pytest.mark.parametrize("num_pages", [MAX_CELLS, MAX_CELLS + 1, 100_001])
def test_a_large_pool_has_a_bounded_number_of_cells(num_pages, num_replicas):
    owners = np.arange(num_pages)[::-1].copy()
    found = pool_json([map_of(owners, {5: 1})] * num_replicas, 16)
    size = found["pages_per_cell"]
    assert (size == 1) == (num_pages * num_replicas <= MAX_CELLS)
    numbers = [sum(count for _, count in one["runs"]) for one in found["replicas"]]
    assert numbers == [-(-num_pages // size)] * num_replicas
    assert MAX_CELLS / 2 < sum(numbers) <= MAX_CELLS
    for one in found["replicas"]:
        assert one["counts"]["used"] == one["num_pages"] == num_pages
        assert one["num_tokens"] == ({5: 1} if size == 1 else {})


def test_a_cell_of_several_pages_shows_what_is_rarest():
    """Shared pages before the newest request, cached pages and free ones."""
    owners = np.full((5, MAX_CELLS), FREE).T.copy()  # five pages a cell
    owners[1, 3] = CACHED
    owners[2, :3] = CACHED, 0, 9
    owners[3, 2:4] = 9, SHARED
    (found,) = pool_json([map_of(owners.ravel())], 16)["replicas"]
    assert found["runs"] == [("free", 1), ("cached", 1), (9, 1), ("shared", 1), ("free", 4092)]


def test_pages_are_shared_while_a_request_runs_and_cached_after_it(server, monkeypatch):
    monkeypatch.setattr(pool, "_SECONDS", 0)
    engine = server.service.engine
    params = SamplingParams(max_tokens=20, temperature=0, n=2)
    counts = []

    async def run():
        await engine.reset_prefix_cache()
        view = PoolView(engine, 16)
        async for _ in engine.submit("x" * 40, params):
            counts.append(json.loads(await view.read())["replicas"][0]["counts"])

    server.call(run())
    # Of the prompt two pages are full, and each completion has one or two pages of its own.
    assert any(one["shared"] == 2 <= one["used"] <= 4 for one in counts)
    server.wait_until_idle()
    answer = server.client.get("/pool")
    assert answer.headers["content-type"] == "application/json"
    (replica,) = answer.json()["replicas"]
    assert replica["counts"]["used"] == replica["counts"]["shared"] == 0
    cached = sum(length for state, length in replica["runs"] if state == "cached")
    assert cached == replica["counts"]["cached"] > 0
    assert replica["num_pages"] == sum(replica["counts"].values()) == 64


class FakeEngine:
    """Answers `pool_map` with what it has, when it is let."""

    def __init__(self, answer):
        self.answer, self.num_calls, self.may = answer, 0, asyncio.Event()

    async def pool_map(self):
        self.num_calls += 1
        await self.may.wait()
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@in_loop
async def test_many_who_look_cost_the_engine_one_map(monkeypatch):
    now = 100.0
    monkeypatch.setattr(pool, "time", SimpleNamespace(monotonic=lambda: now))
    engine = FakeEngine([map_of([FREE])])
    view = PoolView(engine, 16)
    readers = [asyncio.create_task(view.read()) for _ in range(5)]
    await asyncio.sleep(0)
    now += 10  # the engine compiles meanwhile
    readers.append(asyncio.create_task(view.read()))
    await asyncio.sleep(0)
    readers.pop(0).cancel()  # one leaves, and the others still get theirs
    engine.may.set()
    answers = await asyncio.gather(*readers)
    assert engine.num_calls == 1 and len({*answers}) == 1 and b'["free",1]' in answers[0]
    engine.answer = [map_of([CACHED])]
    assert b'["cached",1]' in await view.read() and engine.num_calls == 2
    now += 0.1
    await view.read()
    assert engine.num_calls == 2
    now += 0.2
    await view.read()
    assert engine.num_calls == 3


@pytest.mark.parametrize(
    ("error", "status"),
    [(EngineDeadError("dead", OSError()), 500), (RuntimeError("it has shut down"), 503)],
)
def test_an_engine_without_an_answer_is_an_error(tmp_path, monkeypatch, error, status):
    service = make_service(tmp_path)

    async def pool_map():
        raise error

    monkeypatch.setattr(service.engine, "pool_map", pool_map)
    answer = TestClient(app_of(service)).get("/pool")
    assert answer.status_code == status
    assert ("engine_dead" in answer.text) == (status == 500)
    assert (service.metrics.error is error) == (status == 500)
