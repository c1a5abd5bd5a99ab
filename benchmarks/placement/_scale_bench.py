"""A nats-server, placement replicas and fake workers as processes, for benchmarks of a fleet without engines."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness.processes import cpu_seconds
from benchmarks.placement import _fleet_prompts as prompts
from benchmarks.placement._requester import Requester
from kvfleet.cli.embedded import embedded_nats
from kvfleet.cli.operator.init import create_buckets
from kvfleet.cli.operator.operator_login import Login
from kvproto import codec
from kvproto.connection import Connection
from kvproto.members import Members
from kvproto.messages import PlacementStats, Role
from kvproto.subjects import Subjects
from kvservice import launch

PER_SOURCE = 500  # workers of one process
VAULT_BYTES = 64 * 1024 * 1024  # nothing is put there
START_S = 60.0
FORGOTTEN_S = 1.5  # after which a request that was placed and never sent is


def rss_mb(pid: int) -> int:
    """Resident memory now."""
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return round(int(line.split()[1]) / 1024)


def threads(pid: int) -> int:
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("Threads"))
    return int(line.split()[1])


@dataclass
class ScaleBench:
    """What runs. Replicas are named p0, p1...; sources of workers f0, f1...; the vault v0."""

    url: str
    nats_pid: int
    workers: int
    blocks: int
    logs: Path
    processes: dict[str, subprocess.Popen[str]] = field(default_factory=dict)

    # ------------------------------------------------------------------ processes

    async def start_vault(self) -> None:
        """That every worker connects to: a real one."""
        flags = [f"--nats-url={self.url}", "--id=v0", f"--max-bytes={VAULT_BYTES}", "--log-level=warning"]
        with (self.logs / "v0.log").open("ab") as log:
            command = [sys.executable, "-m", "kvfleet.vault.main", *flags]
            self.processes["v0"] = subprocess.Popen(command, stderr=log, text=True)
        connection = await Connection.open(self.url, name="bench-vault", inbox_prefix="_adm.bench")
        members = Members(connection, Subjects(), hears=False, role=Role.VAULT)
        await members.start()
        end = time.monotonic() + START_S
        while not members.view.members:
            if time.monotonic() > end:
                raise SystemExit("the vault did not start")
            await asyncio.sleep(0.05)
        await members.stop()
        await connection.close()

    async def start_fleet(self) -> None:
        await self.start_vault()
        for first in range(0, self.workers, PER_SOURCE):
            count = min(PER_SOURCE, self.workers - first)
            name = f"f{first // PER_SOURCE}"
            arguments = [self.url, name, str(first), str(count), str(self.blocks)]
            command = [sys.executable, "-m", "benchmarks.placement._fake_fleet", *arguments]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            self.processes[name] = process
        for name in self.sources:
            stdout = self.processes[name].stdout
            assert stdout is not None
            line = await asyncio.to_thread(stdout.readline)
            assert line == "ready\n", f"the fake fleet {name} did not start"

    def start_placement(self, name: str, *, room: tuple[int, int] | None = None) -> float:
        """Start a replica, with `room` for (workers, blocks) in its index or as much as it comes with. Returns when."""
        flags = [f"--nats-url={self.url}", f"--id={name}", f"--fleet-key={prompts.FLEET_KEY}", "--log-level=warning"]
        if room is not None:
            flags += [f"--max-workers={room[0]}", f"--index-blocks={room[1]}"]
        command = launch.command("kvfleet.placement.main", *flags)
        began = time.perf_counter()
        with (self.logs / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(command, stderr=log, text=True)
        return began

    def faults(self, name: str) -> list[str]:
        """Exceptions that a replica's log tells of: their last lines."""
        lines = (self.logs / f"{name}.log").read_text().splitlines()
        return [line for line in lines if re.match(r"[A-Za-z_.]+(Error|Exception)\b", line)]

    def end(self, name: str) -> None:
        process = self.processes.pop(name)
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    @property
    def sources(self) -> list[str]:
        return [name for name in self.processes if name.startswith("f")]

    @property
    def replicas(self) -> list[str]:
        return [name for name in self.processes if name.startswith("p")]

    # ------------------------------------------------------------------ the fake fleet

    async def tell_fleet(self, requester: Requester, **orders: Any) -> dict[str, float]:
        """Give every source an order (`rate`, in events/s of the whole fleet; `grow`); the sums of what they did."""
        if "rate" in orders:
            orders["rate"] /= len(self.sources)
        sums: dict[str, float] = {}
        for name in self.sources:
            data = json.dumps(orders).encode()
            reply = await requester.connection.request(f"bench.fleet.{name}", data, 10.0)
            for key, value in json.loads(reply.data).items():
                sums[key] = sums.get(key, 0) + value
        return sums

    # ------------------------------------------------------------------ what placement knows

    async def stats(self, requester: Requester) -> dict[str, PlacementStats]:
        """Of every replica that answers within a moment."""
        found: dict[str, PlacementStats] = {}

        async def heard(message: Any) -> None:
            if message.data:  # else nobody is there yet
                stats = codec.decode(PlacementStats, message.data)
                found[stats.placement] = stats

        subscription = await requester.connection.subscribe("_ing.bench.stats", heard)
        await requester.connection.publish(Subjects().placement_stats(), b"", reply="_ing.bench.stats")
        for _ in range(40):
            await asyncio.sleep(0.05)
            if len(found) == len(self.replicas):
                break
        await subscription.unsubscribe()
        return found

    async def until_ready(self, requester: Requester, replicas: int = 1) -> None:
        """Until so many replicas know the whole fleet. Raises SystemExit."""
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            stats = await self.stats(requester)
            if sum(len(one.workers) >= self.workers for one in stats.values()) >= replicas:
                return
        raise SystemExit(f"placement does not know {self.workers} workers: {stats}")

    async def until_known(
        self, requester: Requester, blocks: int, among: list[int], replicas: int = 1, limit_s: float = 60.0
    ) -> float:
        """Until so many replicas follow every worker, and have each said of every worker of `among` that it holds so
        many blocks of its own chain. Returns when; raises SystemExit, with how many are missing.

        Who is asked counts on the blocks that the question's request would bring, until that is forgotten.
        """
        missing: dict[str, set[int]] = {}
        end = time.perf_counter() + limit_s
        while time.perf_counter() < end:
            stats = await self.stats(requester)
            if sum(one.workers_exact >= self.workers for one in stats.values()) < replicas:
                continue
            for worker in {w for several in missing.values() for w in several} or among:
                replica, known = await requester.blocks_known(worker)
                if not replica:
                    continue
                several = missing.setdefault(replica, set(among))
                if known == blocks:
                    several.discard(worker)
            if len(missing) >= replicas and not any(missing.values()):
                return time.perf_counter()
            await asyncio.sleep(FORGOTTEN_S)
        raise SystemExit(f"not known after {limit_s} s: { {name: len(some) for name, some in missing.items()} }")

    # ------------------------------------------------------------------ what it costs

    def pids(self) -> dict[str, int]:
        return {"nats-server": self.nats_pid} | {name: one.pid for name, one in self.processes.items()}

    def meter(self) -> Meter:
        return Meter(self.pids())


class Meter:
    """CPU of each process since it was made, as a share of one core."""

    def __init__(self, pids: dict[str, int]) -> None:
        self._pids = pids | {"requester": os.getpid()}
        self._before = {name: cpu_seconds(pid) for name, pid in self._pids.items()}
        self._began = time.perf_counter()

    def cores(self) -> dict[str, float]:
        seconds = time.perf_counter() - self._began
        return {name: round((cpu_seconds(pid) - self._before[name]) / seconds, 3) for name, pid in self._pids.items()}


@contextlib.asynccontextmanager
async def scale_bench(workers: int, blocks: int) -> AsyncIterator[ScaleBench]:
    """A nats-server with buckets; everything that was started ends with the block."""
    with tempfile.TemporaryDirectory() as folder:
        nats = embedded_nats.start(Path(folder), Path(folder) / "nats.log")
        bench = ScaleBench(nats.url, nats.child.process.pid, workers, blocks, Path(folder))
        try:
            await create_buckets(Login(nats.url), "kvf")
            yield bench
        finally:
            for name in list(bench.processes):
                bench.end(name)
            nats.child.signal(signal.SIGTERM)
            nats.child.process.wait(10)
