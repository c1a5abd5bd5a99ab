"""Markdown of tables and headings. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence


def head(title: str, source: str) -> list[str]:
    """The first lines of a page. `source`: what it is made from."""
    return [f"# {title}", "", f"*Made by `python -m scripts.make_reference` from {source}.*", ""]


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table and the empty line after it; nothing where there are no rows."""
    lines = [f"| {' | '.join(cell(one) for one in row)} |" for row in rows]
    if not lines:
        return []
    return [f"| {' | '.join(columns)} |", f"| {' | '.join('---' for _ in columns)} |", *lines, ""]


def cell(text: str) -> str:
    """Text of one cell: on one line, and without what would end the cell."""
    return " ".join(text.split()).replace("|", "\\|")


def code(text: str) -> str:
    """Text as code; nothing where there is none."""
    return f"`{text}`" if text else ""


def written(lines: Iterable[str]) -> str:
    """The page, without empty lines at its end, and none after another."""
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip("\n") + "\n"
