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
