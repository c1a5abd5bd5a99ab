"""Where the command line writes: stdout is for results, everything else goes to stderr."""

from __future__ import annotations

from typing import NoReturn

import typer
from rich.console import Console

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)


def fail(line: str, code: int = 1) -> NoReturn:
    """One clear line on stderr, then exit."""
    err.print(f"kvfleet: {line}", markup=False)
    raise typer.Exit(code)
