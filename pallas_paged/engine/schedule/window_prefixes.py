"""The pages of layers with a window that the prefix cache keeps beside those of other layers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class WindowPrefixes:
    """Which cached page of the layers that see all tokens has which page of the others beside it.

    A sequence can begin with a cached prefix if the last pages of it, as many as the window sees,
    have theirs. Pages that were used the longest ago go first, by themselves: the prefix then
    cannot be used to there, but perhaps to another place.

    Attributes:
        num_inserted: pages that were ever added; while it stays the same, no more is found.
    """

    def __init__(self, *, sliding_window: int, kept_tokens: int, page_size: int, num_pages: int):
        """Start empty.

        Args:
            sliding_window: tokens that the layers see.
            kept_tokens: newest tokens of a sequence whose pages the table has, at least as many.
            page_size: tokens of a page.
            num_pages: most pages to keep.
        """
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
        """Keep pages beside cached ones; return those to retain, and those to release.

        Args:
            pages: cached ones.
            window_pages: beside each, or -1 for none.
        """
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
