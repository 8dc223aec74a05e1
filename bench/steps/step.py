"""Measure a decode step of the engine, beside the time to read the weights and the K/V."""

from __future__ import annotations

import collections
import functools
import gc
import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from bench.measuring import profiler
from bench.measuring.measure import measure_floor, reason
from bench.measuring.report import number, ratio, table
from bench.serving.models import token_bytes, weight_bytes
from bench.steps import gap
from models.decoder import Decoder, engine_model
from models.decoder.attend import dense_attend
from models.generate import generate
from pallas_paged.engine import Engine, EngineConfig, SamplingParams

_SETTLE_CALLS = 6  # after the last prompt: compile, make CUDA graphs, time a step
_TIMED_CALLS = 4  # at least
_PROFILED_STEPS = 20
_PROFILED_CALLS = 2  # at least
_PAUSE_S = 0.1  # longer than any call that is still in flight
_GENERATE_PROMPT = 16  # tokens
_DECODE = re.compile("paged_decode|mla_attention")  # the kernel that each layer has once
_GENERATE_RUNS = 3
_ROUTED_TOKENS = 16  # of each row, by which experts are counted


def measure_step(
    decoder: Decoder,
    params: Sequence[SamplingParams],
    *,
    length: int,
    num_steps: int,
    **config: Any,
) -> dict[str, Any]:
    """Measure the wall and kernel time of a step in which every row decodes.

    Args:
        decoder: the model.
        params: sampling parameters of each row; the bench sets its number of tokens.
        length: tokens of the prompts, which are random and all different.
        num_steps: timed steps, at least.
        config: fields of `EngineConfig`.

    Raises:
        RuntimeError: a request finished within the timed steps.
    """
    num_seqs = len(params)
    config = {"max_num_batched_tokens": EngineConfig.max_num_batched_tokens} | config
    # For calls of any length, so that tables are as wide with one step a call as with several.
    burst = max(config.get("num_scheduler_steps", 1), EngineConfig.num_scheduler_steps)
    # The first rows already decode while the last prompts come in.
    num_prefill = -(-num_seqs * length // (config["max_num_batched_tokens"] - num_seqs)) + num_seqs
    num_bursts = _SETTLE_CALLS + _TIMED_CALLS + _PROFILED_CALLS + 2
    max_tokens = num_prefill + num_bursts * burst + num_steps + _PROFILED_STEPS
    model, weights = engine_model(decoder)
    page_size = config.get("page_size", EngineConfig.page_size)
    engine = Engine(
        model,
        weights,
        EngineConfig(
            num_pages=num_seqs * -(-(length + max_tokens) // page_size),
            max_num_seqs=num_seqs,
            max_model_len=length + max_tokens,
            watermark=0.0,
            enable_prefix_caching=False,
            **config,
        ),
    )
    prompts = np.random.default_rng(0).integers(model.vocab_size, size=(num_seqs, length))
    requests = [
        engine.submit(prompt, replace(one, max_tokens=max_tokens, ignore_eos=True))
        for prompt, one in zip(prompts, params, strict=True)
    ]

    def held() -> np.ndarray:
        return np.array([length + len(request.outputs[0].token_ids) for request in requests])

    def advance(steps: int, calls: int) -> int:
        """Run steps and calls, at least; return the calls."""
        goal, done = len(requests[0].outputs[0].token_ids) + steps, 0
        while len(requests[0].outputs[0].token_ids) < goal or done < calls:
            engine.step()
            done += 1
        return done

    while any(request.first_token_time is None for request in requests):
        engine.step()
    advance(0, _SETTLE_CALLS)
    before, start = held(), time.perf_counter()
    num_calls = advance(num_steps, _TIMED_CALLS)
    seconds, after = time.perf_counter() - start, held()
    steps = int(after[0] - before[0])
    context = float(np.mean((before + after) / 2))
    result = {
        "length": length,
        "num_steps": steps,
        "steps_per_call": steps / num_calls,
        "wall_us": seconds / steps * 1e6,
        **_limit(decoder, context, config.get("kv_cache_dtype"), _last_tokens(prompts, requests)),
        **_kernels(advance, held, decoder.config.num_layers),
    }
    if any(request.finished for request in requests):
        raise RuntimeError(f"{max_tokens=} is too small: a request finished within the timed steps")
    return result


def measure_generate(
    decoder: Decoder,
    params: Sequence[SamplingParams],
    *,
    num_tokens: tuple[int, int],
    **config: Any,
) -> dict[str, Any]:
    """Measure the wall time of a step of `models.generate`: of a long run less that of a short one.

    Args:
        decoder: the model.
        params: sampling parameters of each row.
        num_tokens: of the short run and the long run, after prompts of 16 tokens.
        config: fields of `EngineConfig`.
    """
    short, long = num_tokens
    prompts = np.random.default_rng(0).integers(
        decoder.config.vocab_size, size=(len(params), _GENERATE_PROMPT)
    )

    def run(max_tokens: int) -> float:
        gc.collect()  # the engine of the run before, and its pool
        each = [replace(one, max_tokens=max_tokens, ignore_eos=True) for one in params]
        start = time.perf_counter()
        generate(decoder, prompts.tolist(), each, max_model_len=_GENERATE_PROMPT + long, **config)
        return time.perf_counter() - start

    for max_tokens in num_tokens:
        run(max_tokens)
    seconds = [
        float(np.median([run(max_tokens) for _ in range(_GENERATE_RUNS)]))
        for max_tokens in num_tokens
    ]
    context = _GENERATE_PROMPT + (short + long) / 2
    return {
        "length": _GENERATE_PROMPT,
        "num_steps": long - short,
        "wall_us": (seconds[1] - seconds[0]) / (long - short) * 1e6,
        **_limit(decoder, context, config.get("kv_cache_dtype"), prompts),
        "kernel_us": None,
        "kernels": None,
    }


def step_table(named: Sequence[tuple[Sequence[str], dict[str, Any]]], *heads: str) -> str:
    """Return a table of results, each after cells of its own under `heads`."""
    head = [*heads, "wall us", "kernels us", "launches", "limit us", "wall / limit"]
    head += [f"+ {part} us" for part in gap.PARTS]
    rows = []
    for names, one in named:
        kernels = one["kernels"]
        launches = math.fsum(kernel["launches"] for kernel in kernels) if kernels else None
        cells = (
            number(one["wall_us"], ".0f"),
            number(one["kernel_us"], ".0f"),
            number(launches, ".0f"),
            number(one["limit_us"], ".0f"),
            number(ratio(one["wall_us"], one["limit_us"]), ".2f"),
        )
        over = gap.gap_of(one) or dict.fromkeys(gap.PARTS)
        rows.append([*names, *cells, *(number(over[part], ".0f") for part in gap.PARTS)])
    return table([head, *rows])


def kernel_table(result: dict[str, Any], most: int) -> str:
    """Return a table of the kernels of a step that take longest, or why there is none."""
    if not result["kernels"]:
        return f"No kernel times: {result['reason']}."
    rows = [["us per step", "launches", "kernel"]]
    rows += [
        [f"{kernel['us']:.1f}", f"{kernel['launches']:.3g}", kernel["name"][:100]]
        for kernel in result["kernels"][:most]
    ]
    return table(rows)


def _kernels(advance: Any, held: Any, num_layers: int) -> dict[str, Any]:
    """Kernels of a step by name, longest first; in order too, if each call is a step."""
    first = last = calls = 0

    def run() -> None:
        nonlocal first, calls
        advance(0, 1)  # starts the first call whose kernels are recorded, and reads the one before
        first = held()[0]
        calls = 1 + advance(_PROFILED_STEPS - 1, _PROFILED_CALLS - 1)
        time.sleep(_PAUSE_S)

    time.sleep(_PAUSE_S)  # so that the profile has complete calls only
    try:
        times = profiler.own_times(profiler.record(run))
    except Exception as error:  # no profiler: the wall time is still valid
        return {"kernels": None, "kernel_us": None, "reason": reason(error)}
    if not times:
        return {"kernels": None, "kernel_us": None, "reason": "no kernels: there is no GPU"}
    advance(0, 1)  # reads the last call that was recorded
    last = held()[0]
    counts = collections.Counter(name for name, _ in times)
    num_steps = recorded_steps(counts, num_layers) or int(last - first)
    totals: dict[str, float] = collections.defaultdict(float)
    for name, us in times:
        totals[name] += us / num_steps
    kernels = [
        {"name": name, "us": us, "launches": counts[name] / num_steps}
        for name, us in sorted(totals.items(), key=lambda item: -item[1])
    ]
    order = ordered(times, calls) if calls == num_steps else None
    parts = gap.times_of(kernels)
    return {
        "kernels": kernels,
        "kernel_us": sum(totals.values()),
        "parts_us": parts,
        "order": order,
    }


def recorded_steps(counts: Mapping[str, int], num_layers: int) -> int:
    """Return how many steps a profile has, by the decode kernel of each layer; 0 if it has none.

    Of a loop in a CUDA graph CUPTI reports one iteration, so they may be fewer than the engine's.
    The first may lack a kernel.

    Args:
        counts: launches by the names of kernels.
        num_layers: of the model.
    """
    names = [name for name in counts if _DECODE.search(name) and "merge" not in name]
    return round(sum(counts[name] for name in names) / num_layers)


def ordered(times: Sequence[profiler.Timed], num_runs: int) -> list[list[Any]] | None:
    """Return [name, median microseconds] of the kernels of equal runs, in the first run's order.

    Kernels may run side by side and change places; the n-th of a name stands for the n-th of that
    name in every run. None if the runs differ.
    """
    try:
        runs = profiler.split_runs(times, num_runs)
    except RuntimeError:
        return None
    found: dict[tuple[str, int], list[float]] = collections.defaultdict(list)
    for run in runs:
        seen: collections.Counter[str] = collections.Counter()
        for name, us in run:
            found[name, seen[name]].append(us)
            seen[name] += 1
    return [[name, float(np.median(us))] for (name, _), us in found.items()]


def _last_tokens(prompts: np.ndarray, requests: Sequence[Any]) -> np.ndarray:
    """Return the last tokens of each row, i32[B, _ROUTED_TOKENS] or fewer."""
    rows = [
        [*prompt, *request.outputs[0].token_ids][-_ROUTED_TOKENS:]
        for prompt, request in zip(prompts, requests, strict=True)
    ]
    return np.array(rows, np.int32)


def _limit(
    decoder: Decoder, context: float, kv_cache_dtype: str | None, tokens: np.ndarray
) -> dict[str, Any]:
    """Bytes that a step reads, and how long that takes at the rate of the floor kernel.

    Args:
        decoder, kv_cache_dtype: as in `measure_step`.
        context: tokens of a row; layers with a window read the last of them.
        tokens: i32[B, N] of the rows, which say how many experts a step reads.
    """
    spec = engine_model(decoder)[0].kv_cache_spec
    hit = experts_hit(decoder, tokens)
    weights = weight_bytes(decoder, hit)
    row_bytes = sum(
        token_bytes(spec.of(group), kv_cache_dtype) * min(context, group.sliding_window or context)
        for group in spec.groups
    )
    kv_bytes = row_bytes * len(tokens)
    gbps = _read_gbps()
    return {
        "num_seqs": len(tokens),
        "context": context,
        "kv_cache_dtype": kv_cache_dtype or jnp.dtype(spec.dtype).name,
        **({"experts_hit": hit} if hit else {}),
        "weight_bytes": weights,
        "kv_bytes": kv_bytes,
        "read_gbps": gbps,
        "limit_us": (weights + kv_bytes) / gbps / 1e3 if gbps else None,
    }


def experts_hit(decoder: Decoder, tokens: np.ndarray) -> float:
    """Return how many experts of a layer the rows of a step are routed to, on average.

    Each row is computed as if its text began with these tokens: what it reads before changes the
    routes, but hardly their number. 0 for a model without experts.

    Args:
        decoder: the model.
        tokens: i32[B, N] of B rows, for N steps.
    """
    config = decoder.config.experts
    if config is None:
        return 0.0
    routes = np.asarray(_routes(*nnx.split(decoder), jnp.asarray(tokens, jnp.int32)))
    num_layers, num_rows, num_steps, k = routes.shape
    found = np.zeros((num_layers, num_steps, config.n_routed_experts), bool)
    layer, _, step, _ = np.ogrid[:num_layers, :num_rows, :num_steps, :k]
    found[layer, step, routes] = True
    return float(found.sum(axis=-1).mean())


@functools.partial(jax.jit, static_argnums=0)
def _routes(graphdef: Any, weights: Any, tokens: jax.Array) -> jax.Array:
    """Return the experts i32[L, B, N, k] of tokens i32[B, N]."""
    recorded: list[jax.Array] = []

    class Recorded:
        routed_experts = None

        def __init__(self) -> None:
            self.attend = dense_attend()

        def __call__(self, *args: Any, **options: Any) -> Any:
            return self.attend(*args, **options)

        def record(self, experts: jax.Array) -> None:
            recorded.append(experts)

    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    nnx.merge(graphdef, weights)(tokens, positions, Recorded(), None)
    return jnp.stack(recorded)


@functools.cache
def _read_gbps() -> float | None:
    """The rate of the floor kernel, or None without a GPU."""
    floor = measure_floor(iterations=20)
    return (
        floor["num_bytes"] / floor["kernel_us"]["median"] / 1e3 if floor["status"] == "ok" else None
    )
