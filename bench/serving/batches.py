"""Static batching: requests are served in batches by arrival, each batch until all are done."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from bench.serving.record import Record, Served, Usage
from bench.serving.requests import TraceRequest

_SAMPLES = 40  # memory samples per batch


@dataclass(frozen=True, kw_only=True)
class BatchTimes:
    """Times of a batch's first and last tokens, by `time.perf_counter`, and its padded length."""

    first_token: float
    finish: float
    padded_len: int


# (requests of a batch) -> its times, returned when all its tokens are known
RunBatch = Callable[[Sequence[TraceRequest]], BatchTimes]


def serve_in_batches(
    trace: Sequence[TraceRequest],
    run_batch: RunBatch,
    *,
    batch_size: int,
    max_len: int,
    seconds: float,
    grows: bool = False,
) -> Record:
    """Run the requests that have arrived, at most batch_size at a time, until all are done.

    Args:
        trace: requests by arrival.
        run_batch: gives every request its tokens; it takes as long as the longest output.
        batch_size: rows.
        max_len: tokens of memory that a row may take.
        seconds: no batch starts after this time.
        grows: a row's memory grows from its padded length with each step, instead of being
            max_len from the start.
    """
    served: list[Served] = []
    usage: list[Usage] = []
    start, done = time.perf_counter(), 0
    while done < len(trace):
        now = time.perf_counter() - start
        if now >= seconds:
            break
        if trace[done].arrival > now:
            time.sleep(min(trace[done].arrival, seconds) - now)
            continue
        batch = [one for one in trace[done : done + batch_size] if one.arrival <= now]
        times = run_batch(batch)
        done += len(batch)
        first_token, finish = times.first_token - start, times.finish - start
        served += [
            Served(
                arrival=one.arrival,
                first_token=first_token,
                finish=finish,
                num_tokens=one.num_tokens,
            )
            for one in batch
        ]
        usage += _batch_usage(
            batch,
            times,
            start=start,
            num_rows=len(batch) if grows else batch_size,
            max_len=None if grows else max_len,
            waits=done < len(trace),
        )
    return Record(
        served=served,
        usage=usage,
        wall=time.perf_counter() - start,
        num_tokens=sum(one.num_tokens for one in served),
        capacity=batch_size * max_len,
    )


def _batch_usage(
    batch: Sequence[TraceRequest],
    times: BatchTimes,
    *,
    start: float,
    num_rows: int,
    max_len: int | None,
    waits: bool,
) -> list[Usage]:
    """Memory over the steps of a batch, assumed equally long; without max_len rows grow."""
    prompts = np.array([len(one.prompt) for one in batch])
    wanted = np.array([one.num_tokens for one in batch])
    longest = int(wanted.max())
    samples = []
    for step in np.unique(np.linspace(0, longest - 1, _SAMPLES).astype(int)):
        live = int(np.sum((prompts + step)[wanted > step]))
        row_len = times.padded_len + int(step) if max_len is None else max_len
        at = times.first_token + (times.finish - times.first_token) * int(step) / longest
        samples.append(Usage(time=at - start, live=live, reserved=num_rows * row_len, waits=waits))
    return [*samples, Usage(time=times.finish - start, live=0, reserved=0, waits=waits)]
