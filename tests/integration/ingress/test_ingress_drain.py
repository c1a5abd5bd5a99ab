"""SIGTERM to a real ingress process: load balancers hear of it first, streams finish or say where they go on."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from cut_streams import Event, read, texts
from ingress_rig import Served
from scripted_worker import ScriptedWorker

from kvproto.subjects import Subjects
from kvproto.testing.nats_process import free_port
from kvservice import launch
from tests.support import sse
from tests.support.waiting import LIMIT_S

LONG = [(50 + n, f" word{n}") for n in range(120)]
BODY = {"prompt": "x", "max_tokens": 120}


@dataclass
class Running:
    http: httpx.AsyncClient
    process: asyncio.subprocess.Process

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    async def code(self) -> int:
        return await asyncio.wait_for(self.process.wait(), LIMIT_S)

    async def until_ready(self) -> None:
        async with asyncio.timeout(LIMIT_S):
            while True:
                try:
                    if (await self.http.get("/readyz")).status_code == 200:
                        return
                except httpx.TransportError:
                    pass
                await asyncio.sleep(0.05)


Start = Callable[..., AbstractAsyncContextManager[Running]]


@pytest.fixture
def start(nats_url: str, fleet_buckets: Subjects, worker: ScriptedWorker, tmp_path: Path) -> Start:
    @asynccontextmanager
    async def run(*flags: str) -> AsyncIterator[Running]:
        port = free_port()
        told = [f"--nats-url={nats_url}", f"--namespace={fleet_buckets.namespace}", f"--port={port}", *flags]
        with (tmp_path / "log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *launch.command("kvfleet.ingress.main", *told), stdout=log, stderr=log, env=os.environ
            )
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=LIMIT_S, trust_env=False) as http:
            running = Running(http, process)
            try:
                await running.until_ready()
                yield running
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
        assert "Traceback" not in (tmp_path / "log").read_text()

    return run


async def stream(http: httpx.AsyncClient, began: asyncio.Event) -> list[Event]:
    found: list[Event] = []
    async with http.stream("POST", "/generate", json=BODY) as answer:
        last = ""
        async for line in sse.alines(answer):
            if line.startswith("id: "):
                last = line.removeprefix("id: ")
            elif line.startswith("data: "):
                found.append(Event(last, json.loads(line.removeprefix("data: "))))
                if len(found) > 5:
                    began.set()
    return found


async def test_a_drain_is_announced_and_finishes_what_runs(start: Start, worker: ScriptedWorker) -> None:
    worker.reply, worker.token_s = LONG, 0.025
    async with start("--unready-s=1", "--drain-s=15") as ingress:
        began = asyncio.Event()
        running = asyncio.create_task(stream(ingress.http, began))
        await began.wait()
        ingress.terminate()
        async with asyncio.timeout(LIMIT_S):
            while (ready := await ingress.http.get("/readyz")).is_success:
                await asyncio.sleep(0.01)
        assert (ready.status_code, ready.json()) == (503, {"status": "draining"})
        assert (await ingress.http.get("/livez")).status_code == 200
        late = await ingress.http.post("/generate", json={"prompt": "y", "max_tokens": 2})
        assert late.status_code == 200, "a load balancer may not have looked yet"
        async with asyncio.timeout(LIMIT_S):
            while (refused := await ingress.http.post("/generate", json={"prompt": "y", "max_tokens": 1})).is_success:
                await asyncio.sleep(0.05)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert refused.headers["connection"] == "close"
        assert refused.headers["retry-after"] == "1"
        assert refused.headers["x-should-retry"] == "true"
        events = await running
        assert events[-1].data["type"] == "done"
        assert texts(events) == {0: "".join(text for _, text in LONG)}
        assert await ingress.code() == 0


async def test_what_does_not_finish_in_time_goes_on_at_another_ingress(
    start: Start, served: Served, worker: ScriptedWorker
) -> None:
    worker.reply, worker.token_s = LONG, 0.02
    async with start("--drain-s=0.2") as ingress:
        began = asyncio.Event()
        running = asyncio.create_task(stream(ingress.http, began))
        await began.wait()
        ingress.terminate()
        *events, last = await running
        assert (last.data["type"], last.data["code"]) == ("error", "draining")
        assert "Last-Event-ID" in last.data["error"]
        assert last.id == events[-1].id
        assert await ingress.code() == 0
    assert len(events) < 120
    rest = await read(served, "/generate", BODY, last_event_id=last.id)
    assert texts(events + rest) == {0: "".join(text for _, text in LONG)}
