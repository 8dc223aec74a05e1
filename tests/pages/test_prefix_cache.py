"""The prefix cache: random traces against brute force, what it hashes, what it refuses."""

import itertools
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pallas_paged as pp
from pallas_paged.pages.prefix_cache import chained_hash

Prefix = tuple[int, ...]


def filled(tokens=range(12)):
    """A cache with one sequence in pages 0, 1, 2, ..., released."""
    cache = pp.PrefixCache(page_size=4)
    lease = cache.lookup(list(tokens))
    cache.insert(lease, list(tokens), range(-(-len(tokens) // 4)))
    cache.release(lease)
    return cache


@pytest.fixture
def counted():
    """A cache, and the tokens of all pages that it has hashed."""
    calls = []
    hash_page = lambda parent, tokens: calls.append(tokens) or hash((parent, tokens))  # noqa: E731
    return pp.PrefixCache(page_size=4, hash_page=hash_page), calls


def test_pages_of_the_lease_are_not_hashed_again(counted):
    (cache, calls), tokens = counted, list(range(40))
    lease = cache.lookup(tokens)
    assert len(calls) == 1, "the lookup ends at the first missing page"
    cache.insert(lease, tokens, range(10))
    assert len(calls) == 11
    cache.insert(lease, [*tokens, 1, 2, 3, 4], range(11))
    assert calls[11:] == [(1, 2, 3, 4)]
    cache.release(lease)
    assert len(cache.evict(5)) == 5 and len(calls) == 12


def test_pages_in_blocks_are_not_hashed_again(counted):
    (cache, calls), tokens, blocks = counted, list(range(40)), []
    lease = cache.lookup(tokens, blocks)
    assert len(blocks) == 1, "the lookup ends at the first missing page"
    cache.insert(lease, tokens, range(10), blocks)
    assert calls == [tuple(tokens[i : i + 4]) for i in range(0, 40, 4)]
    assert [content for _, content in blocks] == calls
    cache.release(lease)
    fork = list(blocks)
    assert cache.num_cached_pages(blocks) == 10 and cache.num_cached_pages(blocks[1:]) == 0
    assert cache.lookup([*tokens, 1], blocks).pages == tuple(range(10))
    assert cache.lookup([*tokens, *[2] * 5], fork).num_tokens == 40
    assert (len(calls), len(blocks), len(fork)) == (11, 10, 11)


def test_insert_fills_blocks_with_the_pages_of_the_lease():
    cache, blocks = filled(), []
    lease = cache.lookup(jnp.arange(9))
    new = cache.insert(lease, np.arange(16, dtype=np.int32), np.arange(4, dtype=np.int32), blocks)
    assert new == [3] and type(new[0]) is int
    assert cache.lookup(list(range(17)), blocks).num_tokens == 16
    assert [content[0] for _, content in blocks] == [0, 4, 8, 12]


def test_numbers_out_of_range_are_refused():
    cache = filled()
    with pytest.raises(ValueError, match="page_size=0 must be a positive integer"):
        pp.PrefixCache(page_size=0)
    with pytest.raises(ValueError, match="max_tokens=-1 must be an integer in 0"):
        cache.lookup([1, 2], max_tokens=-1)
    with pytest.raises(ValueError, match=r"max_tokens=1.5 must be an integer"):
        cache.lookup([1, 2], max_tokens=1.5)
    with pytest.raises(ValueError, match="num_pages=-1 must be an integer in 0"):
        cache.evict(-1)
    with pytest.raises(ValueError, match="num_pages='2' must be an integer"):
        cache.evict("2")
    assert (cache.num_query_tokens, len(cache)) == (12, 3)


@pytest.mark.parametrize(
    ("tokens", "pages", "message"),
    [
        (range(12), [0, 1, 2, 3], r"12 tokens in pages of 4 fill fewer than the 4 pages given"),
        ([], [0], r"0 tokens in pages of 4 fill fewer"),
        ([*range(7), 9], [0, 1], r"page 1 .* has \(4, 5, 6, 9\), the lease \(4, 5, 6, 7\)"),
        (range(7), [0, 1], r"page 1 of the sequence has \(4, 5, 6\)"),
        ([], [], r"page 1 of the sequence has \(\)"),
        (range(20), [0, 1, 7, 8, 30], r"page=30 is cached for another prefix"),
        (range(20), [0, 1, 7, 8, 1], r"page=1 is cached"),
        (range(20), [0, 1, 7, 8, 7], r"page=7 must be named once"),
        *((range(20), [0, 1, x, 8], rf"pages\[2\]={x!r} must be") for x in (0.5, "1", -1, 2**40)),
    ],
)
def test_insert_refuses_and_changes_nothing(tokens, pages, message):
    cache = filled(range(8))
    cache.insert(cache.lookup([5] * 4), [5] * 4, [30])
    lease = cache.lookup(list(range(9)))
    with pytest.raises(ValueError, match=message):
        cache.insert(lease, list(tokens), pages)
    assert cache.pages == [0, 1, 30]
    assert cache.lookup(list(range(20))).pages == (0, 1)
    assert cache.insert(lease, list(range(12)), [0, 1, 7]) == [7]


def test_a_lease_ends_once():
    cache = filled()
    lease = cache.lookup(list(range(9)))
    with pytest.raises(ValueError, match=r"PrefixLease\(pages=\(0, 1\), num_tokens=8\) must be of"):
        filled().release(lease)
    cache.release(lease)
    with pytest.raises(ValueError, match="not yet released"):
        cache.release(lease)
    with pytest.raises(ValueError, match="not yet released"):
        cache.insert(lease, list(range(12)), [0, 1, 2])
    assert cache.num_evictable == 3


tokens_of = st.lists(st.integers(0, 1), max_size=9)
steps = st.one_of(
    st.tuples(st.just("start"), tokens_of, st.none() | st.integers(0, 9)),
    st.tuples(st.just("insert"), st.integers(0, 4), tokens_of, st.integers(0, 2)),
    st.tuples(st.just("restart"), st.integers(0, 4)),
    st.tuples(st.just("end"), st.integers(0, 4)),
    st.tuples(st.just("evict"), st.integers(0, 4)),
)


class PrefixOracle:
    """The cache by brute force: maps prefixes to their last page; a lease is a list of prefixes."""

    def __init__(self, *, page_size: int, hash_page: Callable[[int, Prefix], int]):
        self.page_size = page_size
        self.hash_page = hash_page
        self.pages: dict[Prefix, int] = {}
        self.leases: list[list[Prefix]] = []
        self.released_at: dict[Prefix, int] = {}
        self.time = 0

    def lookup(self, tokens: list[int], max_tokens: int | None) -> list[Prefix]:
        lease = self.cached_prefixes(tokens[:-1][:max_tokens])
        self.leases.append(lease)
        return lease

    def cached_prefixes(self, tokens: list[int]) -> list[Prefix]:
        prefixes = self.full_prefixes(tokens)
        return list(itertools.takewhile(self.pages.__contains__, prefixes))

    def insert(self, lease: list[Prefix], tokens: list[int], pages: list[int]) -> list[int]:
        new = []
        for prefix, page in list(zip(self.full_prefixes(tokens), pages, strict=False))[
            len(lease) :
        ]:
            if prefix not in self.pages:
                if self.key(prefix) in map(self.key, self.pages):
                    break
                self.pages[prefix] = page
                new.append(page)
            lease.append(prefix)
        return new

    def release(self, lease: list[Prefix]) -> None:
        self.leases = [other for other in self.leases if other is not lease]
        self.time += 1
        self.released_at |= dict.fromkeys(lease, self.time)

    def evictable(self) -> list[Prefix]:
        """Prefixes that no lease holds, in the order of eviction."""
        held = {prefix for lease in self.leases for prefix in lease}
        free = [prefix for prefix in self.pages if prefix not in held]
        return sorted(free, key=lambda prefix: (self.released_at[prefix], -len(prefix)))

    def num_shared(self) -> int:
        """Prefixes that several leases hold."""
        return sum(sum(prefix in lease for lease in self.leases) > 1 for prefix in self.pages)

    def evict(self, num_pages: int) -> list[int]:
        return [self.pages.pop(prefix) for prefix in self.evictable()[:num_pages]]

    def full_prefixes(self, tokens: list[int]) -> list[Prefix]:
        ends = range(self.page_size, len(tokens) + 1, self.page_size)
        return [tuple(tokens[:end]) for end in ends]

    def key(self, prefix: Prefix) -> int:
        key = 0
        for start in range(0, len(prefix), self.page_size):
            key = self.hash_page(key, prefix[start : start + self.page_size])
        return key


class Simulation:
    """A cache, the oracle, and sequences that take the lowest free page."""

    def __init__(self, page_size, hash_page, keeps_blocks):
        self.cache = pp.PrefixCache(page_size=page_size, hash_page=hash_page)
        self.oracle = PrefixOracle(page_size=page_size, hash_page=hash_page)
        self.keeps_blocks = keeps_blocks
        self.sequences = []  # (lease, the oracle's, tokens, pages, blocks)
        self.num_query_tokens = self.num_hit_tokens = self.num_inserted_pages = 0

    def start(self, tokens, max_tokens=None, blocks=None):
        if self.keeps_blocks:
            blocks = [] if blocks is None else blocks
        lease = self.cache.lookup(tokens, blocks, max_tokens=max_tokens)
        expected = self.oracle.lookup(tokens, max_tokens)
        pages = [self.oracle.pages[prefix] for prefix in expected]
        assert lease.pages == tuple(pages)
        assert lease.num_tokens == len(pages) * self.oracle.page_size
        assert lease.num_tokens < max(len(tokens), 1)
        self.num_query_tokens += len(tokens)
        self.num_hit_tokens += lease.num_tokens
        self.sequences.append((lease, expected, list(tokens), pages, blocks))
        self.insert(-1, [])

    def insert(self, index, new_tokens, num_missing=0):
        """Grows a sequence and inserts its pages but the last ones, as far as they are not held."""
        if self.sequences:
            lease, expected, tokens, pages, blocks = self.sequences[index % len(self.sequences)]
            tokens += new_tokens
            while len(pages) * self.oracle.page_size < len(tokens):
                taken = {page for sequence in self.sequences for page in sequence[3]}
                taken.update(self.oracle.pages.values())
                pages.append(min(set(range(len(taken) + 1)) - taken))
            given = pages[: len(pages) - num_missing]
            new = self.cache.insert(lease, tokens, given, blocks)
            assert new == self.oracle.insert(expected, tokens, given)
            self.num_inserted_pages += len(new)
            if blocks:
                cached = self.oracle.cached_prefixes(tokens)
                assert self.cache.num_cached_pages(blocks) == len(cached)

    def restart(self, index):
        if self.sequences:
            _, _, tokens, _, blocks = self.sequences[index % len(self.sequences)]
            self.end(index)
            self.start(tokens, blocks=blocks)

    def end(self, index):
        if self.sequences:
            lease, expected, *_ = self.sequences.pop(index % len(self.sequences))
            self.cache.release(lease)
            self.oracle.release(expected)

    def evict(self, num_pages):
        assert self.cache.evict(num_pages) == self.oracle.evict(num_pages)

    def compare(self):
        assert self.cache.pages == list(self.oracle.pages.values())
        assert len(self.cache) == len(self.oracle.pages)
        assert self.cache.num_evictable == len(self.oracle.evictable())
        assert self.cache.num_shared == self.oracle.num_shared()
        assert self.cache.num_query_tokens == self.num_query_tokens
        assert self.cache.num_hit_tokens == self.num_hit_tokens
        assert self.cache.num_inserted_pages == self.num_inserted_pages


HASHES = {
    "good": chained_hash,
    "often collides": lambda parent, tokens: (3 * parent + sum(tokens)) % 4,
    "always collides": lambda parent, tokens: 7,
}


@pytest.mark.parametrize("name", HASHES)
@pytest.mark.parametrize("page_size", [1, 3])
@settings(max_examples=100, deadline=None, derandomize=True)
@given(trace=st.lists(steps, min_size=5, max_size=40), keeps_blocks=st.booleans())
def test_random_traces_agree_with_the_oracle(page_size, name, trace, keeps_blocks):
    simulation = Simulation(page_size, HASHES[name], keeps_blocks)
    for name, *arguments in trace:
        getattr(simulation, name)(*arguments)
        simulation.compare()
    while simulation.sequences:
        simulation.end(0)
    assert simulation.cache.clear() == simulation.oracle.evict(len(simulation.oracle.pages))
    simulation.compare()
    assert len(simulation.cache) == 0
