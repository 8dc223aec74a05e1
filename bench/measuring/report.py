"""Numbers as text: the cells and sentences that the tables of all benches share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

# The library: None's choice, and each implementation by name.
OURS = {"ours": "pallas_paged", "triton": "pallas_paged Triton", "mosaic": "pallas_paged Mosaic"}
SLACK = 1.02  # smaller ratios of two times are noise
ONE_BYTE_TITLE = "int8 and fp8 K/V, a scale for each token and head"


def kernel_us(result: dict | None) -> float | None:
    """Median kernel time of a floor or a right result, or None."""
    if result is None or result["status"] != "ok" or not result["kernel_us"]:
        return None
    return result["kernel_us"]["median"]


def number(value: float | None, spec: str = ".1f") -> str:
    """A formatted number; a dash for None."""
    return "-" if value is None else format(value, spec)


def ratio(over: float | None, under: float | None) -> float | None:
    """The quotient, or None if either is missing or 0."""
    return over / under if over and under else None


def geomean(values: Sequence[float]) -> float | None:
    """The geometric mean, or None without values."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else None


def chosen(result: dict | None) -> str:
    """The implementation whose kernels a right result runs, else a dash."""
    if result is None or result["status"] != "ok":
        return "-"
    targets = " ".join(result["custom_calls"])
    return next((name for name in ("mosaic", "triton") if name in targets), "xla")


def loss(results: dict[str, dict]) -> float | None:
    """Time of None's choice over the time of the faster implementation, or None without times."""
    named = [us for name in ("triton", "mosaic") if (us := kernel_us(results.get(name)))]
    return ratio(kernel_us(results.get("ours")), min(named, default=None))


def choice(results: dict[str, dict]) -> str:
    """The implementation that None chooses, and its loss where the other one is faster."""
    lost = loss(results)
    late = f" ({lost:.2f} of the faster)" if lost and lost > SLACK else ""
    return chosen(results.get("ours")) + late


def summarize_choice(shapes: Sequence[dict]) -> dict[str, Any]:
    """The number of shapes on which None chooses the faster implementation, and its worst loss."""
    losses = [lost for shape in shapes if (lost := loss(shape["results"]))]
    right = sum(lost <= SLACK for lost in losses)
    return {"shapes": len(losses), "right": right, "worst": max(losses, default=None)}


def choice_lines(summary: dict[str, Any]) -> list[str]:
    """A sentence about what `summarize_choice` found, if it compared any shapes."""
    if not summary["shapes"]:
        return []
    return [
        f"None chooses the faster implementation (within {SLACK - 1:.0%}) on {summary['right']} of"
        f" {summary['shapes']} shapes, and takes at most {summary['worst']:.2f} of its time"
    ]


def to_show(names: Sequence[str]) -> list[str]:
    """The names without "ours" where implementations are shown by name: None's choice is one."""
    named = {"triton", "mosaic"} & {*names}
    return [name for name in names if name != "ours" or not named]


def time(result: dict) -> str:
    """Median and spread of a result's kernel times, or its status if that is not ok."""
    if result["status"] != "ok":
        return result["status"].upper()
    spread = result["kernel_us"]
    if not spread:
        return "-"
    return f"{spread['median']:.1f} ({spread['p10']:.1f} to {spread['p90']:.1f})"


def wall(result: dict) -> str:
    """Median wall time of a right result."""
    return number(result["wall_us"]["median"] if result["status"] == "ok" else None)


def error(result: dict) -> str:
    """Relative L2 error of a result."""
    return number(result.get("relative_l2"), ".1e")


def cell(result: dict | None, value: float | None, spec: str = ".1f") -> str:
    """A value and the error of a result; WRONG if that is too large, a dash without a value."""
    if result is None:
        return "-"
    if result["status"] == "wrong":
        return f"WRONG [{result['relative_l2']:.0e}]"
    return "-" if value is None else f"{value:{spec}} [{result['relative_l2']:.0e}]"


def reasons(results: dict[str, dict], names: dict[str, str]) -> str:
    """A line for each result without numbers, with the reason."""
    found = ((names[name], result) for name, result in results.items())
    return "".join(
        f"\n  {name}: {result['reason']}" for name, result in found if "reason" in result
    )


def table(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first row is the header."""
    head, *body = ("| " + " | ".join(row) + " |" for row in rows)
    return "\n".join([head, "|---" * len(rows[0]) + "|", *body])
