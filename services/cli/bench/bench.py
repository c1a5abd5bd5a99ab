"""`kvfleet bench`: load as clients make it, then a table; or two saved runs beside each other."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
import uvloop

from kvfleet.cli.bench.bench_figures import BenchTargets, as_json, figures_of
from kvfleet.cli.bench.bench_plot import plot_runs
from kvfleet.cli.bench.bench_view import page
from kvfleet.cli.bench.compare import compare_runs, comparison_page
from kvfleet.cli.bench.connection import StreamConnections
from kvfleet.cli.bench.load_run import BenchAsk, LoadLimits
from kvfleet.cli.bench.probe import first_model
from kvfleet.cli.bench.request_record import NoSavedRun, SavedRun, load, save
from kvfleet.cli.bench.shapes import SIZES, BenchPlan, Shape
from kvfleet.cli.bench.watched_run import WatchedRun, watched_run
from kvfleet.cli.clients.answers import AnswerFailed
from kvfleet.cli.clients.generate import Key
from kvfleet.cli.console import USAGE, Terminal, fail, out
from kvproto.errors import InvalidRequest
from kvservice.trace_rows import read_rows

DEFAULT_DURATION_S = 30.0
DEFAULT_CLIENTS = 8
wide = Terminal(highlight=False, width=1000)  # for pipes, so that no figure is cut
LATE_S = 0.05  # p99 from when requests were due until they were sent: more is told


class BenchEndpoint(StrEnum):
    CHAT = "chat"
    COMPLETIONS = "completions"


def bench(
    url: Annotated[str | None, typer.Argument(help="kvfleet, or any server of OpenAI's form")] = None,
    shape: Annotated[Shape | None, typer.Option(help="what is asked; default: chat")] = None,
    trace: Annotated[Path | None, typer.Option(help="shape trace: JSON lines of Mooncake's format; may be .gz")] = None,
    speed: Annotated[float | None, typer.Option(min=1e-6, help="times as fast as recorded; default: 1")] = None,
    rate: Annotated[
        float | None, typer.Option(min=1e-6, help="open loop: requests/s, in sessions that begin as a Poisson process")
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(min=1, help="clients of the closed loop (default: 8); of an open loop the most requests at once"),
    ] = None,
    duration: Annotated[float | None, typer.Option(min=1e-6, help="seconds; no request begins later")] = None,
    requests: Annotated[int | None, typer.Option(min=1, help="no more; default: a duration of 30 s")] = None,
    seed: Annotated[int, typer.Option(help="of all that is asked, and when")] = 0,
    text_seed: Annotated[
        int | None, typer.Option(help="other words of the same lengths, for a second run on a warm server")
    ] = None,
    model: Annotated[str | None, typer.Option(help="default: the server's first")] = None,
    endpoint: Annotated[BenchEndpoint, typer.Option(help="which of OpenAI's")] = BenchEndpoint.CHAT,
    api_key: Key = None,
    prefix_tokens: Annotated[int | None, typer.Option(min=0, help="of a system prompt, or of a document")] = None,
    prompt_tokens: Annotated[int | None, typer.Option(min=1, help="mean of what a turn adds")] = None,
    output_tokens: Annotated[int | None, typer.Option(min=1, help="mean of an answer")] = None,
    turns: Annotated[int | None, typer.Option(min=1, help="of a session")] = None,
    documents: Annotated[int | None, typer.Option(min=1, help="of shape rag")] = None,
    pause: Annotated[float | None, typer.Option(min=0, help="mean seconds before a further turn")] = None,
    timeout: Annotated[float, typer.Option(min=0.001, help="seconds until a request has failed")] = 300.0,
    ttft_target: Annotated[float | None, typer.Option(min=1e-6, help="seconds; for goodput")] = None,
    itl_target: Annotated[float | None, typer.Option(min=1e-6, help="seconds, a request's mean; for goodput")] = None,
    e2e_target: Annotated[float | None, typer.Option(min=1e-6, help="seconds; for goodput")] = None,
    own_cost: Annotated[
        bool, typer.Option("--overhead/--no-overhead", help="then measure this client on a null server")
    ] = True,
    output: Annotated[Path | None, typer.Option(help="save each request into this file, as JSON lines")] = None,
    plot: Annotated[Path | None, typer.Option(help="draw the run, or both of --compare, as SVG")] = None,
    as_json_line: Annotated[bool, typer.Option("--json", help="one line of JSON instead of a table")] = False,
    compare: Annotated[
        tuple[Path, Path] | None, typer.Option(metavar="A B", help="two saved runs, paired by request; no load")
    ] = None,
) -> None:
    """Load as clients make it, against any server of OpenAI's form, and what it saw: waits, tokens/s, errors."""
    targets = BenchTargets(ttft_target, itl_target, e2e_target)
    for path in filter(None, (output, plot)):
        if not path.parent.is_dir() or path.is_dir():
            fail(f"{path} is no file that can be written", USAGE)
    if compare is not None:
        if url is not None:
            fail("--compare reads two saved runs and asks no server: leave the URL out", USAGE)
        _compare(*compare, targets, plot, as_json_line)
        return
    sizes = {
        "prefix_tokens": prefix_tokens, "prompt_tokens": prompt_tokens, "output_tokens": output_tokens,
        "turns": turns, "documents": documents, "pause_s": pause,
    }  # fmt: skip
    plan = _plan(shape, trace, speed, rate, {name: one for name, one in sizes.items() if one is not None})
    plan = replace(plan, seed=seed, text_seed=seed if text_seed is None else text_seed)
    if duration is None and requests is None and trace is None:
        duration = DEFAULT_DURATION_S
    limits = LoadLimits(requests, duration, concurrency or (None if plan.is_open else DEFAULT_CLIENTS))
    base = _base(url)
    try:
        ask = BenchAsk(model or first_model(base, api_key), endpoint is BenchEndpoint.CHAT, timeout)
        ended = uvloop.run(
            watched_run(StreamConnections(httpx.URL(base), api_key), ask, plan, limits, own_cost=own_cost)
        )
    except (AnswerFailed, OSError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        fail("ended before the first request", 130)
    about = {
        "url": base, "model": ask.model, "endpoint": str(endpoint), "shape": str(plan.shape), "seed": seed, "text_seed": plan.text_seed,
        "arrival": plan.arrival, "sizes": asdict(plan.sizes), "limits": asdict(limits),
    }  # fmt: skip
    _tell(ended, about, targets, as_json_line)
    run = SavedRun(about, ended.duration_s, ended.records)
    try:
        if output is not None:
            save(output, run)
        if plot is not None:
            plot.write_text(plot_runs([run]))
    except OSError as error:
        fail(str(error))
    if ended.records and all(record.error for record in ended.records):
        raise typer.Exit(1)


def _plan(
    shape: Shape | None,
    trace: Path | None,
    speed: float | None,
    rate: float | None,
    sizes: dict[str, Any],
) -> BenchPlan:
    if trace is None:
        if shape is Shape.TRACE or speed is not None:
            fail("--shape trace and --speed take --trace FILE", USAGE)
        shape = shape or Shape.CHAT
        return BenchPlan(shape, replace(SIZES[shape], **sizes), rate=rate)
    if shape not in (None, Shape.TRACE):
        fail(f"--trace is of --shape trace, not of {shape}", USAGE)
    if sizes or rate is not None:
        fail("a trace says how long its prompts are and when they come; --speed makes it faster", USAGE)
    try:
        rows, block_tokens = read_rows(trace)
    except OSError as error:
        fail(f"{trace}: {error.strerror}", USAGE)
    except InvalidRequest as error:
        fail(f"{trace}: {error}", USAGE)
    return BenchPlan(Shape.TRACE, SIZES[Shape.TRACE], rows=rows, block_tokens=block_tokens, speed=speed or 1.0)


def _base(url: str | None) -> str:
    """Without `/v1`, which clients of OpenAI's form take with it."""
    if url is None:
        fail("which server? kvfleet bench URL, such as http://127.0.0.1:8080", USAGE)
    try:
        parts = httpx.URL(url)
        parts.host.encode("idna")  # as a look-up of the name does
    except (httpx.InvalidURL, UnicodeError) as error:
        fail(f"{url}: {error}", USAGE)
    if parts.scheme not in ("http", "https") or not parts.host or parts.query:
        fail(f"{url} is no address of a server, such as http://127.0.0.1:8080", USAGE)
    return str(parts).rstrip("/").removesuffix("/v1")


def _tell(ended: WatchedRun, about: dict[str, Any], targets: BenchTargets, as_json_line: bool) -> None:
    figures = figures_of(ended.records, ended.duration_s, targets)
    costs = {"client_cpu": ended.cpu_per_1000, "client_cpu_on_null_server": ended.null_cpu_per_1000}
    if as_json_line:
        typer.echo(json.dumps({**about, **as_json(figures), **costs, "interrupted": ended.was_interrupted}))
        return
    notes = [f"{name}: {one.error}: {one.told}" for name, one in _examples(ended).items()]
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


def _examples(ended: WatchedRun) -> dict[str, Any]:
    """What was told of the first error of each kind."""
    return {f"first {record.error}": record for record in reversed(ended.records) if record.error}


def _compare(a: Path, b: Path, targets: BenchTargets, plot: Path | None, as_json_line: bool) -> None:
    try:
        runs: Sequence[SavedRun] = [load(path) for path in (a, b)]
        found = compare_runs(runs[0], runs[1], targets)
        if plot is not None:
            plot.write_text(plot_runs(runs))
    except NoSavedRun as error:
        fail(str(error), USAGE)
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}", USAGE)
    if not found.pairs:
        fail(f"{a} and {b} have no request in common that ended well: another seed or shape?", USAGE)
    if as_json_line:
        compared = [{**asdict(one), "verdict": one.verdict} for one in found.figures]
        told = {"a": as_json(found.a), "b": as_json(found.b), "pairs": found.pairs, "sessions": found.sessions}
        typer.echo(json.dumps({**told, "figures": compared}))
    else:
        to = out if out.is_terminal else wide
        to.print(comparison_page(to, runs[0], runs[1], found))
