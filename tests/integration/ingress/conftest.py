"""Fixtures: a scripted worker, and ingresses before it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from ingress_rig import Serve, Served, serve
from scripted_worker import ScriptedWorker

from kvproto.subjects import Subjects


@pytest.fixture
async def worker(nats_url: str, fleet_buckets: Subjects) -> AsyncIterator[ScriptedWorker]:
    worker = await ScriptedWorker.start(nats_url, fleet_buckets)
    yield worker
    await worker.stop()


@pytest.fixture
async def serving(nats_url: str, fleet_buckets: Subjects, worker: ScriptedWorker) -> AsyncIterator[Serve]:
    """Start further ingresses of the same fleet: `await serving(keys=..., max_concurrent=...)`."""
    started: list[Served] = []

    async def start(**options: Any) -> Served:
        started.append(await serve(nats_url, fleet_buckets, **options))
        return started[-1]

    yield start
    await asyncio.gather(*(one.stop() for one in started))


@pytest.fixture
async def served(serving: Serve) -> Served:
    return await serving()
