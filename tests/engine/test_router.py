"""Which replica gets a request."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pallas_paged.engine.router import Router
from pallas_paged.prefix_cache import PrefixCache, chained_hash

PAGE_SIZE, NUM_PAGES = 4, 100
PREFIX = list(range(1, 17))  # four pages


def router_of(*loads: int, caching: bool = True) -> tuple[Router, list]:
    """A router over replicas with these loads and empty caches."""
    replicas = [
        SimpleNamespace(
            load=load,
            cache=PrefixCache(page_size=PAGE_SIZE) if caching else None,
            num_pages=NUM_PAGES,
        )
        for load in loads
    ]
    return Router(replicas, PAGE_SIZE), replicas


def sequence(token_ids: list[int], load: int = 100):
    request = SimpleNamespace(load=load)
    return SimpleNamespace(token_ids=token_ids, block_hashes=[], request=request)


def choose(router: Router, replicas: list, *args) -> int:
    """The chosen replica, which then has the request's load."""
    one = sequence(*args)
    index = replicas.index(router.choose(one))
    replicas[index].load += one.request.load
    return index


def cache(replica, token_ids: list[int], first_page: int = 0) -> None:
    pages = range(first_page, first_page + len(token_ids) // PAGE_SIZE)
    lease = replica.cache.lookup(token_ids)
    replica.cache.insert(lease, token_ids, pages)
    replica.cache.release(lease)


def test_a_request_goes_where_the_longest_prefix_is_cached():
    router, replicas = router_of(0, 50, 50)
    cache(replicas[1], PREFIX[:8])
    cache(replicas[2], PREFIX)
    assert choose(router, replicas, [*PREFIX, 30]) == 2
    assert choose(router, replicas, [30, *PREFIX]) == 0


@pytest.mark.parametrize("is_sent", [False, True])
@pytest.mark.parametrize(("num_tokens", "chosen"), [(4, 0), (7, 0), (8, 1), (9, 1)])
def test_a_prefix_shorter_than_two_pages_does_not_count(num_tokens, chosen, is_sent):
    router, replicas = router_of(0, 50)
    if is_sent:
        replicas[0].load = 100
        assert choose(router, replicas, PREFIX[:num_tokens], 0) == 1
        replicas[0].load = 0
    else:
        cache(replicas[1], PREFIX[:num_tokens])
    assert choose(router, replicas, [*PREFIX, 30]) == chosen


def test_requests_with_no_prefix_in_common_share_the_load_evenly():
    router, replicas = router_of(0, 0, 0)
    for start in range(30):
        choose(router, replicas, [start, *PREFIX], 100 + start % 3)
    loads = [replica.load for replica in replicas]
    assert max(loads) - min(loads) <= 102


def test_requests_that_arrive_together_follow_their_prefix():
    """Nothing is cached yet: the router remembers what it sent."""
    router, replicas = router_of(0, 0)
    first = [choose(router, replicas, [*PREFIX, own]) for own in range(3)]
    second = [choose(router, replicas, [40, *PREFIX, own]) for own in range(3)]
    assert len(set(first)) == len(set(second)) == 1 and first != second


def test_a_prefix_of_all_requests_does_not_send_them_all_to_one_replica():
    router, replicas = router_of(0, 0, 0)
    chosen = [choose(router, replicas, [*PREFIX, own]) for own in range(90)]
    counts = [chosen.count(index) for index in range(3)]
    assert max(counts) - min(counts) <= 4
    assert chosen[:4] == chosen[:1] * 4


def test_a_busy_replica_is_left_to_its_requests():
    router, replicas = router_of(1000, 1600)
    cache(replicas[1], PREFIX)
    assert choose(router, replicas, [*PREFIX, 30], 100) == 0  # over a quarter more, and four ahead
    router, replicas = router_of(1000, 1250)
    cache(replicas[1], PREFIX)
    assert choose(router, replicas, [*PREFIX, 30], 10) == 1


def test_what_was_sent_is_forgotten_with_the_caches_and_beyond_the_size_of_a_pool():
    router, replicas = router_of(0, 0)
    assert choose(router, replicas, PREFIX, 10) == 0
    router.reset()
    assert choose(router, replicas, PREFIX, 1) == 1
    longest = list(range(100, 100 + NUM_PAGES * PAGE_SIZE))
    assert choose(router, replicas, longest, 100) == 1  # and forgets PREFIX
    replicas[1].load = 20
    assert choose(router, replicas, PREFIX, 10) == 0


def test_without_a_prefix_cache_only_the_load_counts():
    router, replicas = router_of(10, 0, caching=False)
    assert [choose(router, replicas, PREFIX, 8) for _ in range(4)] == [1, 1, 0, 1]


def test_the_router_leaves_the_keys_of_pages_with_the_sequence():
    router, _ = router_of(0, 0)
    blocks: list = []
    for start in range(0, 16, 4):
        content = tuple(PREFIX[start : start + 4])
        blocks.append((chained_hash(blocks[-1][0] if blocks else 0, content), content))
    for tokens, num_pages in [(PREFIX, 4), ([*PREFIX, 1, 2, 3], 4), (PREFIX[:-1], 3), ([1], 0)]:
        one = sequence(tokens)
        router.choose(one)
        assert one.block_hashes == blocks[:num_pages]
