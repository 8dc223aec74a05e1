"""Who computes what next: the queue, the rows, and the pages that the host can count on.

Host side and integers only. The device's page table is the truth; the host knows of it what the
last report told and what it has itself asked for since, so `num_free` is never too high. Where that
is not enough, `plan` asks for the exact number before it takes pages from anybody.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from dataclasses import dataclass, field

from models.seq import Seq
from pallas_paged import PrefixCache

Adoption = tuple[int, tuple[int, ...]]  # a row, and the pages that it begins with


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """The next tokens of a sequence that does not decode."""

    seq: Seq
    tokens: list[int]
    ends: bool  # with the last known token: the next one is sampled


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One step: first rows adopt cached pages, then rows are forked, then the batch is computed.

    Attributes:
        adoptions: rows and the pages that they begin with.
        forks: rows, and empty rows that become like them.
        decodes: sequences that go on from their last token.
        given: of those, the ones whose last token the device did not draw, but the host knows.
        chunks: tokens of sequences that have more to compute than their last one.
    """

    adoptions: list[Adoption]
    forks: list[tuple[int, int]]
    decodes: list[Seq]
    given: list[Seq]
    chunks: list[Chunk]


@dataclass(kw_only=True)
class Settlement:
    """What the table is to be told before a plan: pages retained, rows freed, pages released."""

    retained: list[int] = field(default_factory=list)
    freed: list[int] = field(default_factory=list)
    released: list[int] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.retained or self.freed or self.released)


class Scheduler:
    """Decides, step by step, which sequences have rows and what they compute.

    Decoding rows come first, one token each. What is left of the token budget goes to sequences
    that have known tokens to compute, and then to the queue, in the order of arrival. One starts
    when the pages of all its tokens can be had, with a watermark of pages left over. When a running
    one finds no page, cached pages that nobody uses go first; then the newest sequence gives up its
    pages and returns to the front of the queue, to be computed again with the tokens it has.

    Attributes:
        queue, running: sequences without and with a row, oldest first.
        num_free: pages that are free for sure when the next step runs.
        ledger: pages evicted less pages taken, so far.
        num_preemptions: so far.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        max_seqs: int,
        token_budget: int,
        max_chunks: int,
        watermark: int,
        cache: PrefixCache | None,
    ):
        """Starts with all pages free.

        Args:
            num_pages, page_size, max_seqs: of the page table.
            token_budget: tokens of a step, decoding rows included; more than max_seqs.
            max_chunks: sequences in chunks of a step.
            watermark: pages that must be left over when a sequence starts beside others.
            cache: None computes every prompt in full.
        """
        self.queue: deque[Seq] = deque()
        self.running: list[Seq] = []
        self.num_free = num_pages
        self.ledger = 0
        self.num_preemptions = 0
        self._page_size = page_size
        self._token_budget = token_budget
        self._max_chunks = max_chunks
        self._watermark = watermark
        self._cache = cache
        self._spare_pages = max_seqs // page_size  # what a step of all rows takes
        self._rows = list(range(max_seqs - 1, -1, -1))  # without a holder; the last is next
        self._settlement = Settlement()
        self._exact = True  # num_free is what the table says, and nothing is in flight
        self._too_few = -1  # pages with which the head of the queue could not start

    @property
    def num_evictable(self) -> int:
        return self._cache.num_evictable if self._cache is not None else 0

    def plan(self, *, in_flight: bool) -> Plan | None:
        """Plans a step, and counts on its being run.

        Args:
            in_flight: whether steps are dispatched whose reports have not been observed.

        Returns:
            The plan, which may have nothing in it: there is nothing to do, or it waits for a
            report. None if pages are short: read all reports, run the settlement, tell `resync`
            what is free then, and ask again. Rows may have been taken from sequences already.
        """
        given = [seq for seq in self.running if seq.wants_last]
        decodes = [seq for seq in self.running if seq.can_decode or seq.wants_last]
        if not self._make_room(sum(self._growth(seq, 1) for seq in decodes)):
            self._preempt()
            return None
        forks = self._fork()
        chunks = self._continue(self._token_budget - len(decodes))
        budget = self._token_budget - len(decodes) - sum(len(chunk.tokens) for chunk in chunks)
        num_running = len(self.running)
        adoptions = self._admit(budget, chunks)
        started = len(self.running) > num_running
        goes_on = in_flight or decodes or forks or chunks or started
        if not goes_on and (self.running or self.queue):
            self._preempt()
            return None
        self._exact = False
        for seq in decodes:
            seq.num_computed += 1
            seq.num_pending += 1
        for seq in given:
            seq.decoding = not seq.steered
        return Plan(adoptions=adoptions, forks=forks, decodes=decodes, given=given, chunks=chunks)

    def observe(self, num_free: int, ledger: int) -> None:
        """Takes note of a report: the free pages after a step, and `ledger` after its plan."""
        self.num_free = num_free + self.ledger - ledger

    def take_settlement(self) -> Settlement:
        """What has been decided and not yet been told to the table."""
        settlement, self._settlement = self._settlement, Settlement()
        return settlement

    def resync(self, num_free: int) -> None:
        """Takes note of the free pages, with nothing in flight and nothing to settle."""
        self.num_free, self._exact = num_free, True

    def add(self, seq: Seq) -> None:
        """Puts a new sequence, with its followers, at the end of the queue."""
        self.queue.append(seq)

    def branch(self, parent: Seq, child: Seq) -> None:
        """Starts a sequence that has all tokens but the last in common with one that is computed.

        Without a row for it, or if the parent has lost its pages, the child is computed by itself.
        """
        if parent.row is None or not self._rows:
            self._requeue([child])
            return
        self._seat(child)
        child.leader = parent
        parent.followers.append(child)

    def unpark(self, seq: Seq) -> None:
        """Lets a sequence go on whose next token has been chosen."""
        seq.parked = False
        if seq.row is None:
            self._requeue([seq])

    def index(self, seq: Seq) -> None:
        """Lets other sequences find the full pages of a running one."""
        if self._cache is None or seq.lease is None:
            return
        tokens = seq.tokens[: seq.num_stored]
        num_pages = _blocks(len(tokens), self._page_size)
        pages = self._cache.insert(seq.lease, tokens, seq.pages[:num_pages])
        self._settlement.retained += pages

    def remove(self, seq: Seq) -> None:
        """Takes a sequence out for good, with or without a row."""
        unseated = self._part(seq)
        if seq.row is not None:
            self._vacate(seq)
        elif seq in self.queue:
            self.queue.remove(seq)
            self._too_few = -1
        self._requeue(unseated)

    def _preempt(self) -> None:
        """Takes the pages of the newest sequence, once it is certain that they are needed."""
        if not self._exact:
            return
        if not self.running:
            raise RuntimeError(
                f"{self.num_free} pages are free and {self.num_evictable} evictable, but the queue "
                f"cannot start with a sequence of {len(self.queue[0].tokens)} tokens"
            )
        victim = self.running[-1]
        victims = [victim, *victim.followers]
        self._part(victim)
        for seq in victims:
            self._vacate(seq)
            seq.request.num_preemptions += 1
            self.num_preemptions += 1
        self._requeue([seq for seq in victims if not seq.parked])

    def _part(self, seq: Seq) -> list[Seq]:
        """Ends what a sequence was to be forked from or to; returns followers without a row."""
        if seq.leader is not None:
            seq.leader.followers.remove(seq)
            seq.leader = None
        followers, seq.followers = seq.followers, []
        for follower in followers:
            follower.leader = None
        return [follower for follower in followers if follower.row is None]

    def _requeue(self, seqs: list[Seq]) -> None:
        if not seqs:
            return
        queue = [*self.queue]
        for seq in seqs:
            insort(queue, seq, key=lambda x: x.order)
        self.queue = deque(queue)
        self._too_few = -1

    def _fork(self) -> list[tuple[int, int]]:
        """Forks the followers of sequences that are computed up to their last token.

        Those without room for a copy of a partial page wait in the queue, to adopt the full ones.
        """
        forks: list[tuple[int, int]] = []
        waiting: list[Seq] = []
        for leader in [*self.running]:
            if not leader.followers or leader.num_left or leader.num_stored < leader.num_computed:
                continue
            followers, leader.followers = leader.followers, []
            full, tail = divmod(leader.num_computed, self._page_size)
            has_room = self._make_room(len(followers) * bool(tail))
            self.index(leader)
            for follower in followers:
                follower.leader = None
                if not has_room:
                    self._vacate(follower)
                    waiting.append(follower)
                    continue
                forks.append((leader.seat, follower.seat))
                follower.num_computed = follower.num_stored = leader.num_computed
                follower.pages = leader.pages[:full]  # it has a copy of the partial one
                if self._cache is not None:
                    follower.lease = self._cache.lookup(follower.tokens)
        self._requeue(waiting)
        return forks

    def _continue(self, budget: int) -> list[Chunk]:
        """Chunks of running sequences."""
        chunks: list[Chunk] = []
        for seq in self.running:
            if seq.wants_last:
                continue  # decodes, from the next step on if it has just been forked
            if seq.num_left > 0 and budget > 0 and len(chunks) < self._max_chunks:
                chunk = self._chunk(seq, budget)
                if chunk is not None:
                    chunks.append(chunk)
                    budget -= len(chunk.tokens)
        return chunks

    def _chunk(self, seq: Seq, budget: int) -> Chunk | None:
        """As many tokens of a sequence as there are budget and pages for, if any."""
        start = seq.num_computed
        available = self.num_free + self.num_evictable
        room = -start % self._page_size + available * self._page_size
        size = min(seq.num_left, budget, room)
        if size < 1:
            return None
        self._make_room(self._growth(seq, size))
        seq.num_computed += size
        ends = seq.num_computed == len(seq.tokens)
        seq.num_pending += ends
        seq.decoding = ends and not seq.steered
        return Chunk(seq=seq, tokens=seq.tokens[start : start + size], ends=ends)

    def _admit(self, budget: int, chunks: list[Chunk]) -> list[Adoption]:
        """Starts sequences of the queue; adds their first chunks, and returns what they adopt."""
        adoptions: list[Adoption] = []
        while self.queue and budget > 0 and len(chunks) < self._max_chunks:
            seq = self.queue[0]
            rows = 1 + len(seq.followers) + seq.num_spare_rows
            spare = sum(running.num_spare_rows for running in self.running)
            if len(self._rows) - spare < rows:
                break
            if not self._find_pages(seq):
                break
            self.queue.popleft()
            self._seat(seq)
            for follower in seq.followers:
                self._seat(follower)
            if seq.lease is not None and seq.lease.pages:
                adoptions.append((seq.seat, seq.lease.pages))
                seq.num_computed = seq.num_stored = seq.lease.num_tokens
                seq.pages = list(seq.lease.pages)
            if seq.lives == 1 and seq.completion.index == 0:
                seq.request.num_cached_tokens += seq.num_computed
            if seq.num_left > 0:
                chunk = self._chunk(seq, budget)
                assert chunk is not None  # its pages are there
                chunks.append(chunk)
                budget -= len(chunk.tokens)
        return adoptions

    def _find_pages(self, seq: Seq) -> bool:
        """Whether a sequence can start; it then has its lease."""
        reserved = sum(self._growth(running, running.num_left) for running in self.running)
        available = self.num_free + self.num_evictable - reserved
        if available <= self._too_few and self.running:
            return False  # as when it last was looked at
        lease = self._cache.lookup(seq.tokens) if self._cache is not None else None
        found = len(lease.pages) if lease is not None else 0
        needed = _blocks(len(seq.tokens), self._page_size) - found
        watermark = self._watermark if self.running else 0
        # What the lease holds can no longer be evicted.
        if needed + watermark > self.num_free + self.num_evictable - reserved:
            self._too_few = available
            if self._cache is not None and lease is not None:
                self._cache.release(lease)
            return False
        self._too_few = -1
        seq.lease = lease
        return True

    def _seat(self, seq: Seq) -> None:
        seq.row = self._rows.pop()
        seq.lives += 1
        insort(self.running, seq, key=lambda x: x.order)

    def _vacate(self, seq: Seq) -> None:
        """Takes the row of a seq, whose full pages others may still find."""
        self.index(seq)
        if self._cache is not None and seq.lease is not None:
            self._cache.release(seq.lease)
        self._settlement.freed.append(seq.seat)
        self._rows.append(seq.seat)
        self.running.remove(seq)
        seq.row = seq.lease = None
        seq.pages = []
        seq.num_computed = seq.num_stored = 0
        seq.decoding = False
        self._too_few = -1

    def _growth(self, seq: Seq, num_tokens: int) -> int:
        """Pages that a sequence needs for more tokens."""
        start = seq.num_computed
        return _blocks(start + num_tokens, self._page_size) - _blocks(start, self._page_size)

    def _make_room(self, num_pages: int) -> bool:
        """Takes pages that are free, after evicting as many cached ones as are missing."""
        if self._cache is not None and self.num_free < num_pages:
            # Some more than are missing, for each call that tells the table takes its time.
            evicted = self._cache.evict(num_pages - self.num_free + self._spare_pages)
            self._settlement.released += evicted
            self.num_free += len(evicted)
            self.ledger += len(evicted)
        if self.num_free < num_pages:
            return False
        self.num_free -= num_pages
        self.ledger -= num_pages
        return True


def _blocks(num_tokens: int, page_size: int) -> int:
    return -(-num_tokens // page_size)
