"""Words for numbers: what the tables of all benches are made of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

# Of the library: as a caller gets it, and its implementations.
OURS = {"ours": "pallas_paged", "triton": "pallas_paged Triton", "mosaic": "pallas_paged Mosaic"}
# Okabe and Ito's palette, told apart by people with any colour vision.
COLORS = {"ours": "#0072B2", "triton": "#56B4E9", "mosaic": "#D55E00"}
SLACK = 1.02  # within which the faster of two is a matter of the day


def kernel_us(result: dict | None) -> float | None:
    """Median kernel time of a floor or of a right result, None if there is none."""
    if result is None or result["status"] != "ok" or not result["kernel_us"]:
        return None
    return result["kernel_us"]["median"]


def number(value: float | None, spec: str = ".1f") -> str:
    """A number, or a dash where there is none."""
    return "-" if value is None else format(value, spec)


def ratio(over: float | None, under: float | None) -> float | None:
    """One over the other, if there are both."""
    return over / under if over and under else None


def geomean(values: Sequence[float]) -> float | None:
    """Their geometric mean, if there are any."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else None


def chosen(result: dict | None) -> str:
    """Whose kernels the program of a right result has: a name of `OURS`, "xla", or a dash."""
    if result is None or result["status"] != "ok":
        return "-"
    targets = " ".join(result["custom_calls"])
    return next((name for name in ("mosaic", "triton") if name in targets), "xla")


def loss(results: dict[str, dict]) -> float | None:
    """Time of what None chooses over that of the faster implementation, if there are times."""
    named = [us for name in ("triton", "mosaic") if (us := kernel_us(results.get(name)))]
    return ratio(kernel_us(results.get("ours")), min(named, default=None))


def choice(results: dict[str, dict]) -> str:
    """Whose kernels None chooses, and what that costs where it is not the faster one."""
    lost = loss(results)
    late = f" ({lost:.2f} of the faster)" if lost and lost > SLACK else ""
    return chosen(results.get("ours")) + late


def summarize_choice(shapes: Sequence[dict]) -> dict[str, Any]:
    """On how many shapes None chooses the faster implementation, and what it costs at most."""
    losses = [lost for shape in shapes if (lost := loss(shape["results"]))]
    right = sum(lost <= SLACK for lost in losses)
    return {"shapes": len(losses), "right": right, "worst": max(losses, default=None)}


def choice_in_words(summary: dict[str, Any]) -> list[str]:
    """What `summarize_choice` found, if anything."""
    if not summary["shapes"]:
        return []
    return [
        f"What None chooses is the faster one (within {SLACK - 1:.0%}) on {summary['right']} of"
        f" {summary['shapes']} shapes, and takes at most {summary['worst']:.2f} of its time"
    ]


def to_show(names: Sequence[str]) -> list[str]:
    """Without what None chooses where the implementations are shown: it is one of them."""
    named = {"triton", "mosaic"} & {*names}
    return [name for name in names if name != "ours" or not named]


def mark(shape: dict, name: str) -> str:
    """A star behind what None chooses."""
    return "*" * (name == chosen(shape["results"].get("ours")))


def time(result: dict) -> str:
    """Median and spread of a result's kernel times, or what is wrong with it."""
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
    """A result's relative error."""
    return number(result.get("relative_l2"), ".1e")


def cell(result: dict | None, value: float | None, spec: str = ".1f") -> str:
    """A value of a result with its error, WRONG if that is too large, a dash if there is none."""
    if result is None:
        return "-"
    if result["status"] == "wrong":
        return f"WRONG [{result['relative_l2']:.0e}]"
    return "-" if value is None else f"{value:{spec}} [{result['relative_l2']:.0e}]"


def reasons(results: dict[str, dict], names: dict[str, str]) -> str:
    """Lines that say why there are no numbers."""
    found = ((names[name], result) for name, result in results.items())
    return "".join(
        f"\n  {name}: {result['reason']}" for name, result in found if "reason" in result
    )


def table(rows: Sequence[Sequence[str]]) -> str:
    """Markdown of a header and the rows below it."""
    head, *body = ("| " + " | ".join(row) + " |" for row in rows)
    return "\n".join([head, "|---" * len(rows[0]) + "|", *body])
