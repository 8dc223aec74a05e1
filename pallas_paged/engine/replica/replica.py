"""A replica: the devices that compute together, their pool, and the loop of calls on them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pallas_paged.engine.device.batch import StepOutput
from pallas_paged.engine.device.compilation import own_settings
from pallas_paged.engine.device.executor import Executor
from pallas_paged.engine.device.pool import pool_bytes
from pallas_paged.engine.device.runner import ModelRunner
from pallas_paged.engine.requests.detokenizer import Tokenizer
from pallas_paged.engine.requests.output_processor import OutputProcessor
from pallas_paged.engine.requests.request import Request
from pallas_paged.engine.schedule.calls import Decode, DraftPolicy, RunnerOutput, SchedulerOutput
from pallas_paged.engine.schedule.kv_cache_manager import KVCacheManager
from pallas_paged.engine.schedule.scheduler import Scheduler
from pallas_paged.engine.stats import Counters, EngineStats, PoolMap
from pallas_paged.pages.check import check_page_table
from pallas_paged.pages.prefix_cache import PrefixCache

_CALL_SECONDS = 0.01  # of a call of several steps: how long a new request may have to wait for it


@dataclass(frozen=True, kw_only=True)
class _Call:
    """A call in flight, with the host's counts after its schedule."""

    scheduled: SchedulerOutput
    output: StepOutput
    page_balance: int
    num_cached: int
    num_unused_slots: int


class Replica:
    """Serves some of an engine's requests on devices, a pool and a prefix cache of its own.

    It keeps one call in flight while the host works on the one before.

    Attributes:
        scheduler, runner, outputs: what a call computes, the call, and what comes of it.
        weights: on the devices.
        cache: None computes every prompt in full.
        counters: of its requests and calls.
        num_pages, num_window_pages: of its pool, and of layers with one of their own, or 0.
        drafting: whether calls verify drafts; None: none does.
        step_policy: returns the most decode steps of the next call; by default as many as take
            about `_CALL_SECONDS`.
    """

    def __init__(self, executor: Executor, tokenizer: Tokenizer | None):
        """Start without requests, on the devices of an executor."""
        model, config, num_pages = executor.model, executor.config, executor.num_pages
        self.weights, self.num_pages = executor.weights, num_pages
        self.runner, windows = ModelRunner(executor), executor.windows
        self.num_window_pages = 0 if windows is None else windows.num_pages
        page_size, caching = config.page_size, config.enable_prefix_caching
        self.cache = PrefixCache(page_size=page_size) if caching else None
        pages = KVCacheManager(
            num_pages=num_pages,
            page_size=page_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            cache=self.cache,
            sliding_window=model.kv_cache_spec.sliding_window,
            windows=windows,
        )
        self.drafting = None
        if (speculation := config.speculation) is not None:
            self.drafting = DraftPolicy(
                speculation.num_speculative_tokens,
                executor.free_tokens,
                draft_share=executor.draft_share,
                adaptive=speculation.adaptive,
            )
        self.scheduler = Scheduler(
            pages,
            watermark=int(config.watermark * num_pages),
            drafting=self.drafting,
            max_tokens_of_call=config.max_tokens_of_call,
            draws_apart=executor.draws_apart,
        )
        self.counters = Counters(
            num_free_pages=num_pages, num_free_window_pages=self.num_window_pages
        )
        self.outputs = OutputProcessor(tokenizer, model.eos_token_ids, self.counters)
        self._num_scheduler_steps = config.num_scheduler_steps
        self._calls: deque[_Call] = deque()
        self._last_read: float | None = None
        self._step_seconds = _CALL_SECONDS  # at most, of the newest call that only decoded
        self.step_policy: Callable[[], int] = self._num_steps

    @property
    def load(self) -> int:
        """Tokens that its unfinished requests may have in all."""
        return self.outputs.load

    @property
    def calls_in_flight(self) -> int:
        """Number of calls that have been dispatched and not read."""
        return len(self._calls)

    def add(self, request: Request) -> None:
        """Put a request into the queue; it has no sequences before it may get a slot."""
        self.outputs.add(request)

    def abort(self, request: Request) -> None:
        """End an unfinished request as it stands."""
        self.outputs.abort(request)
        self._reschedule()

    def abort_all(self) -> None:
        """End all requests as they stand."""
        for request in [*self.outputs.groups]:
            self.abort(request)

    def restart(self) -> None:
        """Begin all unfinished requests again from their prompts, with nothing in flight."""
        self.outputs.restart()
        self._reschedule()

    def dispatch(self) -> int:
        """Start the next call, if there is anything to do; return how many that were, 0 or 1."""
        if self._calls and self.runner.steps.awaits_next:
            return 0  # read that call first: its tokens need not wait for a program
        scheduled = self._schedule()
        pages, running = self.scheduler.pages, self.scheduler.running
        if pages.must_update or scheduled.attachments:
            attachments = scheduled.attachments, scheduled.window_attachments
            self.runner.update_table(pages.take_update(), *attachments)
        if (output := self.runner.dispatch(scheduled)) is None:
            return 0
        self._calls.append(
            _Call(
                scheduled=scheduled,
                output=output,
                page_balance=pages.page_balance,
                num_cached=pages.num_evictable,
                num_unused_slots=sum(-one.num_computed % pages.page_size for one in running),
            )
        )
        self.counters.num_calls += 1
        if len(self._calls) == 1:
            self._draw()
        return 1

    def finish_step(self, dispatched: int) -> None:
        """Read the call before, given what `dispatch` returned."""
        while len(self._calls) > (dispatched if self.outputs.groups else 0):
            self._read()
        if not self.outputs.groups:
            self.update_table()
            self.count_idle_pages()

    def drain(self) -> None:
        """Read all calls in flight."""
        while self._calls:
            self._read()

    def fail(self, error: BaseException) -> None:
        """End all requests, and forget the calls in flight, because their state is lost."""
        self.outputs.fail_all(error)
        self._calls.clear()

    def sleep(self) -> None:
        """Free the pool's memory, with nothing in flight; sequences wait to be recomputed."""
        self.scheduler.preempt_all()
        self.scheduler.reset_prefix_cache()
        self.update_table()
        self.scheduler.resync(self.num_pages)
        self.runner.executor.sleep()

    @own_settings()
    def check(self) -> None:
        """Wait for the devices; raise ValueError if an invariant of the page table is broken."""
        cached = self.cache.pages if self.cache is not None else ()
        self.runner.executor.wait()
        check_page_table(self.runner.table, retained=np.asarray(cached, np.int32))
        if (windows := self.runner.executor.state.window_table) is not None:
            cached = self.scheduler.pages.cached_window_pages
            check_page_table(windows, retained=np.asarray(cached, np.int32))

    def update_table(self) -> None:
        """Let the page table do what has been decided."""
        if update := self.scheduler.pages.take_update():
            self.runner.update_table(update, [])

    def stats(self) -> EngineStats:
        """Return the counters so far."""
        return stats_of([self])

    def pool_map(self) -> PoolMap:
        """Return which request holds which page of the pool."""
        return self.scheduler.pages.pool_map(self.scheduler.running)

    def count_idle_pages(self) -> None:
        """Count the pages anew where nothing runs: the newest report may be older than an abort."""
        if not self.scheduler.running:
            self.counters.num_cached_pages = num_cached = self.scheduler.pages.num_evictable
            self.counters.num_free_pages = self.num_pages - num_cached
            num_cached = len(self.scheduler.pages.cached_window_pages)
            self.counters.num_free_window_pages = self.num_window_pages - num_cached

    def _schedule(self) -> SchedulerOutput:
        def schedule() -> SchedulerOutput | None:
            self._begin_requests()
            steps = [call.scheduled.num_steps for call in self._calls]
            return self.scheduler.schedule(
                in_flight=bool(steps),
                may_end_early=max(steps, default=1) > 1,
                num_steps=self.step_policy(),
            )

        while (scheduled := schedule()) is None:
            # The host waits for once, to know how many pages are free.
            if self._calls:
                self._read()
                continue
            self.update_table()
            self.scheduler.resync(self.runner.executor.num_free)
        return scheduled

    def _begin_requests(self) -> None:
        """Let requests begin that may get a slot: those behind them cost a step nothing."""
        queue, waiting = self.outputs.queue, self.scheduler.waiting
        most = self.scheduler.pages.max_num_seqs
        while queue and (len(waiting) < most or queue[0].order < waiting[most - 1].order):
            self.outputs.begin()
            self._reschedule()

    def _num_steps(self) -> int:
        """Most decode steps of the next call, by the time that a step took."""
        steps = round(_CALL_SECONDS / max(self._step_seconds, 1e-6))
        return max(1, min(steps, self._num_scheduler_steps))

    def _read(self) -> None:
        """Wait for the oldest call in flight, and take what it has computed."""
        call = self._calls.popleft()
        is_late = call.output.token_ids.is_ready()  # type: ignore[attr-defined]
        output = self.runner.read(call.scheduled, call.output)
        now = time.perf_counter()
        self._draw(output)
        self.scheduler.update(output, call.page_balance)
        self._count(call, output, now, is_late)
        self.outputs.process(output, now)
        self._reschedule()

    def _draw(self, before: RunnerOutput | None = None) -> None:
        """Let the oldest call in flight draw, given what the call before it has computed, if any.

        The device waits for this, so nothing else of that call is processed yet.
        """
        if self._calls:
            call = self._calls[0]
            output = self.runner.draw(call.scheduled.decodes, call.output, before)
            self._calls[0] = replace(call, output=output)

    def _reschedule(self) -> None:
        """Tell the scheduler which sequences have ended and which begin."""
        ended, started = self.outputs.take_changes()
        for sequence in ended:
            self.scheduler.remove(sequence)
        for sequences in started:
            self.scheduler.add(sequences)

    def _count(self, call: _Call, output: RunnerOutput, now: float, is_late: bool) -> None:
        """Count what a call has computed, and how long its steps took."""
        counters, chunks = self.counters, call.scheduled.chunks
        counters.num_free_window_pages = output.num_free_window_pages
        counters.count_pages(
            num_pages=self.num_pages,
            num_free=output.num_free,
            num_cached=call.num_cached,
            num_unused_slots=call.num_unused_slots,
            page_size=self.scheduler.pages.page_size,
        )
        num_steps = max((len(one.token_ids) for one in output.sequences), default=1) or 1
        if (drafts := output.drafts) is not None:
            num_steps = max(1, drafts.num_steps)
            counters.count_drafts(drafts)
        counters.num_steps += num_steps
        counters.computed_tokens += sum(len(chunk.token_ids) for chunk in chunks)
        counters.computed_tokens += sum(
            len(one.token_ids) for one in output.sequences if isinstance(one.scheduled, Decode)
        )
        if not chunks and self._last_read is not None:
            # Calls are read one after another, so this is the time of the device. If the device was
            # done before, it is the host's, which takes about as long for a call of more steps.
            seconds = (now - self._last_read) / num_steps
            if self.drafting is not None and not is_late:
                num_rows = len(call.scheduled.decodes)
                self.drafting.observe_step(num_rows, drafts is not None, seconds)
            self._step_seconds = min(self._step_seconds, seconds) / 2 if is_late else seconds
        self._last_read = now


def stats_of(replicas: Sequence[Replica]) -> EngineStats:
    """Return the counters of replicas together."""
    for replica in replicas:
        replica.count_idle_pages()
    pools = [replica.runner.executor.pool_shape for replica in replicas]
    schedulers = [replica.scheduler for replica in replicas]
    caches = [replica.cache for replica in replicas if replica.cache is not None]
    queues = [queue for one in replicas for queue in (one.scheduler.waiting, one.outputs.queue)]
    return Counters.sum([replica.counters for replica in replicas]).snapshot(
        num_waiting=sum(map(len, queues)),
        num_running=sum(len(one.running) for one in schedulers),
        num_preemptions=sum(one.num_preemptions for one in schedulers),
        prefix_cache_queries=sum(one.num_queried_tokens for one in schedulers),
        prefix_cache_hits=sum(one.num_hit_tokens for one in schedulers),
        compilations=sum(len(replica.runner.steps) for replica in replicas),
        num_pages=sum(replica.num_pages for replica in replicas),
        num_window_pages=sum(replica.num_window_pages for replica in replicas),
        num_shared_pages=sum(cache.num_shared for cache in caches),
        kv_cache_dtype=pools[0].layers[0].k_pages.dtype.name,
        pool_bytes=sum(map(pool_bytes, pools)),
    )
