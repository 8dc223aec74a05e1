"""The pages of running sequences, as far as the host knows them: free, taken, cached, to be freed.

The device's page table is the truth. The host knows the newest report and what it has scheduled
since, so its number of free pages is a lower bound.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import numpy as np

from pallas_paged.checks import INT32_MAX
from pallas_paged.engine.requests.sequence import Sequence
from pallas_paged.engine.schedule.windows import WindowPool, WindowPrefixes
from pallas_paged.engine.stats import PoolMap
from pallas_paged.pages.prefix_cache import PrefixCache, PrefixLease


@dataclass(kw_only=True)
class TableUpdate:
    """What the page table must do before a step: retain pages, free slots, release pages.

    Another one of layers with a window frees the same slots, and has pages of its own.
    """

    retained: list[int] = field(default_factory=list)
    freed: list[int] = field(default_factory=list)
    released: list[int] = field(default_factory=list)
    window_retained: list[int] = field(default_factory=list)
    window_released: list[int] = field(default_factory=list)

    def __bool__(self) -> bool:
        return any(vars(self).values())


class KVCacheManager:
    """Counts pages, and finds, fills and evicts those of the prefix cache.

    Attributes:
        num_pages, page_size, max_num_seqs: of the page table.
        max_num_batched_tokens: of a step.
        num_free: lower bound of the pages that are free when the next step runs.
        page_balance: pages evicted less pages taken, so far.
        update: what has been decided and the table has not done yet.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        cache: PrefixCache | None,
        sliding_window: int | None,
        windows: WindowPool | None = None,
    ):
        """Start with all pages free.

        Args:
            num_pages, page_size, max_num_seqs, max_num_batched_tokens: as in `EngineConfig`.
            cache: None computes every prompt in full.
            sliding_window: tokens after which pages are freed from the left, or None.
            windows: the pool of layers with a window, if they have one of their own.
        """
        self.num_pages, self.page_size = num_pages, page_size
        self.num_free = num_pages
        self.page_balance = 0
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self._cache = cache
        self._window, self._window_pool = sliding_window, windows
        self._windows = None
        if windows is not None and cache is not None:
            self._windows = WindowPrefixes(
                sliding_window=windows.sliding_window,
                kept_tokens=windows.kept_tokens,
                page_size=page_size,
                num_pages=windows.num_cached,
            )
        self._spare_pages = max_num_seqs // page_size  # a step of all slots takes as many
        self.update = TableUpdate()
        # Of the sequence that could not start: which it was, the pages it needed, `_num_inserted`.
        self._blocked: tuple[object, int, int] = None, 0, 0

    @property
    def num_evictable(self) -> int:
        """Cached pages that no sequence uses."""
        return self._cache.num_evictable if self._cache is not None else 0

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can have."""
        return self.num_free + self.num_evictable

    @property
    def _num_inserted(self) -> int:
        """Pages that were ever cached; while it stays the same, no longer prefix is found."""
        num_pages = self._cache.num_inserted_pages if self._cache is not None else 0
        return num_pages + (self._windows.num_inserted if self._windows is not None else 0)

    @property
    def cached_window_pages(self) -> list[int]:
        """Pages of layers with a window that the prefix cache holds, if they have their own."""
        return self._windows.pages if self._windows is not None else []

    def has_window_pages(self, running: Iterable[Sequence], sequence: Sequence) -> bool:
        """Return whether a sequence can run beside others in the pool of layers with a window."""
        if (pool := self._window_pool) is None:
            return True
        held = sum(pool.num_of_sequence(one.max_len) for one in (*running, sequence))
        return held <= pool.num_for_sequences

    def pages_for(self, num_tokens: int) -> int:
        """Pages of this many tokens."""
        return -(-num_tokens // self.page_size)

    def max_pages_held(self, num_tokens: int) -> int:
        """Pages that a sequence holds at a time until its tokens are computed."""
        if self._window is None:
            return self.pages_for(num_tokens)
        # The pages of a chunk and of the window before it, and a partial one at either end.
        most = self.pages_for(self._window + self.max_num_batched_tokens) + 1
        return min(self.pages_for(num_tokens), most)

    def num_new_pages(self, sequence: Sequence, num_tokens: int) -> int:
        """Pages that a sequence needs for more tokens."""
        start = sequence.num_computed
        return self.pages_for(start + num_tokens) - self.pages_for(start)

    def num_copied_by_fork(self, sequence: Sequence) -> int:
        """Whether the last page of a sequence is partial, so that a fork copies it: 1 or 0."""
        return int(sequence.num_computed % self.page_size > 0)

    def tokens_that_fit(self, sequence: Sequence) -> int:
        """Tokens that a sequence can compute with all pages that are available."""
        return -sequence.num_computed % self.page_size + self.num_available * self.page_size

    def allocate(self, num_pages: int) -> bool:
        """Allocate pages that are free, after evicting as many cached ones as are missing."""
        if self._cache is not None and self.num_free < num_pages:
            # Some more than are missing, because each update of the table takes its time.
            evicted = self._cache.evict(num_pages - self.num_free + self._spare_pages)
            self._release(evicted)
            self.num_free += len(evicted)
            self.page_balance += len(evicted)
        if self.num_free < num_pages:
            return False
        self.num_free -= num_pages
        self.page_balance -= num_pages
        return True

    def observe(self, num_free: int, page_balance: int) -> None:
        """Note a report: the free pages after a call, and `page_balance` after its schedule."""
        self.num_free = num_free + self.page_balance - page_balance

    def rewind(self, sequence: Sequence, num_tokens: int) -> None:
        """Note that a call did not compute this many of a running sequence's tokens.

        The sequence counts without them already, and with what calls in flight compute.
        """
        # Pages of what calls in flight compute were counted from a later token. Those calls report
        # what is free after them, so the page_balance, which is for later calls, stays as it is.
        later, start = sequence.num_pending, sequence.num_computed - sequence.num_pending
        end = start + num_tokens
        counted = self.pages_for(end + later) - self.pages_for(end)
        self.num_free += counted - (self.pages_for(start + later) - self.pages_for(start))

    def store(self, sequence: Sequence, pages: list[int], window_pages: list[int]) -> None:
        """Note the pages, one a token, that hold the next tokens of a sequence."""
        first, size = sequence.num_stored, self.page_size
        end = sequence.num_stored = first + len(pages)
        for held, new in ((sequence.pages, pages), (sequence.window_pages, window_pages)):
            while new and len(held) * size < end:
                held.append(new[max(len(held) * size - first, 0)])

    @property
    def must_update(self) -> bool:
        """Whether the table must do the update before the next step.

        Pages to retain can wait while their row holds them, unless a window may free them.
        """
        update = self.update
        changes = update.freed or update.released or update.window_retained
        return bool(changes or update.window_released or (update.retained and self._window))

    def take_update(self) -> TableUpdate:
        """Return what has been decided and the table has not done yet."""
        update, self.update = self.update, TableUpdate()
        return update

    def start(self, sequence: Sequence, running: Collection[Sequence], watermark: int) -> bool:
        """Let a sequence begin with its cached pages, if all that its tokens need are available.

        Args:
            sequence: the first one that waits.
            running: the others, whose known tokens need pages too.
            watermark: pages that must be left over beside others.
        """
        num_available = self.num_available
        num_available -= sum(self.num_new_pages(one, one.num_to_prefill) for one in running)
        blocked, needed, num_inserted = self._blocked
        key = sequence.order, len(sequence.token_ids)
        is_unchanged = blocked == key and num_inserted == self._num_inserted
        if running and is_unchanged and num_available < needed:
            return False
        num_evictable = self.num_evictable
        lease = self._find(sequence)
        needed = self.max_pages_held(len(sequence.token_ids)) + (watermark if running else 0)
        needed -= len(lease.pages) if lease is not None else 0
        # What the lease holds can no longer be evicted.
        if needed > num_available - (num_evictable - self.num_evictable):
            self._release_lease(lease)
            self._blocked = key, needed, self._num_inserted
            return False
        sequence.lease = lease
        if lease is not None:
            sequence.pages, sequence.num_stored = list(lease.pages), lease.num_tokens
            if self._windows is not None:
                sequence.window_pages = self._windows.attach(lease.pages)
        return True

    def _find(self, sequence: Sequence) -> PrefixLease | None:
        """Find the cached pages that a sequence can begin with, and hold them."""
        lease = self._lookup(sequence, sequence.max_cached_tokens)
        if lease is not None and self._windows is not None:
            num_usable = self._windows.num_usable(lease.pages)
            if num_usable < len(lease.pages):
                self._release_lease(lease)
                lease = self._lookup(sequence, num_usable * self.page_size)
        return lease

    def _lookup(self, sequence: Sequence, max_tokens: int | None) -> PrefixLease | None:
        if self._cache is None:
            return None
        return self._cache.lookup(sequence.token_ids, sequence.block_hashes, max_tokens=max_tokens)

    def _release_lease(self, lease: PrefixLease | None) -> None:
        if self._cache is not None and lease is not None:
            self._cache.release(lease)

    def fork(self, source: Sequence, fork: Sequence) -> None:
        """Note that a sequence becomes like another; it gets a copy of the partial page."""
        fork.num_stored = source.num_computed
        num_full = source.num_computed // self.page_size
        fork.pages, fork.window_pages = source.pages[:num_full], source.window_pages[:num_full]
        if source.lease is not None:
            fork.lease = self._lookup(fork, fork.max_cached_tokens)
            assert fork.lease is not None
            if len(fork.lease.pages) < len(fork.pages):
                # Both hold pages that the cache does not have. If one let it have them and ended,
                # they would count as evictable, and would not be free.
                source.caches = fork.caches = False

    def free(self, sequence: Sequence) -> None:
        """Free the slot and the pages of a sequence; others may still find those in the cache."""
        self.cache_full_pages(sequence)
        self._release_lease(sequence.lease)
        self.update.freed.append(sequence.running_slot)
        sequence.lease, sequence.caches = None, True
        sequence.pages, sequence.window_pages, sequence.num_stored = [], [], 0

    def cache_full_pages(self, sequence: Sequence) -> None:
        """Let other sequences find the full pages of a running one."""
        if self._cache is None or sequence.lease is None or not sequence.caches:
            return
        if self._window is not None:
            # Its first pages may be free by now, or it could not hold them beside the later ones.
            most = self.max_pages_held(INT32_MAX) + self.pages_for(self._window)
            if sequence.num_computed > self._window or self.num_pages < most:
                return
        # A stop text may have ended it before the last tokens that were computed.
        num_tokens = min(sequence.num_stored, len(sequence.token_ids))
        if sequence.max_cached_tokens is not None:
            # It would hold what others have cached beside pages of its own, which it must compute.
            num_tokens = min(num_tokens, sequence.max_cached_tokens)
        pages = sequence.pages[: self.pages_for(num_tokens)]
        tokens = sequence.token_ids[:num_tokens]
        self.update.retained += self._cache.insert(
            sequence.lease, tokens, pages, blocks=sequence.block_hashes
        )
        if self._windows is not None:
            held = self._cache.held_pages(sequence.lease)
            # Those that no call in flight has freed; it has freed none that the newest token sees.
            first = self._windows.first_kept(sequence.num_computed)
            last = num_tokens // self.page_size
            retained, released = self._windows.insert(
                held[first:last], sequence.window_pages[first : len(held[:last])]
            )
            self.update.window_retained += retained
            self.update.window_released += released

    def pool_map(self, running: Iterable[Sequence]) -> PoolMap:
        """Return which request holds which page, given the running sequences."""
        owners = np.full(self.num_pages, PoolMap.FREE, np.int32)
        num_holders = np.zeros(self.num_pages, np.int32)
        num_tokens = {}
        if self._cache is not None:
            owners[np.array(self._cache.pages, np.int32)] = PoolMap.CACHED
        for one in running:
            # What lies before the window is free, or only cached.
            first = max(0, one.num_stored - self._window) // self.page_size if self._window else 0
            pages = np.array(one.pages[first:], np.int32)
            owners[pages] = one.request.number
            num_holders[pages] += 1
            # A fork's copy of the partial page is known when a call has written to it.
            if one.num_stored % self.page_size and len(one.pages) == self.pages_for(one.num_stored):
                num_tokens[one.pages[-1]] = one.num_stored % self.page_size
        owners[num_holders > 1] = PoolMap.SHARED
        return PoolMap(owners=owners, num_tokens=num_tokens)

    def reset_prefix_cache(self, running: Iterable[Sequence]) -> None:
        """Empty the prefix cache; running sequences keep their pages, which stay uncached."""
        if self._cache is None:
            return
        freed = self._cache.clear()
        self._release(freed)
        self.num_free += len(freed)
        self.page_balance += len(freed)
        for sequence in running:
            self._release_lease(sequence.lease)
            sequence.lease = None
        # Pages that running sequences hold are not free yet.
        self._release(self._cache.clear())

    def _release(self, pages: list[int]) -> None:
        """Let the tables release pages that the prefix cache has dropped."""
        self.update.released += pages
        if self._windows is not None:
            self.update.window_released += self._windows.drop(pages)
