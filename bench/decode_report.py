"""What the decode bench found, as a summary, a table and a chart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import timing
from bench.report import cell, error, kernel_us, number, ratio, reasons, table, time, wall

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


def progress(run: dict, shape: dict, seconds: float) -> str:
    """One line about the shape just measured."""
    results = shape["results"]
    us = kernel_us(results["ours"])
    gbps, percent = _rate(run, shape, us)
    words = [f"{shape['name']}: floor {number(_floor_us(run['floors'], shape))} us"]
    words += [
        f"{NAMES[name]} {cell(result, kernel_us(result))}" for name, result in results.items()
    ]
    words += [f"{number(gbps, '.0f')} GB/s = {number(percent)}%", f"took {seconds:.0f} s"]
    return ", ".join(words) + reasons(results, NAMES)


def _shapes_table(run: dict) -> str:
    shapes = run["shapes"]
    peers = [name for name in NAMES if name != "ours" and name in shapes[0]["results"]]
    header = ["shape (Hq/Hkv/D/page)", "K/V MB", "floor", "kernel us (p10 to p90)", "wall us"]
    header += ["GB/s", "% of ceiling", "rel. L2", *(NAMES[name] for name in peers)]
    rows = [header + ["vs JAX's op"] * ("jax_op" in peers)]
    for shape in shapes:
        results = shape["results"]
        ours, us = results["ours"], kernel_us(results["ours"])
        gbps, percent = _rate(run, shape, us)
        row = [shape["name"], f"{shape['num_bytes'] / 1e6:.1f}"]
        row += [number(_floor_us(run["floors"], shape)), time(ours), wall(ours)]
        row += [number(gbps, ".0f"), number(percent), error(ours)]
        row += [cell(results.get(name), kernel_us(results.get(name))) for name in peers]
        if "jax_op" in peers:
            times = ratio(kernel_us(results["jax_op"]), us)
            row.append("-" if times is None else f"{times:.2f}x")
        rows.append(row)
    return table(rows)


def _options_table(run: dict) -> str:
    rows = [["shape and option", "K/V MB", "kernel us (p10 to p90)", "GB/s", "rel. L2"]]
    rows[0] += ["plain shape", "its kernel us", "times it", NAMES["jax_op"]]
    for shape in run["options"]:
        ours, jax_op, base = shape["results"]["ours"], shape["results"].get("jax_op"), shape["base"]
        us, plain = kernel_us(ours), kernel_us(base["ours"])
        row = [shape["name"], f"{shape['num_bytes'] / 1e6:.1f}", time(ours)]
        row += [number(_rate(run, shape, us)[0], ".0f"), error(ours), base["name"]]
        row += [number(plain), number(ratio(us, plain), ".2f"), cell(jax_op, kernel_us(jax_op))]
        rows.append(row)
    return table(rows)


def markdown(run: dict) -> str:
    """The tables, with what they were measured on and the summary."""
    summary = run["summary"]
    blocks = [_shapes_table(run)] if run["shapes"] else []
    blocks += [_options_table(run)] if run["options"] else []
    over = number(summary["ours_over_floor_geomean"], ".2f")
    words = [f"Geometric mean over the shapes: {over} times the floor"]
    for name, speedup in summary["speedup_geomean"].items():
        least = summary["speedup_min"][name]
        words.append(f"{NAMES[name]} takes {speedup:.2f} times ours (at least {least:.2f})")
    ceiling = number(run["read_ceiling_gbps"], ".0f")
    blocks += [
        timing.provenance(run["meta"]),
        f"Read ceiling: {ceiling} GB/s.\n" + "; ".join(words),
    ]
    return "\n\n".join(blocks) + ".\n"


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
        for middle, times in zip(middles, ratios, strict=True):
            bars.text(times * 1.02, middle, f"{times:.2f}", va="center", fontsize=6)
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
