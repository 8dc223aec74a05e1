"""Prometheus metrics: counts and latencies of requests, and the engine's own counters."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pallas_paged.engine import AsyncEngine, EngineDeadError, EngineStats, Request

PREFIX = "pallas_paged:"
HEALTH_SECONDS = 1.0  # for which an answer about the health holds; anyone may ask
ENGINE_SECONDS = 1.0  # in which the engine must answer; it does not while it compiles
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_TOKENS = tuple(2**n for n in range(0, 19, 2))
_FINISHED_REASONS = ("stop", "length", "abort", "timeout", "error")
# Fields of `EngineStats` under vLLM's names, where it has them.
_GAUGES = {
    "num_requests_running": ("num_running", "Sequences that have a slot."),
    "num_requests_waiting": ("num_waiting", "Sequences that wait for a slot."),
    "num_kv_cache_pages": ("num_pages", "Pages of the pool."),
    "num_free_pages": ("num_free_pages", "Pages that are free."),
    "num_cached_pages": ("num_cached_pages", "Pages that only the prefix cache holds."),
    "num_shared_pages": ("num_shared_pages", "Cached pages that several running sequences hold."),
    "num_window_pages": ("num_window_pages", "Pages of the pool of layers with a window, or 0."),
    "num_free_window_pages": ("num_free_window_pages", "Those that are free."),
    "num_used_pages": ("num_used_pages", "Pages that running sequences hold."),
    "kv_cache_usage_perc": ("kv_cache_usage", "Share of those, 0 to 1."),
    "kv_cache_bytes": ("pool_bytes", "Bytes of the pool."),
}
_COUNTERS = {
    "prompt_tokens": ("prompt_tokens", "Tokens of the prompts that have been computed."),
    "prefix_cache_queries": ("prefix_cache_queries", "Tokens that the prefix cache was asked for."),
    "prefix_cache_hits": ("prefix_cache_hits", "Tokens of those that it had."),
    "generation_tokens": ("generated_tokens", "New tokens."),
    "computed_tokens": ("computed_tokens", "Tokens that went through the model."),
    "num_preemptions": ("num_preemptions", "Times that a sequence gave up its pages."),
    "num_steps": ("num_steps", "Steps of the model."),
    "num_compilations": ("compilations", "Steps compiled."),
    "spec_decode_num_drafts": ("spec_decode_num_drafts", "Times that a sequence had drafts."),
    "spec_decode_num_draft_tokens": ("spec_decode_num_draft_tokens", "Drafts."),
    "spec_decode_num_accepted_tokens": (
        "spec_decode_num_accepted_tokens",
        "Drafts that were right.",
    ),
}


class Metrics(Collector):
    """What the server counts, and the newest snapshot of what the engine counts.

    Attributes:
        error: why the engine is dead, or None.
    """

    def __init__(self, engine: AsyncEngine, model_name: str):
        """Start at zero; `model_name` is a label of all metrics."""
        self.error: EngineDeadError | None = None
        self._engine, self._model_name = engine, model_name
        self._stats: EngineStats | None = None  # the newest
        self._refresh: asyncio.Task[None] | None = None
        self._refresh_time = -math.inf
        self._registry = CollectorRegistry()
        self._registry.register(self)
        labels = {"model_name": model_name}
        ended = Counter(
            f"{PREFIX}request_success",
            "Requests that the engine took and that have ended, by the reason.",
            ["model_name", "finished_reason"],
            registry=self._registry,
        )
        self._ended = {
            reason: ended.labels(finished_reason=reason, **labels) for reason in _FINISHED_REASONS
        }
        answers = Counter(
            f"{PREFIX}http_errors",
            "Answers with an error, by HTTP status.",
            ["model_name", "status"],
            registry=self._registry,
        )
        self._answers = lambda status: answers.labels(status=str(status), **labels)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(
                PREFIX + name, text, ["model_name"], buckets=buckets, registry=self._registry
            ).labels(**labels)

        self._first_token = histogram(
            "time_to_first_token_seconds", "From arrival to the first output.", _SECONDS
        )
        self._inter_token = histogram(
            "inter_token_latency_seconds",
            "Time between two outputs of a completion, per token, once for each output.",
            _SECONDS,
        )
        self._latency = histogram(
            "e2e_request_latency_seconds", "From arrival to the last output.", _SECONDS
        )
        self._queue = histogram(
            "request_queue_time_seconds", "From submission to a slot of the engine.", _SECONDS
        )
        self._prompt = histogram("request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self._generation = histogram(
            "request_generation_tokens", "New tokens of a request.", _TOKENS
        )

    def first_output(self, seconds: float, request: Request) -> None:
        """Count the first output of a prompt, `seconds` after its arrival."""
        self._first_token.observe(seconds)
        if request.start_time is not None:
            self._queue.observe(request.start_time - request.arrival_time)
        self._prompt.observe(len(request.prompt_token_ids))

    def next_output(self, seconds: float, num_tokens: float) -> None:
        """Count an output, `seconds` after the one before."""
        self._inter_token.observe(seconds / max(num_tokens, 1))

    def last_output(self, seconds: float, num_tokens: int) -> None:
        """Count the end of a prompt's completions, `seconds` after its arrival."""
        self._latency.observe(seconds)
        self._generation.observe(num_tokens)

    def finished(self, reason: str) -> None:
        """Count a request that has ended."""
        self._ended[reason].inc()

    def answered(self, status: int) -> None:
        """Count an answer with an error."""
        self._answers(status).inc()

    async def refresh(self, max_age: float = 0.0) -> None:
        """Ask the engine for its counters, if those here are `max_age` seconds old.

        A busy engine leaves those of the last time.
        """
        if time.monotonic() - self._refresh_time < max_age:
            return
        if self._refresh is None or self._refresh.done():
            self._refresh = asyncio.create_task(self._ask())
        await asyncio.wait([self._refresh], timeout=ENGINE_SECONDS)

    async def render(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        await self.refresh()
        return generate_latest(self._registry)

    async def _ask(self) -> None:
        try:
            self._stats = await self._engine.stats()
            self._refresh_time = time.monotonic()
        except EngineDeadError as error:
            self.error = error
        except RuntimeError:
            pass  # it has shut down

    def collect(self) -> Iterator[Metric]:
        """Yield what the engine counts, for the registry."""

        def metric(family: Any, name: str, text: str, value: float) -> Metric:
            made = family(PREFIX + name, text, labels=["model_name"])
            made.add_metric([self._model_name], value)
            return made

        up = "1, or 0 for a dead engine."
        yield metric(GaugeMetricFamily, "engine_up", up, float(self.error is None))
        if self._stats is None:
            return
        for family, metrics in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for name, (field, text) in metrics.items():
                yield metric(family, name, text, getattr(self._stats, field))
        accepted = CounterMetricFamily(
            f"{PREFIX}spec_decode_num_accepted_tokens_per_pos",
            "Drafts that were right, by their place behind the newest token.",
            labels=["model_name", "position"],
        )
        each = self._stats.spec_decode_num_accepted_tokens_per_pos
        for position, count in enumerate(each):
            accepted.add_metric([self._model_name, str(position)], count)
        yield accepted
