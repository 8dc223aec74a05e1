"""Results of the serving bench: tables."""

from __future__ import annotations

from collections.abc import Callable

from bench.measuring import timing
from bench.measuring.report import number, ratio, table

NAMES = {
    "engine": "engine",
    "engine_no_cache": "engine, no prefix cache",
    "static": "static batch, contiguous cache",
    "transformers": "transformers generate",
    "http": "engine, over HTTP",
}


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
    return timing.page(run["meta"], *blocks)
