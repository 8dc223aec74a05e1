"""An index from token prefixes to pages with their K/V, so that sequences can begin with them.

Host side and integers only: no arrays, no K/V. The cache returns the pages that its caller must
`retain`, `attach` and `release` in the `PageTable`; then a cached page is never free and never
written to.

A page is found by the chained hash of its tokens and all tokens before them, as in vLLM's automatic
prefix caching (Kwon et al., "Efficient Memory Management for Large Language Model Serving with
PagedAttention", 2023). Pages that no sequence uses stay until memory is needed. Eviction takes
the least recently used first, later pages of a prefix before earlier ones, as in SGLang's
RadixAttention (Zheng et al., "SGLang: Efficient Execution of Structured Language Model Programs",
2023).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pallas_paged.checks import check_integer, validate_positive


@dataclass(kw_only=True, eq=False, slots=True)
class _Entry:
    """A cached page. Its users are leases; a lease on a page also uses all pages before it."""

    key: int
    parent: _Entry | None
    tokens: tuple[int, ...]
    page: int
    num_users: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class PrefixLease:
    """A sequence's hold on pages of a `PrefixCache`, which protects them from eviction.

    Attributes:
        pages: pages that `lookup` found, to `attach` to a row; `insert` adds none.
        num_tokens: tokens in those pages.
    """

    pages: tuple[int, ...]
    num_tokens: int
    _entries: list[_Entry] = field(repr=False)


# The key of a full page of a sequence, which is its hash, and the page's tokens.
Block = tuple[int, tuple[int, ...]]


def chained_hash(parent: int, tokens: tuple[int, ...]) -> int:
    """Return the hash of a page's tokens after a prefix with the hash `parent`."""
    return hash((parent, tokens))


class PrefixCache:
    """An index from token prefixes to full pages.

    A page found by its hash is used only if its tokens are the same and it follows the same page.
    So a collision costs a hit and never gives wrong K/V, and the hash needs no salt against prompts
    that are made to collide.

    `lookup` and `insert` hash the pages of a sequence in every call, unless the caller keeps a list
    of `blocks` with the sequence, empty at first, and passes it each time. The cache extends it in
    place. A sequence that begins with the same tokens may start with a copy.

    Attributes:
        num_query_tokens: tokens of the prompts of all `lookup` calls.
        num_hit_tokens: tokens of those that were cached.
        num_inserted_pages: pages that `insert` has added. While it stays the same, a `lookup` that
            is repeated finds no more than before.
    """

    def __init__(
        self,
        *,
        page_size: int,
        hash_page: Callable[[int, tuple[int, ...]], int] = chained_hash,
    ) -> None:
        """Make an empty cache.

        Args:
            page_size: tokens per page, as in the page table.
            hash_page: maps the hash of the pages before a page (0 for none) and its tokens to the
                hash of the page.

        Raises:
            ValueError: `page_size` is not a positive integer.
        """
        validate_positive(page_size=page_size)
        self.num_query_tokens = 0
        self.num_hit_tokens = 0
        self.num_inserted_pages = 0
        self._page_size = int(page_size)
        self._hash_page = hash_page
        self._root = _Entry(key=0, parent=None, tokens=(), page=-1)
        self._by_key: dict[int, _Entry] = {}
        self._by_page: dict[int, _Entry] = {}
        # In the order of eviction. All pages that follow a page in a prefix come before it.
        self._unused: OrderedDict[int, _Entry] = OrderedDict()
        self._leases: set[PrefixLease] = set()
        self._num_shared = 0

    def __len__(self) -> int:
        """Return the number of cached pages."""
        return len(self._by_page)

    @property
    def pages(self) -> list[int]:
        """All cached pages: those that the table must retain, see `check_page_table`."""
        return list(self._by_page)

    @property
    def num_evictable(self) -> int:
        """Number of cached pages that no lease holds."""
        return len(self._unused)

    @property
    def num_shared(self) -> int:
        """Number of cached pages that several leases hold."""
        return self._num_shared

    def lookup(
        self,
        tokens: Sequence[int],
        blocks: list[Block] | None = None,
        *,
        max_tokens: int | None = None,
    ) -> PrefixLease:
        """Find the longest cached prefix of full pages, and hold it until the lease is released.

        At least the last token is left out, so that there is a query to compute: of a prompt that
        is cached in full, the page with the last token is not used.

        Args:
            tokens: the sequence.
            blocks: of the sequence, from earlier calls.
            max_tokens: the most tokens to find; None for all but the last.

        Raises:
            ValueError: `max_tokens` is no integer of 0 or more.
        """
        tokens = _as_list(tokens)
        if max_tokens is not None:
            check_integer("max_tokens", max_tokens, 0)
        limit = len(tokens) - 1
        limit = limit if max_tokens is None else min(limit, max_tokens)
        entries: list[_Entry] = []
        parent = self._root
        for block in range(limit // self._page_size):
            key, content = self._block(tokens, block, parent, blocks)
            entry = self._by_key.get(key)
            if entry is None or not _follows(entry, parent, content):
                break
            entries.append(entry)
            parent = entry
        num_found = len(entries) * self._page_size
        self.num_query_tokens += len(tokens)
        self.num_hit_tokens += num_found
        pages = tuple(entry.page for entry in entries)
        lease = PrefixLease(pages=pages, num_tokens=num_found, _entries=[])
        self._leases.add(lease)
        self._hold(lease, entries)
        return lease

    def num_cached_pages(self, blocks: Sequence[Block]) -> int:
        """Return how many of a sequence's first pages are cached, and hold none of them."""
        parent = self._root
        for count, (key, content) in enumerate(blocks):
            entry = self._by_key.get(key)
            if entry is None or not _follows(entry, parent, content):
                return count
            parent = entry
        return len(blocks)

    def insert(
        self,
        lease: PrefixLease,
        tokens: Sequence[int],
        pages: Sequence[int],
        blocks: list[Block] | None = None,
    ) -> list[int]:
        """Cache a sequence's full pages beyond those that its lease holds, and hold them too.

        Where a page with the same prefix is cached already, that one stays and is held, and the
        sequence's own is not added. At a colliding hash no further pages are added. A later call
        may continue with more tokens of the same sequence.

        Args:
            lease: of the sequence, not yet released.
            tokens: the sequence from its start, at least the tokens that the lease holds.
            pages: `pages[i]` holds the K/V of `tokens[i * page_size : (i + 1) * page_size]`; a
                partial last page is allowed and not added. Pages that the lease holds are not read.
            blocks: of the sequence, from earlier calls.

        Returns:
            The pages that are new in the cache: `retain` them before the row is freed.

        Raises:
            ValueError: the lease is not held, the tokens are not those that it holds, there are
                more pages than tokens need, or a new page is no integer of 0 or more, named twice
                or cached for another prefix. Nothing is changed.
        """
        self._require_held(lease)
        tokens, pages = _as_list(tokens), _as_list(pages)
        if len(pages) > -(-len(tokens) // self._page_size):
            raise ValueError(
                f"{len(tokens)} tokens in pages of {self._page_size} fill fewer than the "
                f"{len(pages)} pages given"
            )
        first = len(lease._entries)
        parent = lease._entries[-1] if lease._entries else self._root
        if lease._entries and self._content(tokens, first - 1) != parent.tokens:
            raise ValueError(
                f"tokens must go on from those of the lease: page {first - 1} of the sequence has "
                f"{self._content(tokens, first - 1)}, the lease {parent.tokens}"
            )
        if blocks is not None:
            blocks += [(entry.key, entry.tokens) for entry in lease._entries[len(blocks) :]]
        held: list[_Entry] = []
        new_by_key: dict[int, _Entry] = {}
        new_by_page: dict[int, _Entry] = {}
        for block in range(first, min(len(pages), len(tokens) // self._page_size)):
            key, content = self._block(tokens, block, parent, blocks)
            entry = self._by_key.get(key) or new_by_key.get(key)
            if entry is None:
                check_integer(f"pages[{block}]", pages[block], 0)
                page = int(pages[block])
                if page in new_by_page:
                    raise ValueError(f"{page=} must be named once")
                if page in self._by_page:
                    raise ValueError(f"{page=} is cached for another prefix")
                entry = _Entry(key=key, parent=parent, tokens=content, page=page)
                new_by_key[key] = new_by_page[page] = entry
            elif not _follows(entry, parent, content):
                break
            held.append(entry)
            parent = entry
        self._by_key |= new_by_key
        self._by_page |= new_by_page
        self.num_inserted_pages += len(new_by_page)
        self._hold(lease, held)
        return list(new_by_page)

    def held_pages(self, lease: PrefixLease) -> list[int]:
        """Return the cached pages of a lease, those of its `pages` and those of `insert`.

        Raises:
            ValueError: the lease is not held.
        """
        self._require_held(lease)
        return [entry.page for entry in lease._entries]

    def release(self, lease: PrefixLease) -> None:
        """End a lease. Its pages stay cached; those that no other lease holds can be evicted.

        Raises:
            ValueError: the lease is not held.
        """
        self._require_held(lease)
        self._leases.remove(lease)
        for entry in reversed(lease._entries):
            entry.num_users -= 1
            self._num_shared -= entry.num_users == 1
            if entry.num_users == 0:
                self._unused[entry.page] = entry
        lease._entries.clear()

    def evict(self, num_pages: int) -> list[int]:
        """Drop up to `num_pages` pages that no lease holds, least recently used first.

        Returns:
            The dropped pages: `release` them in the table.

        Raises:
            ValueError: `num_pages` is no integer of 0 or more.
        """
        check_integer("num_pages", num_pages, 0)
        pages = []
        for _ in range(min(num_pages, len(self._unused))):
            page, entry = self._unused.popitem(last=False)
            del self._by_key[entry.key], self._by_page[page]
            pages.append(page)
        return pages

    def clear(self) -> list[int]:
        """Drop all pages that no lease holds, and return them as `evict` does."""
        return self.evict(len(self._unused))

    def _content(self, tokens: Sequence[int], block: int) -> tuple[int, ...]:
        return tuple(tokens[block * self._page_size : (block + 1) * self._page_size])

    def _block(
        self, tokens: Sequence[int], block: int, parent: _Entry, blocks: list[Block] | None
    ) -> Block:
        """Return the key and the tokens of a full page that follows `parent`."""
        if blocks is not None and block < len(blocks):
            return blocks[block]
        content = self._content(tokens, block)
        new = self._hash_page(parent.key, content), content
        if blocks is not None:
            blocks.append(new)
        return new

    def _hold(self, lease: PrefixLease, entries: list[_Entry]) -> None:
        for entry in entries:
            entry.num_users += 1
            self._num_shared += entry.num_users == 2
            self._unused.pop(entry.page, None)
        lease._entries.extend(entries)

    def _require_held(self, lease: PrefixLease) -> None:
        if lease not in self._leases:
            raise ValueError(f"{lease} must be of this cache and not yet released")


def _as_list(numbers: Any) -> Any:
    """Return an array of NumPy or JAX as a list; other sequences as they are."""
    return numbers.tolist() if hasattr(numbers, "tolist") else numbers


def _follows(entry: _Entry, parent: _Entry, tokens: tuple[int, ...]) -> bool:
    return entry.parent is parent and entry.tokens == tokens
