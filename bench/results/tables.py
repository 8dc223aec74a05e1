"""The tables of docs/results.md that show several runs, by the names that the page gives them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from bench.__main__ import find
from bench.measuring.calls import PEAK_TFLOPS
from bench.measuring.report import number, table
from bench.results.store import CARDS, Store, layout_ratios, option_ratios, scaling

# One run each, of the same call: the H100's first.
_DECODE = ("h100/decode", "h200/decode")
_PEERS = {"jax_op": "JAX's own op", "xla_gather": "XLA gather", "cudnn_paged": "cuDNN paged"}
_OUTSIDE = {"best_layout": "in its best layout", "flashinfer": "FlashInfer", "sdpa": "torch SDPA"}


def _both(values: Sequence[float | None], spec: str, *, bold: bool = False) -> str:
    """Numbers of both cards in one cell."""
    cells = (number(value, spec) for value in values)
    return " / ".join(f"**{cell}**" if bold and cell != "-" else cell for cell in cells)


def decode(store: Store) -> str:
    """Decode calls beside JAX's implementations, H100 / H200."""
    times, shares = ([store.times(r) for r in _DECODE], [store.shares(r) for r in _DECODE])
    rows = [["shape", "K/V MB", "pallas_paged", "% of the limit", *_PEERS.values()]]
    for shape in store[_DECODE[0]]["shapes"]:
        name = shape["name"]
        here = [found.get(name, {}) for found in times]
        percent = [found.get(name, {}).get("ours") for found in shares]
        row = [name, f"{shape['num_bytes'] / 1e6:.0f}"]
        row += [_both([us.get("ours") for us in here], ".1f", bold=True), _both(percent, ".0f")]
        rows.append([*row, *(_both([us.get(peer) for us in here], ".1f") for peer in _PEERS)])
    return table(rows)


def outside(store: Store) -> str:
    """Decode calls beside libraries outside JAX."""
    rows = [["shape", "pallas_paged", *_OUTSIDE.values()]]
    for name, times in store.times("h200/peers-decode").items():
        peers = (number(times.get(peer)) for peer in _OUTSIDE)
        rows.append([name, f"**{times['ours']:.1f}**", *peers])
    return table(rows)


def prompts(store: Store) -> str:
    """Prompts beside libraries outside JAX, in TFLOP/s."""
    rows = [["prompts", "pallas_paged", "% of the peak", "FlashInfer", "torch SDPA"]]
    for name, rates in store.tflops("h200/peers-prefill").items():
        peers = (number(rates.get(peer), ".0f") for peer in ("flashinfer", "sdpa"))
        ours = (f"**{rates['ours']:.0f}**", f"{100 * rates['ours'] / PEAK_TFLOPS:.0f}")
        rows.append([name.removeprefix("prefill "), *ours, *peers])
    return table(rows)


def one_byte(store: Store) -> str:
    """Decode calls on int8 and fp8 pages."""
    rows = [["shape", "K/V MB", "pallas_paged", "% of the limit", "JAX's own op"]]
    run = "h200/decode-one-byte"
    ceiling = store.ceiling("h200")
    for shape in store[run]["one_byte"]:
        us = {name: result["kernel_us"]["median"] for name, result in shape["results"].items()}
        size = shape["num_bytes"]
        row = [shape["name"], f"{size / 1e6:.0f}", f"**{us['ours']:.1f}**"]
        rows.append([*row, f"{size / us['ours'] / ceiling / 10:.0f}", number(us.get("jax_op"))])
    return table(rows)


def options(store: Store) -> str:
    """What each option of a decode call costs."""
    rows = [["shape and option", "times the plain call"]]
    return table(rows + [[name, f"{ratio:.2f}"] for name, ratio in option_ratios(store).items()])


def layouts(store: Store) -> str:
    """What each layout of the pages costs."""
    names = store["h100/layouts"]["layouts"]
    rows = [["shape", "kernels", *names]]
    for (shape, family), ratios in layout_ratios(store).items():
        rows.append([shape, family, *(number(ratios.get(name), ".3f") for name in names)])
    return table(rows)


_SERVING = {
    "serving-1b": "1B, 512 requests at once",
    "serving-1b-int8": "1B, int8 K/V",
    "serving-1b-http": "1B, with and without HTTP",
    "serving-1b-rate": "1B, 40 requests a second",
    "serving-1b-http-rate": "the same, with and without HTTP",
    "serving-8b": "8B, 256 requests at once",
}
_SYSTEMS = {
    "engine": "engine",
    "engine_no_cache": "without prefix cache",
    "http": "over HTTP",
    "static": "static batches",
    "transformers": "transformers",
}


def serving(store: Store) -> str:
    """Requests served by the engine and by static batches."""
    head = ["requests", "system", "tokens/s", "first token s, p50 / p99", "K/V used of reserved"]
    rows = [[*head, "date"]]
    for name, title in _SERVING.items():
        run = store[f"h200/{name}"]
        for system, words in _SYSTEMS.items():
            one = run["systems"].get(system, {"status": "not run"})
            if one["status"] == "ok":
                first, used = one["ttft_s"], one["utilization"]
                rate = f"**{one['tokens_per_s']:.0f}**" if system == "engine" else ""
                row = [title, words, rate or f"{one['tokens_per_s']:.0f}"]
                row += [f"{first['p50']:.2f} / {first['p99']:.2f}", number(used, ".1%")]
                rows.append([*row, run["meta"]["date"][:10]])
    return table(rows)


def nano(store: Store) -> str:
    """The workload of nano-vllm."""
    engine, theirs = store["h200/serving-nano"], store["h200/nano-vllm"]
    rows = [["system", "output tokens/s", "seconds", "date"]]
    for name, one, meta in (
        ("**engine**", engine["systems"]["engine"], engine["meta"]),
        (theirs["system"], theirs, theirs["meta"]),
    ):
        rate = f"{one['tokens_per_s']:.0f}"
        rows.append([name, rate, f"{one['wall_s']:.2f}", meta["date"][:10]])
    return table(rows)


_PARTS = {
    "heads": "attention, KV heads over the GPUs",
    "context": "attention, pages of each row over the GPUs",
    "steps": "decode step",
    "serving": "serving, 128 requests",
}


def gpus(store: Store) -> str:
    """Speedups over one GPU."""
    rows = [["what", "shape", "GPUs", "times as fast as one"]]
    for part, ratios in scaling(store).items():
        for (name, count), ratio in ratios.items():
            rows.append([_PARTS[part], name, str(count), f"{ratio:.2f}"])
    return table(rows)


def start(store: Store) -> str:
    """Seconds until an engine is ready."""
    starts = store["h100/start"]["starts"]
    rows = [["seconds", *starts]]
    rows += [["ready after", *(f"**{one['ready_s']:.1f}**" for one in starts.values())]]
    for part in starts["cold"]["parts_s"]:
        rows.append([f"- {part}", *(f"{one['parts_s'][part]:.1f}" for one in starts.values())])
    if all("all_compiled_s" in one for one in starts.values()):  # not before 2026-11-28
        rows.append(
            ["all compiled after", *(f"{one['all_compiled_s']:.1f}" for one in starts.values())]
        )
    return table(rows)


def runs(store: Store) -> str:
    """All runs, with links to their tables."""
    rows = [["card", "run", "question", "JAX", "date"]]
    for key, run in store.items():
        card, name = key.split("/")
        meta = run["meta"]
        link = f"[{name}](../bench/results/{key}.md)"
        rows.append([CARDS[card], link, question(run), meta["jax"] or "-", meta["date"][:10]])
    return table(rows)


def question(run: dict[str, Any]) -> str:
    """The question that a run answers."""
    words = run["meta"]["command"].split()
    return find(words[2]).question if words[1] == "-m" else "Another project's program"


_ALL: tuple[Callable[[Store], str], ...] = (
    *(decode, outside, prompts, one_byte, options, layouts),
    *(serving, nano, gpus, start, runs),
)
TABLES = {made.__name__: made for made in _ALL}
