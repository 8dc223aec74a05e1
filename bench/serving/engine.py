"""Serve a trace by the engine and sample its memory."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from bench.serving.compilations import Compilations
from bench.serving.record import Record, Served, Usage
from bench.serving.requests import TraceRequest
from pallas_paged.engine import Engine, Request

_SAMPLE_S = 0.05  # seconds between two samples of memory


def numbers_of(engine: Engine, compilations: Compilations) -> dict[str, Any]:
    """What the summary of a run has of its engine."""
    stats = engine.stats()
    return {
        "preemptions": stats.num_preemptions,
        "cache_hit_rate": stats.cache_hit_rate,
        "compilations": compilations.count,
        "num_calls": stats.num_calls,
        "num_steps": stats.num_steps,
        "kv_dtype": stats.kv_cache_dtype,
        "pool_bytes": stats.pool_bytes,
        "pool_utilization": stats.pool_utilization,
        "pages_used": stats.pages_used,
        "prompt_tokens": stats.prompt_tokens,
        "computed_tokens": stats.computed_tokens,
    }


def usage(engine: Engine, requests: Sequence[Request], now: float) -> Usage:
    """Memory at this moment: pages that rows hold; only the last of each row is not full.

    Args:
        engine: the engine, for its page counts.
        requests: unfinished requests; those with tokens are the rows, except for a few that were
            just preempted or are halfway through their prompts.
        now: seconds since the start of the run.
    """
    stats, page_size = engine.stats(), engine.config.page_size
    reserved = (stats.num_pages - stats.num_free_pages - stats.num_cached_pages) * page_size
    lens = [
        len(request.prompt_token_ids) + len(request.outputs[0].token_ids)
        for request in requests
        if request.first_token_time is not None
    ]
    empty = sum(-length % page_size for length in lens)
    waits = stats.num_waiting > 0
    return Usage(time=now, live=max(0, reserved - empty), reserved=reserved, waits=waits)


def serve(engine: Engine, trace: Sequence[TraceRequest], *, seconds: float) -> Record:
    """Serve a trace; abort the requests that are unfinished after `seconds`.

    Args:
        engine: idle, warmed up and new, because its stats count from its start.
        trace: requests by arrival.
        seconds: limit of the run.

    Raises:
        RuntimeError: if a request ends without all its tokens.
    """
    prompts = [one.prompt.tolist() for one in trace]
    requests: list[Request] = []
    samples: list[Usage] = []
    with Compilations() as compilations:
        start, now, next_sample = time.perf_counter(), 0.0, _SAMPLE_S
        while now < seconds and (len(requests) < len(trace) or not engine.idle):
            while len(requests) < len(trace) and trace[len(requests)].arrival <= now:
                index = len(requests)
                requests.append(engine.submit(prompts[index], trace[index].params))
            if engine.idle:
                time.sleep(max(0.0, min(trace[len(requests)].arrival, seconds) - now))
            else:
                engine.step()
            now = time.perf_counter() - start
            if now >= next_sample:
                running = [request for request in requests if not request.finished]
                samples.append(usage(engine, running, now))
                next_sample = now + _SAMPLE_S
        wall = time.perf_counter() - start
    outputs = [len(request.outputs[0].token_ids) for request in requests]
    served = [
        Served(
            arrival=one.arrival,
            first_token=request.first_token_time - start,
            finish=request.finish_time - start,
            num_tokens=num_tokens,
        )
        for one, request, num_tokens in zip(trace, requests, outputs, strict=False)
        if request.first_token_time is not None and request.finish_time is not None
    ]
    for one, request, num_tokens in zip(trace, requests, outputs, strict=False):
        if not request.finished:
            engine.abort(request)
        elif num_tokens != one.num_tokens:
            raise RuntimeError(f"a request got {num_tokens=} of {one.num_tokens}: {request.error}")
    return Record(
        served=served,
        usage=samples,
        wall=wall,
        num_tokens=sum(outputs),
        capacity=engine.num_pages * engine.config.page_size,
        extra=numbers_of(engine, compilations),
    )
