"""What is known of an engine: its counters, and which request holds which page."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from typing import Any, ClassVar

import numpy as np

from pallas_paged.checks import INT32_MAX
from pallas_paged.engine.requests.request import Request
from pallas_paged.engine.schedule.calls import DraftOutput

_NUM_TIMES = 10_000  # newest requests that percentiles cover


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """A snapshot of an engine's counters; times in seconds, percentiles over the newest requests.

    Counts are those of all replicas together.

    Attributes:
        num_waiting, num_running: sequences without and with a slot, now.
        num_finished: requests that ended by themselves.
        num_aborted, num_failed: requests that were aborted, or ended by an error.
        num_preemptions: times that a sequence gave up its pages, to be computed again.
        prompt_tokens: of all requests that have had their first token; of a restarted one again.
        prefix_cache_queries: tokens of prompts that were looked up in the prefix cache, once for
            each request, when it starts; those of a restarted one again.
        prefix_cache_hits: of those, tokens that the cache had.
        computed_tokens: tokens that went through the model, recomputed ones included.
        generated_tokens: new tokens; of beams those that are returned.
        num_steps: steps of the model.
        num_calls: calls of the device that ran them.
        spec_decode_num_drafts: times that a sequence had drafts in a step.
        spec_decode_num_draft_tokens: drafts that were verified.
        spec_decode_num_accepted_tokens: of those, the ones that were right.
        spec_decode_num_accepted_tokens_per_pos: likewise, by their place behind the newest token;
            empty without a `speculative_config`.
        compilations: steps compiled, those of `warmup` included.
        num_pages: of the pool.
        num_window_pages, num_free_window_pages: of layers with a window, where they have a pool of
            their own; `num_pages` and what follows are of the other layers then. Else 0.
        kv_cache_dtype: of the pool.
        pool_bytes: of its K, V and their scales.
        num_free_pages, num_cached_pages: free, and held by the prefix cache only; as of the newest
            report.
        num_shared_pages: cached pages that several running sequences hold.
        pages_used: share of the pool that running sequences hold, mean over calls.
        peak_pages_used: the largest such share.
        pool_utilization: tokens per slot of the pages that running sequences hold, mean over calls.
        ttft_p50, ttft_p99: from submission to the first token.
        tpot_p50, tpot_p99: time per token after the first, of each request.
        latency_p50, latency_p99: from submission to the end.
    """

    num_waiting: int
    num_running: int
    num_finished: int
    num_aborted: int
    num_failed: int
    num_preemptions: int
    prompt_tokens: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    computed_tokens: int
    generated_tokens: int
    num_steps: int
    num_calls: int
    spec_decode_num_drafts: int
    spec_decode_num_draft_tokens: int
    spec_decode_num_accepted_tokens: int
    spec_decode_num_accepted_tokens_per_pos: tuple[int, ...]
    compilations: int
    num_pages: int
    num_window_pages: int
    num_free_window_pages: int
    kv_cache_dtype: str
    pool_bytes: int
    num_free_pages: int
    num_cached_pages: int
    num_shared_pages: int
    pages_used: float
    peak_pages_used: float
    pool_utilization: float
    ttft_p50: float
    ttft_p99: float
    tpot_p50: float
    tpot_p99: float
    latency_p50: float
    latency_p99: float

    @property
    def num_used_pages(self) -> int:
        """Pages that running sequences hold."""
        return self.num_pages - self.num_free_pages - self.num_cached_pages

    @property
    def kv_cache_usage(self) -> float:
        """Share of the pool that running sequences hold."""
        return self.num_used_pages / self.num_pages

    @property
    def cache_hit_rate(self) -> float:
        """Share of the tokens that were looked up and found."""
        queries = self.prefix_cache_queries
        return self.prefix_cache_hits / queries if queries else 0.0


@dataclass(kw_only=True)
class Counters:
    """What the engine counts as it goes; attributes as in `EngineStats`."""

    num_finished: int = 0
    num_aborted: int = 0
    num_failed: int = 0
    prompt_tokens: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    num_steps: int = 0
    num_calls: int = 0
    spec_decode_num_drafts: int = 0
    spec_decode_num_draft_tokens: int = 0
    spec_decode_num_accepted_tokens_per_pos: tuple[int, ...] = ()
    num_free_pages: int = 0
    num_free_window_pages: int = 0
    num_cached_pages: int = 0
    _used: float = 0.0
    _peak_used: float = 0.0
    _utilization: float = 0.0
    _num_seen: int = 0
    _ttft: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_TIMES))
    _tpot: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_TIMES))
    _latency: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_TIMES))

    def count_request(self, request: Request) -> None:
        """Count a request that has ended."""
        reasons = {output.finish_reason for output in request.outputs}
        if "error" in reasons:
            self.num_failed += 1
        elif "abort" in reasons:
            self.num_aborted += 1
        else:
            self.num_finished += 1
        first, finish = request.first_token_time, request.finish_time
        if first is None or finish is None:
            return
        self._ttft.append(first - request.arrival_time)
        self._latency.append(finish - request.arrival_time)
        num_tokens = max((len(output.token_ids) for output in request.outputs), default=0)
        if num_tokens > 1:
            self._tpot.append((finish - first) / (num_tokens - 1))

    def count_drafts(self, drafts: DraftOutput) -> None:
        """Count what a call with drafts has verified."""
        self.spec_decode_num_drafts += drafts.num_drafts
        self.spec_decode_num_draft_tokens += drafts.num_draft_tokens
        each = self.spec_decode_num_accepted_tokens_per_pos, drafts.num_accepted_per_pos
        self.spec_decode_num_accepted_tokens_per_pos = _sums(each)

    def count_pages(
        self,
        *,
        num_pages: int,
        num_free: int,
        num_cached: int,
        num_unused_slots: int,
        page_size: int,
    ) -> None:
        """Count the pages after a call; num_unused_slots are slots of pages that hold no token."""
        self.num_free_pages, self.num_cached_pages = num_free, num_cached
        held = num_pages - num_free - num_cached
        if held <= 0:
            return
        self._num_seen += 1
        self._used += held / num_pages
        self._peak_used = max(self._peak_used, held / num_pages)
        self._utilization += 1 - num_unused_slots / (held * page_size)

    @classmethod
    def sum(cls, many: Sequence[Counters]) -> Counters:
        """Return the counters of several replicas together."""
        if len(many) == 1:
            return many[0]
        each = [vars(one) for one in many]
        total: dict[str, Any] = {
            name: sum(one[name] for one in each)
            for name, value in each[0].items()
            if isinstance(value, int | float)
        }
        name = "spec_decode_num_accepted_tokens_per_pos"
        total[name] = _sums(one[name] for one in each)
        total["_peak_used"] = max(one["_peak_used"] for one in each)
        for name in ("_ttft", "_tpot", "_latency"):
            total[name] = deque(chain.from_iterable(one[name] for one in each))
        return cls(**total)

    def snapshot(self, **now: Any) -> EngineStats:
        """Return all of it, with the fields of `EngineStats` that are not counted."""
        counts: dict[str, Any] = {
            name: n for name, n in vars(self).items() if not name.startswith("_")
        }
        for name in ("ttft", "tpot", "latency"):
            times = getattr(self, f"_{name}")
            p50, p99 = np.percentile(times, [50, 99]) if times else (0.0, 0.0)
            counts |= {f"{name}_p50": float(p50), f"{name}_p99": float(p99)}
        num_accepted = sum(self.spec_decode_num_accepted_tokens_per_pos)
        num_seen = max(self._num_seen, 1)
        return EngineStats(
            pages_used=self._used / num_seen,
            peak_pages_used=self._peak_used,
            pool_utilization=self._utilization / num_seen,
            spec_decode_num_accepted_tokens=num_accepted,
            **counts,
            **now,
        )


def _sums(each: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """Return the sums of lists place by place; a shorter one has zeros behind its end."""
    return tuple(map(sum, zip_longest(*each, fillvalue=0)))


@dataclass(frozen=True, kw_only=True, eq=False)
class PoolMap:
    """Which request holds which page of a replica's pool, as the host knows it.

    It is as of the newest call of the device that was read: a page that a call in flight takes is
    still free here. Where layers with a window have a pool of their own, it is of the other one.

    Attributes:
        owners: `i32[num_pages]`; for each page `FREE`; `CACHED`, if only the prefix cache holds it;
            `Request.number`, if one sequence holds it; or `SHARED`, if several sequences do, of one
            request or of several. In this order the values rise, so the largest of some pages
            is what happens there.
        num_tokens: of the pages that a sequence has begun and not filled, by page.
    """

    FREE: ClassVar[int] = -2
    CACHED: ClassVar[int] = -1
    SHARED: ClassVar[int] = INT32_MAX

    owners: np.ndarray
    num_tokens: dict[int, int]

    @property
    def counts(self) -> dict[str, int]:
        """Numbers of pages: "free", "cached", "shared", and "used" by one sequence."""
        owners = {"free": self.FREE, "cached": self.CACHED, "shared": self.SHARED}
        counts = {k: int(np.count_nonzero(self.owners == owner)) for k, owner in owners.items()}
        return counts | {"used": self.owners.size - sum(counts.values())}
