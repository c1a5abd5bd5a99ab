"""Measures tables one after the other. A table that cannot be measured says why, and the next one is measured all the
same; tables with equal fleets that follow one another share one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from kvfleet.cli.clients.answers import AnswerFailed
from kvfleet.cli.paper.paper_fleet import RunningFleet, running
from kvfleet.cli.paper.paper_table import PaperTable, TableResult


@dataclass(frozen=True, slots=True)
class PaperBench:
    """What a table is measured with. `quick`: fewer and shorter requests."""

    folder: Path
    quick: bool
    running: RunningFleet | None = None

    @property
    def fleet(self) -> RunningFleet:
        assert self.running is not None, "a table that asks a fleet names one"
        return self.running


def results(
    tables: Iterable[PaperTable], folder: Path, begins: Callable[[PaperTable], None], *, quick: bool
) -> Iterator[TableResult]:
    for spec, group in groupby(tables, key=lambda table: table.fleet):
        fleet: AbstractContextManager[RunningFleet | None] = nullcontext() if spec is None else running(spec, folder)
        left = list(group)
        try:
            with fleet as started:
                while left:
                    begins(left[0])
                    yield measured(left.pop(0), PaperBench(folder, quick, started))
        except (AnswerFailed, OSError) as error:  # of the fleet's start
            yield from (TableResult(table, 0.0, error=str(error)) for table in left)


def measured(table: PaperTable, bench: PaperBench) -> TableResult:
    began = time.monotonic()
    try:
        rows = tuple(table.measure(bench))
    except (AnswerFailed, OSError) as error:
        return TableResult(table, time.monotonic() - began, error=str(error) or type(error).__name__)
    return TableResult(table, time.monotonic() - began, rows, tuple(table.judge(rows)))
