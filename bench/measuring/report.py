"""Numbers as text: the cells and sentences that the tables of all benches share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any


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


def table(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first row is the header."""
    head, *body = ("| " + " | ".join(row) + " |" for row in rows)
    return "\n".join([head, "|---" * len(rows[0]) + "|", *body])


def table_of(results: Iterable[Any], columns: Mapping[str, Callable[[Any], str]]) -> str:
    """A Markdown table with a row for each result, of columns by their heads."""
    rows = ([cell(one) for cell in columns.values()] for one in results)
    return table([[*columns], *rows])


def table_of_limits(
    shapes: Iterable[dict], names: Mapping[str, str], columns: Mapping[str, Callable[[dict], str]]
) -> str:
    """A Markdown table with a row for each result of each shape, beside the shape's limit.

    Args:
        shapes: each with `limit_us` and `results` by the keys of `names`.
        names: who computes, as the table has it.
        columns: of the shape, by their heads.
    """
    head = [*columns, "limit us", "by", "kernel us", "wall us", "times the limit", "rel. L2"]
    rows = [head]
    for shape in shapes:
        cells = [*(cell(shape) for cell in columns.values()), number(shape["limit_us"])]
        for name, result in shape["results"].items():
            us, wall = kernel_us(result), result.get("wall_us")
            times = number(us) if result["status"] == "ok" else result["status"].upper()
            cells += [names[name], times, number(wall["median"] if wall else None)]
            cells.append(number(ratio(us, shape["limit_us"]), ".2f"))
            rows.append([*cells, number(result.get("relative_l2"), ".1e")])
            cells = [""] * (len(columns) + 1)
    return table(rows)


def progress_of_limits(shape: dict, seconds: float) -> str:
    """A line about a shape of `table_of_limits`."""
    times = (f"{name} {number(kernel_us(x))}" for name, x in shape["results"].items())
    limit = number(shape["limit_us"])
    return f"{shape['name']}: limit {limit}, {', '.join(times)} ({seconds:.0f} s)"
