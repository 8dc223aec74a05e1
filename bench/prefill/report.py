"""Results of the prefill bench: summary and tables."""

from __future__ import annotations

from typing import Any

from bench.measuring import kv_dtypes, report, timing
from bench.measuring.report import OURS, cell, error, kernel_us, number, ratio, table

NAMES = OURS | {"cudnn": "cuDNN dense", "mha": "JAX's Triton mha"}


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
    summary = summarize(run)
    words = [
        f"Ours over {NAMES[name]}: {found['geomean']:.2f} in the geometric mean of"
        f" {found['shapes']} shapes, at least {found['min']:.2f}"
        for name, found in summary["over"].items()
    ]
    words += report.choice_lines(summary["choice"])
    blocks += ["\n".join(f"- {word}." for word in words)] if words else []
    return "\n\n".join(blocks) + "\n"
