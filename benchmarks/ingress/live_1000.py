"""1,000 streams at once through one ingress process: errors, its memory, and how long a frame takes through it.

    python -m benchmarks.live_1000 [--quick]

Real processes: two fake workers with 500 streams each at 3 tokens/s a stream, a placement, one ingress; a stream that
ends is replaced by a new one, for 60 s (--quick: 15 s) after all have begun. A frame's delay is from when NATS gives
it to an observer beside the ingress until the HTTP client has read the token's event. Memory is the ingress's resident
set, fitted by a line over the second half; ended requests are kept for 5 s for clients that come back, not for a
minute, so that what is kept is level by then. Value: p99 of the delays, over that of as many streams with as many
messages a second through a bare relay of NATS to HTTP on this machine, before and after (`_yardsticks.relayed_ms`).
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import cast
from urllib.parse import urlsplit

import uvloop

from benchmarks.harness.live_fleet import Fleet, one_server, percentile
from benchmarks.harness.processes import cpu_seconds
from benchmarks.harness.report import finish, parse_quick, progress
from benchmarks.harness.yardsticks import relayed_ms
from kvproto.subjects import INGRESS_INBOX, batch_inbox, sealed_prefix
from tests.support.processes import FLEET_KEY

STREAMS, WORKERS, PACE, TOKENS = 1000, 2, 3, 120
FLOOR = 14.0  # 250 ms where the bare relay takes 18
FLAT_MB_PER_MINUTE = 8.0
RELAYED_S = 8.0
MARK, NAMED = b'"type":"token"', b'"request_id":"'


@dataclass
class Arrivals:
    """What all readers saw: when each token's event was read, by request and index."""

    at: dict[tuple[str, int], int] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    completed: int = 0
    live: int = 0


class Reader(asyncio.Protocol):
    """One request on a connection of its own, for as little work per token as can be."""

    def __init__(self, number: int, arrivals: Arrivals, ended: asyncio.Future[None]) -> None:
        self._number = number
        self._arrivals = arrivals
        self._ended = ended
        self._tail = b""
        self._request = ""
        self._tokens = 0
        self._whole = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        text = f"{self._number} what light through yonder window breaks?"
        body = {"prompt": text, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        data = json.dumps(body).encode()
        head = "POST /generate HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
        cast("asyncio.Transport", transport).write(  # uvloop's is no subclass
            f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data
        )

    def data_received(self, data: bytes) -> None:
        now = time.monotonic_ns()
        seen = self._tail + data
        if not self._request:
            at = seen.find(NAMED)
            if at < 0 or len(seen) < at + 64:
                self._tail = seen
                return
            self._request = seen[at + len(NAMED) : seen.index(b'"', at + len(NAMED))].decode()
            self._arrivals.live += 1
        for _ in range(seen.count(MARK)):
            self._arrivals.at[self._request, self._tokens] = now
            self._tokens += 1
        self._whole |= b'"type":"done"' in seen
        counted = seen.rfind(MARK)
        self._tail = seen[max(counted + len(MARK) if counted >= 0 else 0, len(seen) - len(MARK)) :]

    def connection_lost(self, error: Exception | None) -> None:
        self._arrivals.live -= bool(self._request)
        if error is not None or not self._whole or self._tokens != TOKENS:
            what = self._tail[:600].decode(errors="replace")
            self._arrivals.errors.append(f"{error!r} after {self._tokens} tokens: {what}")
        else:
            self._arrivals.completed += 1
        if not self._ended.done():
            self._ended.set_result(None)


async def keep_one_running(slot: int, base: str, arrivals: Arrivals, until: asyncio.Event) -> None:
    where = urlsplit(base)
    host, port = where.hostname or "", where.port or 80
    loop = asyncio.get_running_loop()
    await asyncio.sleep(slot * 8 / STREAMS)  # they do not begin, nor end, in one moment
    round_ = 0
    while not until.is_set():
        ended: asyncio.Future[None] = loop.create_future()
        number = slot + STREAMS * round_
        await loop.create_connection(lambda n=number, e=ended: Reader(n, arrivals, e), host, port)  # type: ignore[misc]
        await ended
        round_ += 1


def resident_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"process {pid} is gone")


async def load(base: str, ingress: int, seconds: float) -> tuple[Arrivals, list[float], float, tuple[int, int]]:
    """What was read, the ingress's memory each second, its share of a core, and the measured span of time."""
    arrivals, done, memory = Arrivals(), asyncio.Event(), []
    slots = [asyncio.create_task(keep_one_running(n, base, arrivals, done)) for n in range(STREAMS)]
    waited = time.monotonic()
    while arrivals.live < STREAMS * 0.99:
        await asyncio.sleep(0.2)
        if arrivals.errors or time.monotonic() - waited > 60:
            raise SystemExit(f"{arrivals.live} streams began; errors: {arrivals.errors[:3]}")
    progress(f"{arrivals.live} streams run")
    began, spent = time.monotonic_ns(), cpu_seconds(ingress)
    least = STREAMS
    while time.monotonic_ns() - began < seconds * 1e9:
        await asyncio.sleep(1.0)
        memory.append(resident_mb(ingress))
        least = min(least, arrivals.live)
        if len(memory) % 10 == 0:
            progress(f"{arrivals.live} live, {arrivals.completed} complete, ingress {memory[-1]:.0f} MB")
    ended = time.monotonic_ns()
    share = (cpu_seconds(ingress) - spent) / ((ended - began) / 1e9)
    done.set()
    await asyncio.gather(*slots)
    progress(f"at least {least} were live at once")
    return arrivals, memory, share, (began, ended)


def slope_per_minute(memory: list[float]) -> float:
    """MB a minute of the line through the second half of a sample each second."""
    half = memory[len(memory) // 2 :]
    middle, mean = (len(half) - 1) / 2, sum(half) / len(half)
    spread = sum((at - middle) ** 2 for at in range(len(half)))
    return 60 * sum((at - middle) * (mb - mean) for at, mb in enumerate(half)) / spread


def delays_ms(arrivals: Arrivals, heard: str, span: tuple[int, int]) -> list[float]:
    """Of every token that NATS delivered in the span."""
    delays = []
    for line in heard.splitlines():
        request, first, count, at = line.split()
        if span[0] <= int(at) <= span[1]:
            for index in range(int(first), int(first) + int(count)):
                read = arrivals.at.get((request, index))
                if read is not None:
                    delays.append((read - int(at)) / 1e6)
    return delays


def relayed_p99_ms() -> float:
    found = percentile(relayed_ms(STREAMS, PACE, STREAMS // WORKERS, RELAYED_S), 0.99)
    progress(f"a bare relay: {found:.1f} ms")
    return found


def main() -> None:
    seconds = 15.0 if parse_quick(__doc__) else 60.0
    bare = [relayed_p99_ms()]
    with one_server() as (server, folder):
        flags = (f"--fake-tokens-per-s={STREAMS * PACE // WORKERS}", "--slots=600")
        fleet = Fleet(server.url, folder, *flags)
        fleet.ingress_flags = ("--resume-grace-s=5",)
        fleet.init()
        inbox = batch_inbox(sealed_prefix(INGRESS_INBOX, "i0", FLEET_KEY.encode()))
        notes = folder / "heard"
        command = [sys.executable, "-m", "benchmarks.ingress._frame_observer", server.url, inbox, str(notes)]
        observer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            fleet.start("placement", "p0")
            for number in range(WORKERS):
                fleet.worker(f"w{number}")
            ingress = fleet.ingress("i0")
            assert observer.stdout is not None
            assert observer.stdout.readline() == "ready\n"
            fleet.wait_ready(WORKERS)
            arrivals, memory, share, span = uvloop.run(load(fleet.base, ingress.pid, seconds))
        finally:
            observer.terminate()
            observer.communicate(timeout=20)
            fleet.stop()
        delays = delays_ms(arrivals, notes.read_text(), span)
    bare.append(relayed_p99_ms())
    p99, slope = percentile(delays, 0.99), slope_per_minute(memory)
    value = p99 / median(bare)
    if arrivals.errors:
        progress(f"errors: {arrivals.errors[:3]}")
    finish(
        "live_1000",
        round(value, 2),
        "times a bare relay's time from NATS to the HTTP client, p99",
        floor=FLOOR,
        ok=not arrivals.errors and value < FLOOR and slope < FLAT_MB_PER_MINUTE,
        peer="a bare relay",
        p99_ms=round(p99, 1),
        bare_p99_ms=[round(one, 1) for one in bare],
        p50_ms=round(percentile(delays, 0.5), 1),
        max_ms=round(max(delays), 1),
        streams=STREAMS,
        seconds=seconds,
        errors=len(arrivals.errors),
        completed=arrivals.completed,
        tokens=len(delays),
        tokens_per_s=round(len(delays) / seconds),
        ingress_mb=round(memory[-1], 1),
        ingress_mb_per_minute=round(slope, 2),
        ingress_mb_per_minute_floor=FLAT_MB_PER_MINUTE,
        ingress_core_share=round(share, 2),
    )


if __name__ == "__main__":
    main()
