"""Results of attention calls as text: a row for each shape and implementation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.measuring import timing
from bench.measuring.report import geomean, kernel_us, number, ratio, table

# The library: None's choice, and each implementation by name.
OURS = {"ours": "pallas_paged", "triton": "pallas_paged Triton", "mosaic": "pallas_paged Mosaic"}
ONE_BYTE_TITLE = "int8 and fp8 K/V, a scale for each token and head"
PEAK_TFLOPS = 989.4  # dense bf16 of an H100 or H200 SXM, by its data sheet
SLACK = 1.02  # smaller ratios of two times are noise
_HEAD = ["shape (Hq/Hkv/D/page)", "K/V MB", "by", "kernel us (p10 to p90)", "wall us", "GB/s"]
_HEAD += ["TFLOP/s", "times the first", "rel. L2", "variant"]


def chosen(result: dict | None) -> str:
    """The implementation whose kernels a right result runs, else a dash."""
    if result is None or result["status"] != "ok":
        return "-"
    targets = " ".join(result["custom_calls"])
    return next((name for name in ("mosaic", "triton") if name in targets), "xla")


def loss(results: Mapping[str, dict]) -> float | None:
    """Time of None's choice over the time of the faster implementation, or None without times."""
    named = [us for name in ("triton", "mosaic") if (us := kernel_us(results.get(name)))]
    return ratio(kernel_us(results.get("ours")), min(named, default=None))


def tflops(shape: dict, result: dict | None) -> float | None:
    """TFLOP/s over the operations that the result computes: more than ours without a mask."""
    us = kernel_us(result)
    if result is None or us is None or "num_flops" not in shape:
        return None
    return result.get("num_flops", shape["num_flops"]) / us / 1e6


def times(shape: dict, name: str, base: str) -> float | None:
    """Kernel time of an implementation over that of another one, at equal operations."""
    one, other = shape["results"].get(name), shape["results"].get(base)
    over = ratio(kernel_us(one), kernel_us(other))
    if one and other and over:
        over *= other.get("num_flops", shape["num_flops"])
        over /= one.get("num_flops", shape["num_flops"])
    return over


def summarize(shapes: Sequence[dict], names: Mapping[str, str]) -> dict[str, dict[str, float]]:
    """Times of each implementation over the first one's: geometric mean, least, most, shapes."""
    base, *others = names
    found = {}
    for name in others:
        over = [x for shape in shapes if (x := times(shape, name, base))]
        if mean := geomean(over):
            found[name] = {"geomean": mean, "min": min(over), "max": max(over), "shapes": len(over)}
    return found


def _cells(shape: dict, name: str, names: Mapping[str, str]) -> list[str]:
    result, us = shape["results"][name], kernel_us(shape["results"][name])
    label, base = names[name], next(iter(names))
    if name == "ours" and "custom_calls" in result:
        label += f": {chosen(result)}"
    spread, wall = result.get("kernel_us"), result.get("wall_us")
    words = number(us)
    if result["status"] != "ok":
        words = result["status"].upper()
    elif spread and "p10" in spread:
        words += f" ({spread['p10']:.1f} to {spread['p90']:.1f})"
    return [
        label,
        words,
        number(wall["median"] if wall else None),
        number(shape["num_bytes"] / us / 1e3 if us else None, ".0f"),
        number(tflops(shape, result)),
        number(times(shape, name, base) if name != base else None, ".2f"),
        number(result.get("relative_l2"), ".1e"),
        result.get("variant", "-"),
    ]


def calls_table(shapes: Sequence[dict], names: Mapping[str, str]) -> str:
    """A table of the results of shapes; `names` has those to show, compared with the first."""
    rows = [_HEAD]
    for shape in shapes:
        head = [shape["name"], f"{shape['num_bytes'] / 1e6:.1f}"]
        for name in (name for name in names if name in shape["results"]):
            rows.append([*head, *_cells(shape, name, names)])
            head = ["", ""]
    return table(rows)


def markdown(
    parts: Mapping[str, Sequence[dict]],
    names: Mapping[str, str],
    meta: dict[str, Any],
    *words: str,
) -> str:
    """The table of each part under its title, what it says in the mean, and where it is from."""
    blocks = []
    lines = [*words]
    for title, shapes in parts.items():
        if not shapes:
            continue
        blocks += [f"{title}:"] * bool(title) + [calls_table(shapes, names)]
        first, of = names[next(iter(names))], f", {title}" if title else ""
        lines += [
            f"{names[name]}{of}: {found['geomean']:.3f} times {first} in the geometric mean of"
            f" {found['shapes']} shapes, {found['min']:.2f} to {found['max']:.2f}"
            for name, found in summarize(shapes, names).items()
        ]
        losses = [lost for shape in shapes if (lost := loss(shape["results"]))]
        if losses:
            right = sum(lost <= SLACK for lost in losses)
            lines.append(
                f"None{of}: the faster implementation (within {SLACK - 1:.0%}) on {right} of"
                f" {len(losses)} shapes, at most {max(losses):.2f} of its time"
            )
    blocks += [timing.provenance(meta)]
    blocks += ["\n".join(f"- {line}." for line in lines)] * bool(lines)
    return "\n\n".join(blocks) + "\n"


def progress(names: Mapping[str, str], shape: dict, seconds: float) -> str:
    """A line about the shape just measured, and one for each result without numbers."""
    results = shape["results"]
    words = [
        f"{names[name]} {number(kernel_us(result))} us [{number(result.get('relative_l2'), '.0e')}]"
        for name, result in results.items()
    ]
    lines = [f"{shape['name']}: {', '.join(words)}, took {seconds:.0f} s"]
    for name, result in results.items():
        if "reason" in result:
            lines.append(f"  {names[name]}: {result['reason']}")
    return "\n".join(lines)
