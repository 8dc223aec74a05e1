"""Charts as SVG: 700 pixels wide, light and dark, with a title and a description for readers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from html import escape

WIDTH = 700
ROW = 24  # pixels of a line of text, and of a row of a chart
_SIZE = 13  # pixels of text
_LETTER = 7.4  # mean width of a letter of that size
# Okabe and Ito's palette, distinct for any colour vision: (on white, on black).
_COLORS = {
    "blue": ("#0072B2", "#56B4E9"),
    "orange": ("#E69F00", "#E69F00"),
    "green": ("#009E73", "#009E73"),
    "red": ("#D55E00", "#D55E00"),
    "pink": ("#CC79A7", "#CC79A7"),
    "black": ("#1F2328", "#E6EDF3"),
    "grey": ("#8C959F", "#8C959F"),
    "faint": ("#57606A", "#9DA7B1"),
    "rule": ("#D0D7DE", "#30363D"),
    "page": ("#FFFFFF", "#0D1117"),
}
# Marks of a point: drawn around (0, 0), since shapes tell series apart without colours.
_MARKS = {
    "circle": '<circle r="5.5"/>',
    "square": '<rect x="-5" y="-5" width="10" height="10"/>',
    "diamond": '<path d="M0-7 7 0 0 7-7 0z"/>',
    "triangle": '<path d="M0-6.5 6.5 5-6.5 5z"/>',
    "down": '<path d="M0 6.5-6.5-5 6.5-5z"/>',
    "plus": '<path d="M-2-6h4v4h4v4h-4v4h-4v-4h-4v-4h4z"/>',
}


@dataclasses.dataclass(frozen=True)
class Series:
    """A series of a chart.

    Attributes:
        name: as the legend has it.
        color: a name of the palette.
        mark: the shape of its points.
        hollow: whether points are outlines: they are of another run.
    """

    name: str
    color: str
    mark: str = "square"
    hollow: bool = False


def width_of(text: str) -> float:
    """About the width of a text in pixels."""
    return _LETTER * len(text)


def _rule(name: str, color: str) -> str:
    return f".{name}{{fill:{color};stroke:{color};stroke-width:0}}"


class Canvas:
    """Shapes and text of a chart, drawn from the top; y is where the next row begins."""

    def __init__(self, title: str, subtitle: str) -> None:
        self.title = title
        self._parts: list[str] = []
        self.y = 14.0
        self.text(16, self.y + 12, title, bold=True)
        self.y += ROW
        self.text(16, self.y + 10, subtitle, color="faint")
        self.y += ROW

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        anchor: str = "start",
        color: str = "black",
        bold: bool = False,
    ) -> None:
        """Write a line whose baseline is at y."""
        weight = ' font-weight="700"' if bold else ""
        where = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
        self._parts.append(f'<text class="{color}" {where}{weight}>{escape(words)}</text>')

    def bar(self, x: float, y: float, width: float, height: float, color: str) -> None:
        """Fill a rectangle."""
        size = f'width="{max(width, 0.0):.1f}" height="{height:.1f}"'
        self._parts.append(f'<rect class="{color}" x="{x:.1f}" y="{y:.1f}" {size}/>')

    def point(self, x: float, y: float, series: Series) -> None:
        """Mark a point of a series."""
        kind = f"{series.color} hollow" if series.hollow else series.color
        where = f'transform="translate({x:.1f} {y:.1f})"'
        self._parts.append(f'<g class="{kind}" {where}>{_MARKS[series.mark]}</g>')

    def legend(self, all_series: Sequence[Series]) -> None:
        """Write the names of the series, in as many lines as they take."""
        x = 16.0
        for series in all_series:
            width = width_of(series.name) + 34
            if x + width > WIDTH - 8:
                x, self.y = 16.0, self.y + ROW
            self.point(x + 6, self.y + 8, series)
            self.text(x + 18, self.y + 12.5, series.name)
            x += width
        self.y += ROW + 6

    def axis(
        self, left: float, right: float, most: float, ticks: Sequence[float], top: float, unit: str
    ) -> None:
        """Draw the lines of ticks from `top` to here and their numbers, and name the unit."""
        for tick in ticks:
            x = left + (right - left) * tick / most
            line = f'<path class="rule hair" d="M{x:.1f} {top:.1f}V{self.y:.1f}"/>'
            self._parts.insert(0, line)
            self.text(x, self.y + 16, f"{tick:g}", anchor="middle", color="faint")
        self.y += ROW
        self.text((left + right) / 2, self.y + 12, unit, anchor="middle", color="faint")
        self.y += ROW

    def render(self, description: str) -> str:
        """The SVG."""
        light, dark = (
            "".join(_rule(name, pair[i]) for name, pair in _COLORS.items()) for i in (0, 1)
        )
        style = (
            f"text{{font:{_SIZE}px system-ui,'Segoe UI',Helvetica,Arial,sans-serif}}{light}"
            f"@media(prefers-color-scheme:dark){{{dark}}}"
            ".hollow{fill:none;stroke-width:2}.hair{stroke-width:1}"
        )
        height = self.y + 8
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}"'
                f' width="{WIDTH}" height="{height:.0f}" role="img" aria-labelledby="title desc">',
                f'<title id="title">{escape(self.title)}</title>',
                f'<desc id="desc">{escape(description)}</desc>',
                f"<style>{style}</style>",
                f'<rect class="page" width="{WIDTH}" height="{height:.0f}"/>',
                *self._parts,
                "</svg>\n",
            ]
        )
