"""Which page holds the K/V of which prefix, so that a sequence begins with pages of others.

Host side and integers only: no arrays, no K/V. The index tells its caller which pages to `retain`,
`attach` and `release` in the `PageTable`, and the caller does it, so that an indexed page is never
free and never written to.

A page is found by the chained hash of its tokens and all tokens before them, as in vLLM's automatic
prefix caching (Kwon et al., "Efficient Memory Management for Large Language Model Serving with
PagedAttention", 2023). Pages that no sequence uses stay until room is needed, and go least
recently used first, later pages of a prefix before earlier ones, as in SGLang's RadixAttention
(Zheng et al., "SGLang: Efficient Execution of Structured Language Model Programs", 2023).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pallas_paged.page_table import validate_positive


@dataclass(kw_only=True, eq=False, slots=True)
class _Entry:
    """A page in the index. Users are leases; those of a page also use all pages before it."""

    key: int
    parent: _Entry | None
    tokens: tuple[int, ...]
    page: int
    num_users: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class PrefixLease:
    """A sequence's hold on entries of a `PrefixCache`, which keeps them from eviction.

    Attributes:
        pages: pages that `lookup` found, for a row to `attach`; `insert` adds none.
        num_tokens: tokens in those pages.
    """

    pages: tuple[int, ...]
    num_tokens: int
    _entries: list[_Entry] = field(repr=False)


def chained_hash(parent: int, tokens: tuple[int, ...]) -> int:
    """Returns the hash of a page's tokens after a prefix with the hash `parent`."""
    return hash((parent, tokens))


class PrefixCache:
    """An index from token prefixes to full pages.

    Nothing is taken for equal because its hash is: a page found by hash is used if its tokens are
    the same and it follows the same page. So a collision costs a hit and never gives wrong K/V, and
    the hash needs no salt against prompts that are made to collide.

    Attributes:
        num_query_tokens: tokens that `lookup` was asked for, in all calls.
        num_hit_tokens: tokens that it found.
    """

    def __init__(
        self,
        *,
        page_size: int,
        hash_page: Callable[[int, tuple[int, ...]], int] = chained_hash,
    ) -> None:
        """Makes an empty index.

        Args:
            page_size: tokens per page, as in the page table.
            hash_page: from the hash of what comes before a page (0 for nothing) and the page's
                tokens to its hash.

        Raises:
            ValueError: `page_size` is not a positive integer.
        """
        validate_positive(page_size=page_size)
        self.num_query_tokens = 0
        self.num_hit_tokens = 0
        self._page_size = int(page_size)
        self._hash_page = hash_page
        self._root = _Entry(key=0, parent=None, tokens=(), page=-1)
        self._by_key: dict[int, _Entry] = {}
        self._by_page: dict[int, _Entry] = {}
        # In the order of eviction. A page is in it only if all that follow it are, before it.
        self._unused: OrderedDict[int, _Entry] = OrderedDict()
        self._leases: set[PrefixLease] = set()

    def __len__(self) -> int:
        """Pages in the index."""
        return len(self._by_page)

    @property
    def pages(self) -> list[int]:
        """All pages in the index: those that the table retains for it, see `check_page_table`."""
        return list(self._by_page)

    @property
    def num_evictable(self) -> int:
        """Pages in the index that no lease holds."""
        return len(self._unused)

    def lookup(self, tokens: Sequence[int]) -> PrefixLease:
        """Finds the longest prefix of full pages and holds it until the lease is released.

        At least the last token is left out, so that there is a query to compute: of a prompt that
        is there as a whole in full pages the last page is not used.
        """
        entries: list[_Entry] = []
        parent = self._root
        for block in range((len(tokens) - 1) // self._page_size):
            content = self._content(tokens, block)
            entry = self._by_key.get(self._hash_page(parent.key, content))
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

    def insert(self, lease: PrefixLease, tokens: Sequence[int], pages: Sequence[int]) -> list[int]:
        """Adds a sequence's full pages beyond those that its lease holds, and holds them too.

        Where a page with the same prefix is there already, that one stays and is held, and the
        sequence's own is not added. A hash that collides ends the pages that are added. A later
        call may go on with more tokens of the same sequence.

        Args:
            lease: the sequence's, not yet released.
            tokens: the sequence from its start, at least what the lease holds.
            pages: `pages[i]` holds the K/V of `tokens[i * page_size : (i + 1) * page_size]`; a
                partial last page may be there and is not added.

        Returns:
            The pages that are new in the index: `retain` them before the row gives them up.

        Raises:
            ValueError: the lease is not held, the tokens are not those that it holds, there are
                more pages than tokens need, or a page is in the index for another prefix. Nothing
                is changed.
        """
        self._require_held(lease)
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
        held: list[_Entry] = []
        new_by_key: dict[int, _Entry] = {}
        new_by_page: dict[int, _Entry] = {}
        for block in range(first, min(len(pages), len(tokens) // self._page_size)):
            content = self._content(tokens, block)
            key = self._hash_page(parent.key, content)
            entry = self._by_key.get(key) or new_by_key.get(key)
            if entry is None:
                page = int(pages[block])
                if page in self._by_page or page in new_by_page:
                    raise ValueError(f"{page=} is in the index for another prefix")
                entry = _Entry(key=key, parent=parent, tokens=content, page=page)
                new_by_key[key] = new_by_page[page] = entry
            elif not _follows(entry, parent, content):
                break
            held.append(entry)
            parent = entry
        self._by_key |= new_by_key
        self._by_page |= new_by_page
        self._hold(lease, held)
        return list(new_by_page)

    def release(self, lease: PrefixLease) -> None:
        """Ends a lease. Its pages stay in the index; those that no other lease holds may go.

        Raises:
            ValueError: the lease is not held.
        """
        self._require_held(lease)
        self._leases.remove(lease)
        for entry in reversed(lease._entries):
            entry.num_users -= 1
            if entry.num_users == 0:
                self._unused[entry.page] = entry
        lease._entries.clear()

    def evict(self, num_pages: int) -> list[int]:
        """Drops up to `num_pages` pages that no lease holds, least recently used first.

        Returns:
            The pages dropped, which are to be released in the table.

        Raises:
            ValueError: `num_pages` is negative.
        """
        if num_pages < 0:
            raise ValueError(f"{num_pages=} must not be negative")
        pages = []
        for _ in range(min(num_pages, len(self._unused))):
            page, entry = self._unused.popitem(last=False)
            del self._by_key[entry.key], self._by_page[page]
            pages.append(page)
        return pages

    def clear(self) -> list[int]:
        """Drops all pages that no lease holds, and returns them as `evict` does."""
        return self.evict(len(self._unused))

    def _content(self, tokens: Sequence[int], block: int) -> tuple[int, ...]:
        return tuple(tokens[block * self._page_size : (block + 1) * self._page_size])

    def _hold(self, lease: PrefixLease, entries: list[_Entry]) -> None:
        for entry in entries:
            entry.num_users += 1
            self._unused.pop(entry.page, None)
        lease._entries.extend(entries)

    def _require_held(self, lease: PrefixLease) -> None:
        if lease not in self._leases:
            raise ValueError(f"{lease} must be of this cache and not yet released")


def _follows(entry: _Entry, parent: _Entry, tokens: tuple[int, ...]) -> bool:
    return entry.parent is parent and entry.tokens == tokens
