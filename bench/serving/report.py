"""Results of the serving bench: tables and chart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.measuring import timing
from bench.measuring.report import number, ratio, table
from bench.steps.step import kernel_table, step_table

NAMES = {
    "engine": "engine",
    "engine_no_cache": "engine, no prefix cache",
    "static": "static batch, contiguous cache",
    "transformers": "transformers generate",
    "http": "engine, over HTTP",
}
_COLORS = dict(zip(NAMES, ("#0072B2", "#56B4E9", "#D55E00", "#009E73", "#CC79A7"), strict=True))
_NUM_KERNELS = 25


def _rate(result: dict | None) -> float | None:
    return result.get("tokens_per_s") if result else None


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _spread(spread: dict | None, scale: float = 1.0, spec: str = ".2f") -> str:
    if spread is None:
        return "-"
    return f"{scale * spread['p50']:{spec}} / {scale * spread['p99']:{spec}}"


# header: function that returns the cell of a result
_COLUMNS: dict[str, Callable[[dict], str]] = {
    "K/V": lambda x: x.get("kv_dtype", "-"),
    "tokens that fit": lambda x: str(x["capacity"]),
    "requests": lambda x: str(x["num_finished"]),
    "wall s": lambda x: f"{x['wall_s']:.1f}",
    "tokens/s": lambda x: f"{x['tokens_per_s']:.0f}",
    "requests/s": lambda x: f"{x['requests_per_s']:.1f}",
    "memory utilisation": lambda x: _percent(x["utilization"]),
    "live K/V of the budget": lambda x: _percent(x["live_of_budget"]),
    "while requests wait": lambda x: _percent(x["live_of_budget_under_load"]),
    "first token s, p50 / p99": lambda x: _spread(x["ttft_s"]),
    "per token ms": lambda x: _spread(x["tpot_s"], 1e3, ".1f"),
    "request s": lambda x: _spread(x["latency_s"]),
    "preemptions": lambda x: str(x.get("preemptions", "-")),
    "cache hits": lambda x: _percent(x.get("cache_hit_rate")),
    "compilations": lambda x: str(x.get("compilations", "-")),
}


def progress(name: str, result: dict) -> str:
    """One line about the system just measured."""
    if result["status"] != "ok":
        return f"{NAMES[name]}: {result['status']}, {result['reason']}"
    cells = (f"{head} {cell(result)}" for head, cell in _COLUMNS.items())
    return f"{NAMES[name]}: " + ", ".join(cells)


def _systems_table(run: dict) -> str:
    systems = run["systems"]
    static = _rate(systems.get("static"))
    rows = [["system", *_COLUMNS, "x static"]]
    found = {name: systems[name] for name in NAMES if name in systems}
    for name, result in found.items():
        if result["status"] == "ok":
            cells = [cell(result) for cell in _COLUMNS.values()]
            times = number(ratio(_rate(result), static), ".2f")
        else:
            cells, times = ["-"] * len(_COLUMNS), "-"
        rows.append([NAMES[name], *cells, times])
    reasons = [
        f"- {NAMES[name]}: {result['reason']}"
        for name, result in found.items()
        if "reason" in result
    ]
    return "\n\n".join([table(rows), *(["\n".join(reasons)] if reasons else [])])


def _trace_text(run: dict) -> str:
    trace, sizes = run["trace"], run["sizes"]
    return (
        f"{run['shape']}, {sizes['kv_gib']:g} GiB of K/V = {sizes['capacity']} tokens in the dtype"
        " of the model, rows of up"
        f" to {sizes['max_len']}. {trace['num_requests']} requests, prompts of"
        f" {trace['prompt_mean']:.0f} tokens in the mean (most {trace['prompt_max']}), outputs of"
        f" {trace['output_mean']:.0f} (most {trace['output_max']}); the last request arrives after"
        f" {trace['last_arrival']:.1f} s."
    )


def markdown(run: dict) -> str:
    """The tables and the provenance of their numbers."""
    blocks = [_trace_text(run)]
    blocks += [_systems_table(run)] if run["systems"] else []
    if step := run["decode_step"]:
        names = (f"{step['num_seqs']} x {step['context']:.0f}", step["kv_cache_dtype"])
        blocks += [step_table([(names, step)], "decode step, rows x tokens", "K/V")]
        blocks += [kernel_table(step, _NUM_KERNELS)]
    return "\n\n".join([*blocks, timing.provenance(run["meta"])]) + "\n"


def plot(run: dict[str, Any], path: Path) -> None:
    """Write a PNG: throughput, memory over time, and the distribution of request latencies.

    Raises:
        ValueError: if no system was measured.
    """
    found = run["systems"]
    systems = {x: found[x] for x in NAMES if x in found and found[x]["status"] == "ok"}
    if not systems:
        raise ValueError("there is nothing to plot: no system was measured")
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    figure, (rates, memory, latency) = plt.subplots(1, 3, figsize=(15, 4.2), layout="constrained")
    heights = [result["tokens_per_s"] for result in systems.values()]
    bars = rates.bar(range(len(systems)), heights, color=[_COLORS[name] for name in systems])
    rates.bar_label(bars, [f"{height:.0f}" for height in heights])
    rates.set_xticks(range(len(systems)), [NAMES[x].replace(", ", ",\n") for x in systems])
    rates.tick_params(axis="x", labelsize=8)
    rates.set_ylabel("output tokens/s")
    rates.set_title(f"{run['shape']}, {run['sizes']['kv_gib']:g} GiB of K/V")
    for name, result in systems.items():
        usage = result["usage"]
        times = [sample["time"] for sample in usage] + [result["wall_s"]]
        shares = [sample["live"] / result["capacity"] for sample in usage]
        if name in ("engine", "static"):
            label = f"{NAMES[name]}: {_percent(result['utilization'])} of what is reserved"
            memory.stairs(shares, times, color=_COLORS[name], label=label, baseline=None)
        done = result["latencies"]
        share = [(i + 1) / len(done) for i in range(len(done))]
        latency.step(done, share, where="post", color=_COLORS[name], label=NAMES[name])
    memory.set_ylim(0, 1)
    memory.set_xlabel("seconds")
    memory.set_ylabel("K/V of live tokens / KV memory")
    memory.set_title("KV memory over time")
    memory.legend(fontsize=8)
    latency.set_ylim(0, 1)
    latency.set_xlabel("seconds from arrival to the last token")
    latency.set_ylabel("share of requests")
    latency.set_title(f"{run['meta']['device']}, JAX {run['meta']['jax']}")
    latency.legend(fontsize=8)
    for axes in (memory, latency):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=140)
    plt.close(figure)
