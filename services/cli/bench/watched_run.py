"""A run with its live page, which Ctrl-C and SIGTERM end as its own end does: with what was done."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import deque
from dataclasses import dataclass, field

from rich.live import Live

from kvfleet.cli.bench import overhead
from kvfleet.cli.bench.bench_view import LivePage, live_page
from kvfleet.cli.bench.connection import StreamConnections
from kvfleet.cli.bench.load_run import BenchAsk, LoadRun
from kvfleet.cli.bench.probe import ProbedServer, probe
from kvfleet.cli.bench.request_record import RequestRecord
from kvfleet.cli.bench.shapes import BenchPlan, LoadLimits
from kvfleet.cli.console import Terminal

LOOK_S = 0.5  # between two live pages
PACE_LOOKS = 6  # the live page's tokens/s are of so many
screen = Terminal(stderr=True, highlight=False)  # results go to stdout


@dataclass(frozen=True)
class WatchedRun:
    """What is known when the load has ended."""

    records: tuple[RequestRecord, ...]
    duration_s: float
    was_interrupted: bool
    server: ProbedServer
    cpu_per_1000: float | None  # this run's CPU time for 1,000 tokens; None without tokens
    null_cpu_per_1000: float | None  # the same of a null server's; None: not measured


async def watched_run(
    connections: StreamConnections, ask: BenchAsk, plan: BenchPlan, limits: LoadLimits, *, own_cost: bool
) -> WatchedRun:
    """Raises AnswerFailed, OSError and, before the first request, KeyboardInterrupt."""
    server = await probe(connections, ask, plan.seed)
    run = LoadRun(connections, server.ask, limits)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, run.stop)
    page = asyncio.ensure_future(LivePages(run, plan).show()) if screen.is_terminal else None
    before = time.process_time()
    try:
        await run.load(plan.sessions(server.words_per_token), plan.arrivals(), is_open=plan.is_open)
    finally:
        if page is not None:
            page.cancel()
            await asyncio.wait([page])
    spent = time.process_time() - before
    null = await overhead.measure() if own_cost and not run.stopped else None
    own = overhead.share(spent, run.meter.events) if run.meter.events else None
    return WatchedRun(tuple(run.records), run.duration_s, run.stopped, server, own, null)


@dataclass(eq=False)
class LivePages:
    """Reads the run; only this task draws."""

    run: LoadRun
    plan: BenchPlan
    _seen: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=PACE_LOOKS))

    async def show(self) -> None:
        with Live(console=screen, auto_refresh=False, transient=True) as live:
            while True:
                live.update(live_page(self._page()), refresh=True)
                await asyncio.sleep(LOOK_S)

    def _page(self) -> LivePage:
        run, now = self.run, time.perf_counter()
        elapsed_s = now - run.began if run.began else 0.0
        self._seen.append((now, run.meter.events))
        (first_at, first), (last_at, last) = self._seen[0], self._seen[-1]
        title = f"kvfleet bench: {self.plan.shape} on {run.connections.base}, {run.ask.model}, {self.plan.arrival}"
        return LivePage(
            title,
            run.limits.done(len(run.records), elapsed_s),
            elapsed_s,
            run.in_flight,
            (last - first) / (last_at - first_at) if last_at > first_at else 0.0,
            run.records,
            run.errors,
        )
