"""Two runs of one plan beside each other, paired by request, with the confidence that the data allow.

Each resample draws sessions with replacement, the same of both runs: turns of one session are not independent, and what
a request asks is the same on both sides. The interval of a ratio is between the 2.5th and 97.5th percentile of those of
the resamples (percentile bootstrap: Efron, Annals of Statistics 7, 1979).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from random import Random
from typing import TypeAlias

from rich.console import Console, Group, RenderableType
from rich.text import Text

from kvfleet.cli.bench.bench_figures import BenchTargets, RunFigures, figures_of, percentile
from kvfleet.cli.bench.request_record import RequestRecord, SavedRun
from kvfleet.cli.clients.top_view import NONE, milliseconds, rate, share
from kvfleet.cli.console import figures as table_of
from kvfleet.cli.console import printable

MOST_RESAMPLES, LEAST_RESAMPLES, WORK = 1000, 200, 2_000_000
LEAST_SESSIONS = 5  # of fewer no interval is said

Pair: TypeAlias = tuple[float, float]
TIMES: dict[str, Callable[[RequestRecord], float | None]] = {
    "TTFT": lambda one: one.ttft_s,
    "ITL": lambda one: one.itl_s,
    "E2E": lambda one: one.e2e_s,
}
STATISTICS: dict[str, Callable[[Sequence[float]], float]] = {
    "p50": lambda ordered: percentile(ordered, 0.5),
    "p90": lambda ordered: percentile(ordered, 0.9),
    "p99": lambda ordered: percentile(ordered, 0.99),
    "mean": lambda ordered: sum(ordered) / len(ordered),
}


@dataclass(frozen=True)
class ComparedFigure:
    """`change` is B's figure over A's, less one; `low` to `high` holds it in 95 of 100 such pairs of runs."""

    time: str
    statistic: str
    a: float
    b: float
    change: float
    low: float | None  # None: too few sessions
    high: float | None

    @property
    def verdict(self) -> str:
        if self.low is None or self.high is None:
            return "too few"
        if self.low <= 0 <= self.high:
            return "unclear"
        return "B sooner" if self.high < 0 else "B later"


@dataclass(frozen=True)
class RunComparison:
    a: RunFigures
    b: RunFigures
    pairs: int
    sessions: int
    figures: tuple[ComparedFigure, ...]


def compare_runs(a: SavedRun, b: SavedRun, targets: BenchTargets, seed: int = 0) -> RunComparison:
    """Of requests that both runs ended without an error; `pairs` may be 0."""
    ours = {record.key: record for record in a.records if not record.error}
    by_session: dict[int, list[tuple[RequestRecord, RequestRecord]]] = defaultdict(list)
    for record in b.records:
        if not record.error and record.key in ours:
            by_session[record.session].append((ours[record.key], record))
    compared: list[ComparedFigure] = []
    for name, value in TIMES.items():
        clusters = [
            [
                (x, y)
                for ours_of, theirs_of in pairs
                if (x := value(ours_of)) is not None and (y := value(theirs_of)) is not None
            ]
            for pairs in by_session.values()
        ]
        compared += _compared(name, [pairs for pairs in clusters if pairs], Random(f"{seed} {name}"))
    one, other = (figures_of(run.records, run.duration_s, targets) for run in (a, b))
    return RunComparison(one, other, sum(map(len, by_session.values())), len(by_session), tuple(compared))


def _compared(name: str, clusters: Sequence[Sequence[Pair]], random: Random) -> list[ComparedFigure]:
    if not clusters:
        return []
    pairs = list(chain.from_iterable(clusters))
    changes: dict[str, list[float]] = {statistic: [] for statistic in STATISTICS}
    if len(clusters) >= LEAST_SESSIONS:
        for _ in range(min(max(WORK // len(pairs), LEAST_RESAMPLES), MOST_RESAMPLES)):
            drawn = list(chain.from_iterable(random.choices(clusters, k=len(clusters))))
            for statistic, (one, other) in _statistics(drawn).items():
                changes[statistic].append(_change(one, other))
    found = []
    for statistic, (one, other) in _statistics(pairs).items():
        seen = sorted(changes[statistic])
        low, high = (percentile(seen, at) if seen else None for at in (0.025, 0.975))
        found.append(ComparedFigure(name, statistic, one, other, _change(one, other), low, high))
    return found


def _statistics(pairs: Sequence[Pair]) -> dict[str, Pair]:
    ours, others = (sorted(side) for side in zip(*pairs, strict=True))
    return {name: (of(ours), of(others)) for name, of in STATISTICS.items()}


def _change(one: float, other: float) -> float:
    return other / one - 1 if one > 0 else 0.0


def comparison_page(console: Console, a: SavedRun, b: SavedRun, found: RunComparison) -> RenderableType:
    lines = [
        f"A: {a.name}, {_run(found.a)}",
        f"B: {b.name}, {_run(found.b)}",
        f"{found.pairs:,} requests of {found.sessions:,} sessions ended well in both; 95 % intervals of B's change",
    ]
    if differs := [
        name for name in ("shape", "sizes", "seed", "arrival", "limits") if a.about.get(name) != b.about.get(name)
    ]:
        lines.append(f"not the same load: {', '.join(differs)} differ")
    table = table_of(console, "", "", "A", "B", "change", "from", "to", "verdict")
    for one in found.figures:
        table.add_row(
            one.time if one.statistic == "p50" else "",
            one.statistic,
            milliseconds(1000 * one.a),
            milliseconds(1000 * one.b),
            *(NONE if value is None else f"{value:+.1%}" for value in (one.change, one.low, one.high)),
            one.verdict,
        )
    return Group(*(Text(printable(line)) for line in lines), Text(), table)


def _run(figures: RunFigures) -> str:
    cached = "cached share not told" if figures.cached_share is None else f"{share(figures.cached_share)} cached"
    return f"{rate(figures.tokens_per_s)} tokens/s, {cached}, {figures.errors:,} of {figures.requests:,} failed"
