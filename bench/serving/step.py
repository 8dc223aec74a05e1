"""Measure the engine's decode step, beside the time to read the weights and the K/V."""

from __future__ import annotations

import collections
import time
from typing import Any

import numpy as np

from bench import profiler
from bench.measure import measure_floor, reason
from bench.serving.engine import greedy
from bench.serving.models import ServingShape, weight_bytes
from models.decoder import Decoder
from models.engine import Engine, EngineConfig

_PAGE_SIZE = 16
_SETTLE_STEPS = 10  # after the last prompt
_PROFILED_STEPS = 20
_PAUSE_S = 0.1  # longer than any step that is still in flight


def measure_step(
    model: Decoder,
    shape: ServingShape,
    *,
    num_seqs: int,
    length: int,
    num_steps: int,
    token_budget: int,
    kv_dtype: str | None,
    implementation: str | None,
) -> dict[str, Any]:
    """Wall and kernel time of a step that decodes num_seqs rows of at least length tokens.

    Args:
        model: the model that the engine runs.
        shape: sizes of the model.
        num_seqs, length: number and length of the prompts, random and all different.
        num_steps: timed steps.
        token_budget, kv_dtype, implementation: of the engine.

    Raises:
        RuntimeError: if a request finishes within the timed steps.
    """
    # The first rows already decode while the last prompts come in.
    num_prefill_steps = -(-num_seqs * length // (token_budget - num_seqs)) + num_seqs
    num_tokens = num_prefill_steps + _SETTLE_STEPS + num_steps + _PROFILED_STEPS + 8
    num_pages = num_seqs * -(-(length + num_tokens) // _PAGE_SIZE)
    engine = Engine(
        model,
        None,
        None,
        EngineConfig(
            num_pages=num_pages,
            page_size=_PAGE_SIZE,
            max_seqs=num_seqs,
            max_len=length + num_tokens,
            token_budget=token_budget,
            watermark=0.0,
            prefix_caching=False,
            kv_dtype=kv_dtype,
            implementation=implementation,
        ),
    )
    engine.warmup([greedy(num_tokens)])
    vocab_size = shape.config.vocab_size
    prompts = np.random.default_rng(0).integers(vocab_size, size=(num_seqs, length))
    requests = [engine.submit(prompt.tolist(), greedy(num_tokens)) for prompt in prompts]
    while any(request.first_token_time is None for request in requests):
        engine.step()
    for _ in range(_SETTLE_STEPS):
        engine.step()

    def num_held() -> int:
        return sum(length + len(request.completions[0].tokens) for request in requests)

    before = num_held()
    start = time.perf_counter()
    for _ in range(num_steps):
        engine.step()
    wall_us = (time.perf_counter() - start) / num_steps * 1e6
    num_context = (before + num_held()) / 2
    kv_bytes = num_context * shape.token_bytes(kv_dtype)
    result = {
        "num_seqs": num_seqs,
        "num_steps": num_steps,
        "context": num_context / num_seqs,
        "wall_us": wall_us,
        "weight_bytes": weight_bytes(model),
        "kv_dtype": engine.stats().kv_dtype,
        "kv_bytes": kv_bytes,
        **_kernels(engine),
        **_roofline(weight_bytes(model) + kv_bytes),
    }
    if any(request.finished for request in requests):
        raise RuntimeError(f"{num_tokens=} is too small: a request finished within the timed steps")
    return result


def _kernels(engine: Engine) -> dict[str, Any]:
    """Kernels of a step by name, longest first: microseconds and launches."""

    def run() -> None:
        for _ in range(_PROFILED_STEPS):
            engine.step()
        time.sleep(_PAUSE_S)

    time.sleep(_PAUSE_S)  # so that the profile has whole steps only
    try:
        times = profiler.own_times(profiler.record(run))
    except Exception as error:  # no profiler: the wall time is still valid
        return {"kernels": None, "kernel_us": None, "reason": reason(error)}
    if not times:
        return {"kernels": None, "kernel_us": None, "reason": "no kernels: there is no GPU"}
    counts = collections.Counter(name for name, _ in times)
    totals: dict[str, float] = collections.defaultdict(float)
    for name, us in times:
        totals[name] += us / _PROFILED_STEPS
    kernels = [
        {"name": name, "us": us, "launches": counts[name] / _PROFILED_STEPS}
        for name, us in sorted(totals.items(), key=lambda item: -item[1])
    ]
    return {"kernels": kernels, "kernel_us": sum(totals.values())}


def _roofline(num_bytes: float) -> dict[str, Any]:
    """Time to read num_bytes at the measured rate of the floor kernel, or None without a rate."""
    floor = measure_floor(1 << 30, num_sets=2, num_calls=4, iterations=20)
    if floor["status"] != "ok":
        return {"read_gbps": None, "roofline_us": None}
    gbps = floor["num_bytes"] / floor["kernel_us"]["median"] / 1e3
    return {"read_gbps": gbps, "roofline_us": num_bytes / gbps / 1e3}
