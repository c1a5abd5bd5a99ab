"""What a run looks like: the live page while it lasts, then its table. Pure.

Milliseconds and shares are those of the other commands' pages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from kvfleet.cli.bench.bench_figures import Percentiles, RunFigures, percentiles
from kvfleet.cli.bench.request_record import RequestRecord
from kvfleet.cli.clients.top_view import NONE, milliseconds, rate, share
from kvfleet.cli.console import figures as table_of
from kvfleet.cli.console import printable

RECENT = 500  # requests that the live page's figures are of
TIMES = {
    "ttft_s": "time to first token", "itl_s": "between tokens", "tpot_s": "per token, a request's mean",
    "e2e_s": "end to end",
}  # fmt: skip


@dataclass(frozen=True)
class LivePage:
    """What the page shows of a moment. `done`: share of the run, None where nothing says how long it is."""

    title: str
    done: float | None
    elapsed_s: float
    in_flight: int
    tokens_per_s: float
    records: Sequence[RequestRecord]
    errors: Mapping[str, int]


def live_page(live: LivePage) -> RenderableType:
    whole = [record for record in live.records[-RECENT:] if not record.error]
    parts: list[RenderableType] = [_line(live.title, "bold")]
    bar = Table.grid(padding=(0, 1))
    bar.add_row(
        ProgressBar(total=1.0, completed=live.done or 0.0, width=40, pulse=live.done is None),
        f"{live.elapsed_s:,.0f} s",
    )
    failed = sum(live.errors.values())
    count = f"{len(live.records):,} ended, {live.in_flight:,} under way, {rate(live.tokens_per_s)} tokens/s"
    parts += [bar, _line(count)]
    for name in ("ttft_s", "tpot_s", "e2e_s"):
        values = percentiles(value for record in whole if (value := _value(record, name)) is not None)
        shown = "  ".join(f"{one} {_time(getattr(values, one)):>8}" for one in ("p50", "p90", "p99"))
        parts.append(_line(f"{TIMES[name]:<28}{shown}"))
    if failed:
        parts.append(_line(f"{failed:,} failed: {_kinds(live.errors)}", "red"))
    return Group(*parts, _line("Ctrl-C ends it, with the table of what was done", "dim"))


def _value(record: RequestRecord, name: str) -> float | None:
    value: float | None = record.itl_s if name == "tpot_s" else getattr(record, name)
    return value


def page(console: Console, title: str, figures: RunFigures, notes: Sequence[str]) -> RenderableType:
    """The table of a run that is over."""
    times = table_of(console, "", "p50", "p90", "p99", "mean")
    for name, told in TIMES.items():
        values: Percentiles = getattr(figures, name)
        times.add_row(told, *(_time(getattr(values, one)) for one in ("p50", "p90", "p99", "mean")))
    lines = [_line(f"{name:<28}{value}") for name, value in _rows(figures)]
    return Group(_line(title), Text(), times, Text(), *lines, *(_line(note) for note in notes))


def _rows(figures: RunFigures) -> Iterator[tuple[str, str]]:
    yield "requests", f"{figures.requests:,} in {figures.duration_s:,.1f} s, {figures.requests_per_s:,.2f}/s whole"
    yield "output", f"{figures.output_tokens:,} tokens, {rate(figures.tokens_per_s)} tokens/s"
    prompt = NONE if figures.prompt_tokens is None else f"{figures.prompt_tokens:,}"
    cached = "the server does not tell" if figures.cached_share is None else share(figures.cached_share)
    yield "prompts", f"{prompt} tokens, cached: {cached}"
    if figures.goodput is not None:
        yield "goodput", f"{share(figures.goodput)} of requests, {figures.goodput_per_s:,.2f}/s"
    yield "errors", _kinds(figures.errors_by_kind) or "none"


def _kinds(errors: Mapping[str, int]) -> str:
    return ", ".join(f"{number:,} {kind}" for kind, number in errors.items())


def _time(seconds: float | None) -> str:
    return milliseconds(None if seconds is None else 1000 * seconds)


def _line(text: str, style: Any = "") -> Text:
    return Text(printable(text), style=style)
