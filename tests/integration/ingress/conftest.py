"""Fixtures: a scripted worker, and ingresses before it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from ingress_rig import Serve, Served, serve
from scripted_worker import ScriptedWorker, demo_bundle

from kvproto.subjects import Subjects
from tests.support.waiting import LIMIT_S

THINKS = (  # a template of a model that reasons
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content.split('</think>')[-1] }}<|end|>{% endfor %}"
    "<|assistant|>{% if enable_thinking is not false %}<think>\n{% endif %}"
)


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


@pytest.fixture
async def thinker(nats_url: str, fleet_buckets: Subjects, served: Served) -> AsyncIterator[ScriptedWorker]:
    bundle = demo_bundle("thinker", chat_template=THINKS)
    worker = await ScriptedWorker.start(nats_url, fleet_buckets, "w2", bundle)
    async with asyncio.timeout(LIMIT_S):
        while "thinker" not in (await served.http.get("/v1/models")).text:
            await asyncio.sleep(0.05)
    yield worker
    await worker.stop()
