"""Where the fan-in of tokens saturates: many workers, one nats-server, few ingresses.

    python -m benchmarks.token_fan_in [--quick]

Every ingress has 64 streams, as many as can be from different workers: a worker's message to an ingress carries all the
sequences that the two share, so a large fleet's messages carry one token each. The parts of one worker and of 8 have
the same streams in fewer messages. Workers send frames encoded beforehand as fast as NATS takes them; an ingress is
`kvproto.Client`, which reads, orders and counts; in the last part it is a real one, read over HTTP, whose ring gives
some workers several streams and some none.

Each process's CPU is given in microseconds a token. `saturates` is what comes to its limit first if every process has a
core of its own: the one with the most, nats-server's divided by the cores that it can use here.

The value is tokens/s from 64 workers into one ingress, as a share of the messages of a token's size that a bare
nats-py subscriber counts (`_yardsticks.messages_per_s`) before and after.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness.http import Connection
from benchmarks.harness.processes import cpu_seconds
from benchmarks.harness.report import finish, parse_quick, progress
from benchmarks.harness.yardsticks import messages_per_s
from benchmarks.ingress.ingress_rate import MARK, wait_ready
from kvfleet.cli.embedded import embedded_nats
from kvfleet.cli.operator.init import create_buckets
from kvfleet.cli.operator.operator_login import Login
from kvproto.testing.nats_process import free_port
from kvservice import launch

FLOOR = (
    0.25  # of bare messages/s, of one ingress that gets each token in a message of its own; 25,000/s where those were
)
# 270,000 would be 0.09
STREAMS = 64
PARTS = ((1, 1), (8, 1), (64, 1), (64, 4), (256, 1), (256, 4))  # workers, ingresses
Process = subprocess.Popen[str]


class Processes:
    """A nats-server and what hangs on it; ended with `running`."""

    def __init__(self, url: str, nats: int) -> None:
        self.url = url
        self.nats = nats
        self._all: list[Process] = []

    def start(self, module: str, *arguments: object) -> Process:
        command = [sys.executable, "-m", f"benchmarks.ingress.{module}", self.url, *map(str, arguments)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._all.append(process)
        assert _line(process) == "ready", f"{module} did not start"
        return process

    def start_ingress(self, port: int) -> Process:
        flags = [f"--nats-url={self.url}", f"--port={port}", "--log-level=warning"]
        process = subprocess.Popen(launch.command("kvfleet.ingress.main", *flags), text=True)
        self._all.append(process)
        return process

    def add(self, process: Process) -> None:
        self._all.append(process)

    def end(self) -> None:
        for process in reversed(self._all):
            process.terminate()
            process.wait(15)


@contextmanager
def running() -> Iterator[Processes]:
    with tempfile.TemporaryDirectory() as folder:
        nats = embedded_nats.start(Path(folder), Path(folder) / "nats.log")
        processes = Processes(nats.url, nats.child.process.pid)
        try:
            asyncio.run(create_buckets(Login(nats.url), "kvf"))
            yield processes
        finally:
            processes.end()
            nats.child.signal(signal.SIGTERM)
            nats.child.process.wait(10)


def _line(process: Process) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def part(workers: int, ingresses: int, tokens: int, repeats: int) -> dict[str, Any]:
    """Clients as ingresses."""
    total = ingresses * STREAMS * tokens
    rates, spent = [], []
    with running() as processes:
        several = 2 if workers > 1 else 1
        sources = []
        for number in range(several):
            first, count, streams = number * workers // several, workers // several, ingresses * STREAMS // several
            sources.append(processes.start("_token_source", f"s{number}", first, count, streams, tokens))
        sinks = [processes.start("_token_sink", number, STREAMS, tokens, workers) for number in range(ingresses)]
        time.sleep(1.5)  # everybody's record has been seen
        for _ in range(repeats + 1):
            pids = {"nats-server": [processes.nats], "workers": [one.pid for one in sources]}
            before = {name: sum(map(cpu_seconds, some)) for name, some in pids.items()}
            for sink in sinks:
                assert sink.stdin is not None
                sink.stdin.write("\n")
                sink.stdin.flush()
            done = [json.loads(_line(sink)) for sink in sinks]
            assert sum(one["tokens"] for one in done) == total, "tokens were lost"
            rates.append(total / (max(one["last"] for one in done) - min(one["first"] for one in done)))
            cpu = {name: sum(map(cpu_seconds, some)) - before[name] for name, some in pids.items()}
            spent.append(cpu | {"ingresses": sum(one["cpu_s"] for one in done)})
    report = summary(rates[1:], spent[1:], total, ingresses, several)  # the first warms up
    progress(f"{workers} workers, {ingresses} ingresses: {report}")
    return {"workers": workers, "ingresses": ingresses} | report


def over_http(workers: int, tokens: int, repeats: int) -> dict[str, Any]:
    """One real ingress; it finds workers by the ring, for no placement runs."""
    total, body = STREAMS * tokens, {"model": "demo", "max_tokens": tokens, "stream": True}
    rates, spent = [], []
    with running() as processes:
        source = processes.start("_token_source", "s0", 0, workers, STREAMS, tokens)
        port = free_port()
        ingress = processes.start_ingress(port)
        base = f"http://127.0.0.1:{port}"
        wait_ready(base)
        pids = {"nats-server": processes.nats, "workers": source.pid, "ingresses": ingress.pid}

        async def read() -> float:
            connections = [Connection(base) for _ in range(STREAMS)]
            began = time.perf_counter()
            prompts = ([5 + i % 900, 6, 7 + i // 900] for i in range(STREAMS))
            asked = (
                c.stream("/v1/completions", body | {"prompt": p}, MARK)
                for c, p in zip(connections, prompts, strict=True)
            )
            done = await asyncio.gather(*asked)
            seconds = time.perf_counter() - began - min(first for first, _ in done)
            assert sum(count for _, count in done) >= total, "tokens were lost"
            for connection in connections:
                await connection.close()
            return total / seconds

        for _ in range(repeats + 1):
            before = {name: cpu_seconds(pid) for name, pid in pids.items()}
            rates.append(asyncio.run(read()))
            spent.append({name: cpu_seconds(pid) - before[name] for name, pid in pids.items()})
    report = summary(rates[1:], spent[1:], total, 1, 1)
    progress(f"{workers} workers, one ingress over HTTP: {report}")
    return {"workers": workers, "ingresses": 1, "http": True} | report


def summary(
    rates: list[float], spent: list[dict[str, float]], total: int, ingresses: int, sources: int
) -> dict[str, Any]:
    us = {name: median(one[name] for one in spent) / total * 1e6 for name in spent[0]}
    cores = len(os.sched_getaffinity(0))
    alone = {
        "ingresses": us["ingresses"] / ingresses,
        "workers": us["workers"] / sources,
        "nats-server": us["nats-server"] / cores,
    }
    return {
        "tokens_per_s": round(median(rates)),
        "cpu_us_per_token": {name: round(value, 2) for name, value in us.items()},
        "saturates": max(alone, key=lambda name: alone[name]),
        "cores_in_all": round(sum(us.values()) * median(rates) / 1e6, 2),
    }


def bare_messages() -> float:
    with running() as processes:
        rate = messages_per_s(processes.url)
    progress(f"bare: {rate:,.0f} messages/s")
    return rate


def main() -> None:
    quick = parse_quick(__doc__)
    repeats = 2 if quick else 5
    tokens = 400 if quick else 1_500
    bare = [bare_messages()]
    parts = [part(workers, ingresses, tokens // ingresses, repeats) for workers, ingresses in PARTS]
    http = over_http(64, tokens, repeats)
    bare.append(bare_messages())
    rate = next(one["tokens_per_s"] for one in parts if (one["workers"], one["ingresses"]) == (64, 1))
    value = rate / median(bare)
    finish(
        "token_fan_in",
        round(value, 3),
        "of a bare subscriber's messages/s from 64 workers into one ingress",
        floor=FLOOR,
        ok=value >= FLOOR,
        peer="a bare nats-py subscriber",
        tokens_per_s=rate,
        bare_messages_per_s=[round(one) for one in bare],
        cores=len(os.sched_getaffinity(0)),
        streams_per_ingress=STREAMS,
        parts=[*parts, http],
    )


if __name__ == "__main__":
    main()
