"""A placement that hears and does not answer costs a client a few waits, not one for each request."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvproto import codec
from kvproto.client import Client, Generation
from kvproto.connection import Connection
from kvproto.messages import Placement, PlaceRequest, Sampling
from kvproto.streams.placing import PLACE_TIMEOUT_S
from kvproto.streams.silence import SILENT_ENOUGH
from kvproto.subjects import Subjects
from tests.support.fake_fleet import FakeFleet
from tests.support.waiting import LIMIT_S

ONE = Sampling(max_tokens=1, temperature=0.0, ignore_eos=True)


@pytest.fixture(autouse=True)
def _promised_timeout(_placement_is_waited_for: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the ring is to place, as soon as it does."""
    monkeypatch.setattr("kvproto.streams.placing.PLACE_TIMEOUT_S", PLACE_TIMEOUT_S)


class Deaf:
    """Hears what placement is asked; answers once told to."""

    def __init__(self, connection: Connection) -> None:
        self.asked: list[PlaceRequest] = []
        self.answers = False
        self._connection = connection

    async def hear(self, message: Any) -> None:
        ask = codec.decode(PlaceRequest, message.data)
        self.asked.append(ask)
        if self.answers:
            placement = Placement(ask.request, "w0", ask.attempt, policy="told")
            await self._connection.publish(message.reply, codec.encode(placement))


async def placed(client: Client) -> str:
    async with client.generate(Generation("demo", ONE, (1, 2, 3))) as stream:
        async for _ in stream:
            pass
    assert stream.placement is not None
    return stream.placement.policy


async def test_a_silent_placement_is_asked_by_few_until_it_answers(
    fleet: FakeFleet, client: Client, nats_url: str, fleet_buckets: Subjects
) -> None:
    await fleet.start("w0")
    async with asyncio.timeout(LIMIT_S):
        while not list(client.members.view.ready()):
            await asyncio.sleep(0.02)
    connection = await Connection.open(nats_url, name="deaf", inbox_prefix="_plc.deaf")
    try:
        deaf = Deaf(connection)
        await connection.subscribe(fleet_buckets.place_all(), deaf.hear)
        await connection.synced()
        for _ in range(SILENT_ENOUGH):
            assert await placed(client) == "ring"
        assert len(deaf.asked) == SILENT_ENOUGH
        assert all(ask.deadline_ms == 50 and ask.expires_unix_ms for ask in deaf.asked)
        assert client.counters.unasked_total == 0
        assert await asyncio.gather(*(placed(client) for _ in range(200))) == ["ring"] * 200
        asked = len(deaf.asked) - SILENT_ENOUGH
        assert client.counters.unasked_total == 200 - asked
        assert asked < 40, "one in a quarter of a second, however long it took"
        deaf.answers = True
        async with asyncio.timeout(LIMIT_S):
            while await placed(client) == "ring":
                await asyncio.sleep(0.01)
        unasked = client.counters.unasked_total
        assert [await placed(client) for _ in range(20)].count("ring") <= 2, "a machine may be busy for 50 ms"
        assert client.counters.unasked_total == unasked
    finally:
        await connection.close()
