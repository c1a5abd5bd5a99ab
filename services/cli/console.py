"""Output of the command line: results go to stdout, everything else to stderr.

This file alone keeps the texts of servers, models and files from controlling the terminal.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NoReturn

import typer
from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

USAGE = 2  # exit code for wrong flags
INSTEAD = "\N{REPLACEMENT CHARACTER}"
# Rich drops carriage returns and makes spaces of tabs. A lone surrogate, which JSON can hold, cannot be written.
COMMANDS = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")


class Terminal(Console):
    """Only this program moves its cursor or colours it; no character of a printed text does."""

    def render_str(self, text: str, **how: Any) -> Text:
        return super().render_str(COMMANDS.sub(INSTEAD, text), **how)  # before its width is taken

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control is None and COMMANDS.search(segment.text):
                yield Segment(COMMANDS.sub(INSTEAD, segment.text), segment.style)
            else:
                yield segment


out = Terminal(markup=False, highlight=False, soft_wrap=True)
wide = Terminal(highlight=False, width=1000)  # for tables in pipes, so that no figure is cut
err = Terminal(stderr=True, markup=False, highlight=False, soft_wrap=True)


def figures(console: Console, first: str, *columns: str, pad_edge: bool = False) -> Table:
    """Lines on a terminal, bare columns in a pipe."""
    table = Table(box=box.SIMPLE_HEAD if console.is_terminal else None, pad_edge=pad_edge)
    table.add_column(first, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def printable(text: str) -> str:
    """For names and messages: one line, read in one direction."""
    return "".join(one if one.isprintable() else INSTEAD for one in text)


def fail(line: str, code: int = 1) -> NoReturn:
    """One clear line on stderr, then exit."""
    err.print(f"kvfleet: {printable(' '.join(line.splitlines()))}")
    raise typer.Exit(code)
