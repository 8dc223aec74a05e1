"""The scheduler: which sequences run in the next step, in which slots, on which pages.

Host side and integers only. The device's page table is the truth. The host knows the newest
report and what it has scheduled since, so `num_free` is a lower bound. Where that is not enough,
`schedule` asks for the exact number before it takes pages from a sequence.
"""

from __future__ import annotations

import time
from bisect import insort
from collections import deque

from pallas_paged.engine.requests.request import enqueue
from pallas_paged.engine.requests.sequence import Sequence
from pallas_paged.engine.schedule.calls import (
    Chunk,
    Decode,
    DraftPolicy,
    RunnerOutput,
    SchedulerOutput,
)
from pallas_paged.engine.schedule.kv_cache_manager import KVCacheManager

_FREE_TOKENS = 8  # that a grammar has not forced, after which more of them are expected


class Scheduler:
    """Decides, step by step, which sequences have slots and what they compute.

    Decoding sequences come first, one token each. The rest of the batched tokens goes to sequences
    with known tokens to compute, and then to the waiting queue, by priority and arrival. A sequence
    starts when the pages of all its tokens are available and a watermark of pages is left over.
    When a running one finds no page, cached pages that no sequence uses go first; then the last
    sequence in the order gives up its pages and waits again, to be computed anew with its tokens.

    Attributes:
        waiting, running: sequences without and with a slot, in the order of service.
        pages: the pages of running sequences.
        num_preemptions: so far.
        num_queried_tokens, num_hit_tokens: of requests that have started with a prefix cache: their
            tokens, and those that it had.
        unused_slots: the last is the next to be used.
    """

    def __init__(
        self,
        pages: KVCacheManager,
        *,
        watermark: int,
        drafting: DraftPolicy | None = None,
        max_tokens_of_call: int = 1,
        draws_apart: bool = False,
    ):
        """Start without sequences.

        Args:
            pages: of the pool.
            watermark: pages that are left over where a sequence starts.
            drafting: None: calls never verify drafts.
            max_tokens_of_call: most of a row in a call with drafts.
            draws_apart: whether decode steps with masks draw once the host has read the tokens of
                the call before.
        """
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.pages, self._watermark = pages, watermark
        self.num_preemptions = self.num_queried_tokens = self.num_hit_tokens = 0
        self._drafting, self._max_tokens_of_call = drafting, max_tokens_of_call
        self._draws_apart = draws_apart
        self.unused_slots = list(range(pages.max_num_seqs - 1, -1, -1))
        self._exact = True  # pages.num_free is what the table says, and nothing is in flight

    def schedule(
        self, *, in_flight: bool, may_end_early: bool = False, num_steps: int = 1
    ) -> SchedulerOutput | None:
        """Schedule the next call, and count on its being run.

        Args:
            in_flight: whether reports of dispatched calls are yet to be observed.
            may_end_early: whether one of those is a call of several tokens, which may do fewer.
            num_steps: most steps of a call that only decodes, while no sequence waits.

        Returns:
            The schedule. It may be empty: there is nothing to do, or it waits for a report. None if
            the number of free pages must be known: read all reports, run the update, call `resync`
            with the number of free pages, and ask again. Pages may have been taken from sequences.
        """
        if may_end_early and self._may_start:
            return None
        for one in self.running:
            if one.has_forced_tokens:
                one.decoding = False  # they are computed as those of a prompt are
        resumed = [one for one in self.running if one.needs_last_token]
        only_decodes = not (self._may_start or self._has_prefill)
        goes_ahead = only_decodes and self._goes_ahead
        grammars = [x for x in self.running if x.grammar is not None] if self._draws_apart else []
        if in_flight and not goes_ahead and any(one.num_pending for one in grammars):
            return SchedulerOutput()  # the next call needs their masks: read their tokens first
        decoding = [x for x in self.running if x.can_decode(goes_ahead) or x.needs_last_token]
        if not only_decodes or resumed or self.waiting or grammars:
            num_steps = 1
        num_drafts = self._num_drafts(decoding) if only_decodes and not resumed else 0
        taken = self._take_decode_pages(decoding, num_steps, num_drafts)
        num_steps, num_tokens, num_drafts = taken
        if not num_steps:
            self._preempt()
            return None
        forks = self._fork()
        budget = self.pages.max_num_batched_tokens - len(decoding)
        chunks: list[Chunk] = []
        for one in self.running:
            # One that needs its last token decodes, in the next step if just forked.
            if one.num_to_prefill > 0 and not one.needs_last_token:
                budget -= self._add_chunk(one, budget, chunks)
        num_running = len(self.running)
        attached = self._schedule_waiting(budget, chunks)
        started = len(self.running) > num_running
        goes_on = in_flight or decoding or forks or chunks or started
        if not goes_on and (self.running or self.waiting):
            self._preempt()
            return None
        self._exact = False
        decodes = []
        for one in decoding:
            count = self._num_tokens(one, num_tokens)
            one.num_computed += count
            one.num_pending += count
            decodes.append(Decode(sequence=one, num_tokens=count))
        for one in resumed:
            one.decoding = True
        return SchedulerOutput(
            attachments=[(one.running_slot, tuple(one.pages)) for one in attached],
            window_attachments=[(one.running_slot, tuple(one.window_pages)) for one in attached],
            forks=forks,
            decodes=decodes,
            resumed=resumed,
            chunks=chunks,
            num_steps=num_tokens,
            num_drafts=num_drafts,
            num_verifications=num_steps if num_drafts else 0,
            nothing_waits=not self.waiting,
        )

    def resync(self, num_free: int) -> None:
        """Note the free pages, with nothing in flight and no update left."""
        self.pages.num_free, self._exact = num_free, True

    def update(self, output: RunnerOutput, page_balance: int) -> None:
        """Note what a call has computed, given `pages.page_balance` after its schedule."""
        self.pages.observe(output.num_free, page_balance)
        if (drafts := output.drafts) is not None and self._drafting is not None:
            self._drafting.observe_drafts(drafts.num_rows, sum(drafts.num_accepted_per_pos))
        for one in output.sequences:
            scheduled, sequence = one.scheduled, one.scheduled.sequence
            self.pages.store(sequence, one.pages, one.window_pages)
            if isinstance(scheduled, Chunk):
                sequence.num_pending -= scheduled.is_last
                self.pages.cache_full_pages(sequence)
                continue
            sequence.num_pending -= scheduled.num_tokens
            if missing := scheduled.num_tokens - len(one.token_ids):
                sequence.num_computed -= missing
                self.pages.rewind(sequence, missing)

    def add(self, sequences: list[Sequence]) -> None:
        """Put new sequences of the same tokens into the waiting queue.

        The first computes the tokens, and the others are forked from it.
        """
        source, *source.forks = sequences
        for fork in source.forks:
            fork.fork_source = source
        enqueue(self.waiting, source)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out for good, with or without a slot."""
        self._detach(sequence)
        if sequence.slot is not None:
            self._stop(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def preempt_all(self) -> None:
        """Take all slots and pages, with nothing in flight; the sequences wait to be recomputed."""
        while self.running:
            self._preempt_last()

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache; running sequences keep their pages, which stay uncached."""
        self.pages.reset_prefix_cache(self.running)

    @property
    def _has_prefill(self) -> bool:
        """Whether a running sequence has known tokens to compute, or is about to be forked."""
        return any(one.num_to_prefill or one.forks for one in self.running)

    @property
    def _may_start(self) -> bool:
        return bool(self.waiting and self.unused_slots)

    @property
    def _goes_ahead(self) -> bool:
        """Whether a call that only decodes may begin before the tokens behind its masks are read.

        Forced tokens of a row are then seen a step late, so most rows should be in the midst of
        free text.
        """
        if not self._draws_apart:
            return False
        free = [x for x in self.running if x.grammar is None or x.num_unforced >= _FREE_TOKENS]
        return 2 * len(free) >= len(self.running)

    def _num_drafts(self, decoding: list[Sequence]) -> int:
        """Drafts of each sequence in a call that can only decode; 0 where they do not pay."""
        if self._drafting is None or not decoding or not all(x.takes_drafts for x in decoding):
            return 0
        return self._drafting.num_for(len(decoding))

    def _take_decode_pages(
        self, decoding: list[Sequence], num_steps: int, num_drafts: int
    ) -> tuple[int, int, int]:
        """Take the pages of as many steps as there are pages for, without drafts if need be.

        Returns:
            That number, the most tokens that they give a sequence, and the drafts; or zeros.
        """
        while num_steps:
            num_tokens = num_steps
            if num_drafts:
                # The pool of layers with a window has room for as many as a step may have in all.
                most = self.pages.max_num_batched_tokens // len(decoding)
                most = min(self._max_tokens_of_call, most)
                num_tokens = min(num_steps * (1 + num_drafts), most)
            needed = (
                self.pages.num_new_pages(one, self._num_tokens(one, num_tokens)) for one in decoding
            )
            if self.pages.allocate(sum(needed)):
                return num_steps, num_tokens, num_drafts
            if num_drafts:
                num_drafts = 0
            else:
                num_steps //= 2
        return 0, 0, 0

    def _num_tokens(self, sequence: Sequence, most: int) -> int:
        """Tokens that a decoding sequence computes in a call."""
        if most == 1 or not sequence.decoding or sequence.grammar is not None:
            return 1
        return min(most, sequence.num_to_decode)

    def _preempt(self) -> None:
        """Take the pages of the last sequence, once it is certain that they are needed."""
        if not self._exact:
            return
        if not self.running:
            raise RuntimeError(
                f"{self.pages.num_free} pages are free and {self.pages.num_evictable} evictable, "
                f"too few for a sequence of {len(self.waiting[0].token_ids)} tokens"
            )
        self._preempt_last()

    def _preempt_last(self) -> None:
        """Take the slot of the last sequence; one that waits for its source loses it as well."""
        victim = self.running[-1]
        source = victim.fork_source or victim
        for one in [source, *source.forks]:
            if one.slot is None:
                continue
            if one.num_computed:
                one.request.num_preemptions += 1
                self.num_preemptions += 1
            self._stop(one)
        enqueue(self.waiting, source)

    def _detach(self, sequence: Sequence) -> None:
        """Take a sequence out of its group of forks; the first fork becomes the source."""
        if sequence.fork_source is not None:
            sequence.fork_source.forks.remove(sequence)
            sequence.fork_source = None
        forks, sequence.forks = sequence.forks, []
        if not forks:
            return
        source, *rest = sorted(forks, key=lambda one: one.slot is None)
        source.fork_source, source.forks = None, rest
        for fork in rest:
            fork.fork_source = source
        if source.slot is None:
            enqueue(self.waiting, source)

    def _fork(self) -> list[tuple[int, int]]:
        """Fork sequences that are computed up to their last token.

        Those without a slot, or without a page for a copy of the partial one, go to the waiting
        queue and will attach the full pages.
        """
        pairs: list[tuple[int, int]] = []
        for source in [*self.running]:
            if not source.forks or source.num_to_prefill or source.num_stored < source.num_computed:
                continue
            forks, source.forks = source.forks, []
            num_copies = self.pages.num_copied_by_fork(source)
            self.pages.cache_full_pages(source)
            for fork in forks:
                fork.fork_source = None
                if fork.slot is None and self._has_slot(fork):
                    self._start(fork)
                if fork.slot is None or not self.pages.allocate(num_copies):
                    if fork.slot is not None:
                        self._stop(fork)
                    enqueue(self.waiting, fork)
                    continue
                pairs.append((source.running_slot, fork.slot))
                fork.num_computed = source.num_computed
                self.pages.fork(source, fork)
        return pairs

    def _add_chunk(self, sequence: Sequence, budget: int, chunks: list[Chunk]) -> int:
        """Add a chunk of as many tokens as there are budget and pages for; return their number."""
        start = sequence.num_computed
        size = min(sequence.num_to_prefill, budget, self.pages.tokens_that_fit(sequence))
        if size < 1:  # with a window, pages may come free only as it goes on
            return 0
        self.pages.allocate(self.pages.num_new_pages(sequence, size))
        sequence.num_computed += size
        is_last = sequence.num_computed == len(sequence.token_ids)
        sequence.num_pending += is_last
        sequence.decoding = is_last
        tokens = sequence.token_ids[start : start + size]
        chunks.append(Chunk(sequence=sequence, start=start, token_ids=tokens, is_last=is_last))
        return size

    def _schedule_waiting(self, budget: int, chunks: list[Chunk]) -> list[Sequence]:
        """Start waiting sequences; add their first chunks, and return those that attach pages."""
        attached: list[Sequence] = []
        while self.waiting and budget > 0:
            sequence = self.waiting[0]
            if not self._has_slot(sequence):
                break
            if not self.pages.start(sequence, self.running, self._watermark):
                break
            self.waiting.popleft()
            self._start(sequence)
            for fork in sequence.forks:
                if self._has_slot(fork):
                    self._start(fork)
            sequence.num_computed = sequence.num_stored
            if sequence.pages:
                attached.append(sequence)
            request = sequence.request
            if request.start_time is None:
                request.num_cached_tokens = sequence.num_computed
                request.start_time = time.perf_counter()
                if sequence.lease is not None:
                    self.num_queried_tokens += len(sequence.token_ids)
                    self.num_hit_tokens += sequence.num_computed
            budget -= self._add_chunk(sequence, budget, chunks)
        return attached

    def _has_slot(self, sequence: Sequence) -> bool:
        """Return whether a sequence can have a slot, and its window pages."""
        return bool(self.unused_slots) and self.pages.has_window_pages(self.running, sequence)

    def _start(self, sequence: Sequence) -> None:
        sequence.slot = self.unused_slots.pop()
        insort(self.running, sequence, key=lambda x: x.order)

    def _stop(self, sequence: Sequence) -> None:
        """Take the slot and the pages of a sequence."""
        self.pages.free(sequence)
        self.unused_slots.append(sequence.running_slot)
        self.running.remove(sequence)
        sequence.slot, sequence.num_computed, sequence.decoding = None, 0, False
