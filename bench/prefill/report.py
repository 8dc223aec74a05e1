"""Results of the prefill bench: summary, tables and chart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.measuring import kv_dtypes, report, timing
from bench.measuring.report import OURS, cell, error, kernel_us, number, ratio, table

NAMES = OURS | {"cudnn": "cuDNN dense", "mha": "JAX's Triton mha"}
_COLORS = report.COLORS | {"cudnn": "#CC79A7", "mha": "#E69F00"}
# Operations per byte of K/V; below this an H200 is bound by memory, not by compute.
_RIDGE = 200


def tflops(shape: dict, result: dict | None) -> float | None:
    """TFLOP/s over the operations that the result computes: more than ours without a mask."""
    us = kernel_us(result)
    if result is None or us is None:
        return None
    return result.get("num_flops", shape["num_flops"]) / us / 1e6


def gbps(shape: dict, result: dict | None) -> float | None:
    """GB/s of the K/V attended to."""
    us = kernel_us(result)
    return shape["num_bytes"] / us / 1e3 if us else None


def progress(shape: dict, seconds: float) -> str:
    """One line about the shape just measured."""
    results = shape["results"]
    words = [
        f"{NAMES[name]} {number(kernel_us(result))} us = {cell(result, tflops(shape, result))}"
        for name, result in results.items()
    ]
    line = f"{shape['name']}: {', '.join(words)} TFLOP/s, chose {report.choice(results)}"
    return f"{line}, took {seconds:.0f} s" + report.reasons(results, NAMES)


def summarize(run: dict) -> dict[str, Any]:
    """None's choice, and our TFLOP/s over each other's: geometric mean, least, number of shapes."""
    over = {}
    for name in NAMES:
        found = [
            mine / theirs
            for shape in run["shapes"]
            if (mine := tflops(shape, shape["results"]["ours"]))
            and (theirs := tflops(shape, shape["results"].get(name)))
        ]
        if found and name != "ours":
            mean = report.geomean(found)
            over[name] = {"geomean": mean, "min": min(found), "shapes": len(found)}
    return {"choice": report.summarize_choice(run["shapes"]), "over": over}


def _shapes_table(run: dict) -> str:
    others = [name for name in NAMES if name != "ours" and name in run["shapes"][0]["results"]]
    header = ["shape (Hq/Hkv/D/page)", "TFLOP", "K/V MB", "kernel us (p10 to p90)", "wall us"]
    header += ["TFLOP/s", "GB/s", "rel. L2", "chosen"]
    for name in others:
        header += [f"{NAMES[name]}, TFLOP/s", "ours over it"]
    rows = [header]
    for shape in run["shapes"]:
        results = shape["results"]
        ours = results["ours"]
        rate = tflops(shape, ours)
        row = [shape["name"], f"{shape['num_flops'] / 1e12:.3f}", f"{shape['num_bytes'] / 1e6:.1f}"]
        row += [report.time(ours), report.wall(ours), number(rate)]
        row += [number(gbps(shape, ours), ".0f"), error(ours), report.choice(results)]
        for name in others:
            theirs = tflops(shape, results[name])
            row += [cell(results[name], theirs), number(ratio(rate, theirs), ".2f")]
        rows.append(row)
    return table(rows)


def _one_byte_table(run: dict) -> str:
    found = [record["kv_dtype"] for record in run["one_byte"]]
    names = [name for name in kv_dtypes.ONE_BYTE if kv_dtypes.NAMES[name] in found]
    rows = [["shape (Hq/Hkv/D/page)", "bf16 us", "TFLOP/s"]]
    for name in names:
        rows[0] += [f"{name} us", "of bf16", "TFLOP/s"]
    for plain, by_dtype in kv_dtypes.rows(run):
        before = kernel_us(plain["results"]["ours"]) if plain else None
        row = [next(iter(by_dtype.values()))["base"], number(before)]
        row.append(number(tflops(plain, plain["results"]["ours"]) if plain else None))
        for shape in (by_dtype.get(name) for name in names):
            result = shape["results"]["ours"] if shape else None
            us = kernel_us(result)
            row += [cell(result, us), number(ratio(us, before), ".2f")]
            row.append(number(tflops(shape, result) if shape else None))
        rows.append(row)
    return f"{report.ONE_BYTE_TITLE}:\n\n{table(rows)}"


def markdown(run: dict) -> str:
    """The tables, the provenance of their numbers and the summary."""
    blocks = [_shapes_table(run)] if run["shapes"] else []
    blocks += [_one_byte_table(run)] if run["one_byte"] else []
    blocks.append(timing.provenance(run["meta"]))
    words = [
        f"Ours over {NAMES[name]}: {found['geomean']:.2f} in the geometric mean of"
        f" {found['shapes']} shapes, at least {found['min']:.2f}"
        for name, found in run["summary"]["over"].items()
    ]
    words += report.choice_lines(run["summary"]["choice"])
    blocks += ["\n".join(f"- {word}." for word in words)] if words else []
    return "\n\n".join(blocks) + "\n"


def plot(run: dict, path: Path) -> None:
    """Write a PNG: TFLOP/s of compute-bound shapes, GB/s of K/V of memory-bound ones.

    Raises:
        ValueError: if the run has no kernel times to draw.
    """
    shapes = [shape for shape in run["shapes"] if kernel_us(shape["results"]["ours"])]
    if not shapes:
        raise ValueError("there are no kernel times to plot: they need a GPU with CUPTI")
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    long = [s for s in shapes if s["num_flops"] >= _RIDGE * s["num_bytes"]]
    short = [s for s in shapes if s not in long]
    parts = [
        (chosen, rate, unit)
        for chosen, rate, unit in ((long, tflops, "TFLOP/s"), (short, gbps, "GB/s of K/V"))
        if chosen
    ]
    figure, all_axes = plt.subplots(
        len(parts),
        1,
        figsize=(11, 0.5 * len(shapes) + 1.2 * len(parts) + 0.8),
        height_ratios=[len(chosen) + 1 for chosen, _, _ in parts],
        layout="constrained",
        squeeze=False,
    )
    for axes, (chosen, rate, unit) in zip(all_axes[:, 0], parts, strict=True):
        names = report.to_show(
            [n for n in NAMES if any(rate(s, s["results"].get(n)) for s in chosen)]
        )
        height = 0.8 / len(names)
        for i, name in enumerate(names):
            rates = [rate(shape, shape["results"].get(name)) or 0.0 for shape in chosen]
            middles = [row + (i - (len(names) - 1) / 2) * height for row in range(len(chosen))]
            axes.barh(middles, rates, height, color=_COLORS[name], label=NAMES[name])
            for shape, middle, value in zip(chosen, middles, rates, strict=True):
                if value:
                    words = f" {value:.0f}{report.mark(shape, name)}"
                    axes.text(value, middle, words, va="center", fontsize=6)
        axes.set_yticks(range(len(chosen)), [shape["name"] for shape in chosen])
        axes.set_ylim(len(chosen) - 0.4, -0.6)
        axes.set_xlabel(f"{unit} (more is better, * is None's choice)")
        axes.grid(axis="x", alpha=0.3)
    all_axes[0, 0].set_title(f"{run['meta']['device']}, bf16, JAX {run['meta']['jax']}")
    figure.legend(*all_axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.savefig(path, dpi=140)
    plt.close(figure)
