"""Workers that are told to go while they work: under the roles of deploy/nats, as a rolling restart does it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import nats
import pytest

from kvproto.client import Client, Generation
from kvproto.messages import Finished, Sampling, Tokens
from kvproto.testing.fixtures import ConfiguredNats
from kvproto.testing.nats_process import free_port
from tests.support.processes import KVFLEET, Deployment
from tests.support.waiting import LIMIT_S, until

DEPLOY = Path(__file__).parents[2] / "deploy" / "nats"
USERS = ("admin", "ingress", "placement", "worker", "vault", "producer-public", "sys")
VARIABLES = {user: f"KVF_{user.upper()}_PASSWORD" for user in USERS} | {
    "producer-public": "KVF_PRODUCER_public_PASSWORD"
}
BLOCK = 16
TOKENS = 300
PROMPT = tuple(range(100, 180))
SAMPLING = Sampling(TOKENS, temperature=0.0, ignore_eos=True)
DRAIN_S = 3.0


@pytest.fixture(scope="module")
def fleet(nats_with_config: ConfiguredNats, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    passwords = {user: f"secret-of-{user}" for user in USERS}
    server = nats_with_config(DEPLOY / "nats-server.conf", {VARIABLES[user]: passwords[user] for user in USERS})
    fleet = Deployment(server.url, tmp_path_factory.mktemp("draining"), passwords)
    fleet.init()
    fleet.start("placement", "p0")
    PORTS["v0"] = free_port()
    fleet.start("vault", "v0", "--max-bytes=67108864", f"--metrics-port={PORTS['v0']}")
    for worker in ("w0", "w1"):
        start(fleet, worker)
    fleet.start("ingress", "i0", f"--port={fleet.port}")
    try:
        fleet.wait_ready(2)
        yield fleet
    finally:
        fleet.stop()


PORTS: dict[str, int] = {}


def start(fleet: Deployment, worker: str) -> None:
    PORTS[worker] = free_port()
    fleet.start(
        "worker", worker, "--runner=fake", "--fake-tokens-per-s=200", f"--drain-s={DRAIN_S}", "--workers-on-host=2",
        f"--metrics-port={PORTS[worker]}", "--preload-s=0",
    )  # fmt: skip


def metric(worker: str, name: str) -> float:
    text = httpx.get(f"http://127.0.0.1:{PORTS[worker]}/metrics").text
    found = re.search(rf"^{name} ([0-9.e+]+)$", text, re.MULTILINE)
    assert found, name
    return float(found.group(1))


@asynccontextmanager
async def opened(fleet: Deployment) -> AsyncIterator[Client]:
    assert fleet.passwords is not None
    async with await Client.open(
        fleet.nats_url, user="producer-public", password=fleet.passwords["producer-public"]
    ) as client:
        yield client


class Producer:
    """A bare one: nats-py and JSON, and nothing of ours."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.kinds: list[str] = []
        self.worker = ""
        self.over = asyncio.Event()

    async def __aenter__(self) -> Producer:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.nc.close()

    async def ask(self, fleet: Deployment) -> None:
        assert fleet.passwords is not None
        user, prefix = "producer-public", b"_prd.public.bare"
        self.nc = await nats.connect(fleet.nats_url, user=user, password=fleet.passwords[user], inbox_prefix=prefix)
        inbox = self.nc.new_inbox()
        await self.nc.subscribe(inbox, cb=self._hear)
        body = {"prompt_ids": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        headers = {"Content-Type": "application/json"}
        await self.nc.publish("kvf.generate.public.demo", json.dumps(body).encode(), reply=inbox, headers=headers)

    async def _hear(self, message: Any) -> None:
        frame = json.loads(message.data)
        self.kinds.append(frame["type"])
        self.worker = frame.get("worker") or self.worker
        if frame["type"] == "tokens":
            assert frame["index"] == len(self.ids), "every token once, in order"
            self.ids += frame["ids"]
        elif frame["type"] in ("finished", "failed", "moved"):
            self.over.set()


async def read(client: Client, ids: list[int], workers: list[str], tokens: int = TOKENS) -> None:
    sampling = replace(SAMPLING, max_tokens=tokens)
    async with client.generate(Generation("demo", sampling, prompt_ids=PROMPT)) as stream:
        async for event in stream:
            if isinstance(event, Tokens):
                ids += event.ids
            elif isinstance(event, Finished):
                workers.append(event.worker)


async def test_nobody_notices_that_a_worker_goes(fleet: Deployment) -> None:
    """A Client's streams and a bare producer's: all go on elsewhere, and hardly anything is computed again."""
    async with opened(fleet) as client, Producer() as producer:
        reference: list[int] = []
        await read(client, reference, [])
        ids: list[list[int]] = [[] for _ in range(6)]
        ended: list[str] = []
        streams = [asyncio.create_task(read(client, one, ended)) for one in ids]
        await producer.ask(fleet)
        await until(lambda: all(len(one) > 30 for one in ids) and len(producer.ids) > 30)
        leaving = "w0" if producer.worker == "w0" else "w1"
        staying = "w1" if leaving == "w0" else "w0"
        before = metric(staying, "kvfleet_worker_recomputed_tokens_total")
        moved = [s for s in client._streams.values() if s.worker == leaving]
        began = time.monotonic()
        fleet.services[leaving].process.terminate()
        assert await asyncio.to_thread(fleet.services[leaving].process.wait, 20) == 0
        assert time.monotonic() - began < DRAIN_S + 10
        await asyncio.wait_for(asyncio.gather(*streams), LIMIT_S)
        await asyncio.wait_for(producer.over.wait(), LIMIT_S)
        assert all(one == reference for one in ids)
        assert producer.ids == reference
        assert producer.kinds.count("finished") == 1
        assert not {"failed", "moved"} & set(producer.kinds)
        assert ended == [staying] * len(ids) or len(moved) < len(ids)
        recomputed = metric(staying, "kvfleet_worker_recomputed_tokens_total") - before
        assert 0 < recomputed <= BLOCK * (len(moved) + 1), fleet.logs()


async def test_without_a_successor_blocks_wait_in_a_vault(fleet: Deployment) -> None:
    """The last worker of a model is drained by its operator, and another one comes."""
    leaving, *others = [name for name in ("w0", "w1") if fleet.services[name].process.poll() is None]
    for other in others:
        assert fleet.services[other].stop() == 0
    coming = "w2"
    tokens = 4 * TOKENS  # six seconds of them
    async with opened(fleet) as client:
        ids: list[int] = []
        ended: list[str] = []
        stream = asyncio.create_task(read(client, ids, ended, tokens))
        await until(lambda: len(ids) > 100)
        drained = await asyncio.to_thread(
            subprocess.run,
            [KVFLEET, "drain", leaving, "--wait", "20"],
            env={**os.environ, **fleet._env("admin")},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert drained.returncode == 0, drained.stderr
        assert fleet.services[leaving].process.wait(LIMIT_S) == 0
        assert not stream.done(), "the stream was too short for this test"
        start(fleet, coming)
        await asyncio.wait_for(stream, LIMIT_S)
        assert ended == [coming]
        assert len(ids) == tokens
        tiers = httpx.get(f"http://127.0.0.1:{PORTS[coming]}/metrics").text.splitlines()
        told = "\n".join(line for line in tiers if line.startswith("kvfleet_worker_tier") and 'tier="vault"' in line)
        assert metric(coming, "kvfleet_worker_recomputed_tokens_total") <= BLOCK, f"{told}\n{fleet.logs()}"


async def test_what_only_the_leaving_worker_has_of_prefixes_in_demand_stays_in_a_vault(fleet: Deployment) -> None:
    """Too little of it has come again for the worker itself to keep it: placement knows that it is asked for."""
    start(fleet, "w3")
    shared = tuple(range(400, 400 + 6 * BLOCK))
    sampling = replace(SAMPLING, max_tokens=4)
    async with opened(fleet) as client:
        await until(lambda: "w3" in client.members.view.workers)
        await until(lambda: any(view.record.id == "w3" for view in client.members.view.ready("demo")))
        for number in range(4):
            tail = tuple(range(600 + 50 * number, 600 + 50 * number + BLOCK))
            async with client.generate(Generation("demo", sampling, prompt_ids=shared + tail, worker="w3")) as stream:
                async for _ in stream:
                    pass
            await asyncio.sleep(0.2)  # its blocks are told of
        before = metric("v0", "kvfleet_vault_stored_blocks_total")
        fleet.services["w3"].process.terminate()
        assert await asyncio.to_thread(fleet.services["w3"].process.wait, 20) == 0
        assert metric("v0", "kvfleet_vault_stored_blocks_total") - before >= len(shared) // BLOCK, fleet.logs()
