"""Tokens per second through one ingress process, with an engine of unlimited speed behind it.

    python -m benchmarks.ingress_rate [--quick]

64 streams of /v1/completions over SSE. Frames are encoded beforehand and sent as fast as NATS takes them. Where there
are two cores the ingress has one for itself; NATS, the source and the load share the other.

Tokens per second say as much of the machine as of the ingress, and of who else runs on it. The value is the ingress's
CPU time per token, in that of a plain loop which decodes as many frames and writes their JSON, and does nothing else
(`_yardsticks.tokens_per_s`), measured between the runs; medians.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import httpx

from benchmarks.harness.http import Connection
from benchmarks.harness.processes import cpu_seconds
from benchmarks.harness.report import finish, parse_quick, progress, spread
from benchmarks.harness.yardsticks import tokens_per_s
from kvfleet.cli.embedded import embedded_nats
from kvfleet.cli.embedded.processes import Process
from kvfleet.cli.operator.init import create_buckets
from kvfleet.cli.operator.operator_login import Login
from kvproto.testing.nats_process import free_port
from kvservice import launch

STREAMS, TOKENS, FLOOR = 64, 2000, 20.0  # 50,000 tokens/s where the plain loop did 2.2 million would be 45
MARK = b'"text":"'


async def run(base: str, ingress: int) -> tuple[float, float]:
    """Tokens/s from the first token that arrived to the last, and the ingress's CPU microseconds per token."""
    body = {"model": "demo", "prompt": [5, 6, 7], "max_tokens": TOKENS, "stream": True}
    connections = [Connection(base) for _ in range(STREAMS)]
    before, began = cpu_seconds(ingress), time.perf_counter()
    done = await asyncio.gather(*(c.stream("/v1/completions", body, MARK) for c in connections))
    seconds = time.perf_counter() - began - min(first for first, _ in done)
    for connection in connections:
        await connection.close()
    total = sum(count for _, count in done)
    assert total >= STREAMS * TOKENS, f"{total} tokens of {STREAMS * TOKENS}"
    return STREAMS * TOKENS / seconds, (cpu_seconds(ingress) - before) / (STREAMS * TOKENS) * 1e6


def pin(pid: int, number: int) -> None:
    """To one of the cores that this run may use."""
    if len(ours := sorted(os.sched_getaffinity(0))) > number:
        os.sched_setaffinity(pid, {ours[number]})


def main() -> None:
    repeats = 3 if parse_quick(__doc__) else 7
    rates, costs, yard = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        nats = embedded_nats.start(Path(folder), Path(folder) / "nats.log")
        children: list[Process] = [nats.child.process]
        try:
            asyncio.run(create_buckets(Login(nats.url), "kvf"))
            port = free_port()
            flags = [f"--nats-url={nats.url}", f"--port={port}", "--log-level=warning"]
            ingress = subprocess.Popen(launch.command("kvfleet.ingress.main", *flags))
            source = [sys.executable, "-m", "benchmarks.ingress._frame_source", nats.url, str(STREAMS), str(TOKENS)]
            children += [ingress, subprocess.Popen(source)]
            for child, number in zip(children, (0, 1, 0), strict=True):
                pin(child.pid, number)
            pin(0, 0)
            base = f"http://127.0.0.1:{port}"
            wait_ready(base)
            for number in range(repeats + 1):
                rate, cost = asyncio.run(run(base, ingress.pid))
                plain = tokens_per_s()
                if number:  # the first warms up
                    rates.append(rate)
                    costs.append(cost)
                    yard.append(plain)
                progress(
                    f"run {number}: {rate:,.0f} tokens/s, {cost:.1f} us of ingress CPU per token; plain {plain:,.0f}"
                )
        finally:
            for child in reversed(children):
                child.send_signal(signal.SIGTERM)
                child.wait(10)
    value = median(costs) * median(yard) / 1e6
    finish(
        "ingress_rate",
        round(value, 2),
        "times a plain loop's CPU per token",
        floor=FLOOR,
        ok=value <= FLOOR,
        streams=STREAMS,
        peer="a plain loop over as many tokens",
        tokens_per_s=spread(rates),
        plain_tokens_per_s=spread(yard),
        cpu_us_per_token=round(median(costs), 2),
    )


def wait_ready(base: str) -> None:
    end = time.monotonic() + 30
    while time.monotonic() < end:
        try:
            if httpx.get(f"{base}/readyz", trust_env=False).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    raise SystemExit("the ingress did not become ready")


if __name__ == "__main__":
    main()
