"""A placement replica and fake workers on the run's NATS server, each test in a namespace of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio
from fake_fleet import BareProducer, FakeWorker, StartPlacement, StartWorker, open_placement

from kvfleet.placement.loop import PlacementLoop
from kvproto.connection import Connection
from kvproto.subjects import Subjects


@pytest_asyncio.fixture
async def start_placement(nats_url: str, fleet_buckets: Subjects) -> AsyncIterator[StartPlacement]:
    started: list[tuple[PlacementLoop, Connection]] = []

    async def start(policy: str = "bounded_ring", fleet_key: bytes | None = None) -> PlacementLoop:
        loop, connection = await open_placement(nats_url, fleet_buckets, policy=policy, fleet_key=fleet_key)
        started.append((loop, connection))
        await loop.start()
        return loop

    yield start
    for loop, connection in started:
        await loop.stop(grace_s=0)
        await connection.close()
        assert loop.internal_errors_total == 0
        loop.core.check_integrity()


@pytest_asyncio.fixture
async def start_worker(nats_url: str, fleet_buckets: Subjects) -> AsyncIterator[StartWorker]:
    workers: list[FakeWorker] = []

    async def start(worker: str, behaviour: str = "serve") -> FakeWorker:
        fake = FakeWorker(nats_url, fleet_buckets, worker, behaviour)
        workers.append(await fake.start())
        return fake

    yield start
    for fake in workers:
        await fake.kill()


@pytest_asyncio.fixture
async def requester(nats_url: str) -> AsyncIterator[Connection]:
    """As an ingress asks."""
    connection = await Connection.open(nats_url, name="requester", inbox_prefix="_ing.test")
    yield connection
    await connection.close()


@pytest_asyncio.fixture
async def producer(nats_url: str, fleet_buckets: Subjects) -> AsyncIterator[BareProducer]:
    bare = await BareProducer.open(nats_url, fleet_buckets)
    yield bare
    await bare.nc.close()
