"""What a serving run leaves behind: the fate of each request, KV memory over time, and the sums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

_POINTS = 400  # most samples of memory that are kept for the chart


@dataclass(frozen=True, kw_only=True)
class Served:
    """One request that has all its tokens; seconds since the start of the run.

    Attributes:
      arrival: when it was there, whether or not anybody looked.
      first_token: when its first token was known to the host.
      finish: when the caller could have its last token.
      num_tokens: tokens of output.
    """

    arrival: float
    first_token: float
    finish: float
    num_tokens: int


@dataclass(frozen=True, kw_only=True)
class Usage:
    """KV memory from one moment on, in tokens.

    Attributes:
      time: seconds since the start of the run.
      live: tokens whose K/V are there and will be read, each stored one counted once.
      reserved: tokens that fit into what running requests were given.
      waits: whether requests wait that have not been started, for memory above all.
    """

    time: float
    live: float
    reserved: float
    waits: bool


@dataclass(frozen=True, kw_only=True)
class Record:
    """A run of one system.

    Attributes:
      served: requests that were finished.
      usage: samples, in the order of their times.
      wall: seconds of the run.
      num_tokens: tokens of output, those of requests that were cut off included.
      capacity: tokens that the KV memory of the system can hold.
    """

    served: list[Served]
    usage: list[Usage]
    wall: float
    num_tokens: int
    capacity: int
    extra: dict[str, Any] = field(default_factory=dict)

    def summarize(self) -> dict[str, Any]:
        """Rates, latencies in seconds and shares of memory, fit for JSON."""
        served = self.served
        first = [one.first_token - one.arrival for one in served]
        whole = [one.finish - one.arrival for one in served]
        each = [
            (one.finish - one.first_token) / (one.num_tokens - 1)
            for one in served
            if one.num_tokens > 1
        ]
        step = -(-len(self.usage) // _POINTS) or 1
        return {
            "status": "ok",
            "wall_s": self.wall,
            "num_finished": len(served),
            "num_tokens": self.num_tokens,
            "tokens_per_s": self.num_tokens / self.wall,
            "requests_per_s": len(served) / self.wall,
            "ttft_s": _percentiles(first),
            "tpot_s": _percentiles(each),
            "latency_s": _percentiles(whole),
            "utilization": self._share("live", "reserved"),
            "reserved_of_budget": self._share("reserved", None),
            "live_of_budget": self._share("live", None),
            "live_of_budget_under_load": self._share("live", None, under_load=True),
            "usage": [asdict(sample) for sample in self.usage[::step]],
            "latencies": sorted(whole),
            "capacity": self.capacity,
            **self.extra,
        }

    def _share(self, part: str, whole: str | None, *, under_load: bool = False) -> float | None:
        """The mean over the time in which something was reserved, or in which requests waited."""
        spans = np.diff([*(sample.time for sample in self.usage), self.wall])
        shares, weights = [], []
        for sample, span in zip(self.usage, spans, strict=True):
            if sample.reserved and (sample.waits or not under_load):
                total = getattr(sample, whole) if whole else self.capacity
                shares.append(getattr(sample, part) / total)
                weights.append(max(float(span), 0.0))
        return float(np.average(shares, weights=weights)) if sum(weights) else None


def _percentiles(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    p50, p99 = np.percentile(values, [50, 99])
    return {"p50": float(p50), "p99": float(p99)}
