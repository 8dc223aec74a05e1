"""Results of the decode bench: summary, tables and chart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.measuring import kv_dtypes, report, timing
from bench.measuring.report import OURS, cell, error, geomean, kernel_us, number, ratio, table

NAMES = OURS | {
    "jax_op": "JAX's own op",
    "xla_gather": "XLA gather",
    "cudnn_paged": "cuDNN paged",
}
_COLORS = report.COLORS | {
    "jax_op": "#E69F00",
    "xla_gather": "#009E73",
    "cudnn_paged": "#CC79A7",
}
_MARKERS = dict(zip(NAMES, "ovPs^D", strict=True))


def _floor_us(floors: Sequence[dict], shape: dict) -> float | None:
    same = [floor for floor in floors[1:] if floor["num_bytes"] == shape["num_bytes"]]
    return kernel_us(same[0]) if same else None


def summarize(
    floors: Sequence[dict], shapes: Sequence[dict], one_byte: Sequence[dict]
) -> dict[str, Any]:
    """The read ceiling in GB/s, and ours relative to the floor and to the peers.

    Args:
        floors: the read for the ceiling first, then one for each K/V size of the shapes.
        shapes: results of `measure_shape`.
        one_byte: those with int8 or fp8 K/V.
    """
    rates = [floor["num_bytes"] / us / 1e3 for floor in floors if (us := kernel_us(floor))]
    floor_over: dict[str, list[float]] = {}
    speedups: dict[str, list[float]] = {}
    for shape in shapes:
        results = shape["results"]
        for name, result in results.items():
            if name in OURS and (share := ratio(_floor_us(floors, shape), kernel_us(result))):
                floor_over.setdefault(name, []).append(share)
            elif name not in OURS and (
                times := ratio(kernel_us(result), kernel_us(results["ours"]))
            ):
                speedups.setdefault(name, []).append(times)
    return {
        "read_ceiling_gbps": max(rates, default=None),
        "summary": {
            "floor_over_geomean": {name: geomean(shares) for name, shares in floor_over.items()},
            "floor_over_shapes": {name: len(shares) for name, shares in floor_over.items()},
            "choice": report.summarize_choice(shapes),
            "speedup_geomean": {name: geomean(ratios) for name, ratios in speedups.items()},
            "speedup_min": {name: min(ratios) for name, ratios in speedups.items()},
            "one_byte": {
                name: _summarize_dtype(floors, shapes, [r for r in one_byte if r["kv_dtype"] == d])
                for name, d in kv_dtypes.NAMES.items()
                if any(r["kv_dtype"] == d for r in one_byte)
            },
        },
    }


def _summarize_dtype(
    floors: Sequence[dict], shapes: Sequence[dict], found: Sequence[dict]
) -> dict[str, Any]:
    """Geometric means of the ratios in the int8/fp8 table, each with its number of shapes."""
    plain = {shape["name"]: shape["results"] for shape in shapes}
    ratios: dict[str, list[float]] = {"of_bf16": [], "floor_over": [], "speedup": []}
    for shape in found:
        us = kernel_us(shape["results"]["ours"])
        before = plain.get(shape["base"], {}).get("ours")
        for name, value in (
            ("of_bf16", ratio(us, kernel_us(before))),
            ("floor_over", ratio(_floor_us(floors, shape), us)),
            ("speedup", ratio(kernel_us(shape["results"].get("jax_op")), us)),
        ):
            ratios[name] += [value] if value else []
    return {name: {"geomean": geomean(x), "shapes": len(x)} for name, x in ratios.items()}


def _rate(run: dict, shape: dict, us: float | None) -> tuple[float | None, float | None]:
    """GB/s of the K/V attended to, and its percentage of the ceiling."""
    gbps = shape["num_bytes"] / us / 1e3 if us else None
    ceiling = run["read_ceiling_gbps"]
    return gbps, 100 * gbps / ceiling if gbps and ceiling else None


def progress(run: dict, shape: dict, seconds: float) -> str:
    """One line about the shape just measured."""
    results = shape["results"]
    gbps, percent = _rate(run, shape, kernel_us(results.get("ours")))
    words = [f"{shape['name']}: floor {number(_floor_us(run['floors'], shape))} us"]
    words += [
        f"{NAMES[name]} {cell(result, kernel_us(result))}" for name, result in results.items()
    ]
    words += [f"chose {report.choice(results)}", f"{number(gbps, '.0f')} GB/s = {number(percent)}%"]
    return ", ".join([*words, f"took {seconds:.0f} s"]) + report.reasons(results, NAMES)


def _shapes_table(run: dict) -> str:
    shapes = run["shapes"]
    others = [name for name in NAMES if name != "ours" and name in shapes[0]["results"]]
    header = ["shape (Hq/Hkv/D/page)", "K/V MB", "floor", "kernel us (p10 to p90)", "wall us"]
    header += ["GB/s", "% of ceiling", "rel. L2", "chosen", *(NAMES[name] for name in others)]
    rows = [header + ["vs JAX's op"] * ("jax_op" in others)]
    for shape in shapes:
        results = shape["results"]
        ours, us = results["ours"], kernel_us(results["ours"])
        gbps, percent = _rate(run, shape, us)
        row = [shape["name"], f"{shape['num_bytes'] / 1e6:.1f}"]
        row += [number(_floor_us(run["floors"], shape)), report.time(ours), report.wall(ours)]
        row += [number(gbps, ".0f"), number(percent), error(ours), report.choice(results)]
        row += [cell(results.get(name), kernel_us(results.get(name))) for name in others]
        if "jax_op" in others:
            times = ratio(kernel_us(results["jax_op"]), us)
            row.append("-" if times is None else f"{times:.2f}x")
        rows.append(row)
    return table(rows)


def _options_table(run: dict) -> str:
    shapes = run["options"]
    ours = report.to_show([n for n in OURS if any(n in shape["results"] for shape in shapes)])
    rows = [["shape and option", "K/V MB", "chosen"]]
    for name in ours:
        rows[0] += [f"{NAMES[name]}, us (p10 to p90)", "rel. L2", "times plain"]
    rows[0] += [NAMES["jax_op"], "plain shape"]
    for shape in shapes:
        results, plain = shape["results"], shape["base"]["results"]
        row = [shape["name"], f"{shape['num_bytes'] / 1e6:.1f}", report.choice(results)]
        for name in ours:
            result = results.get(name)
            times = ratio(kernel_us(result), kernel_us(plain[name]))
            row += [report.time(result), error(result)] if result else ["-", "-"]
            row.append(number(times, ".2f"))
        jax_op = results.get("jax_op")
        rows.append([*row, cell(jax_op, kernel_us(jax_op)), shape["base"]["name"]])
    return table(rows)


def _one_byte_table(run: dict) -> str:
    names = [name for name in kv_dtypes.ONE_BYTE if name in run["summary"]["one_byte"]]
    head = ["shape (Hq/Hkv/D/page)", "K/V MB", "bf16 us", "floor over it"]
    for name in names:
        head += [f"{name} us", "of bf16", "floor over it", "GB/s", "% of ceiling"]
    rows = [[*head, *(f"{NAMES['jax_op']}, {name}" for name in names)]]
    for plain, by_dtype in kv_dtypes.rows(run):
        one, before = next(iter(by_dtype.values())), None
        row = [one["base"], f"{one['num_bytes'] / 1e6:.1f}", "-", "-"]
        if plain:
            before = kernel_us(plain["results"]["ours"])
            row[2] = number(before)
            row[3] = number(ratio(_floor_us(run["floors"], plain), before), ".2f")
        for shape in (by_dtype.get(name) for name in names):
            if shape is None:  # the run was cut short
                row += ["-"] * 5
                continue
            result = shape["results"]["ours"]
            us = kernel_us(result)
            gbps, percent = _rate(run, shape, us)
            row += [cell(result, us), number(ratio(us, before), ".2f")]
            row.append(number(ratio(_floor_us(run["floors"], shape), us), ".2f"))
            row += [number(gbps, ".0f"), number(percent)]
        for name in names:
            theirs = by_dtype[name]["results"].get("jax_op") if name in by_dtype else None
            row.append(cell(theirs, kernel_us(theirs)))
        rows.append(row)
    return f"{report.ONE_BYTE_TITLE}:\n\n{table(rows)}"


def _one_byte_lines(summary: dict[str, Any]) -> list[str]:
    phrases = {
        "of_bf16": "{name} takes {mean:.3f} of bf16's time",
        "floor_over": "Floor over {name}: {mean:.3f}",
        "speedup": "JAX's own op takes {mean:.2f} times ours with {name}",
    }
    return [
        phrases[key].format(name=name, mean=found["geomean"])
        + f" in the geometric mean of {found['shapes']} shapes"
        for name, ratios in summary.items()
        for key, found in ratios.items()
        if found["shapes"]
    ]


def markdown(run: dict) -> str:
    """The tables, the provenance of their numbers and the summary."""
    summary = run["summary"]
    blocks = [_shapes_table(run)] if run["shapes"] else []
    blocks += [_one_byte_table(run)] if run["one_byte"] else []
    blocks += [_options_table(run)] if run["options"] else []
    words = [
        f"Floor over {NAMES[name]}: {share:.3f} in the geometric mean of"
        f" {summary['floor_over_shapes'][name]} shapes"
        for name, share in summary["floor_over_geomean"].items()
    ]
    words += report.choice_lines(summary["choice"])
    for name, speedup in summary["speedup_geomean"].items():
        least = summary["speedup_min"][name]
        words.append(f"{NAMES[name]} takes {speedup:.2f} times ours (at least {least:.2f})")
    words += _one_byte_lines(summary["one_byte"])
    ceiling = number(run["read_ceiling_gbps"], ".0f")
    blocks += [
        timing.provenance(run["meta"]),
        "\n".join(f"- {word}." for word in [f"Read ceiling: {ceiling} GB/s", *words]),
    ]
    return "\n\n".join(blocks) + "\n"


def plot(run: dict, path: Path) -> None:
    """Write a PNG: kernel times over the floor, and K/V rates against the read ceiling.

    Raises:
        ValueError: if the run has no kernel times to draw.
    """
    shapes = [s for s in run["shapes"] if _floor_us(run["floors"], s)]
    names = report.to_show(
        [n for n in NAMES if any(kernel_us(s["results"].get(n)) for s in shapes)]
    )
    if not names:
        raise ValueError("there are no kernel times to plot: they need a GPU with CUPTI")
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    figure, (bars, rates) = plt.subplots(
        1,
        2,
        figsize=(15, 0.1 * len(shapes) * (len(names) + 1) + 2.4),
        width_ratios=(3, 2),
        layout="constrained",
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
        stars = [report.mark(shapes[row], name) for row, _, _, _ in found]
        for middle, times, star in zip(middles, ratios, stars, strict=True):
            bars.text(times * 1.02, middle, f"{times:.2f}{star}", va="center", fontsize=6)
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
    bars.set_xlabel("kernel time / time to only read the K/V (less is better, * is None's choice)")
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
