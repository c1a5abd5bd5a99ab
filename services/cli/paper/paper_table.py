"""What a table of a paper is, and what came of it. Pure.

A row is a frozen dataclass. Its fields are the columns, in their order, and their names say the unit: `_s` seconds,
`_db` decibels, `_bytes`; the last one is `paper`, what was printed there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class PaperModel:
    """A model with random weights: its name, and its config.json. Token 17 of it is the word "t17"."""

    name: str
    config: Mapping[str, Any]

    @property
    def vocab_size(self) -> int:
        return int(self.config["vocab_size"])


@dataclass(frozen=True, slots=True)
class FleetSpec:
    """Flags of `kvfleet up`, and the models; none: the demo. Tables with equal ones share a fleet."""

    flags: tuple[str, ...]
    models: tuple[PaperModel, ...] = ()


@dataclass(frozen=True, slots=True)
class Criterion:
    """A ratio or a property, which holds on any machine."""

    says: str
    measured: str
    is_met: bool


@dataclass(frozen=True)
class PaperTable:
    """`measure` takes a `PaperBench` and returns rows, which `judge` takes. `fleet`: what `measure` asks."""

    name: str
    title: str
    source: str  # where it was printed
    measure: Callable[[Any], Sequence[Any]]
    judge: Callable[[Sequence[Any]], list[Criterion]]
    fleet: FleetSpec | None = None


@dataclass(frozen=True)
class TableResult:
    table: PaperTable
    seconds: float
    rows: tuple[Any, ...] = ()
    criteria: tuple[Criterion, ...] = ()
    error: str = ""  # why it could not be measured

    @property
    def is_met(self) -> bool:
        return not self.error and all(one.is_met for one in self.criteria)

    def as_json(self) -> dict[str, Any]:
        table = {"name": self.table.name, "title": self.table.title, "source": self.table.source}
        criteria = [{"says": one.says, "measured": one.measured, "met": one.is_met} for one in self.criteria]
        rows = [asdict(row) for row in self.rows]
        return {
            **table, "met": self.is_met, "seconds": round(self.seconds, 2), "rows": rows, "criteria": criteria,
            "error": self.error or None,
        }  # fmt: skip


def ratio(value: float, base: float) -> float:
    """Of nothing it is no number, which meets no criterion."""
    return value / base if base else math.nan


def at_most(says: str, value: float, limit: float) -> Criterion:
    return Criterion(f"{says}: at most {limit:g}", f"{value:.3g}", value <= limit)


def at_least(says: str, value: float, limit: float) -> Criterion:
    return Criterion(f"{says}: at least {limit:g}", f"{value:.3g}", value >= limit)


def all_of(says: str, good: int, of: int) -> Criterion:
    """Of none at all it is not met."""
    return Criterion(says, f"{good:,} of {of:,}", good == of > 0)
