"""Words for numbers: what the tables of all benches are made of."""

from __future__ import annotations

from collections.abc import Sequence


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
