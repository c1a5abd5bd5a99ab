"""What `kvfleet bench paper` does: the tables that there are, measured one after the other and told."""

from __future__ import annotations

import json
import platform
import signal
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import typer

from kvfleet.cli.console import USAGE, err, fail, out, printable, wide
from kvfleet.cli.paper.paper_run import results
from kvfleet.cli.paper.paper_table import PaperTable, TableResult
from kvfleet.cli.paper.paper_view import summary, table_page
from kvfleet.cli.paper.tables import (
    batches,
    burst,
    codec_snr,
    kv_sizes,
    locality,
    out_of_memory,
    reuse,
    vault_restore,
    windows,
)
from kvservice.host import cores

TABLES = {
    module.TABLE.name: module.TABLE
    for module in (reuse, kv_sizes, burst, batches, locality, vault_restore, codec_snr, windows, out_of_memory)
}


def chosen(names: Collection[str]) -> list[PaperTable]:
    """All of them without names. Fails for a name that none has."""
    if unknown := [name for name in names if name not in TABLES]:
        fail(f"no table is named {unknown[0]!r}: there are {', '.join(TABLES)}", USAGE)
    return [table for name, table in TABLES.items() if not names or name in names]


def measure(tables: Sequence[PaperTable], *, quick: bool, as_json: bool) -> None:
    """Exits with 1 if a criterion is not met."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the fleet is stopped, the folder goes
    began = time.monotonic()
    to = out if out.is_terminal else wide
    found: list[TableResult] = []
    try:
        with TemporaryDirectory(prefix="kvfleet-paper-") as folder:
            for result in results(tables, Path(folder), _begins, quick=quick):
                found.append(result)
                if not as_json:
                    to.print(*table_page(to, result), sep="\n")
    except KeyboardInterrupt:
        fail("interrupted", 130)
    seconds, is_met = time.monotonic() - began, all(result.is_met for result in found)
    if as_json:
        all_told = [result.as_json() for result in found]
        told = {"machine": machine(), "quick": quick, "met": is_met, "seconds": round(seconds, 2), "tables": all_told}
        typer.echo(json.dumps(told))
    else:
        to.print(summary(found, seconds))
        to.print(f"on {machine()}")
    if not is_met:
        raise typer.Exit(1)


def _begins(table: PaperTable) -> None:
    err.print(f"measuring {table.name}: {table.title}", style="dim")


def machine() -> str:
    """Cores that this process may use, and what they are."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.machine()
    return f"{cores()} cores of {printable(model)}"
