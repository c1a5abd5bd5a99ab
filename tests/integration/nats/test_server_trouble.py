"""One server: killed, hung, retired, killed again and again, without JetStream, full. Streams pause; nothing else."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import nats.js.errors
import pytest

from kvproto.buckets import Bucket
from kvproto.client import Client
from kvproto.connection import Connection
from kvproto.errors import Unavailable
from kvproto.testing.fixtures import ProcessFactory
from kvproto.testing.nats_process import PLAIN_CONFIG
from tests.support.trouble import Fleet, fleet_over
from tests.support.waiting import LIMIT_S, until

LONGER_THAN_MEMBERS_LIVE_S = 6.0


async def test_killed_and_hung(nats_process: ProcessFactory) -> None:
    """Away for 0.3 s, for 4 s (longer than a record lives), hung for 6 s and woken: one fleet, one life."""
    server = nats_process()
    async with fleet_over(server.url) as fleet:
        epochs = fleet.epochs()
        for away_s in (0.3, 4.0):
            streams = await fleet.start_streams(6, 100)
            server.kill()
            await asyncio.sleep(away_s)
            server.start()
            done = await asyncio.wait_for(asyncio.gather(*streams), LIMIT_S)
            assert all(one.attempts == 1 for one in done), "nothing is computed again"
            await until(fleet.is_whole)
            fleet.check(epochs)
        streams = await fleet.start_streams(6, 100)
        server.hang()
        await asyncio.sleep(6.0)
        assert fleet.is_whole(), "who hears nobody buries nobody"
        server.wake()
        done = await asyncio.wait_for(asyncio.gather(*streams), LIMIT_S)
        assert all(one.attempts == 1 for one in done)
        await fleet.leases_are_written()
        fleet.check(epochs)
        await fleet.serve()


async def test_what_ends_while_the_server_hangs_is_ended_in_the_ledger(nats_process: ProcessFactory) -> None:
    """The workers said so to a server that read nothing any more, and dropped them."""
    server = nats_process()
    async with fleet_over(server.url) as fleet:
        streams = await fleet.start_streams(6, 60)
        server.hang()
        await until(lambda: not any(worker.loop.milestones for worker in fleet.workers.workers.values()))
        await asyncio.sleep(LONGER_THAN_MEMBERS_LIVE_S)  # until all connections were given up
        server.wake()
        await asyncio.wait_for(asyncio.gather(*streams), LIMIT_S)
        ledger = fleet.placement.core.ledger
        await until(lambda: all(one.actual.ended for one in ledger.entries.values()))
        await until(fleet.is_whole)
        fleet.placement.core.check_integrity()


async def test_killed_again_and_again_under_two_hundred_connections(nats_process: ProcessFactory) -> None:
    """A storm: each time everybody comes back at once."""
    server = nats_process()
    async with fleet_over(server.url) as fleet:
        epochs = fleet.epochs()
        crowd = [await Connection.open(server.url, name=f"c{i}", inbox_prefix=f"_adm.c{i}") for i in range(200)]
        try:
            streams = await fleet.start_streams(4, 400)
            began = time.monotonic()
            for _ in range(20):
                server.restart()
                await asyncio.sleep(0.2)
            assert time.monotonic() - began < 20
            await asyncio.wait_for(asyncio.gather(*streams), LIMIT_S)
            await until(lambda: all(one.is_connected for one in crowd))
        finally:
            await asyncio.gather(*(one.close() for one in crowd))
        await until(fleet.is_whole)
        await fleet.leases_are_written()
        fleet.check(epochs)
        await fleet.serve()


async def test_jetstream_away(nats_process: ProcessFactory, tmp_path: Path) -> None:
    """Leases cannot be renewed, requests are served by heartbeats. Two fleets at once: most of it is waiting."""
    async with asyncio.TaskGroup() as side_by_side:
        side_by_side.create_task(jetstream_is_off_and_back(nats_process, tmp_path / "off.conf"))
        side_by_side.create_task(jetstream_is_full(nats_process, tmp_path / "full.conf"))


async def jetstream_is_off_and_back(nats_process: ProcessFactory, config: Path) -> None:
    config.write_text(PLAIN_CONFIG)
    server = nats_process(config)
    async with fleet_over(server.url) as fleet:
        epochs = fleet.epochs()
        streams = await fleet.start_streams(4, 200)
        config.write_text(PLAIN_CONFIG.replace("jetstream: enabled", ""))
        server.restart()
        await asyncio.wait_for(asyncio.gather(*streams), LIMIT_S)
        await asyncio.sleep(LONGER_THAN_MEMBERS_LIVE_S)
        now = fleet.client.now()
        assert all(now - view.record_at > 3 for view in fleet.client.members.view.workers.values()), "not renewed"
        await serves(fleet)
        config.write_text(PLAIN_CONFIG)
        server.restart()
        await fleet.leases_are_written()
        fleet.check(epochs)
        await fleet.serve()


async def jetstream_is_full(nats_process: ProcessFactory, config: Path) -> None:
    config.write_text(PLAIN_CONFIG.replace("enabled", "{ max_file_store: 2MB }"))
    server = nats_process(config)
    async with fleet_over(server.url, responses_bytes=500_000) as fleet:
        epochs = fleet.epochs()
        filler = await Connection.open(server.url, name="filler", inbox_prefix="_adm.filler")
        jetstream = filler.raw.jetstream(timeout=2)
        await jetstream.add_stream(name="JUNK", subjects=["junk"])
        streams = await fleet.start_streams(4, 200)
        filling = asyncio.create_task(keep_full(jetstream))
        bucket = await Bucket.open(filler, fleet.subjects.sessions_bucket)
        revision = 0
        with pytest.raises(Unavailable):
            while True:
                revision = await bucket.update("a", b"x", revision)
        await asyncio.wait_for(asyncio.gather(*streams), LIMIT_S)
        await asyncio.sleep(LONGER_THAN_MEMBERS_LIVE_S)
        await serves(fleet)
        filling.cancel()
        await jetstream.delete_stream("JUNK")
        await fleet.leases_are_written()
        fleet.check(epochs)
        await fleet.serve()
        await filler.close()


async def keep_full(jetstream: Any) -> None:
    """Every byte that a record's end sets free is taken."""
    size = 64_000
    while True:
        try:
            await jetstream.publish("junk", bytes(size))
        except nats.js.errors.Error:
            size = max(1, size // 8)
            await asyncio.sleep(0.002)


async def serves(fleet: Fleet) -> None:
    assert fleet.is_whole(), "nobody is forgotten"
    served = await fleet.serve(within_s=3)
    assert served.attempts == 1


async def test_a_reader_that_is_cut_off_as_too_slow_loses_nothing(nats_process: ProcessFactory, tmp_path: Path) -> None:
    """Its loop stands still for 3 s; what the server holds for it grows until the server drops the connection."""
    config = tmp_path / "server.conf"
    config.write_text(PLAIN_CONFIG + "max_pending: 1MB\n")
    server = nats_process(config)
    async with fleet_over(server.url) as fleet:
        flood = await Connection.open(server.url, name="flood", inbox_prefix="_adm.flood")
        reading = threading.Event()
        slow = asyncio.create_task(asyncio.to_thread(asyncio.run, read_slowly(fleet, reading)))
        await asyncio.to_thread(reading.wait, LIMIT_S)
        for _ in range(100):
            await flood.publish("noise", bytes(200_000))
        reconnects = await asyncio.wait_for(slow, LIMIT_S)
        assert reconnects >= 1
        assert "Slow Consumer" in server.log()
        await flood.close()
        fleet.check(fleet.epochs())


async def read_slowly(fleet: Fleet, reading: threading.Event) -> int:
    """In a loop of its own: four streams, with a standstill in their middle. How often it had to reconnect."""

    async def ignore(message: object) -> None:
        pass

    async with await Client.open(fleet.servers) as client:
        own = replace(fleet, client=client)
        streams = await own.start_streams(4, 200)
        await client.connection.subscribe("noise", ignore)
        await client.connection.synced()
        reading.set()
        time.sleep(3.0)
        await asyncio.gather(*streams)
        return client.connection.reconnects_total
