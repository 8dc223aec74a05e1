"""A storm of requests on the host side of the engine: no device, no model, no JAX.

`python -m tests.support.scheduler_storm 1000000` runs a million requests, and prints what they did.
The page table is a list of pages for each slot, with counts of the holders of each page.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter, deque
from dataclasses import dataclass

from pallas_paged.engine.outputs import RequestOutput
from pallas_paged.engine.requests.output_processor import OutputProcessor
from pallas_paged.engine.requests.request import Request
from pallas_paged.engine.requests.sequence import Sequence
from pallas_paged.engine.sampling_params import SamplingParams
from pallas_paged.engine.schedule.calls import RunnerOutput, SchedulerOutput, SequenceOutput
from pallas_paged.engine.schedule.kv_cache_manager import KVCacheManager
from pallas_paged.engine.schedule.scheduler import Scheduler
from pallas_paged.engine.stats import Counters
from pallas_paged.pages.prefix_cache import PrefixCache

PAGE_SIZE = 4
EOS = 1
FIRST = 50  # the first new token of a completion; the one after it is 51, and so on
_STEMS = [[1000 * stem + i for i in range(40)] for stem in range(2, 26)]
_PARAMS = [
    SamplingParams(max_tokens=most, n=n, best_of=best_of, stop_token_ids=stop)
    for most in (1, 3, 8, 20)
    for n, best_of in ((1, None), (1, None), (1, None), (2, None), (5, None), (1, 3))
    for stop in ((), (FIRST + 2,), (FIRST + 9,))
] + [SamplingParams(max_tokens=0), SamplingParams(max_tokens=2, prompt_logprobs=0)]


class Pages:
    """The page table of the device: rows of pages, counts of holders, tokens with K/V."""

    def __init__(self, num_pages: int, num_slots: int):
        self.free = list(range(num_pages))
        self.holders = [0] * num_pages
        self.retained: set[int] = set()
        self.content: list[tuple[int, ...]] = [()] * num_pages  # of full pages
        self.rows: list[list[int]] = [[] for _ in range(num_slots)]  # -1: before the window
        self.tokens: list[list[int]] = [[] for _ in range(num_slots)]

    def retain(self, pages: list[int]) -> None:
        for page in pages:
            assert self.holders[page] > 0 and page not in self.retained
            assert len(self.content[page]) == PAGE_SIZE, "only full pages are cached"
            self.retained.add(page)
            self.holders[page] += 1

    def release(self, pages: list[int]) -> None:
        for page in pages:
            self.retained.remove(page)
            self._drop(page)

    def free_rows(self, slots: list[int]) -> None:
        for slot in slots:
            for page in self.rows[slot]:
                self._drop(page)
            self.rows[slot], self.tokens[slot] = [], []

    def attach(self, slot: int, pages: tuple[int, ...]) -> None:
        assert not self.rows[slot] and not self.tokens[slot]
        for page in pages:
            assert page in self.retained
            self.holders[page] += 1
            self.tokens[slot] += self.content[page]
        self.rows[slot] += pages

    def fork(self, src: int, dst: int) -> None:
        assert not self.rows[dst]
        self.tokens[dst] += self.tokens[src]
        full = len(self.tokens[src]) // PAGE_SIZE
        for page in self.rows[src][:full]:
            self.holders[page] += page >= 0
        self.rows[dst] += self.rows[src][:full]
        if full < len(self.rows[src]):
            self.rows[dst].append(self._take())

    def extend(self, slot: int, tokens: list[int]) -> list[int]:
        """Write tokens, and return the page of each."""
        row, held, found = self.rows[slot], self.tokens[slot], []
        for token in tokens:
            if len(held) % PAGE_SIZE == 0:
                row.append(self._take())
            assert self.holders[row[-1]] == 1, "a shared page is written to"
            held.append(token)
            found.append(row[-1])
            if len(held) % PAGE_SIZE == 0:
                self.content[row[-1]] = tuple(held[-PAGE_SIZE:])
        return found

    def free_before(self, slot: int, window: int, num_pages: int) -> None:
        row, end = self.rows[slot], max(len(self.tokens[slot]) - window + 1, 0) // PAGE_SIZE
        for block in [block for block in range(end) if row[block] >= 0][:num_pages]:
            self._drop(row[block])
            row[block] = -1

    def check(self, cached: list[int]) -> None:
        """Every page is free, or has as many holders as rows and the cache have of it."""
        assert sorted(cached) == sorted(self.retained)
        counts = Counter(page for row in self.rows for page in row if page >= 0)
        counts.update(self.retained)
        assert [counts[page] for page in range(len(self.holders))] == self.holders
        assert sorted([*self.free, *counts]) == [*range(len(self.holders))]

    def _take(self) -> int:
        assert self.free, "the schedule needs more pages than are free"
        page = self.free.pop()
        self.holders[page], self.content[page] = 1, ()
        return page

    def _drop(self, page: int) -> None:
        if page >= 0:
            self.holders[page] -= 1
            if not self.holders[page]:
                self.free.append(page)


@dataclass(kw_only=True)
class _Call:
    output: RunnerOutput
    num_steps: int
    page_balance: int


class Storm:
    """Requests that come, end, are aborted and preempted at random; `counts` has how many."""

    def __init__(self, seed: int, *, caching: bool = True, window: int | None = None, checks: int):
        """Prepare; invariants of all pages are checked in every step that `checks` divides."""
        self.random = random.Random(seed)
        self.num_slots, self.budget, self.checks, self.window = 32, 96, checks, window
        num_pages = 110 if window is None else 75
        self.cache = PrefixCache(page_size=PAGE_SIZE) if caching else None
        pages = KVCacheManager(
            num_pages=num_pages,
            page_size=PAGE_SIZE,
            max_num_seqs=self.num_slots,
            max_num_batched_tokens=self.budget,
            cache=self.cache,
            sliding_window=window,
        )
        self.scheduler = Scheduler(pages, watermark=num_pages // 32)
        self.outputs = OutputProcessor(None, (EOS,), Counters())
        self.pages = Pages(num_pages, self.num_slots)
        self.calls: deque[_Call] = deque()
        self.ended_slots: set[int] = set()  # on the device
        self.live: dict[str, Request] = {}
        self.counts: Counter[str] = Counter()

    def run(self, num_requests: int) -> None:
        """Serve all requests to their ends."""
        scheduler, events = self.scheduler, self.random
        left = num_requests
        while left or self.live:
            for _ in range(events.randrange(24) if len(self.live) < 2 * self.num_slots else 0):
                if left:
                    self._submit(num_requests - left)
                    left -= 1
            event = events.random()
            if self.live and event < 0.3:
                request = self.live[events.choice([*self.live])]
                self.outputs.abort(request)
                self._reschedule()
            elif event < 0.302:
                scheduler.reset_prefix_cache()
            elif event < 0.304:
                while self.calls:
                    self._read()
                scheduler.preempt_all()
            self._step()
            self.counts["steps"] += 1
            assert self.counts["steps"] < 100 * num_requests, "requests hang"
        while self.calls:
            self._read()
        self._update()
        self._check()
        assert not (scheduler.waiting or scheduler.running or self.outputs.load)
        cached = 0 if self.cache is None else len(self.cache)
        assert len(self.pages.free) + cached == len(self.pages.holders)
        assert self.counts["ended"] == num_requests
        self.counts["preemptions"] = scheduler.num_preemptions
        self.counts["prefix_cache_hits"] = scheduler.num_hit_tokens

    def _submit(self, number: int) -> None:
        events = self.random
        stem, params = events.choice(_STEMS), events.choice(_PARAMS)
        prompt = stem[: events.randrange(41)]
        prompt += [100_000 + number] * events.randrange(0 if prompt else 1, 9)
        request = Request(
            request_id=str(number),
            number=number,
            prompt=None,
            prompt_token_ids=prompt,
            params=params,
            seed=0,
            priority=events.choice((0, 0, 0, 0, -1, 3)),
            max_len=len(prompt) + (params.max_tokens or 0),
            score_start=None if params.prompt_logprobs is None else 1,
            prompt_logprobs=None if params.prompt_logprobs is None else [None] * len(prompt),
        )
        self.live[request.request_id] = request
        self.outputs.add(request)

    def _step(self) -> None:
        """Schedule and run a call, then read the one before it, as `Replica` does."""
        while (scheduled := self._schedule()) is None:
            if self.calls:
                self._read()
                continue
            self._update()
            self.scheduler.resync(len(self.pages.free))
        if self.scheduler.pages.must_update or scheduled.attachments:
            self._update()
        for slot, pages in scheduled.attachments:
            self.pages.attach(slot, pages)
        for src, dst in scheduled.forks:
            self.pages.fork(src, dst)
        dispatched = bool(scheduled.decodes or scheduled.chunks)
        if dispatched:
            self._run(scheduled)
        if self.counts["steps"] % self.checks == 0:
            self._check()
        while len(self.calls) > (dispatched if self.live else 0):
            self._read()

    def _schedule(self) -> SchedulerOutput | None:
        queue, scheduler = self.outputs.queue, self.scheduler
        waiting, most = scheduler.waiting, self.num_slots
        while queue and (len(waiting) < most or queue[0].order < waiting[most - 1].order):
            self.outputs.begin()
            self._reschedule()
        before = {*scheduler.running}
        num_steps = max((call.num_steps for call in self.calls), default=1)
        scheduled = scheduler.schedule(
            in_flight=bool(self.calls),
            may_end_early=num_steps > 1,
            num_steps=self.random.choice((1, 2, 8)),
        )
        if waiting:  # none has passed it, but for samples of a prompt that is computed
            started = [x for x in scheduler.running if x not in before and not x.output.index]
            assert all(one.order < waiting[0].order for one in started)
        return scheduled

    def _run(self, scheduled: SchedulerOutput) -> None:
        """Compute a call as the device does: rows that end take no further part."""
        chunks, decodes = scheduled.chunks, scheduled.decodes
        num_tokens = len(decodes) + sum(len(chunk.token_ids) for chunk in chunks)
        assert num_tokens <= self.budget and (scheduled.num_steps == 1 or not chunks)
        starting = [*scheduled.resumed, *(chunk.sequence for chunk in chunks if chunk.is_last)]
        self.ended_slots -= {one.running_slot for one in starting}
        resumed, results = {*scheduled.resumed}, []
        if self.window is not None:
            for one in [*(x.sequence for x in decodes), *(x.sequence for x in chunks)]:
                most = len(self.pages.holders) if chunks else 1
                self.pages.free_before(one.running_slot, self.window, most)
        for decode in decodes:
            one, slot = decode.sequence, decode.sequence.running_slot
            pages, sampled = [], []
            for _ in range(decode.num_tokens if slot not in self.ended_slots else 0):
                length = len(self.pages.tokens[slot])
                token = one.token_ids[-1] if one in resumed else _token(one, length)
                pages += self.pages.extend(slot, [token])
                sampled.append(_token(one, length + 1))
                if self._ends(one, length + 2):
                    break
            results.append(SequenceOutput(scheduled=decode, pages=pages, token_ids=sampled))
        for chunk in chunks:
            one, slot = chunk.sequence, chunk.sequence.running_slot
            assert chunk.start == len(self.pages.tokens[slot]) and chunk.token_ids
            pages, sampled = self.pages.extend(slot, chunk.token_ids), []
            if chunk.is_last:
                length = len(self.pages.tokens[slot])
                sampled = [_token(one, length)]
                self._ends(one, length + 1)
            results.append(SequenceOutput(scheduled=chunk, pages=pages, token_ids=sampled))
        self.calls.append(
            _Call(
                output=RunnerOutput(num_free=len(self.pages.free), sequences=results),
                num_steps=scheduled.num_steps,
                page_balance=self.scheduler.pages.page_balance,
            )
        )

    def _ends(self, one: Sequence, length: int) -> bool:
        """Note whether a row of the device ends with the token that it has just sampled."""
        ends = length >= one.max_len or _token(one, length - 1) in one.stop_token_ids
        if ends:
            self.ended_slots.add(one.running_slot)
        return ends

    def _read(self) -> None:
        call = self.calls.popleft()
        sequences = [x for x in call.output.sequences if x.scheduled.sequence.slot is not None]
        output = RunnerOutput(num_free=call.output.num_free, sequences=sequences)
        self.scheduler.update(output, call.page_balance)
        self.outputs.process(output, time.perf_counter())
        self._reschedule()

    def _reschedule(self) -> None:
        ended, started = self.outputs.take_changes()
        for one in ended:
            if one.slot is not None and one.slot not in self.scheduler.pages.update.freed:
                held = self.pages.tokens[one.slot]
                known = [*one.token_ids, *(_token(one, i) for i in range(len(one.token_ids), 100))]
                assert held == known[: len(held)], "a page has the K/V of other tokens"
            self.scheduler.remove(one)
        for sequences in started:
            self.scheduler.add(sequences)
        for output in self.outputs.take_outputs():
            if output.finished:
                self._end(self.live.pop(output.request_id), output)

    def _end(self, request: Request, output: RequestOutput) -> None:
        """A request ends once, with the tokens that it gets alone."""
        params = request.params
        self.counts["ended"] += 1
        assert len(request.outputs) == params.n
        for one in request.outputs:
            new = one.token_ids
            assert new == [*range(FIRST, FIRST + len(new))]
            stops = bool(new) and new[-1] in (params.stop_token_ids or ())
            assert one.finish_reason == "abort" or stops or len(new) == params.max_tokens
            self.counts[str(one.finish_reason)] += 1
        assert request.num_cached_tokens < len(request.prompt_token_ids)

    def _update(self) -> None:
        update = self.scheduler.pages.take_update()
        self.pages.retain(update.retained)
        self.pages.free_rows(update.freed)
        self.pages.release(update.released)

    def _check(self) -> None:
        """No page is lost or owned twice, and the host counts on no more than are free."""
        scheduler, update = self.scheduler, self.scheduler.pages.update
        cached = [] if self.cache is None else self.cache.pages
        pending = {*update.retained}
        self.pages.check([page for page in cached if page not in pending] + update.released)
        assert scheduler.pages.num_free <= len(self.pages.free) + len(update.released)
        slots = [one.running_slot for one in scheduler.running]
        assert sorted([*slots, *scheduler.unused_slots]) == [*range(self.num_slots)]
        for queue in (scheduler.running, scheduler.waiting, self.outputs.queue):
            assert [one.order for one in queue] == sorted(one.order for one in queue)


def _token(one: Sequence, position: int) -> int:
    """The new token of a sequence at a position."""
    return FIRST + position - len(one.request.prompt_token_ids)


def main(num_requests: int) -> None:
    kinds = dict(caching=True), dict(caching=False), dict(window=9), dict(window=9, caching=False)
    total: Counter[str] = Counter()
    start = time.perf_counter()
    for seed, kind in enumerate(kinds):
        storm = Storm(seed, checks=50, **kind)
        storm.run(num_requests // len(kinds))
        total += storm.counts
        print(kind, dict(storm.counts), flush=True)
    print(f"{dict(total)} in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main(int(sys.argv[1]))
