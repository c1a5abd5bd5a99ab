"""Shared by tests against a real NATS server: fake workers, and a client of them, in a namespace of their own."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from kvproto.client import Client
from kvproto.subjects import Subjects
from tests.support.fake_fleet import FakeFleet


@pytest.fixture(autouse=True)
def _placement_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine too it is placement that places, where there is one: no ring instead of it."""
    monkeypatch.setattr("kvproto.streams.placing.PLACE_TIMEOUT_S", 5.0)


@pytest.fixture
async def fleet(nats_url: str, fleet_buckets: Subjects) -> AsyncIterator[FakeFleet]:
    fleet = FakeFleet(nats_url, fleet_buckets)
    yield fleet
    await fleet.stop()


@pytest.fixture
async def client(nats_url: str, fleet_buckets: Subjects) -> AsyncIterator[Client]:
    client = await Client.open(nats_url, namespace=fleet_buckets.namespace)
    yield client
    await client.close()
