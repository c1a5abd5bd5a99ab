"""What a table looks like: our rows with the paper's figures beside them, then each criterion. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

from rich.console import Console, RenderableType
from rich.text import Text

from kvfleet.cli.clients.top_view import NONE, milliseconds, rate
from kvfleet.cli.console import figures, printable
from kvfleet.cli.paper.paper_table import TableResult

VERDICTS = {True: ("met", "green"), False: ("not met", "bold red")}


def table_page(console: Console, result: TableResult) -> Iterator[RenderableType]:
    table = result.table
    yield Text(f"\n{table.name}: {table.title} ({table.source})", "bold")
    if result.error:
        yield Text(f"not measured: {printable(result.error)}", "bold red")
        return
    names = [field.name for field in fields(result.rows[0])]
    shown = figures(console, heading(names[0]), *map(heading, names[1:]))
    for row in result.rows:
        shown.add_row(*(cell(name, getattr(row, name)) for name in names))
    yield shown
    for one in result.criteria:
        word, style = VERDICTS[one.is_met]
        yield Text.assemble((f"{word:<9}", style), f"{one.says}: {one.measured}")


def summary(results: Sequence[TableResult], seconds: float) -> RenderableType:
    failed = [result.table.name for result in results if not result.is_met]
    text = f"\n{len(results) - len(failed)} of {len(results)} tables met their criteria in {seconds:,.0f} s"
    return Text(text + (f"; not: {', '.join(failed)}" if failed else ""), VERDICTS[not failed][1])


def heading(name: str) -> str:
    """Of a field, without its unit, which each cell has."""
    for unit in ("_per_s", "_s"):
        if name.endswith(unit):
            name = name.removesuffix(unit) + ("/s" if unit == "_per_s" else "")
            break
    return name.replace("_db", "_dB").replace("_", " ")


def cell(name: str, value: Any) -> str:
    if value is None or value == "":
        return NONE
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return printable(value)
    if name.endswith("_per_s"):
        return rate(value)
    if name.endswith("_s"):
        return milliseconds(1000 * value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"
