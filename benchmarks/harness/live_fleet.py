"""A running fleet for benchmarks: processes over servers with a system account, and readers that keep times."""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tokenizers import Tokenizer

from kvfleet.worker.model.model_folder import DEMO_FOLDER
from kvproto.client import Client
from kvproto.messages import Sampling, Started, Tokens
from kvproto.streams.generation import Generation
from kvproto.testing.nats_cluster import SYSTEM_PASSWORD, SYSTEM_USER, NatsCluster
from kvproto.testing.nats_process import NatsProcess, ServerSpec
from tests.support.processes import KVFLEET, Deployment, Service
from tests.support.unfailed import unfailed

PROMPT = 64

_CONFIG = """
ping_interval: "2s"
ping_max: 2
jetstream: enabled
accounts {
  FLEET { jetstream: enabled, users: [ { user: local, password: local } ] }
  SYS { users: [ { user: sys, password: sys } ] }
}
system_account: SYS
no_auth_user: local
"""


class Fleet(Deployment):
    """Processes over one server or a cluster. `worker_flags` are those of every worker."""

    def __init__(self, nats_url: str, folder: Path, *worker_flags: str, replicas: int = 1) -> None:
        super().__init__(nats_url, folder)
        self.worker_flags = ("--runner=fake", "--workers-on-host=2", *worker_flags)
        self.ingress_flags: tuple[str, ...] = ()
        self.replicas = replicas

    def _env(self, role: str) -> dict[str, str]:
        env = super()._env(role) | {"OMP_NUM_THREADS": "1", "KVFLEET_LOG_LEVEL": "info"}
        if role == "placement":
            env |= {"KVFLEET_SYSTEM_USER": SYSTEM_USER, "KVFLEET_SYSTEM_PASSWORD": SYSTEM_PASSWORD}
        return env

    def init(self) -> None:
        command = [KVFLEET, "init", f"--replicas={self.replicas}"]
        subprocess.run(command, env={**os.environ, **self._env("admin")}, check=True, capture_output=True, timeout=60)

    def worker(self, name: str, *flags: str) -> Service:
        return self.start("worker", name, *self.worker_flags, *flags)

    def ingress(self, name: str = "i0", port: int | None = None) -> Service:
        return self.start("ingress", name, f"--port={port or self.port}", *self.ingress_flags)


def end_in_order() -> None:
    """SIGTERM ends the benchmark through its `finally`s: nothing that it started stays."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


@contextmanager
def work_folder() -> Iterator[Path]:
    """A folder that goes with the benchmark, however it ends."""
    end_in_order()
    with tempfile.TemporaryDirectory(prefix="kvfleet-bench-") as name:
        yield Path(name)


@contextmanager
def one_server() -> Iterator[tuple[NatsProcess, Path]]:
    """A server with a system account, and a folder for the fleet's logs."""
    with work_folder() as folder:
        config = folder / "server.conf"
        config.write_text(_CONFIG)
        server = NatsProcess(folder / "nats", ServerSpec(config))
        server.start()
        try:
            yield server, folder
        finally:
            server.stop()


@contextmanager
def three_servers() -> Iterator[tuple[NatsCluster, Path]]:
    with work_folder() as folder:
        cluster = NatsCluster(folder / "nats")
        cluster.start()
        try:
            yield cluster, folder
        finally:
            cluster.stop()


# ---------------------------------------------------------------------------------------------- readers


def prompt(number: int, tokens: int = PROMPT) -> tuple[int, ...]:
    """Ids that share no block with those of another number."""
    chance = random.Random(number)
    return tuple(chance.randrange(10, 910) for _ in range(tokens))


@dataclass
class Seen:
    """One stream: its ids, when each came (monotonic seconds), and how its attempts started."""

    prompt: tuple[int, ...]
    tokens: int
    ids: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    starts: list[Started] = field(default_factory=list)
    attempts: int = 0
    worker: str | None = None
    fenced: int = 0
    error: str | None = None
    told: str = ""  # what a producer was told last

    def take(self, ids: tuple[int, ...] | list[int], now: float) -> None:
        self.ids += ids
        self.times += [now] * len(ids)

    @property
    def ok(self) -> bool:
        return self.error is None and self.ids == unfailed(self.prompt, self.tokens)


async def read_with_client(
    client: Client, seen: Seen, *, model: str = "demo", sampling: Sampling | None = None, **options: Any
) -> Seen:
    """Run a request to its end; errors are noted in it. `sampling` is greedy and ignores the end unless given."""
    sampling = sampling or Sampling(seen.tokens, temperature=0.0, ignore_eos=True)
    generation = Generation(model, sampling, seen.prompt, patience_s=30.0, **options)
    try:
        async with client.generate(generation) as stream:
            while events := await stream.read():
                now = time.monotonic()
                seen.worker = stream.worker
                for event in events:
                    if isinstance(event, Tokens):
                        seen.take(event.ids, now)
                    elif isinstance(event, Started):
                        seen.starts.append(event)
            seen.attempts, seen.fenced = stream.attempts, stream.assembly.fenced
    except Exception as error:  # noqa: BLE001 - what the reader was told is what is measured
        seen.error = f"{type(error).__name__}: {error}"
    return seen


async def sse(base: str, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """The events of one POST, read from a bare socket. Raises RuntimeError for another status than 200."""
    where = urlsplit(base)
    reader, writer = await asyncio.open_connection(where.hostname, where.port, limit=2**20)
    try:
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        status = await reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in status.split(b"\r\n", 1)[0]:
            raise RuntimeError(status.split(b"\r\n", 1)[0].decode() + (await reader.read(500)).decode(errors="replace"))
        while line := await reader.readline():
            if line.startswith(b"data: "):
                yield json.loads(line[6:])
    finally:
        writer.close()


async def read_over_http(base: str, seen: Seen, text: str) -> Seen:
    """The same by POST /generate; `seen.prompt` are the ids of `text`."""
    body = {"prompt": text, "max_tokens": seen.tokens, "temperature": 0, "ignore_eos": True}
    try:
        async for event in sse(base, "/generate", body):
            if event["type"] == "token":
                seen.take([event["token_id"]], time.monotonic())
            elif event["type"] == "start":
                seen.worker = event["worker_id"]
            elif event["type"] == "error":
                seen.error = f"{event['code']}: {event['error']}"
    except Exception as error:  # noqa: BLE001 - as above
        seen.error = f"{type(error).__name__}: {error}"
    return seen


class Texts:
    """Prompts as text with the ids that the ingress makes of them."""

    def __init__(self) -> None:
        self._tokenizer = Tokenizer.from_file(str(DEMO_FOLDER / "tokenizer.json"))

    def ask(self, number: int, tokens: int) -> tuple[str, Seen]:
        text = f"request {number} asks: " + "what light through yonder window breaks? " * 4
        return text, Seen(tuple(self._tokenizer.encode(text, add_special_tokens=True).ids), tokens)


def percentile(values: list[float], share: float) -> float:
    """Nearest rank."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * share) - 1)]
