"""The record of a serving run: times of each request, KV memory over time, and the summary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Served:
    """A finished request; times are seconds since the start of the run.

    Attributes:
        arrival: time of its arrival, even if it was picked up later.
        first_token: time when the host knew its first token.
        finish: time when its last token was available to the caller.
        num_tokens: tokens of output.
    """

    arrival: float
    first_token: float
    finish: float
    num_tokens: int


@dataclass(frozen=True, kw_only=True)
class Usage:
    """KV memory in tokens, valid until the next sample.

    Attributes:
        time: seconds since the start of the run.
        live: tokens whose K/V are stored and will be read; shared ones count once.
        reserved: tokens that fit in the memory held by running requests.
        waits: whether arrived requests wait to be started, mostly for memory.
    """

    time: float
    live: float
    reserved: float
    waits: bool


@dataclass(frozen=True, kw_only=True)
class Record:
    """A run of one system.

    Attributes:
        served: finished requests.
        usage: samples by time.
        wall: seconds of the run.
        num_tokens: tokens of output, including those of unfinished requests.
        capacity: tokens that the KV memory of the system can hold.
        extra: more fields of the summary.
    """

    served: list[Served]
    usage: list[Usage]
    wall: float
    num_tokens: int
    capacity: int
    extra: dict[str, Any] = field(default_factory=dict)

    def summarize(self) -> dict[str, Any]:
        """Rates, latencies in seconds and shares of memory, ready for JSON."""
        served = self.served
        first = [one.first_token - one.arrival for one in served]
        latencies = [one.finish - one.arrival for one in served]
        each = [
            (one.finish - one.first_token) / (one.num_tokens - 1)
            for one in served
            if one.num_tokens > 1
        ]
        return {
            "status": "ok",
            "wall_s": self.wall,
            "num_finished": len(served),
            "num_tokens": self.num_tokens,
            "tokens_per_s": self.num_tokens / self.wall,
            "requests_per_s": len(served) / self.wall,
            "ttft_s": _percentiles(first),
            "tpot_s": _percentiles(each),
            "latency_s": _percentiles(latencies),
            "utilization": self._share("live", "reserved"),
            "reserved_of_budget": self._share("reserved", None),
            "live_of_budget": self._share("live", None),
            "live_of_budget_under_load": self._share("live", None, under_load=True),
            "capacity": self.capacity,
            **self.extra,
        }

    def _share(self, part: str, of: str | None, *, under_load: bool = False) -> float | None:
        """Mean share over the time with memory reserved; under_load: and with requests waiting."""
        spans = np.diff([*(sample.time for sample in self.usage), self.wall])
        shares, weights = [], []
        for sample, span in zip(self.usage, spans, strict=True):
            if sample.reserved and (sample.waits or not under_load):
                total = getattr(sample, of) if of else self.capacity
                shares.append(getattr(sample, part) / total)
                weights.append(max(float(span), 0.0))
        return float(np.average(shares, weights=weights)) if sum(weights) else None


def _percentiles(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    p50, p99 = np.percentile(values, [50, 99])
    return {"p50": float(p50), "p99": float(p99)}
