"""`kvfleet bench paper`: its flags, and which tables there are. How they are measured lies in `paper_work`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from kvfleet.cli.console import figures, out, wide


def paper(
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME", help="of tables; default: all")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="fewer and shorter requests: all in minutes")] = False,
    list_tables: Annotated[bool, typer.Option("--list", help="what tables there are, and measure none")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="one line of JSON instead of tables")] = False,
) -> None:
    """Measure what the papers printed, on fleets that it starts on this machine, and judge each table by its criteria.

    The exit code is 1 if a criterion is not met. `docs/papers` has a page for each table.
    """
    from kvfleet.cli.paper import paper_work  # uvloop, and all tables, which no other command needs

    tables = paper_work.chosen(names or ())
    if not list_tables:
        paper_work.measure(tables, quick=quick, as_json=as_json)
        return
    told = [{"name": table.name, "title": table.title, "printed in": table.source} for table in tables]
    if as_json:
        typer.echo(json.dumps(told))
        return
    to = out if out.is_terminal else wide
    shown = figures(to, *told[0])
    for row in told:
        shown.add_row(*row.values())
    for column in shown.columns:
        column.justify = "left"
    to.print(shown)
