"""Adapter: matplotlib, which comes with the extra `plot`, and the one style of all pictures.

A picture is one SVG that needs no other file: text stays text in fonts by name, no script, nothing loaded. The same
data give the same bytes. Artists named by `titled` show that under the pointer.
"""

from __future__ import annotations

import io
import re
from collections import defaultdict
from contextlib import AbstractContextManager
from itertools import count
from typing import Any
from xml.etree import ElementTree

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure, FigureBase

INK, FAINT, GRID = "#1f2933", "#66727f", "#e3e8ed"
# Okabe and Ito's colours, which colour-blind people tell apart too.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8a8f98", "#b8860b", "#56b4e9")
DPI = 72  # a point of a figure is a pixel of the picture
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "kvfleet",
    "text.parse_math": False,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Segoe UI", "Helvetica Neue", "Arial"],
    "font.size": 11,
    "text.color": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 14,
    "axes.titleweight": "bold",
    "axes.edgecolor": GRID,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "xtick.color": GRID,
    "ytick.color": GRID,
    "xtick.labelcolor": FAINT,
    "ytick.labelcolor": FAINT,
    "legend.frameon": False,
}

_SVG = "http://www.w3.org/2000/svg"
_TITLE = "title: "  # begins the id of what is titled, until the title is an element


def styled() -> AbstractContextManager[None]:
    """Make, draw and write figures within it."""
    return matplotlib.rc_context(STYLE)


def new_figure(width: float, height: float) -> Figure:
    """In pixels."""
    return Figure(figsize=(width / DPI, height / DPI), dpi=DPI, layout="constrained")


def head(figure: FigureBase, title: str, *below: str) -> None:
    """The title of a whole figure or of a part with several axes, at its left edge."""
    figure.suptitle("\n".join((title, *below)), x=0.01, ha="left", fontsize=12, linespacing=1.4)


def entitle(axes: Axes, title: str, below: str = "") -> None:
    axes.set_title(title, pad=24 if below else 8)
    if below:
        axes.annotate(
            below, (0, 1), (0, 9), xycoords="axes fraction", textcoords="offset points", color=FAINT, fontsize=10
        )


def titled(artist: Artist, title: str) -> None:
    artist.set_gid(f"{_TITLE}{title}")


def as_svg(figure: Figure) -> str:
    """The same figure is the same text: ids of clips, which hash a solver's coordinates, become numbers."""
    written = io.BytesIO()
    figure.savefig(written, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    ElementTree.register_namespace("", _SVG)
    ElementTree.register_namespace("xlink", "http://www.w3.org/1999/xlink")
    root = ElementTree.fromstring(written.getvalue())
    for element in root.iter():
        if element.get("id", "").startswith(_TITLE):
            title = ElementTree.Element(f"{{{_SVG}}}title")
            title.text = element.attrib.pop("id").removeprefix(_TITLE)
            element.insert(0, title)
    numbers: defaultdict[str, int] = defaultdict(count().__next__)
    return (
        re.sub(r"\bp[0-9a-f]{10}\b", lambda clip: f"p{numbers[clip[0]]}", ElementTree.tostring(root, "unicode")) + "\n"
    )
