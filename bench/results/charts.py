"""The kinds of charts: shares of a limit, bars, and parts of times."""

from __future__ import annotations

from collections.abc import Sequence

from bench.results.svg import ROW, WIDTH, Canvas, Series, width_of

_RIGHT = WIDTH - 24


def _label_width(labels: Sequence[str]) -> float:
    return 28 + max(map(width_of, labels))


def _round_up(value: float) -> tuple[float, list[float]]:
    """The end of an axis for values up to `value`, and its ticks."""
    step = next(
        base * 10.0**power
        for power in range(-3, 9)
        for base in (1, 2, 5)
        if value <= 6 * base * 10.0**power
    )
    count = int(-(-value // step))
    return count * step, [step * i for i in range(count + 1)]


def shares(
    title: str,
    subtitle: str,
    unit: str,
    rows: Sequence[tuple[str, dict[Series, float]]],
) -> str:
    """Points in percent, a row for each label: far right is good."""
    canvas = Canvas(title, subtitle)
    all_series = list(dict.fromkeys(series for _, values in rows for series in values))
    canvas.legend(all_series)
    left, top = _label_width([label for label, _ in rows]), canvas.y
    scale = (_RIGHT - left) / 105
    words = []
    for label, values in rows:
        middle = canvas.y + ROW / 2
        canvas.text(16, middle + 4, label)
        for series, value in reversed(values.items()):  # the first one is drawn last, on top
            canvas.point(left + value * scale, middle, series)
        canvas.y += ROW
        found = ", ".join(f"{series.name} {value:.0f}%" for series, value in values.items())
        words.append(f"{label}: {found}.")
    canvas.axis(left, left + 100 * scale, 100, (0, 20, 40, 60, 80, 100), top, unit)
    return canvas.render(" ".join(words))


def bars(
    title: str,
    subtitle: str,
    unit: str,
    rows: Sequence[tuple[str, dict[Series, float]]],
    spec: str = ".0f",
) -> str:
    """Bars with their numbers, a group for each label."""
    canvas = Canvas(title, subtitle)
    all_series = list(dict.fromkeys(series for _, values in rows for series in values))
    if len(all_series) > 1:
        canvas.legend(all_series)
    left, top = _label_width([label for label, _ in rows]), canvas.y
    most, ticks = _round_up(max(value for _, values in rows for value in values.values()))
    scale = (_RIGHT - left - 48) / most  # with room for a number
    words = []
    for label, values in rows:
        canvas.y += 4
        canvas.text(16, canvas.y + 8 * len(values) + 4, label)
        for series, value in values.items():
            canvas.bar(left, canvas.y + 1, value * scale, 14, series.color)
            canvas.text(left + value * scale + 6, canvas.y + 12.5, f"{value:{spec}}")
            canvas.y += 16
        canvas.y += 4
        found = ", ".join(f"{series.name} {value:{spec}}" for series, value in values.items())
        words.append(f"{label}: {found}.")
    canvas.axis(left, left + most * scale, most, ticks, top, unit)
    return canvas.render(" ".join(words))


def parts(
    title: str,
    subtitle: str,
    unit: str,
    rows: Sequence[tuple[str, dict[Series, float], str]],
) -> str:
    """Bars of parts in a row, with a text at the end of each."""
    canvas = Canvas(title, subtitle)
    canvas.legend(list(rows[0][1]))
    left, top = _label_width([label for label, _, _ in rows]), canvas.y
    room = 12 + max(width_of(text) for _, _, text in rows)
    most, ticks = _round_up(max(sum(values.values()) for _, values, _ in rows))
    scale = (_RIGHT - left - room) / most
    words = []
    for label, values, text in rows:
        canvas.text(16, canvas.y + ROW / 2 + 4, label)
        x = left
        for series, value in values.items():
            canvas.bar(x, canvas.y + 3, value * scale, ROW - 6, series.color)
            x += value * scale
        canvas.text(x + 6, canvas.y + ROW / 2 + 4, text)
        canvas.y += ROW
        found = ", ".join(f"{series.name} {value:.2f}" for series, value in values.items())
        words.append(f"{label}: {found}; {text}.")
    canvas.axis(left, left + most * scale, most, ticks, top, unit)
    return canvas.render(" ".join(words))
