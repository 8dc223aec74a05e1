"""What the decode bench found, as a summary, a table and a chart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import timing

NAMES = {
    "ours": "pallas_paged",
    "jax_op": "JAX's own op",
    "xla_gather": "XLA gather",
    "cudnn_paged": "cuDNN paged",
}
# Okabe and Ito's palette, told apart by people with any colour vision.
_COLORS = {
    "ours": "#0072B2",
    "jax_op": "#E69F00",
    "xla_gather": "#009E73",
    "cudnn_paged": "#CC79A7",
}
_MARKERS = {"ours": "o", "jax_op": "s", "xla_gather": "^", "cudnn_paged": "D"}


def kernel_us(result: dict | None) -> float | None:
    """Median kernel time of a floor or of a right result, None if there is none."""
    if result is None or result["status"] != "ok" or not result["kernel_us"]:
        return None
    return result["kernel_us"]["median"]


def _floor_us(floors: Sequence[dict], shape: dict) -> float | None:
    same = [floor for floor in floors[1:] if floor["num_bytes"] == shape["num_bytes"]]
    return kernel_us(same[0]) if same else None


def _geomean(ratios: Sequence[float]) -> float | None:
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else None


def summarize(floors: Sequence[dict], shapes: Sequence[dict]) -> dict[str, Any]:
    """The read ceiling in GB/s and how ours stands to the floor and to the peers.

    Args:
      floors: of the ceiling's probe, then of each size of the shapes.
      shapes: results of `measure_shape`.
    """
    rates = [floor["num_bytes"] / us / 1e3 for floor in floors if (us := kernel_us(floor))]
    over_floor: list[float] = []
    speedups: dict[str, list[float]] = {}
    for shape in shapes:
        ours = kernel_us(shape["results"]["ours"])
        if ours is None:
            continue
        if floor := _floor_us(floors, shape):
            over_floor.append(ours / floor)
        for name, result in shape["results"].items():
            if name != "ours" and (theirs := kernel_us(result)):
                speedups.setdefault(name, []).append(theirs / ours)
    return {
        "read_ceiling_gbps": max(rates, default=None),
        "summary": {
            "ours_over_floor_geomean": _geomean(over_floor),
            "speedup_geomean": {name: _geomean(ratios) for name, ratios in speedups.items()},
            "speedup_min": {name: min(ratios) for name, ratios in speedups.items()},
        },
    }


def _rate(run: dict, shape: dict, us: float | None) -> tuple[float | None, float | None]:
    """GB/s of the K/V attended, and that as a percentage of the ceiling."""
    gbps = shape["num_bytes"] / us / 1e3 if us else None
    ceiling = run["read_ceiling_gbps"]
    return gbps, 100 * gbps / ceiling if gbps and ceiling else None


def _number(value: float | None, spec: str = ".1f") -> str:
    return "-" if value is None else format(value, spec)


def _spread(spread: dict | None) -> str:
    if not spread:
        return "-"
    return f"{spread['median']:.1f} ({spread['p10']:.1f} to {spread['p90']:.1f})"


def _cell(result: dict | None) -> str:
    if result is None:
        return "-"
    if result["status"] == "wrong":
        return f"WRONG [{result['relative_l2']:.0e}]"
    us = kernel_us(result)
    return "-" if us is None else f"{us:.1f} [{result['relative_l2']:.0e}]"


def progress(run: dict, shape: dict, seconds: float) -> str:
    """One line about the shape just measured."""
    results = shape["results"]
    us = kernel_us(results["ours"])
    gbps, percent = _rate(run, shape, us)
    words = [f"{shape['name']}: floor {_number(_floor_us(run['floors'], shape))} us"]
    words += [f"{NAMES[name]} {_cell(result)}" for name, result in results.items()]
    words += [f"{_number(gbps, '.0f')} GB/s = {_number(percent)}%", f"took {seconds:.0f} s"]
    reasons = [f"\n  {NAMES[n]}: {r['reason']}" for n, r in results.items() if "reason" in r]
    return ", ".join(words) + "".join(reasons)


def markdown(run: dict) -> str:
    """The table, with what it was measured on and the summary."""
    summary = run["summary"]
    peers = [name for name in NAMES if name != "ours" and name in run["shapes"][0]["results"]]
    header = ["shape (Hq/Hkv/D/page)", "K/V MB", "floor", "kernel us (p10 to p90)", "wall us"]
    header += ["GB/s", "% of ceiling", "rel. L2", *(NAMES[name] for name in peers)]
    if "jax_op" in peers:
        header.append("vs JAX's op")
    lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    for shape in run["shapes"]:
        results = shape["results"]
        ours, us = results["ours"], kernel_us(results["ours"])
        right = ours["status"] == "ok"
        gbps, percent = _rate(run, shape, us)
        cells = [shape["name"], f"{shape['num_bytes'] / 1e6:.1f}"]
        cells.append(_number(_floor_us(run["floors"], shape)))
        cells.append(_spread(ours["kernel_us"]) if right else ours["status"].upper())
        cells.append(_number(ours["wall_us"]["median"] if right else None))
        cells += [_number(gbps, ".0f"), _number(percent)]
        cells.append(_number(ours.get("relative_l2"), ".1e"))
        cells += [_cell(results.get(name)) for name in peers]
        if "jax_op" in peers:
            theirs = kernel_us(results["jax_op"])
            cells.append(f"{theirs / us:.2f}x" if theirs and us else "-")
        lines.append("| " + " | ".join(cells) + " |")
    ceiling = _number(run["read_ceiling_gbps"], ".0f")
    lines += ["", timing.provenance(run["meta"]), "", f"Read ceiling: {ceiling} GB/s."]
    over = _number(summary["ours_over_floor_geomean"], ".2f")
    lines.append(f"Geometric mean over the shapes: {over} times the floor")
    for name, speedup in summary["speedup_geomean"].items():
        least = summary["speedup_min"][name]
        lines[-1] += f"; {NAMES[name]} takes {speedup:.2f} times ours (at least {least:.2f})"
    lines[-1] += "."
    return "\n".join(lines) + "\n"


def plot(run: dict, path: Path) -> None:
    """Writes a PNG: kernel times over the floor, and K/V rates against the read ceiling.

    Raises:
      ValueError: if the run has no kernel times to draw.
    """
    shapes = [s for s in run["shapes"] if _floor_us(run["floors"], s)]
    names = [n for n in NAMES if any(kernel_us(s["results"].get(n)) for s in shapes)]
    if not names:
        raise ValueError("there are no kernel times to plot: they need a GPU with CUPTI")
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    figure, (bars, rates) = plt.subplots(
        1, 2, figsize=(15, 0.42 * len(shapes) + 2.4), width_ratios=(3, 2), layout="constrained"
    )
    height = 0.8 / len(names)
    for i, name in enumerate(names):
        found = []  # row, bytes, microseconds, floor
        for row, shape in enumerate(shapes):
            us, floor = kernel_us(shape["results"].get(name)), _floor_us(run["floors"], shape)
            if us and floor:
                found.append((row, shape["num_bytes"], us, floor))
        ratios = [us / floor for _, _, us, floor in found]
        middles = [row + (i - (len(names) - 1) / 2) * height for row, _, _, _ in found]
        bars.barh(middles, ratios, height, color=_COLORS[name], label=NAMES[name])
        for middle, ratio in zip(middles, ratios, strict=True):
            bars.text(ratio * 1.02, middle, f"{ratio:.2f}", va="center", fontsize=6)
        rates.plot(
            [num_bytes / 1e6 for _, num_bytes, _, _ in found],
            [num_bytes / us / 1e3 for _, num_bytes, us, _ in found],
            _MARKERS[name],
            color=_COLORS[name],
            label=NAMES[name],
            alpha=0.85,
        )
    bars.axvline(1, color="black", linewidth=1)
    bars.set_xscale("log")
    ticks = [t for t in (1, 1.5, 2, 3, 5, 8, 12, 20) if t <= 1.3 * bars.get_xlim()[1]]
    bars.set_xticks(ticks, [f"{t:g}" for t in ticks])
    bars.minorticks_off()
    bars.set_xlim(0.8, 1.2 * bars.get_xlim()[1])
    bars.set_ylim(-0.6, len(shapes) - 0.4)
    bars.set_yticks(range(len(shapes)), [shape["name"] for shape in shapes])
    bars.invert_yaxis()
    bars.set_xlabel("kernel time / time to only read the K/V (less is better, 1 is the floor)")
    bars.set_title("One decode step: num_seqs x length, Hq/Hkv/D/page")

    sizes = sorted({s["num_bytes"]: _floor_us(run["floors"], s) for s in shapes}.items())
    rates.plot(
        [size / 1e6 for size, _ in sizes],
        [size / us / 1e3 for size, us in sizes if us],
        "--",
        color="gray",
        label="read floor",
    )
    ceiling = run["read_ceiling_gbps"]
    rates.axhline(ceiling, color="black", linewidth=1, label=f"read ceiling, {ceiling:.0f} GB/s")
    rates.set_xscale("log")
    rates.set_ylim(bottom=0)
    rates.set_xlabel("K/V attended (MB)")
    rates.set_ylabel("GB/s")
    rates.set_title(f"{run['meta']['device']}, bf16, cold L2, JAX {run['meta']['jax']}")
    rates.grid(alpha=0.3)
    figure.legend(*rates.get_legend_handles_labels(), loc="outside lower center", ncols=6)
    figure.savefig(path, dpi=140)
    plt.close(figure)
