"""Which request holds which page: the host's map beside the page tables of the devices."""

from dataclasses import replace

import numpy as np
import pytest

from pallas_paged.engine import AsyncEngine, PoolMap
from tests.support.engine_calls import MODEL, PROMPTS, greedy, make_engine, step
from tests.support.event_loops import in_loop

FREE, CACHED, SHARED = PoolMap.FREE, PoolMap.CACHED, PoolMap.SHARED
PROMPT = [*range(10)]  # two pages and a half


def counts(**pages):
    return dict(free=0, cached=0, shared=0, used=0) | pages


def is_exact(replica, window=None):
    """Check the map of a replica with no call in flight against its page table.

    It may lack a fork's copy of a page, until a call has written to it, and say that pages before
    the window are free, which the next call frees. Returns whether it lacks nothing.
    """
    found, table = replica.pool_map(), replica.runner.table
    rows, lengths = np.asarray(table.block_tables), np.asarray(table.seq_lens)
    size = table.page_size
    wanted = np.full(replica.num_pages, FREE)
    if replica.cache is not None:
        wanted[replica.cache.pages] = CACHED
    holders = np.zeros(replica.num_pages, int)
    num_tokens, may_differ = {}, set()
    for one in replica.scheduler.running:
        row, length = rows[one.slot], lengths[one.slot]
        pages = row[: -(-length // size)]
        held = pages[pages < replica.num_pages]
        wanted[held] = one.request.number
        holders[held] += 1
        if length % size:
            num_tokens[pages[-1]] = length % size
            may_differ.add(pages[-1])
        if window is not None:
            may_differ |= {*pages[: max(0, length - window) // size]}
    wanted[holders > 1] = SHARED
    assert sum(found.counts.values()) == replica.num_pages
    assert found.num_tokens.items() <= num_tokens.items()
    differing = {*np.flatnonzero(found.owners != wanted)}
    assert differing <= may_differ
    return not differing


@pytest.mark.parametrize(("window", "caching"), [(None, True), (None, False), (6, False)])
def test_the_map_is_that_of_the_page_table_when_no_call_is_in_flight(window, caching):
    model = replace(MODEL, sliding_window=window, num_layers=1) if window else MODEL
    engine = make_engine(model, enable_prefix_caching=caching)
    (replica,) = engine.replicas
    for prompt in (PROMPT, PROMPT, *PROMPTS):
        engine.submit(prompt, greedy(n=2))
    seen, exact = set(), []
    while not engine.idle:
        step(engine)
        engine.replicas.drain()
        exact.append(is_exact(replica, window))
        seen |= {name for name, count in engine.pool_map()[0].counts.items() if count}
    assert seen == {"free", "used", "shared"} | ({"cached"} if caching else set())
    assert exact[-1] and (window is not None or exact.count(True) > 2 * exact.count(False))


def test_a_prompt_is_shared_by_its_completions_and_cached_when_they_have_ended():
    engine = make_engine()
    assert engine.pool_map()[0].owners.tolist() == [FREE] * engine.num_pages
    number = engine.submit(PROMPT, greedy(n=2, max_tokens=4)).number
    seen = []
    while not engine.idle:
        step(engine)
        (pool_map,) = engine.pool_map()
        seen.append(pool_map.counts)
        pages = {*np.flatnonzero(pool_map.owners == number)}
        assert pool_map.num_tokens.keys() <= pages and {*pool_map.num_tokens.values()} <= {1, 2, 3}
    assert (pool_map.owners.dtype, pool_map.owners.shape) == (np.int32, (engine.num_pages,))
    size = engine.num_pages
    # Both have two pages of the prompt together, and a page and a half of their own.
    assert counts(shared=2, used=2, free=size - 4) in seen
    # The last token has no K/V: each has filled one page of its own, or both the same one.
    cached = seen[-1]["cached"]
    assert cached in (3, 4) and seen[-1] == counts(cached=cached, free=size - cached)
    assert seen[-1]["free"] == engine.stats().num_free_pages


@in_loop
async def test_a_map_can_be_had_while_an_async_engine_runs():
    inner = make_engine()
    async with AsyncEngine(inner) as engine:
        stream = engine.submit(PROMPT, greedy(max_tokens=40))
        seen = []
        async for _ in stream:
            seen += await engine.pool_map()
        assert any(0 in pool_map.owners for pool_map in seen)
        (last,) = await engine.pool_map()
        assert last.counts["used"] == last.counts["shared"] == 0 < last.counts["cached"]
