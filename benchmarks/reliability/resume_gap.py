"""The gap in a stream whose worker is killed, or hangs, beyond the pause between two of its tokens.

    python -m benchmarks.resume_gap [--quick]

Real processes: four fake workers at 40 tokens/s a stream (computing a prompt again takes them no time), a placement
with the system account, an ingress. One worker at a time is killed while it streams, every fourth time to an HTTP
client of /generate; then workers are stopped (SIGSTOP), and woken after their stream went on elsewhere. Value: p50
after SIGKILL.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

from benchmarks.harness.live_fleet import (
    Fleet,
    Seen,
    Texts,
    one_server,
    percentile,
    prompt,
    read_over_http,
    read_with_client,
)
from benchmarks.harness.report import finish, parse_quick, progress
from kvproto.client import Client

WORKERS, RATE, TOKENS, BEFORE = 4, 40, 80, 12
P50_FLOOR_S, P99_FLOOR_S, STOPPED_FLOOR_S = 0.25, 1.0, 3.5


@dataclass
class Phases:
    """When the client acts on a loss, of the stream that runs now: seconds since the signal was sent."""

    began: float = 0.0
    detected: list[float] = field(default_factory=list)
    placed: list[float] = field(default_factory=list)
    first_token: list[float] = field(default_factory=list)
    _seen: dict[str, float] = field(default_factory=dict)

    def note(self, what: str) -> None:
        if self.began:
            self._seen.setdefault(what, time.monotonic() - self.began)

    def end(self, seen: Seen) -> None:
        if placed := self._seen.get("placed"):
            detected = self._seen["detected"]
            self.detected.append(detected)
            self.placed.append(placed - detected)
            self.first_token.append(next(at for at in seen.times if at > self.began + placed) - self.began - placed)
        self.began = 0.0
        self._seen.clear()

    def medians_ms(self) -> dict[str, float]:
        parts = {"detect": self.detected, "place": self.placed, "first_token": self.first_token}
        return {name: round(1e3 * median(values), 1) for name, values in parts.items() if values}


def watch(client: Client, note: Callable[[str], None]) -> None:
    """Notes when a stream's driver turns to placing it again, and when it knows where."""
    placer: Any = client._driver.placer
    place = placer.place

    async def timed(*arguments: Any, **options: Any) -> Any:
        note("detected")
        placement = await place(*arguments, **options)
        note("placed")
        return placement

    placer.place = timed


async def gap_of(seen: Seen, reading: Awaitable[Seen], strike: Callable[[str], None], phases: Phases) -> float:
    """Break the worker of a stream in its midst; the longest pause after it, less the usual one."""
    task = asyncio.ensure_future(reading)
    while len(seen.ids) < BEFORE and not task.done():
        await asyncio.sleep(0.005)
    assert seen.worker is not None, seen.error
    struck = phases.began = time.monotonic()
    strike(seen.worker)
    await task
    if not seen.ok:
        raise SystemExit(f"a stream was broken: {seen.error or 'wrong tokens'}, {len(seen.ids)} of {seen.tokens}")
    phases.end(seen)
    pauses = [(after - before, after) for before, after in pairwise(seen.times)]
    usual = median(pause for pause, _ in pauses)
    return max(0.0, max(pause for pause, at in pauses if at > struck) - usual)


async def measure(fleet: Fleet, kills: int, stops: int) -> dict[str, Any]:
    texts, killed, over_http, stopped, fenced = Texts(), [], [], [], 0
    by_kill, by_stop = Phases(), Phases()

    def kill(worker: str) -> None:
        fleet.services[worker].kill()

    def stop(worker: str) -> None:
        os.kill(fleet.services[worker].pid, signal.SIGSTOP)

    async with await Client.open(fleet.nats_url) as client:
        for number in range(kills):
            if number == 0:
                watch(client, by_kill.note)
            await asyncio.to_thread(fleet.wait_ready, WORKERS)
            if number % 4 == 3:
                text, seen = texts.ask(number, TOKENS)
                gap = await gap_of(seen, read_over_http(fleet.base, seen, text), kill, Phases())
                over_http.append(gap)
            else:
                seen = Seen(prompt(number), TOKENS)
                gap = await gap_of(seen, read_with_client(client, seen), kill, by_kill)
            killed.append(gap)
            progress(f"kill {number + 1}: {1e3 * gap:.0f} ms")
            for name, service in list(fleet.services.items()):
                if service.process.poll() is not None:
                    fleet.worker(name)
    async with await Client.open(fleet.nats_url) as client:
        watch(client, by_stop.note)
        for number in range(stops):
            await asyncio.to_thread(fleet.wait_ready, WORKERS)
            seen = Seen(prompt(10_000 + number), 6 * TOKENS)  # still running when the stopped worker wakes
            waking = asyncio.create_task(wake_when(seen, fleet))
            stopped.append(await gap_of(seen, read_with_client(client, seen), stop, by_stop))
            await waking
            fenced += seen.fenced
            progress(f"stop {number + 1}: {1e3 * stopped[-1]:.0f} ms, {seen.fenced} frames of the woken worker dropped")
    return {
        "killed": killed,
        "over_http": over_http,
        "stopped": stopped,
        "fenced": fenced,
        "by_kill": by_kill.medians_ms(),
        "by_stop": by_stop.medians_ms(),
    }


async def wake_when(seen: Seen, fleet: Fleet) -> None:
    """Wake the first worker once another one has given tokens."""
    while seen.worker is None:
        await asyncio.sleep(0.01)
    first = seen.worker
    while seen.worker == first or time.monotonic() - seen.times[-1] > 0.1:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.3)
    os.kill(fleet.services[first].pid, signal.SIGCONT)


def main() -> None:
    quick = parse_quick(__doc__)
    with one_server() as (server, folder):
        fleet = Fleet(server.url, folder, f"--fake-tokens-per-s={RATE}", "--drain-s=0.5")
        fleet.init()
        try:
            fleet.start("placement", "p0")
            for number in range(WORKERS):
                fleet.worker(f"w{number}")
            fleet.ingress()
            fleet.wait_ready(WORKERS)
            progress("the fleet is ready")
            seen = asyncio.run(measure(fleet, *((10, 3) if quick else (40, 10))))
        finally:
            fleet.stop()
    p50, p99 = percentile(seen["killed"], 0.5), percentile(seen["killed"], 0.99)
    worst = max(seen["stopped"])
    finish(
        "resume_gap",
        round(1e3 * p50, 1),
        "ms in a stream beyond its pace after SIGKILL, p50",
        floor=1e3 * P50_FLOOR_S,
        ok=p50 < P50_FLOOR_S and p99 < P99_FLOOR_S and worst < STOPPED_FLOOR_S and seen["fenced"] > 0,
        p99_ms=round(1e3 * p99, 1),
        p99_floor_ms=1e3 * P99_FLOOR_S,
        kills=len(seen["killed"]),
        over_http_ms=[round(1e3 * gap, 1) for gap in seen["over_http"]],
        after_sigstop_max_s=round(worst, 3),
        after_sigstop_p50_s=round(percentile(seen["stopped"], 0.5), 3),
        after_sigstop_floor_s=STOPPED_FLOOR_S,
        stops=len(seen["stopped"]),
        frames_of_woken_workers_dropped=seen["fenced"],
        phases_after_kill_ms=seen["by_kill"],
        phases_after_stop_ms=seen["by_stop"],
    )


if __name__ == "__main__":
    main()
