"""`kvfleet bench`: its flags, and which of them go together. What it does then lies in `bench_work`."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from kvfleet.cli.bench.bench_figures import BenchTargets
from kvfleet.cli.bench.shapes import SIZES, BenchPlan, LoadLimits, Shape
from kvfleet.cli.clients.generate import Key
from kvfleet.cli.console import USAGE, fail
from kvproto.errors import InvalidRequest
from kvservice.trace_rows import read_rows

DEFAULT_DURATION_S = 30.0
DEFAULT_CLIENTS = 8


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
    spread: Annotated[float | None, typer.Option(min=0, max=1, help="of lengths, as a share; default: 0.5")] = None,
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
    """Load as clients make it, against any server of OpenAI's form, and what it saw: waits, tokens/s, errors.

    `kvfleet bench paper` is a command of its own.
    """
    from kvfleet.cli.bench import bench_work  # uvloop, httptools and statistics, which no other command needs

    targets = BenchTargets(ttft_target, itl_target, e2e_target)
    for path in filter(None, (output, plot)):
        if not path.parent.is_dir() or path.is_dir():
            fail(f"{path} is no file that can be written", USAGE)
    told = bench_work.BenchTold(targets, output, plot, as_json_line)
    if compare is not None:
        if url is not None:
            fail("--compare reads two saved runs and asks no server: leave the URL out", USAGE)
        bench_work.compare(*compare, told)
        return
    sizes = {
        "prefix_tokens": prefix_tokens, "prompt_tokens": prompt_tokens, "output_tokens": output_tokens,
        "turns": turns, "documents": documents, "pause_s": pause, "spread": spread,
    }  # fmt: skip
    plan = _plan(shape, trace, speed, rate, {name: one for name, one in sizes.items() if one is not None})
    plan = replace(plan, seed=seed, text_seed=seed if text_seed is None else text_seed)
    if duration is None and requests is None and trace is None:
        duration = DEFAULT_DURATION_S
    limits = LoadLimits(requests, duration, concurrency or (None if plan.is_open else DEFAULT_CLIENTS))
    server = bench_work.AskedServer(_base(url), api_key, model, endpoint is BenchEndpoint.CHAT, timeout)
    bench_work.load(server, plan, limits, told, own_cost=own_cost)


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
    if parts.scheme not in ("http", "https") or not parts.host or parts.query or (parts.port or 0) > 65535:
        fail(f"{url} is no address of a server, such as http://127.0.0.1:8080", USAGE)
    return str(parts).rstrip("/").removesuffix("/v1")
