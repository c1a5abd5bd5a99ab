"""What `kvfleet bench` does: a load and its table, or two saved runs beside each other."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import typer
import uvloop

from kvfleet.cli.bench import request_record
from kvfleet.cli.bench.bench_figures import BenchTargets, as_json, figures_of
from kvfleet.cli.bench.bench_plot import plot_runs
from kvfleet.cli.bench.bench_view import page
from kvfleet.cli.bench.compare import compare_runs, comparison_page
from kvfleet.cli.bench.connection import StreamConnections
from kvfleet.cli.bench.load_run import BenchAsk
from kvfleet.cli.bench.probe import first_model
from kvfleet.cli.bench.request_record import NoSavedRun, SavedRun
from kvfleet.cli.bench.shapes import BenchPlan, LoadLimits
from kvfleet.cli.bench.watched_run import WatchedRun, watched_run
from kvfleet.cli.clients.answers import AnswerFailed
from kvfleet.cli.console import USAGE, fail, out, wide

LATE_S = 0.05  # p99 from when requests were due until they were sent: more is told


@dataclass(frozen=True)
class AskedServer:
    base: str
    api_key: str | None = field(repr=False)
    model: str | None  # None: its first
    is_chat: bool
    timeout_s: float


@dataclass(frozen=True)
class BenchTold:
    """How results are told, and where they go."""

    targets: BenchTargets
    output: Path | None
    plot: Path | None
    as_json: bool


def load(server: AskedServer, plan: BenchPlan, limits: LoadLimits, told: BenchTold, *, own_cost: bool) -> None:
    """Fails in one line; exits with 1 if every request failed."""
    base = server.base
    try:
        ask = BenchAsk(server.model or first_model(base, server.api_key), server.is_chat, server.timeout_s)
        connections = StreamConnections(httpx.URL(base), server.api_key)
        ended = uvloop.run(watched_run(connections, ask, plan, limits, own_cost=own_cost))
    except (AnswerFailed, OSError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        fail("ended before the first request", 130)
    about = {
        "url": base, "model": ask.model, "endpoint": ask.path.removeprefix("/v1/"), "shape": str(plan.shape),
        "seed": plan.seed, "text_seed": plan.text_seed, "arrival": plan.arrival, "sizes": asdict(plan.sizes),
        "limits": asdict(limits),
    }  # fmt: skip
    _tell(ended, about, told)
    run = SavedRun(about, ended.duration_s, ended.records)
    try:
        if told.output is not None:
            request_record.save(told.output, run)
        if told.plot is not None:
            told.plot.write_text(plot_runs([run]))
    except OSError as error:
        fail(str(error))
    if ended.records and all(record.error for record in ended.records):
        raise typer.Exit(1)


def _tell(ended: WatchedRun, about: dict[str, Any], told: BenchTold) -> None:
    figures = figures_of(ended.records, ended.duration_s, told.targets)
    costs = {"client_cpu": ended.cpu_per_1000, "client_cpu_on_null_server": ended.null_cpu_per_1000}
    if told.as_json:
        typer.echo(json.dumps({**about, **as_json(figures), **costs, "interrupted": ended.was_interrupted}))
        return
    notes = [f"first {kind}: {line}" for kind, line in _examples(ended).items()]
    if not ended.server.tells_usage:
        notes.append("the server tells no usage: tokens are events with text, and prompts 0.75 words a token")
    if (figures.late_s.p99 or 0.0) > LATE_S:
        notes.append(f"requests were sent late: p99 {figures.late_s.p99:.2f} s, which their times include")
    own = [
        f"{cost:.1%} of a core per 1,000 tokens/s {where}"
        for cost, where in zip(costs.values(), ("in this run", "on a null server"), strict=True)
        if cost is not None
    ]
    if own:
        notes.append(f"{'this client':<28}{', '.join(own)}")
    if ended.was_interrupted:
        notes.append("it was interrupted: requests under way are left out")
    title = f"{about['shape']} on {about['url']}, {about['model']}: {about['arrival']}"
    to = out if out.is_terminal else wide
    to.print(page(to, title, figures, notes))


def _examples(ended: WatchedRun) -> dict[str, str]:
    """What was told of the first error of each kind."""
    return {record.error: record.told for record in reversed(ended.records) if record.error}


def compare(a: Path, b: Path, told: BenchTold) -> None:
    try:
        runs = [request_record.load(path) for path in (a, b)]
        found = compare_runs(runs[0], runs[1], told.targets)
        if told.plot is not None:
            told.plot.write_text(plot_runs(runs))
    except NoSavedRun as error:
        fail(str(error), USAGE)
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}", USAGE)
    if not found.pairs:
        fail(f"{a} and {b} have no request in common that ended well: another seed or shape?", USAGE)
    if told.as_json:
        compared = [{**asdict(one), "verdict": one.verdict} for one in found.figures]
        both = {"a": as_json(found.a), "b": as_json(found.b), "pairs": found.pairs, "sessions": found.sessions}
        typer.echo(json.dumps({**both, "figures": compared}))
    else:
        to = out if out.is_terminal else wide
        to.print(comparison_page(to, runs[0], runs[1], found))
