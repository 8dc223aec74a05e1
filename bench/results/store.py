"""The runs of bench/results, and the numbers that tables, charts and texts take from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.decode import report as decode_report
from bench.measuring import calls, kv_dtypes
from bench.measuring.report import kernel_us
from bench.peers import __main__ as peers

FOLDER = Path(__file__).parent
# In the order of the docs: the name of a folder, and of the card as texts have it.
CARDS = {"h100": "H100", "h200": "H200", "2xh200": "two H200", "4xh200": "four H200", "cpu": "CPU"}
# In README: of one run on an H100.
README_SHAPES = (
    *(f"{name}/16" for name in ("1x8192 32/8/128", "8x2048 32/8/128", "64x4096 32/8/128")),
    *("64x4096 32/1/128/16", "64 ragged 32/8/128/16"),
)
LARGE = 500e6  # bytes of K/V from which a decode call is bound by memory


class Store(dict[str, dict[str, Any]]):
    """The runs by `card/name`."""

    @classmethod
    def load(cls, folder: Path = FOLDER) -> Store:
        """Read all JSON of a folder."""
        paths = (path for card in CARDS for path in sorted((folder / card).glob("*.json")))
        return cls({f"{p.parent.name}/{p.stem}": json.loads(p.read_text()) for p in paths})

    def times(self, run: str, part: str = "shapes") -> dict[str, dict[str, float]]:
        """Median kernel times of a run's shapes by implementation, without missing ones.

        Args:
            run: its key.
            part: the list of shapes: "shapes", or "one_byte".
        """
        return {
            shape["name"]: {
                name: us for name, result in shape["results"].items() if (us := kernel_us(result))
            }
            for shape in self[run][part]
        }

    def ceiling(self, card: str) -> float:
        """The read limit of a card in GB/s: the best rate of the floor kernel."""
        found = decode_report.read_ceiling(self[f"{card}/decode"])
        assert found, f"{card}/decode.json has no floor"
        return found

    def shares(self, run: str, part: str = "shapes") -> dict[str, dict[str, float]]:
        """Percent of the card's read limit, like `times`."""
        ceiling, times = self.ceiling(run.partition("/")[0]), self.times(run, part)
        return {
            shape["name"]: {
                name: 100 * shape["num_bytes"] / us / 1e3 / ceiling
                for name, us in times[shape["name"]].items()
            }
            for shape in self[run][part]
        }

    def tflops(self, run: str) -> dict[str, dict[str, float]]:
        """TFLOP/s, like `times`."""
        return {
            shape["name"]: {
                name: rate
                for name, result in shape["results"].items()
                if (rate := calls.tflops(shape, result))
            }
            for shape in self[run]["shapes"]
        }


def values(store: Store) -> dict[str, float]:
    """The numbers that texts quote, by name."""
    found: dict[str, float] = {}
    for card in ("h100", "h200"):
        run, shares = store[f"{card}/decode"], store.shares(f"{card}/decode")
        large = [shares[s["name"]]["ours"] for s in run["shapes"] if s["num_bytes"] > LARGE]
        found |= {f"{card}_large_min": min(large), f"{card}_large_max": max(large)}
        found[f"{card}_short"] = shares["1x1024 32/8/128/16"]["ours"]
        found[f"{card}_ceiling"] = store.ceiling(card)
        for name, over in calls.summarize(run["shapes"], decode_report.NAMES).items():
            found |= {f"{card}_{name}": over["geomean"], f"{card}_{name}_min": over["min"]}
    for part in ("decode", "prompts"):
        run = store["h200/peers-decode" if part == "decode" else "h200/peers-prefill"]
        for name, over in calls.summarize(run["shapes"], peers.NAMES).items():
            found |= {f"{part}_{name}": over["geomean"], f"{part}_{name}_min": over["min"]}
    rates = [rates["ours"] for rates in store.tflops("h200/peers-prefill").values()]
    found["peak"] = calls.PEAK_TFLOPS
    found |= {"prompts_min": min(rates), "prompts_max": max(rates)}
    one_byte = decode_report.with_floors(store["h200/decode-one-byte"], "one_byte")
    for dtype in kv_dtypes.ONE_BYTE:
        shapes = [shape for shape in one_byte if shape["kv_dtype"] == kv_dtypes.NAMES[dtype]]
        summary = calls.summarize(shapes, decode_report.NAMES)
        found[f"{dtype}_jax_op"] = summary["jax_op"]["geomean"]
        found[f"{dtype}_floor"] = 100 * summary["floor"]["geomean"]
    kv = store["h200/quality"]["checkpoint"]["kv"]
    for name, one in kv.items():
        found[f"{name}_top1"] = 100 * one["top1"]
    options = option_ratios(store)
    found |= {"options_min": min(options.values()), "options_max": max(options.values())}
    for size in (512, 1024):
        name = f"64x4096 32/8/128/16 fixed_split_size={size}"
        found[f"fixed_{size}"] = 100 * (options[name] - 1)
    layouts = [ratio for ratios in layout_ratios(store).values() for ratio in ratios.values()]
    found["layouts_max"] = max(layouts)
    for model, num_seqs, case in (("1b", 1, "loop"), ("1b", 64, "loop"), ("8b", 64, "loop")):
        one = step(store, model, num_seqs, case)
        found[f"{model}_{num_seqs}_over"] = one["wall_us"] / one["limit_us"]
    for name in ("1b", "8b"):
        systems = store[f"h200/serving-{name}"]["systems"]
        found[f"{name}_static"] = (
            systems["engine"]["tokens_per_s"] / systems["static"]["tokens_per_s"]
        )
        found[f"{name}_utilization"] = 100 * systems["engine"]["utilization"]
        found[f"{name}_static_utilization"] = 100 * systems["static"]["utilization"]
    alone = store["h200/serving-1b"]["systems"]["transformers"]
    found["transformers"] = alone["num_finished"]
    rate = store["h200/serving-1b-http-rate"]["systems"]
    for name in ("engine", "http"):
        found[f"{name}_ttft_ms"] = 1e3 * rate[name]["ttft_s"]["p50"]
    nano = store["h200/serving-nano"]["systems"]["engine"]["tokens_per_s"]
    found["nano_over"] = nano / store["h200/nano-vllm"]["tokens_per_s"]
    found["http_more_ms"] = found["http_ttft_ms"] - found["engine_ttft_ms"]
    speedups = scaling(store)
    for num_seqs in (1, 64):
        found[f"step_8b_{num_seqs}"] = speedups["steps"][f"8b, {num_seqs} x 2048", 2]
    for name, ratios in speedups.items():
        found |= {f"{name}_min": min(ratios.values()), f"{name}_max": max(ratios.values())}
    starts = store["h100/start"]["starts"]
    found |= {f"{name}_ready_s": starts[name]["ready_s"] for name in ("cold", "warm")}
    for shape in decode_report.with_floors(store["h100/decode"], "shapes"):
        if shape["name"] in README_SHAPES:
            row = f"row{README_SHAPES.index(shape['name'])}"
            for name, result in shape["results"].items():
                found[f"{row}_{name}"] = kernel_us(result) or 0.0
    return found


def option_ratios(store: Store) -> dict[str, float]:
    """Time of a decode call with an option over that of the plain call, by shape and option."""
    found = {}
    for shape in store["h100/decode-options"]["options"]:
        with_option = kernel_us(shape["results"]["ours"])
        plain = kernel_us(shape["base"]["results"]["ours"])
        if with_option and plain:
            found[shape["name"]] = with_option / plain
    return found


def layout_ratios(store: Store) -> dict[tuple[str, str], dict[str, float]]:
    """Time of each layout over that of the first, by shape and family of kernels."""
    found = {}
    for shape in store["h100/layouts"]["shapes"]:
        for family in next(iter(shape["layouts"].values())):
            times = {name: kernel_us(one[family]) for name, one in shape["layouts"].items()}
            first = next(iter(times.values()))
            if first:
                found[shape["name"], family] = {k: us / first for k, us in times.items() if us}
    return found


def step(store: Store, model: str, num_seqs: int, case: str) -> dict[str, Any]:
    """The decode step of a model with some rows."""
    return next(
        one
        for one in store[f"h200/steps-{model}"]["results"]
        if (one["num_seqs"], one["case"]) == (num_seqs, case)
    )


def scaling(store: Store) -> dict[str, dict[tuple[str, int], float]]:
    """Speedups over one GPU of the same run, by part, and by what is run and number of GPUs."""
    speedups: dict[str, dict[tuple[str, int], float]] = {"heads": {}, "context": {}}
    for part, run, way in (
        ("heads", store["2xh200/parallel"]["attention"], "jit"),
        ("context", store["2xh200/parallel-context"]["context"], "context"),
    ):
        one_gpu = {one["name"]: one["us"]["median"] for one in run if one["devices"] == 1}
        for one in run:
            if one["devices"] > 1 and one["way"] == way:
                speedup = one_gpu[one["name"]] / one["us"]["median"]
                speedups[part][one["name"], one["devices"]] = speedup
    steps: dict[tuple[str, int], float] = {}
    for card in ("2xh200", "4xh200"):
        found = store[f"{card}/parallel"]["steps"]
        alone = {(s["model"], s["num_seqs"]): s["wall_us"] for s in found if s["devices"] == 1}
        for one in found:
            name = f"{one['model']}, {one['num_seqs']} x {one['length']}"
            if one["devices"] > 1 and (name, one["devices"]) not in steps:
                key = one["model"], one["num_seqs"]
                steps[name, one["devices"]] = alone[key] / one["wall_us"]
    first, *others = store["2xh200/parallel-serving"]["serving"]
    serving = {
        (one["model"], one["tensor_parallel_size"]): first["seconds"] / one["seconds"]
        for one in others
    }
    return {**speedups, "steps": steps, "serving": serving}
