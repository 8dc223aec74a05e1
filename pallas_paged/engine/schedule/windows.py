"""Layers with a window beside others: how many pages they have, and which of them are cached."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class WindowPool:
    """Sizes of a pool for the layers with a window.

    Its pages never run out: as many sequences run as can hold theirs at a time, so that beyond
    this the scheduler counts the pages of the other layers alone.

    Attributes:
        num_pages: of each of these layers. A third of them is for the prefix cache, if there is
            one.
        page_size, max_num_batched_tokens: as in `EngineConfig`.
        sliding_window: tokens that the layer with the largest window sees.
        kept_tokens: newest tokens of a sequence whose pages are not freed. The prefix cache takes
            the pages at the end of a prompt or an answer when the host has read it, and by then
            the next call has run: so with a prefix cache they are more than the window.
        caches: whether there is a prefix cache.
    """

    num_pages: int
    page_size: int
    max_num_batched_tokens: int
    sliding_window: int
    kept_tokens: int
    caches: bool

    # A call with chunks first frees what lies left of the kept tokens. K - 1 tokens of a sequence
    # are left, and it adds N: these are in at most (K - 2 + N) // page_size + 2 pages. All N
    # together are at most max_num_batched_tokens. Until the next such call each sequence adds one
    # token in a step, and a step frees a page of each that has one to free.

    @property
    def most_of_sequence(self) -> int:
        """Pages that a sequence holds at most, beside those of the tokens of a step."""
        return -(-(self.kept_tokens - 1) // self.page_size) + 2

    @property
    def num_cached(self) -> int:
        """Most pages that the prefix cache keeps."""
        return self.num_pages // 3 if self.caches else 0

    @property
    def num_for_sequences(self) -> int:
        """Pages for sequences, beside those of the tokens of a step."""
        return self.num_pages - self.num_cached - self._num_of_step

    def num_needed(self, num_seqs: int) -> int:
        """Return the pages of a pool in which as many sequences can run."""
        num_pages = num_seqs * self.most_of_sequence + self._num_of_step
        return num_pages + (num_pages // 2 + 1 if self.caches else 0)

    def num_of_sequence(self, max_len: int) -> int:
        """Return the pages of a sequence of at most `max_len` tokens, as `most_of_sequence`."""
        return min(-(-max_len // self.page_size), self.most_of_sequence)

    @property
    def _num_of_step(self) -> int:
        return -(-self.max_num_batched_tokens // self.page_size)


class WindowPrefixes:
    """Which cached page of the layers that see all tokens has which page of the others beside it.

    A sequence can begin with a cached prefix if the last pages of it, as many as the window sees,
    have theirs. Pages that were used the longest ago go first, by themselves: the prefix then
    cannot be used to there, but perhaps to another place.

    Attributes:
        num_inserted: pages that were ever added; while it stays the same, no more is found.
    """

    def __init__(self, *, sliding_window: int, kept_tokens: int, page_size: int, num_pages: int):
        """Start empty, for at most `num_pages`; the other sizes are those of `WindowPool`."""
        self.num_inserted = 0
        self._kept_tokens = kept_tokens
        self._window, self._page_size, self._num_pages = sliding_window, page_size, num_pages
        self._pages: OrderedDict[int, int] = OrderedDict()  # the next to be dropped first

    @property
    def pages(self) -> list[int]:
        """All that are kept: those that the table of these layers must retain."""
        return [*self._pages.values()]

    def first_block(self, num_blocks: int) -> int:
        """Return the first block that is seen from behind `num_blocks` full pages."""
        return max(0, num_blocks * self._page_size - self._window + 1) // self._page_size

    def first_kept(self, num_tokens: int) -> int:
        """Return the first block that a sequence of at most `num_tokens` has for certain."""
        return max(0, num_tokens - self._kept_tokens + 1) // self._page_size

    def num_usable(self, pages: Iterable[int]) -> int:
        """Return with how many of the first pages of a cached prefix a sequence can begin."""
        most = known = 0  # of the blocks until here, the last `known` have their pages
        for num_blocks, page in enumerate(pages, 1):
            known = known + 1 if page in self._pages else 0
            if num_blocks - self.first_block(num_blocks) <= known:
                most = num_blocks
        return most

    def attach(self, pages: Sequence[int]) -> list[int]:
        """Return the pages beside those of a usable prefix, -1 left of the window."""
        first = self.first_block(len(pages))
        for page in pages[first:]:
            self._pages.move_to_end(page)
        return [-1] * first + [self._pages[page] for page in pages[first:]]

    def insert(self, pages: Iterable[int], window_pages: Iterable[int]) -> tuple[list, list]:
        """Keep a page, or -1 for none, beside cached ones; return what to retain and to release."""
        retained: list[int] = []
        for page, window_page in zip(pages, window_pages, strict=True):
            if page in self._pages:
                self._pages.move_to_end(page)
            elif window_page >= 0:
                self._pages[page] = window_page
                retained.append(window_page)
        self.num_inserted += len(retained)
        num_dropped = max(0, len(self._pages) - self._num_pages)
        return retained, [self._pages.popitem(last=False)[1] for _ in range(num_dropped)]

    def drop(self, pages: Iterable[int]) -> list[int]:
        """Return the pages beside those that the prefix cache has dropped, to be released."""
        return [self._pages.pop(page) for page in pages if page in self._pages]
