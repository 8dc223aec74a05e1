"""The scheduler: which sequences run in the next step, in which slots, on which pages.

Host side and integers only. The device's page table is the truth. The host knows the newest
report and what it has scheduled since, so `num_free` is a lower bound. Where that is not enough,
`schedule` asks for the exact number before it takes pages from a sequence.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from dataclasses import dataclass, field

from pallas_paged.engine.sequence import Sequence
from pallas_paged.prefix_cache import PrefixCache

Attachment = tuple[int, tuple[int, ...]]  # a slot, and the cached pages that it begins with


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """The next known tokens of a sequence that is not decoding.

    Attributes:
        sequence: the sequence.
        start: index of the first token.
        token_ids: the tokens.
        is_last: whether its last known token is among them, so that the next one is sampled.
    """

    sequence: Sequence
    start: int
    token_ids: list[int]
    is_last: bool


@dataclass(frozen=True, kw_only=True)
class Decode:
    """Tokens of a sequence that goes on from its last one.

    Attributes:
        sequence: the sequence.
        num_tokens: how many it computes, at most; it samples as many.
    """

    sequence: Sequence
    num_tokens: int


@dataclass(frozen=True, kw_only=True)
class SchedulerOutput:
    """What one call runs: first slots attach cached pages, then slots are forked, then the batch.

    Attributes:
        attachments: slots and the pages that they begin with.
        forks: slots, and empty slots that become like them.
        decodes: sequences that go on from their last token.
        resumed: of those, the ones whose last token the host must send.
        chunks: tokens of sequences that have more to compute than their last one.
        num_steps: steps of this call; 1 if there are chunks.
    """

    attachments: list[Attachment]
    forks: list[tuple[int, int]]
    decodes: list[Decode]
    resumed: list[Sequence]
    chunks: list[Chunk]
    num_steps: int


@dataclass(kw_only=True)
class TableUpdate:
    """What the page table must do before a step: retain pages, free slots, release pages."""

    retained: list[int] = field(default_factory=list)
    freed: list[int] = field(default_factory=list)
    released: list[int] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.retained or self.freed or self.released)


class Scheduler:
    """Decides, step by step, which sequences have slots and what they compute.

    Decoding sequences come first, one token each. The rest of the batched tokens goes to sequences
    with known tokens to compute, and then to the waiting queue, by priority and arrival. A sequence
    starts when the pages of all its tokens are available and a watermark of pages is left over.
    When a running one finds no page, cached pages that no sequence uses go first; then the last
    sequence in the order gives up its pages and waits again, to be computed anew with its tokens.

    Attributes:
        waiting, running: sequences without and with a slot, in the order of service.
        num_free: lower bound of the pages that are free when the next step runs.
        ledger: pages evicted less pages taken, so far.
        num_preemptions: so far.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        watermark: int,
        cache: PrefixCache | None,
        sliding_window: int | None = None,
    ):
        """Start with all pages free.

        Args:
            num_pages, page_size: of the page table.
            max_num_seqs: slots.
            max_num_batched_tokens: tokens of a step, decodes included; more than max_num_seqs.
            watermark: pages that must be left over when a sequence starts beside others.
            cache: None computes every prompt in full.
            sliding_window: tokens after which pages are freed from the left, or None.
        """
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_free = num_pages
        self.ledger = 0
        self.num_preemptions = 0
        self._page_size = page_size
        self._max_num_batched_tokens = max_num_batched_tokens
        self._watermark = watermark
        self._cache = cache
        self._window = sliding_window
        self._spare_pages = max_num_seqs // page_size  # a step of all slots takes as many
        self._slots = list(range(max_num_seqs - 1, -1, -1))  # unused; the last is next
        self._update = TableUpdate()
        self._exact = True  # num_free is what the table says, and nothing is in flight
        self._blocked: tuple[int, int] | None = None  # what the head of the queue needed, and when

    @property
    def num_evictable(self) -> int:
        return self._cache.num_evictable if self._cache is not None else 0

    def schedule(
        self, *, in_flight: bool, uncertain: bool = False, num_steps: int = 1
    ) -> SchedulerOutput | None:
        """Schedule the next call, and count on its being run.

        Args:
            in_flight: whether reports of dispatched calls are yet to be observed.
            uncertain: whether one of those is a call of several steps, which may do fewer.
            num_steps: most steps of a call that only decodes, while no sequence waits.

        Returns:
            The schedule. It may be empty: there is nothing to do, or it waits for a report. None if
            the number of free pages must be known: read all reports, run the update, call `resync`
            with the number of free pages, and ask again. Pages may have been taken from sequences.
        """
        if uncertain and self.waiting and self._slots:
            return None
        resumed = [one for one in self.running if not one.decoding and one.needs_last_token]
        decoding = [one for one in self.running if one.can_decode or one in resumed]
        num_steps = self._take_decode_pages(decoding, resumed, num_steps)
        if not num_steps:
            self._preempt()
            return None
        forks = self._fork()
        budget = self._max_num_batched_tokens - len(decoding)
        chunks = self._continue(budget)
        budget -= sum(len(chunk.token_ids) for chunk in chunks)
        num_running = len(self.running)
        attachments = self._admit(budget, chunks)
        started = len(self.running) > num_running
        goes_on = in_flight or decoding or forks or chunks or started
        if not goes_on and (self.running or self.waiting):
            self._preempt()
            return None
        self._exact = False
        decodes = []
        for one in decoding:
            count = self._num_tokens(one, num_steps)
            one.num_computed += count
            one.num_pending += count
            decodes.append(Decode(sequence=one, num_tokens=count))
        for one in resumed:
            one.decoding = not one.is_beam
        return SchedulerOutput(
            attachments=attachments,
            forks=forks,
            decodes=decodes,
            resumed=resumed,
            chunks=chunks,
            num_steps=num_steps,
        )

    def observe(self, num_free: int, ledger: int) -> None:
        """Note a report: the free pages after a call, and `ledger` after its schedule."""
        self.num_free = num_free + self.ledger - ledger

    def rewind(self, decode: Decode, num_tokens: int) -> None:
        """Note that a call computed fewer tokens of a running sequence than were scheduled.

        Args:
            decode: what was scheduled; its tokens are not pending any more.
            num_tokens: tokens that were computed.
        """
        sequence = decode.sequence
        sequence.num_computed -= decode.num_tokens - num_tokens
        # Pages of what calls in flight compute were counted from a later token. Those calls report
        # what is free after them, so the ledger, which is for later calls, stays as it is.
        later, start = sequence.num_pending, sequence.num_computed - sequence.num_pending
        end = start + decode.num_tokens - num_tokens
        counted = self._blocks(end + later) - self._blocks(end)
        self.num_free += counted - (self._blocks(start + later) - self._blocks(start))

    def pages_of(self, num_tokens: int) -> int:
        """Pages that a sequence holds at a time until its tokens are computed."""
        if self._window is None:
            return self._blocks(num_tokens)
        # The pages of a chunk and of the window before it, and a partial one at either end.
        most = self._blocks(self._window + self._max_num_batched_tokens) + 1
        return min(self._blocks(num_tokens), most)

    def take_update(self) -> TableUpdate:
        """Return what has been decided and the table has not done yet."""
        update, self._update = self._update, TableUpdate()
        return update

    def resync(self, num_free: int) -> None:
        """Note the free pages, with nothing in flight and no update left."""
        self.num_free, self._exact = num_free, True

    def add(self, sequence: Sequence) -> None:
        """Put a new sequence, with its followers, into the waiting queue."""
        self._wait([sequence])

    def branch(self, parent: Sequence, child: Sequence) -> None:
        """Start a sequence that has all tokens but the last in common with one that is computed.

        Without a slot for it, or if the parent has lost its pages, the child is computed by itself.
        """
        if parent.slot is None or not self._slots:
            self._wait([child])
            return
        self._start(child)
        child.leader = parent
        parent.followers.append(child)

    def resume(self, sequence: Sequence) -> None:
        """Let a sequence go on whose next token has been chosen."""
        sequence.awaiting_choice = False
        if sequence.slot is None:
            self._wait([sequence])

    def cache_full_pages(self, sequence: Sequence) -> None:
        """Let other sequences find the full pages of a running one."""
        if self._cache is None or sequence.lease is None:
            return
        if self._window is not None and sequence.num_computed > self._window:
            return  # its first pages may be free by now
        # A stop text may have ended it before the last tokens that were computed.
        num_tokens = min(sequence.num_stored, len(sequence.token_ids))
        pages = sequence.pages[: self._blocks(num_tokens)]
        tokens = sequence.token_ids[:num_tokens]
        self._update.retained += self._cache.insert(
            sequence.lease, tokens, pages, blocks=sequence.blocks
        )

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out for good, with or without a slot."""
        self._detach(sequence)
        if sequence.slot is not None:
            self._stop(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
            self._blocked = None

    def preempt_all(self) -> None:
        """Take all slots and pages, with nothing in flight; the sequences wait to be recomputed."""
        while self.running:
            self._preempt_last()

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache; running sequences keep their pages, which stay uncached."""
        if self._cache is None:
            return
        freed = self._cache.clear()
        self.num_free += len(freed)
        self.ledger += len(freed)
        for one in self.running:
            if one.lease is not None:
                self._cache.release(one.lease)
                one.lease = None
        # Pages that running sequences hold are not free yet.
        self._update.released += freed + self._cache.clear()
        self._blocked = None

    def _take_decode_pages(
        self, decoding: list[Sequence], resumed: list[Sequence], num_steps: int
    ) -> int:
        """Take the pages of as many steps as there are pages for; return that number, or 0."""
        single = self.waiting or resumed or any(one.is_beam for one in decoding)
        if single or any(one.num_to_prefill or one.followers for one in self.running):
            num_steps = 1
        while num_steps:
            needed = (self._growth(one, self._num_tokens(one, num_steps)) for one in decoding)
            if self._make_room(sum(needed)):
                return num_steps
            num_steps //= 2
        return 0

    def _num_tokens(self, sequence: Sequence, num_steps: int) -> int:
        """Tokens that a decoding sequence computes in a call."""
        return min(num_steps, sequence.num_to_decode) if sequence.decoding else 1

    def _preempt(self) -> None:
        """Take the pages of the last sequence, once it is certain that they are needed."""
        if not self._exact:
            return
        if not self.running:
            raise RuntimeError(
                f"{self.num_free} pages are free and {self.num_evictable} evictable, but the queue "
                f"cannot start with a sequence of {len(self.waiting[0].token_ids)} tokens"
            )
        self._preempt_last()

    def _preempt_last(self) -> None:
        """Take the slot of the last sequence; one that waits for its leader loses it as well."""
        victim = self.running[-1]
        leader = victim.leader or victim
        for one in [leader, *leader.followers]:
            if one.slot is None:
                continue
            if one.num_computed:
                one.request.num_preemptions += 1
                self.num_preemptions += 1
            self._stop(one)
        if not leader.awaiting_choice:
            self._wait([leader])

    def _detach(self, sequence: Sequence) -> None:
        """Take a sequence out of its group of forks; the first follower becomes the leader."""
        if sequence.leader is not None:
            sequence.leader.followers.remove(sequence)
            sequence.leader = None
        followers, sequence.followers = sequence.followers, []
        if not followers:
            return
        leader, *rest = sorted(followers, key=lambda one: one.slot is None)
        leader.leader, leader.followers = None, rest
        for follower in rest:
            follower.leader = leader
        if leader.slot is None:
            self._wait([leader])

    def _wait(self, sequences: list[Sequence]) -> None:
        if not sequences:
            return
        waiting = [*self.waiting]
        for one in sequences:
            insort(waiting, one, key=lambda x: x.order)
        self.waiting = deque(waiting)
        self._blocked = None

    def _fork(self) -> list[tuple[int, int]]:
        """Fork the followers of sequences that are computed up to their last token.

        Those without a slot, or without a page for a copy of the partial one, go to the waiting
        queue and will attach the full pages.
        """
        forks: list[tuple[int, int]] = []
        late: list[Sequence] = []
        for leader in [*self.running]:
            if not leader.followers or leader.num_to_prefill:
                continue
            if leader.num_stored < leader.num_computed:
                continue
            followers, leader.followers = leader.followers, []
            full, tail = divmod(leader.num_computed, self._page_size)
            self.cache_full_pages(leader)
            for follower in followers:
                follower.leader = None
                if follower.slot is None and self._slots:
                    self._start(follower)
                if follower.slot is None or not self._make_room(bool(tail)):
                    if follower.slot is not None:
                        self._stop(follower)
                    late.append(follower)
                    continue
                forks.append((leader.running_slot, follower.slot))
                follower.num_computed = follower.num_stored = leader.num_computed
                follower.pages = leader.pages[:full]  # it has a copy of the partial one
                if self._cache is not None and leader.lease is not None:
                    follower.lease = self._cache.lookup(follower.token_ids, blocks=follower.blocks)
        self._wait(late)
        return forks

    def _continue(self, budget: int) -> list[Chunk]:
        """Chunks of running sequences."""
        chunks: list[Chunk] = []
        for one in self.running:
            if one.needs_last_token:
                continue  # decodes, from the next step on if it has just been forked
            if one.num_to_prefill > 0 and budget > 0:
                chunk = self._chunk(one, budget)
                if chunk is not None:
                    chunks.append(chunk)
                    budget -= len(chunk.token_ids)
        return chunks

    def _chunk(self, sequence: Sequence, budget: int) -> Chunk | None:
        """As many tokens of a sequence as there are budget and pages for, if any."""
        start = sequence.num_computed
        available = self.num_free + self.num_evictable
        room = -start % self._page_size + available * self._page_size
        size = min(sequence.num_to_prefill, budget, room)
        if size < 1:
            return None
        self._make_room(self._growth(sequence, size))
        sequence.num_computed += size
        is_last = sequence.num_computed == len(sequence.token_ids)
        sequence.num_pending += is_last
        sequence.decoding = is_last and not sequence.is_beam
        return Chunk(
            sequence=sequence,
            start=start,
            token_ids=sequence.token_ids[start : start + size],
            is_last=is_last,
        )

    def _admit(self, budget: int, chunks: list[Chunk]) -> list[Attachment]:
        """Start waiting sequences; add their first chunks, and return the pages they attach."""
        attachments: list[Attachment] = []
        while self.waiting and budget > 0 and self._slots:
            sequence = self.waiting[0]
            if not self._find_pages(sequence):
                break
            self.waiting.popleft()
            self._start(sequence)
            for follower in sequence.followers:
                if self._slots:
                    self._start(follower)
            if sequence.lease is not None and sequence.lease.pages:
                attachments.append((sequence.running_slot, sequence.lease.pages))
                sequence.num_computed = sequence.num_stored = sequence.lease.num_tokens
                sequence.pages = list(sequence.lease.pages)
            if sequence.num_starts == 1 and sequence.output.index == 0:
                sequence.request.num_cached_tokens += sequence.num_computed
            if sequence.num_to_prefill > 0:
                chunk = self._chunk(sequence, budget)
                if chunk is not None:  # with a window, pages may come free only as it goes on
                    chunks.append(chunk)
                    budget -= len(chunk.token_ids)
        return attachments

    def _find_pages(self, sequence: Sequence) -> bool:
        """Return whether a sequence can start; it then has its lease."""
        reserved = sum(self._growth(one, one.num_to_prefill) for one in self.running)
        available = self.num_free + self.num_evictable - reserved
        version = self._cache.num_inserted_pages if self._cache is not None else 0
        if self.running and self._blocked is not None:
            needed, seen = self._blocked
            if available < needed and seen == version:
                return False  # as when it was last looked at
        lease, found = None, 0
        if self._cache is not None:
            lease = self._cache.lookup(
                sequence.token_ids, blocks=sequence.blocks, max_tokens=sequence.max_cached_tokens
            )
            found = len(lease.pages)
        needed = self.pages_of(len(sequence.token_ids)) - found
        needed += self._watermark if self.running else 0
        # What the lease holds can no longer be evicted.
        if needed > self.num_free + self.num_evictable - reserved:
            if self._cache is not None and lease is not None:
                self._cache.release(lease)
            self._blocked = needed, version
            return False
        self._blocked = None
        sequence.lease = lease
        return True

    def _start(self, sequence: Sequence) -> None:
        sequence.slot = self._slots.pop()
        sequence.num_starts += 1
        insort(self.running, sequence, key=lambda x: x.order)

    def _stop(self, sequence: Sequence) -> None:
        """Take the slot of a sequence; others may still find its full pages in the cache."""
        self.cache_full_pages(sequence)
        if self._cache is not None and sequence.lease is not None:
            self._cache.release(sequence.lease)
        slot = sequence.running_slot
        self._update.freed.append(slot)
        self._slots.append(slot)
        self.running.remove(sequence)
        sequence.slot = sequence.lease = None
        sequence.pages = []
        sequence.num_computed = sequence.num_stored = 0
        sequence.decoding = False
        self._blocked = None

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._page_size)

    def _growth(self, sequence: Sequence, num_tokens: int) -> int:
        """Pages that a sequence needs for more tokens."""
        start = sequence.num_computed
        return self._blocks(start + num_tokens) - self._blocks(start)

    def _make_room(self, num_pages: int) -> bool:
        """Take pages that are free, after evicting as many cached ones as are missing."""
        if self._cache is not None and self.num_free < num_pages:
            # Some more than are missing, because each update of the table takes its time.
            evicted = self._cache.evict(num_pages - self.num_free + self._spare_pages)
            self._update.released += evicted
            self.num_free += len(evicted)
            self.ledger += len(evicted)
        if self.num_free < num_pages:
            return False
        self.num_free -= num_pages
        self.ledger -= num_pages
        return True
