"""NATS goes away for ten seconds, or hangs: a pause, and nothing else."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from kvproto.buckets import ensure_buckets
from kvproto.client import Client, Generation
from kvproto.connection import Connection
from kvproto.messages import Sampling, Tier, Tokens
from kvproto.subjects import Subjects
from kvproto.testing.fixtures import ProcessFactory
from tests.support.fake_fleet import FakeFleet
from tests.support.waiting import LIMIT_S, until

OUTAGE_S = 10.0
SAMPLING = Sampling(max_tokens=400, temperature=0.0, ignore_eos=True)


async def run(client: Client, generation: Generation, progress: list[int], *, attempts: int = 1) -> list[int]:
    ids: list[int] = []
    async with client.generate(generation) as stream:
        async for event in stream:
            if isinstance(event, Tokens):
                assert event.index == len(ids)
                ids += event.ids
                progress.append(len(ids))
    assert stream.attempts <= attempts, "nobody's work was thrown away"
    return ids


async def test_running_streams_complete_and_blocks_are_still_known(nats_process: ProcessFactory) -> None:
    server = nats_process()
    subjects = Subjects()
    setup = await Connection.open(server.url, name="setup", inbox_prefix="_adm.t")
    await ensure_buckets(setup, subjects)
    await setup.close()
    fleet = FakeFleet(server.url, subjects)
    for worker in ("w0", "w1"):
        await fleet.start(worker, fake_tokens_per_s=500)
    client = await Client.open(server.url)
    try:
        async with asyncio.timeout(LIMIT_S):
            while len(list(client.members.view.ready())) < 2:
                await asyncio.sleep(0.02)
        epochs = {w: view.record.epoch for w, view in client.members.view.workers.items()}
        progress: list[int] = []
        asked = [Generation("demo", SAMPLING, tuple(range(i, i + 40))) for i in range(10)]
        running = [asyncio.create_task(run(client, one, progress)) for one in asked]
        async with asyncio.timeout(LIMIT_S):
            while len(progress) < 200:
                await asyncio.sleep(0.01)
        server.kill()
        await asyncio.sleep(OUTAGE_S)
        server.start()
        # This one may find its worker not back yet, and ask the next.
        during = asyncio.create_task(run(client, Generation("demo", SAMPLING, tuple(range(900, 940))), [], attempts=8))
        results = await asyncio.wait_for(asyncio.gather(*running), LIMIT_S)
        assert all(len(ids) == 400 for ids in results)
        assert len(await asyncio.wait_for(during, LIMIT_S)) == 400, "what was asked during the outage is served too"
        async with asyncio.timeout(LIMIT_S):
            while len(list(client.members.view.ready())) < 2:
                await asyncio.sleep(0.05)
        assert {w: view.record.epoch for w, view in client.members.view.workers.items()} == epochs
        for worker in fleet.workers.values():
            assert worker.fatal == []
        worker = fleet.workers["w0"]
        assert len(await worker.thread.call(lambda engine: engine.kv.holdings()[Tier.DEVICE])) > 0
        sampling = replace(SAMPLING, max_tokens=1)
        first = client.generate(Generation("demo", sampling, (*range(40), *results[0])))
        started = (await first.read())[0]
        assert getattr(started, "cached_tokens", 0) >= 40 + 400 - 1 - 16, "prompt and answer are still cached"
        await first.cancel()
    finally:
        await client.close()
        await fleet.stop()


async def test_a_hung_server_is_left_behind(nats_process: ProcessFactory) -> None:
    """SIGSTOP with unsent data: nats-py alone would never fail over (nats.py #671)."""
    server = nats_process()
    connection = await Connection.open(server.url, name="hang", inbox_prefix="_adm.h")
    try:
        server.hang()
        lost = asyncio.Event()
        connection.on_disconnect.append(lost.set)
        for _ in range(200):
            await asyncio.wait_for(connection.publish("x", bytes(60_000)), LIMIT_S)
        await asyncio.wait_for(lost.wait(), LIMIT_S)
    finally:
        server.wake()
        async with asyncio.timeout(LIMIT_S):
            while not connection.is_connected:
                await asyncio.sleep(0.05)
        await connection.close()


async def test_a_cancel_that_was_lost_with_its_connection_is_said_again(
    nats_url: str, fleet_buckets: Subjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = FakeFleet(nats_url, fleet_buckets)
    worker = await fleet.start("w0", fake_tokens_per_s=20)
    client = await Client.open(nats_url, namespace=fleet_buckets.namespace)
    try:
        await until(lambda: list(client.members.view.ready()))
        endless = replace(SAMPLING, max_tokens=3000)
        async with client.generate(Generation("demo", endless, tuple(range(40)))) as stream:
            await stream.read()
            publish = client.connection.publish

            async def lost(subject: str, data: bytes, **more: Any) -> None:
                if not subject.endswith(".cancel.public"):
                    await publish(subject, data, **more)

            monkeypatch.setattr(client.connection, "publish", lost)
        monkeypatch.undo()
        await asyncio.sleep(0.2)
        assert worker.thread.engine.load().running == 1
        client.connection.raw._transport._io_writer.transport.abort()  # type: ignore[union-attr]
        await until(lambda: not worker.thread.engine.load().running)
        assert client.connection.reconnects_total == 1
    finally:
        await client.close()
        await fleet.stop()
