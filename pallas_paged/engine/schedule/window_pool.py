"""How large the pool of layers with a window is, where other layers see all tokens."""

from __future__ import annotations

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
        num_cached: most pages that the prefix cache keeps.
    """

    num_pages: int
    page_size: int
    max_num_batched_tokens: int
    sliding_window: int
    kept_tokens: int
    num_cached: int

    @classmethod
    def of(
        cls,
        *,
        sliding_window: int,
        page_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_tokens_of_call: int,
        enable_prefix_caching: bool,
        most_pages: int | None = None,
    ) -> WindowPool | None:
        """Return the pool that lets all sequences run, or one of `most_pages` if that is less.

        Args:
            sliding_window: of the pool.
            page_size, max_num_seqs, max_num_batched_tokens, max_tokens_of_call,
                enable_prefix_caching: as in `EngineConfig`.
            most_pages: None is any number.

        Returns:
            The pool; None if not even one sequence can run in so few pages.
        """
        kept = sliding_window + (page_size + max_tokens_of_call if enable_prefix_caching else 0)

        def pool(num_pages: int) -> WindowPool:
            return cls(
                num_pages=num_pages,
                page_size=page_size,
                max_num_batched_tokens=max_num_batched_tokens,
                sliding_window=sliding_window,
                kept_tokens=kept,
                num_cached=num_pages // 3 if enable_prefix_caching else 0,
            )

        def needed(num_seqs: int) -> int:
            num_pages = num_seqs * pool(0).most_of_sequence - pool(0).num_for_sequences
            return num_pages + (num_pages // 2 + 1 if enable_prefix_caching else 0)

        num_pages = needed(max_num_seqs)
        if most_pages is not None:
            num_pages = min(num_pages, most_pages)
        return pool(num_pages) if num_pages >= needed(1) else None

    # A call with chunks first frees what lies left of the kept tokens. K - 1 tokens of a sequence
    # are left, and it adds N: these are in at most (K - 2 + N) // page_size + 2 pages. All N
    # together are at most max_num_batched_tokens. Until the next such call each sequence adds one
    # token in a step, and a step frees a page of each that has one to free.

    @property
    def most_of_sequence(self) -> int:
        """Pages that a sequence holds at most, beside those of the tokens of a step."""
        return -(-(self.kept_tokens - 1) // self.page_size) + 2

    @property
    def num_for_sequences(self) -> int:
        """Pages for sequences, beside those of the tokens of a step."""
        step = -(-self.max_num_batched_tokens // self.page_size)
        return self.num_pages - self.num_cached - step

    def num_of_sequence(self, max_len: int) -> int:
        """Return the pages of a sequence of at most `max_len` tokens, as `most_of_sequence`."""
        return min(-(-max_len // self.page_size), self.most_of_sequence)
