"""Results of the decode bench: summary and tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.measuring import kv_dtypes, report, timing
from bench.measuring.report import OURS, cell, error, geomean, kernel_us, number, ratio, table

NAMES = OURS | {
    "jax_op": "JAX's own op",
    "xla_gather": "XLA gather",
    "cudnn_paged": "cuDNN paged",
}


def floor_us(run: dict, shape: dict) -> float | None:
    """Time to only read the K/V of a shape, or None."""
    same = [floor for floor in run["floors"][1:] if floor["num_bytes"] == shape["num_bytes"]]
    return kernel_us(same[0]) if same else None


def read_ceiling(run: dict) -> float | None:
    """The best rate of the floor kernel in GB/s."""
    times = ((floor["num_bytes"], kernel_us(floor)) for floor in run["floors"])
    return max((num_bytes / us / 1e3 for num_bytes, us in times if us), default=None)


def summarize(run: dict) -> dict[str, Any]:
    """Ours relative to the floor and to the peers, over all shapes of a run."""
    shapes, one_byte = run["shapes"], run["one_byte"]
    floor_over: dict[str, list[float]] = {}
    speedups: dict[str, list[float]] = {}
    for shape in shapes:
        results = shape["results"]
        for name, result in results.items():
            if name in OURS and (share := ratio(floor_us(run, shape), kernel_us(result))):
                floor_over.setdefault(name, []).append(share)
            elif name not in OURS and (
                times := ratio(kernel_us(result), kernel_us(results["ours"]))
            ):
                speedups.setdefault(name, []).append(times)
    return {
        "floor_over_geomean": {name: geomean(shares) for name, shares in floor_over.items()},
        "floor_over_shapes": {name: len(shares) for name, shares in floor_over.items()},
        "choice": report.summarize_choice(shapes),
        "speedup_geomean": {name: geomean(ratios) for name, ratios in speedups.items()},
        "speedup_min": {name: min(ratios) for name, ratios in speedups.items()},
        "one_byte": {
            name: _summarize_dtype(run, [r for r in one_byte if r["kv_dtype"] == d])
            for name, d in kv_dtypes.NAMES.items()
            if any(r["kv_dtype"] == d for r in one_byte)
        },
    }


def _summarize_dtype(run: dict, found: Sequence[dict]) -> dict[str, Any]:
    """Geometric means of the ratios in the int8/fp8 table, each with its number of shapes."""
    plain = {shape["name"]: shape["results"] for shape in run["shapes"]}
    ratios: dict[str, list[float]] = {"of_bf16": [], "floor_over": [], "speedup": []}
    for shape in found:
        us = kernel_us(shape["results"]["ours"])
        before = plain.get(shape["base"], {}).get("ours")
        for name, value in (
            ("of_bf16", ratio(us, kernel_us(before))),
            ("floor_over", ratio(floor_us(run, shape), us)),
            ("speedup", ratio(kernel_us(shape["results"].get("jax_op")), us)),
        ):
            ratios[name] += [value] if value else []
    return {name: {"geomean": geomean(x), "shapes": len(x)} for name, x in ratios.items()}


def rate(run: dict, shape: dict, us: float | None) -> tuple[float | None, float | None]:
    """GB/s of the K/V attended to, and its percentage of the ceiling."""
    gbps = shape["num_bytes"] / us / 1e3 if us else None
    ceiling = read_ceiling(run)
    return gbps, 100 * gbps / ceiling if gbps and ceiling else None


def progress(run: dict, shape: dict, seconds: float) -> str:
    """One line about the shape just measured."""
    results = shape["results"]
    gbps, percent = rate(run, shape, kernel_us(results.get("ours")))
    words = [f"{shape['name']}: floor {number(floor_us(run, shape))} us"]
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
        gbps, percent = rate(run, shape, us)
        row = [shape["name"], f"{shape['num_bytes'] / 1e6:.1f}"]
        row += [number(floor_us(run, shape)), report.time(ours), report.wall(ours)]
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
    measured = {shape["kv_dtype"] for shape in run["one_byte"]}
    names = [name for name in kv_dtypes.ONE_BYTE if kv_dtypes.NAMES[name] in measured]
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
            row[3] = number(ratio(floor_us(run, plain), before), ".2f")
        for shape in (by_dtype.get(name) for name in names):
            if shape is None:  # the run was cut short
                row += ["-"] * 5
                continue
            result = shape["results"]["ours"]
            us = kernel_us(result)
            gbps, percent = rate(run, shape, us)
            row += [cell(result, us), number(ratio(us, before), ".2f")]
            row.append(number(ratio(floor_us(run, shape), us), ".2f"))
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
    summary = summarize(run)
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
    ceiling = number(read_ceiling(run), ".0f")
    blocks += [
        timing.provenance(run["meta"]),
        "\n".join(f"- {word}." for word in [f"Read ceiling: {ceiling} GB/s", *words]),
    ]
    return "\n\n".join(blocks) + "\n"
