"""A prefix cache by brute force, written from the contract without the library."""

import itertools
from collections.abc import Callable

Prefix = tuple[int, ...]


class PrefixOracle:
    """Maps prefixes to their last page; a lease is a list of prefixes."""

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
