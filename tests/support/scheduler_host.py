"""The host side of the engine without a device: schedules run on an allocator of lists."""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pallas_paged import PrefixCache
from pallas_paged.engine import CompletionOutput, Request, SamplingParams
from pallas_paged.engine.requests.sequence import Sequence
from pallas_paged.engine.sampling_params import SamplingMode
from pallas_paged.engine.schedule.calls import (
    DraftPolicy,
    RunnerOutput,
    SchedulerOutput,
    SequenceOutput,
)
from pallas_paged.engine.schedule.kv_cache_manager import KVCacheManager
from pallas_paged.engine.schedule.scheduler import Scheduler
from tests.support.allocator_oracle import AllocatorOracle

PAGE_SIZE = 4
FIRST = 1000  # new token of a request
STRIDE = 100_000  # from one of its samples to the next
SIZES: dict[str, Any] = dict(num_pages=16, max_num_seqs=4, max_num_batched_tokens=16)
SIZES |= dict(watermark=0, sliding_window=None)


def make_request(number: int, prompt: list[int], *, new: int, **values) -> Request:
    """A request of at most `new` tokens; values of its attributes."""
    values = dict(params=SamplingParams(), priority=0) | values
    values |= dict(prompt=None, prompt_token_ids=prompt, seed=0, max_len=len(prompt) + new)
    return Request(request_id=str(number), number=number, **values)


def make_sequence(
    number: int, length: int = 0, *, new: int = 8, prompt=(), priority: int = 0, **values
) -> Sequence:
    """A sequence with a prompt, or with one of this length; values of its attributes."""
    tokens = list(prompt) or [100 * number + i for i in range(length)]
    return _sequence(make_request(number, tokens, new=new, priority=priority), 0, **values)


def _sequence(request: Request, index: int, **values) -> Sequence:
    return Sequence(
        request=request,
        output=CompletionOutput(index=index),
        token_ids=request.prompt_token_ids[:],
        max_len=request.max_len,
        mode=SamplingMode(),
        **values,
    )


def with_forks(source: Sequence, count: int) -> list[Sequence]:
    """Add forks to a sequence, and return them."""
    source.forks += [_sequence(source.request, i + 1, fork_source=source) for i in range(count)]
    return source.forks[:]


def token_at(one: Sequence, position: int) -> int:
    """The new token of a sequence at a position, the same under every schedule."""
    return FIRST + position - len(one.request.prompt_token_ids) + STRIDE * one.output.index


@dataclass
class _Call:
    scheduled: SchedulerOutput
    sampled: dict[Sequence, list[int]]  # a row that had ended before samples nothing
    pages: dict[Sequence, list[int]]  # one a token
    num_free: int
    page_balance: int
    num_frees: int


class Host:
    """Runs schedules on an allocator that refuses wrong ones, and reads results one call late.

    A call of several steps ends with the last row that ends, as on the device, or with the first,
    for what may end a call earlier. In one with drafts a random number of them is right.
    """

    def __init__(
        self,
        *sequences: Sequence,
        caching: bool = False,
        num_steps: int | Callable[[], int] = 1,
        cache: PrefixCache | None = None,
        ends_early: bool = True,
        drafting: DraftPolicy | None = None,
        max_tokens_of_call: int = 1,
        **sizes,
    ):
        """Put these sequences into the queue of a scheduler with SIZES, except those given."""
        self.sizes = SIZES | sizes
        self.cache = PrefixCache(page_size=PAGE_SIZE) if caching else cache
        watermark = self.sizes.pop("watermark")
        pages = KVCacheManager(page_size=PAGE_SIZE, cache=self.cache, **self.sizes)
        self.scheduler = Scheduler(
            pages, watermark=watermark, drafting=drafting, max_tokens_of_call=max_tokens_of_call
        )
        self.rng = random.Random(0)
        sizes = dict(num_pages=self.sizes["num_pages"], max_seqs=self.sizes["max_num_seqs"])
        self.table = AllocatorOracle(page_size=PAGE_SIZE, pages_per_seq=64, **sizes)
        self.num_steps = num_steps if callable(num_steps) else lambda: num_steps
        self.ends_early = ends_early
        self.calls: deque[_Call] = deque()
        self.finished: set[int] = set()  # slots that have ended on the device
        self.num_frees = 0
        self.is_exact = True  # the newest report knows of all slots that were freed
        self.add(*sequences)

    def add(self, *sequences: Sequence) -> None:
        for one in sequences:
            self.scheduler.add([one, *one.forks])

    def update(self) -> None:
        update = self.scheduler.pages.take_update()
        assert all(self.table.retain(update.retained))
        self.num_frees += len(update.freed)
        self.is_exact &= not update.freed
        self.table.free([slot in update.freed for slot in range(len(self.table.pages))])
        self.table.release(update.released)

    def schedule(self) -> SchedulerOutput | None:
        running, waiting = self.scheduler.running, self.scheduler.waiting
        steps, before = [call.scheduled.num_steps for call in self.calls], {*running}
        early = max(steps, default=1) > 1
        how = dict(in_flight=bool(steps), may_end_early=early, num_steps=self.num_steps())
        scheduled = self.scheduler.schedule(**how)
        if waiting:  # none has passed it, but for samples of a prompt that is computed
            started = [one for one in running if one not in before and not one.output.index]
            assert all(one.order < waiting[0].order for one in started)
        return scheduled

    def step(self) -> SchedulerOutput:
        """Schedule and run a call, then read those before it."""
        while (scheduled := self.schedule()) is None:
            if self.calls:
                self.read()
                continue
            self.update()
            self.scheduler.resync(self.table.num_free)
            self.is_exact = True
        attached, forks = scheduled.attachments, scheduled.forks
        if self.scheduler.pages.must_update or attached:
            self.update()
        assert all(self.table.attach([slot for slot, _ in attached], [[*x] for _, x in attached]))
        for slot, pages in attached:  # K and V depend on all tokens before them
            for end, page in enumerate(pages, 1):
                prefix = self.table.tokens[slot][: end * PAGE_SIZE]
                assert self.table.prefixes[page] == prefix, "a page of another prefix"
        assert all(self.table.fork([src for src, _ in forks], [dst for _, dst in forks]))
        dispatched = bool(scheduled.decodes or scheduled.chunks)
        if dispatched:
            self.calls.append(self._run(scheduled))
        self.check_bound()
        while len(self.calls) > dispatched:
            self.read()
        self.check()
        return scheduled

    def _run(self, scheduled: SchedulerOutput) -> _Call:
        starting = [*scheduled.resumed, *(x.sequence for x in scheduled.chunks if x.is_last)]
        self.finished -= {one.running_slot for one in starting}
        chunks = {chunk.sequence: chunk.token_ids for chunk in scheduled.chunks}
        limits = {x.sequence: x.num_tokens for x in scheduled.decodes}
        for chunk in scheduled.chunks:
            assert chunk.start == len(self.table.tokens[chunk.sequence.running_slot])
        num_tokens = len(limits) + sum(map(len, chunks.values()))
        assert num_tokens <= self.sizes["max_num_batched_tokens"] and all(chunks.values())
        if scheduled.num_drafts:
            assert not (chunks or scheduled.resumed)
            limits = self._accepted(limits)
        else:
            assert scheduled.num_steps == 1 or not (chunks or self.scheduler.waiting)
        sampled: dict[Sequence, list[int]] = {one: [] for one in limits}
        pages: dict[Sequence, list[int]] = {one: [] for one in [*limits, *chunks]}
        for step in range(scheduled.num_steps):
            goes_on = (one for one, limit in limits.items() if step < limit)
            active = [one for one in goes_on if one.running_slot not in self.finished]
            new: list[list[int]] = [[] for _ in self.table.tokens]
            for one in active:
                length = len(self.table.tokens[one.running_slot])
                given = one in scheduled.resumed
                new[one.running_slot] = [one.token_ids[-1] if given else token_at(one, length)]
            for one, tokens in chunks.items():
                new[one.running_slot] = tokens
            if (window := self.sizes["sliding_window"]) is not None:
                rows = zip(self.table.tokens, new, strict=True)
                first = [len(tokens) - window + 1 if added else 0 for tokens, added in rows]
                self.table.free_before(first, None if chunks else 1)
            assert all(self.table.extend(new, 10**6)), "the schedule needs more pages than are free"
            for one in [*active, *chunks]:
                slot = one.running_slot
                length = len(self.table.tokens[slot])
                held = range(length - len(new[slot]), length)
                pages[one] += [self.table.pages[slot][at // PAGE_SIZE] for at in held]
            for one in [*active, *(x.sequence for x in scheduled.chunks if x.is_last)]:
                length = len(self.table.tokens[one.running_slot])
                token = token_at(one, length)
                sampled.setdefault(one, []).append(token)
                if length + 1 >= one.max_len or token in one.stop_token_ids:
                    self.finished.add(one.running_slot)
            if self.ends_early and any(one.running_slot in self.finished for one in active):
                break
        page_balance = self.scheduler.pages.page_balance
        return _Call(scheduled, sampled, pages, self.table.num_free, page_balance, self.num_frees)

    def _accepted(self, limits: dict[Sequence, int]) -> dict[Sequence, int]:
        """Return how many tokens rows compute, which first take the pages of the most."""
        rows = {one: limit for one, limit in limits.items() if one.slot not in self.finished}
        lens = {one: len(self.table.tokens[one.running_slot]) for one in rows}
        needed = (
            -(-(lens[i] + x) // PAGE_SIZE) - -(-lens[i] // PAGE_SIZE) for i, x in rows.items()
        )
        assert sum(needed) <= self.table.num_free, "the schedule needs more pages than are free"
        return {one: self.rng.randint(1, limit) for one, limit in limits.items()}

    def drain(self) -> None:
        while self.calls:
            self.read()

    def read(self) -> None:
        call = self.calls.popleft()
        self.is_exact = call.num_frees == self.num_frees
        outputs = [
            SequenceOutput(
                scheduled=one,
                pages=call.pages[one.sequence],
                token_ids=call.sampled.get(one.sequence, []),
            )
            for one in [*call.scheduled.decodes, *call.scheduled.chunks]
            if one.sequence.slot is not None
        ]
        output = RunnerOutput(num_free=call.num_free, sequences=outputs)
        self.scheduler.update(output, call.page_balance)
        self.process(output)
        self.check_bound()

    def process(self, output: RunnerOutput) -> None:
        """Give the sequences their new tokens."""
        for one in output.sequences:
            for token_id in one.token_ids:
                if (reason := one.scheduled.sequence.append(token_id)) is not None:
                    self.end(one.scheduled.sequence, reason)
                    break

    def end(self, one: Sequence, reason: str) -> None:
        one.output.finish_reason = reason
        self.scheduler.remove(one)

    def reset_prefix_cache(self) -> None:
        """Pages that rows hold are released, and not free yet."""
        self.scheduler.reset_prefix_cache()
        self.num_frees, self.is_exact = self.num_frees + 1, False

    def check_bound(self) -> None:
        """The host never counts on more pages than are free, and on as many if it knows all."""
        pages = self.scheduler.pages
        counted, free = pages.num_free, self.table.num_free + len(pages.update.released)
        assert counted <= free
        assert self.calls or not self.is_exact or counted == free

    def check(self) -> None:
        """Slots hold the tokens and the pages that the scheduler expects, and so does the cache."""
        scheduler, update = self.scheduler, self.scheduler.pages.update
        for one in scheduler.running:
            if one.slot in update.freed:
                continue
            held, pages = self.check_tokens(one), self.table.pages[one.running_slot]
            assert len(held) <= one.num_computed
            assert self.calls or len(held) == one.num_computed == one.num_stored
            full = one.pages[: one.num_stored // PAGE_SIZE]
            # None: before the window.
            assert all(page in (mine, None) for mine, page in zip(full, pages, strict=False))
        slots = [one.running_slot for one in scheduler.running]
        assert sorted([*slots, *scheduler.unused_slots]) == list(range(len(self.table.tokens)))
        for queue in (scheduler.running, scheduler.waiting):
            assert [one.order for one in queue] == sorted(one.order for one in queue)
        assert all(one.slot is None for one in scheduler.waiting)
        cached = self.cache.pages if self.cache else ()
        retained = [page for page in cached if page not in update.retained]
        assert sorted([*retained, *update.released]) == sorted(self.table.retained)

    def check_tokens(self, one: Sequence) -> list[int]:
        """The row of a sequence holds its tokens, and perhaps the next ones; returns them."""
        length, held = len(one.token_ids), self.table.tokens[one.running_slot]
        known = [*one.token_ids, *(token_at(one, i) for i in range(length, one.max_len))]
        assert held == known[: len(held)], "a page has the K and V of other tokens"
        return held

    def run(self, max_steps: int = 30_000) -> list[SchedulerOutput]:
        schedules = []
        while self.scheduler.waiting or self.scheduler.running or self.calls:
            schedules.append(self.step())
            assert len(schedules) < max_steps
        return schedules
