"""One server: killed, hung, retired, and back; JetStream off, full, or read-only. Streams pause, and nothing else."""

from __future__ import annotations

import asyncio
import time

import pytest

from kvproto.connection import Connection
from kvproto.errors import Unavailable
from kvproto.testing.fixtures import ProcessFactory
from tests.support.trouble import fleet_over, until


async def test_killed_hung_and_retired_one_after_the_other(nats_process: ProcessFactory) -> None:
    """Away for 0.3 s, for 4 s (longer than a record lives), hung for 6 s and woken, and retired: one fleet, one life."""
    server = nats_process()
    async with fleet_over(server.url) as fleet:
        epochs = fleet.epochs()
        for away_s in (0.3, 4.0):
            streams = await fleet.start_streams(6, 100)
            server.kill()
            await asyncio.sleep(away_s)
            server.start()
            done = await asyncio.wait_for(asyncio.gather(*streams), 30)
            assert all(one.attempts == 1 for one in done), "nothing is computed again"
            await until(fleet.is_whole)
            fleet.check(epochs)
        streams = await fleet.start_streams(6, 100)
        server.hang()
        await asyncio.sleep(6.0)
        server.wake()
        done = await asyncio.wait_for(asyncio.gather(*streams), 30)
        assert all(one.attempts == 1 for one in done)
        await until(fleet.is_whole)
        await fleet.leases_are_written()
        fleet.check(epochs)
        await fleet.serve()


async def test_an_outage_longer_than_every_time_to_live(nats_process: ProcessFactory) -> None:
    server = nats_process()
    async with fleet_over(server.url) as fleet:
        epochs = fleet.epochs()
        streams = await fleet.start_streams(6, 100)
        server.kill()
        asked = asyncio.create_task(fleet.serve())  # during the outage
        await asyncio.sleep(12.0)
        server.start()
        done = await asyncio.wait_for(asyncio.gather(*streams), 30)
        assert all(one.attempts == 1 for one in done)
        await asked
        await until(fleet.is_whole)
        fleet.check(epochs)
