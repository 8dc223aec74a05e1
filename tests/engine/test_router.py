"""Which replica gets a request."""

from types import SimpleNamespace

import pytest

from pallas_paged.engine.replica.replicas import Router
from pallas_paged.pages.prefix_cache import PrefixCache, chained_hash

PAGE_SIZE, NUM_PAGES = 4, 100
PREFIX = list(range(1, 17))  # four pages


class Replicas:
    """Replicas with these loads and empty caches, behind a router."""

    def __init__(self, *loads: int, caching: bool = True):
        self.each = [SimpleNamespace(load=x, cache=None, num_pages=NUM_PAGES) for x in loads]
        for replica in self.each if caching else ():
            replica.cache = PrefixCache(page_size=PAGE_SIZE)
        self.router = Router(self.each, PAGE_SIZE)

    def choose(self, token_ids: list[int], load: int = 100) -> int:
        fields = dict(prompt_token_ids=token_ids, block_hashes=[], given_experts=None, load=load)
        request = SimpleNamespace(**fields)
        chosen = self.router.choose(request)
        chosen.load += load
        return self.each.index(chosen)

    def cache(self, index: int, token_ids: list[int]) -> None:
        cache = self.each[index].cache
        lease = cache.lookup(token_ids)
        cache.insert(lease, token_ids, range(len(token_ids) // PAGE_SIZE))
        cache.release(lease)


def test_requests_follow_their_prefix_until_a_replica_is_four_requests_ahead():
    replicas = Replicas(0, 50, 50)
    replicas.cache(1, PREFIX[:8])
    replicas.cache(2, PREFIX)
    assert replicas.choose([*PREFIX, 30]) == 2
    assert replicas.choose([30, *PREFIX]) == 0
    # Nothing is cached yet: the router remembers what it sent.
    replicas = Replicas(0, 0, 0)
    chosen = [replicas.choose([*PREFIX, own]) for own in range(90)]
    counts = [chosen.count(index) for index in range(3)]
    assert max(counts) - min(counts) <= 4
    assert chosen[:4] == chosen[:1] * 4


@pytest.mark.parametrize("is_sent", [False, True])
@pytest.mark.parametrize(("num_tokens", "chosen"), [(4, 0), (7, 0), (8, 1), (9, 1)])
def test_a_prefix_shorter_than_two_pages_does_not_count(num_tokens, chosen, is_sent):
    replicas = Replicas(100 * is_sent, 50)
    if is_sent:
        assert replicas.choose(PREFIX[:num_tokens], 0) == 1
        replicas.each[0].load = 0
    else:
        replicas.cache(1, PREFIX[:num_tokens])
    assert replicas.choose([*PREFIX, 30]) == chosen


@pytest.mark.parametrize("caching", [False, True])
def test_requests_without_a_common_prefix_share_the_load_evenly(caching):
    replicas = Replicas(0, 0, 0, caching=caching)
    for start in range(30):
        replicas.choose([start, *PREFIX] if caching else PREFIX, 100 + start % 3)
    loads = [replica.load for replica in replicas.each]
    assert max(loads) - min(loads) <= 102


@pytest.mark.parametrize(("load", "size", "chosen"), [(1600, 100, 0), (1250, 10, 1)])
def test_a_replica_more_than_a_quarter_and_four_requests_ahead_gets_no_more(load, size, chosen):
    replicas = Replicas(1000, load)
    replicas.cache(1, PREFIX)
    assert replicas.choose([*PREFIX, 30], size) == chosen


def test_the_newest_sent_prompts_are_remembered_up_to_the_size_of_a_pool_or_a_reset():
    replicas = Replicas(0, 0)
    assert replicas.choose(PREFIX, 10) == 0
    replicas.router.reset()
    assert replicas.choose(PREFIX, 5) == 1
    fresh = iter(range(100, 2000))
    for num_pages in (NUM_PAGES - 4, 4, NUM_PAGES):  # sent to replica 1 between the prefix
        replicas.each[1].load = 5
        assert replicas.choose([next(fresh) for _ in range(num_pages * PAGE_SIZE)], 10) == 1
        replicas.each[1].load = 20
        assert replicas.choose(PREFIX, 10) == (num_pages < NUM_PAGES)


@pytest.mark.parametrize("tokens", [PREFIX, [*PREFIX, 1, 2, 3], PREFIX[:-1], [1]], ids=len)
def test_the_router_leaves_the_keys_of_full_pages_with_the_request(tokens):
    fields = dict(prompt_token_ids=tokens, block_hashes=[], given_experts=None, load=1)
    request = SimpleNamespace(**fields)
    Replicas(0, 0).router.choose(request)
    key, ends = 0, range(4, len(tokens) + 1, 4)
    for block, end in zip(request.block_hashes, ends, strict=True):
        key = chained_hash(key, tuple(PREFIX[end - 4 : end]))
        assert block == (key, tuple(PREFIX[end - 4 : end]))
