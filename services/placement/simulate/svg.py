"""Pictures as text: what `plot` needs of SVG, and no more. Pure.

A `Picture` is one file that needs no other: own fonts only by name, no script, nothing loaded. `Axes` maps values to
places in a rectangle of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

INK, FAINT, GRID = "#1f2933", "#66727f", "#e3e8ed"
FONT = "system-ui, 'Segoe UI', Roboto, 'Helvetica Neue', 'DejaVu Sans', Arial, sans-serif"

Points = Sequence[tuple[float, float]]


class Picture:
    def __init__(self, width: float, height: float) -> None:
        self._size = width, height
        self._parts: list[str] = []

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = 12,
        color: str = INK,
        anchor: str = "start",
        bold: bool = False,
        halo: bool = False,
    ) -> None:
        """`halo`: readable over lines too."""
        weight = ' font-weight="600"' if bold else ""
        weight += ' stroke="#ffffff" stroke-width="4" paint-order="stroke"' if halo else ""
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:g}" fill="{color}" text-anchor="{anchor}"{weight}>'
            f"{escape(text)}</text>"
        )

    def line(self, points: Points, color: str, *, width: float = 1.5, dash: str = "") -> None:
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        self._parts.append(
            f'<polyline points="{_places(points)}" fill="none" stroke="{color}" stroke-width="{width:g}" '
            f'stroke-linejoin="round"{dashes}/>'
        )

    def area(self, points: Points, color: str, *, opacity: float = 1.0) -> None:
        self._parts.append(f'<polygon points="{_places(points)}" fill="{color}" fill-opacity="{opacity:g}"/>')

    def box(self, x: float, y: float, width: float, height: float, color: str, *, title: str = "") -> None:
        inside = f"<title>{escape(title)}</title>" if title else ""
        self._parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{max(height, 0):.1f}" '
            f'fill="{color}">{inside}</rect>'
        )

    def dot(self, x: float, y: float, color: str, radius: float = 3.0, *, title: str = "") -> None:
        inside = f"<title>{escape(title)}</title>" if title else ""
        self._parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" fill="{color}">{inside}</circle>')

    def __str__(self) -> str:
        width, height = self._size
        body = "\n".join(self._parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
            f'height="{height:g}" font-family="{FONT}">\n'
            f'<rect x="0" y="0" width="{width:g}" height="{height:g}" fill="#ffffff"/>\n{body}\n</svg>\n'
        )


@dataclass(frozen=True, slots=True)
class Axes:
    """A rectangle of a picture (left, top, width, height) and the values at its edges."""

    left: float
    top: float
    width: float
    height: float
    x_range: tuple[float, float]
    y_range: tuple[float, float]
    log_x: bool = False

    def x(self, value: float) -> float:
        low, high = self.x_range
        if self.log_x:
            low, high, value = math.log10(low), math.log10(high), math.log10(max(value, low))
        return self.left + self.width * _share(value, low, high)

    def y(self, value: float) -> float:
        return self.top + self.height * (1 - _share(value, *self.y_range))

    def points(self, values: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
        return [(self.x(x), self.y(y)) for x, y in values]

    def draw_x(self, picture: Picture, ticks: Iterable[tuple[float, str]]) -> None:
        for value, label in ticks:
            x = self.x(value)
            picture.line([(x, self.top), (x, self.top + self.height)], GRID, width=1)
            picture.text(x, self.top + self.height + 15, label, size=11, color=FAINT, anchor="middle")

    def draw_y(self, picture: Picture, ticks: Iterable[tuple[float, str]]) -> None:
        for value, label in ticks:
            y = self.y(value)
            picture.line([(self.left, y), (self.left + self.width, y)], GRID, width=1)
            picture.text(self.left - 6, y + 4, label, size=11, color=FAINT, anchor="end")


def ticks(high: float, about: int = 4) -> list[float]:
    """Round numbers from 0 to at most `high`."""
    if not 0 < high < math.inf:
        return [0.0]
    raw = high / about
    scale = 10.0 ** math.floor(math.log10(raw))
    step = next(scale * one for one in (1, 2, 2.5, 5, 10) if scale * one >= raw * 0.999)
    return [step * number for number in range(int(high / step * 1.001) + 1)]


def _share(value: float, low: float, high: float) -> float:
    """Within the edges, and in the middle where there is no width."""
    return 0.5 if high <= low else min(max((value - low) / (high - low), 0.0), 1.0)


def _places(points: Points) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
