"""Workers that stop, hang in a step, or are merely slow: what a reader sees of it."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
import time
from typing import Any

import pytest

from kvproto.client import Client, Generation
from kvproto.connection import Connection
from kvproto.ids import new_process_id
from kvproto.messages import Role, Sampling, Tokens
from kvproto.subjects import PLACEMENT_INBOX, inbox_prefix
from kvservice.membership import member_record
from services.placement.loop import PlacementLoop
from tests.support.fake_fleet import FakeFleet

PROMPT = tuple(range(100, 140))
SAMPLING = Sampling(max_tokens=60, temperature=0.0, ignore_eos=True)
GAP_S = 3.5


async def ready(client: Client, count: int) -> None:
    async with asyncio.timeout(10):
        while len(list(client.members.view.ready())) < count:
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("placed", [False, True])
async def test_a_worker_that_stops_costs_a_gap_and_what_it_says_later_is_dropped(
    fleet: FakeFleet, client: Client, placed: bool
) -> None:
    for worker in ("w0", "w1"):
        await fleet.start(worker, fake_tokens_per_s=200)
    await ready(client, 2)
    placement = None
    if placed:
        name = new_process_id()
        connection = await Connection.open(fleet.nats_url, name=name, inbox_prefix=inbox_prefix(PLACEMENT_INBOX, name))
        record = member_record(Role.PLACEMENT, name)
        placement = PlacementLoop(connection, client.subjects, record, chance=random.random)
        await placement.start()
    try:
        ids: list[int] = []
        came: list[float] = []
        stopped = ""
        async with client.generate(Generation("demo", SAMPLING, PROMPT)) as stream:
            async for event in stream:
                if isinstance(event, Tokens):
                    ids += event.ids
                    came.append(time.monotonic())
                    if len(ids) >= 10 and not stopped:
                        stopped = str(stream.worker)
                        await fleet.workers[stopped].freeze()
        gap = max(after - before for before, after in itertools.pairwise(came))
        assert 0.3 < gap < GAP_S
        assert stream.attempts == 2
        assert stream.worker != stopped
        assert len(ids) == 60
        assert client.counters.placed_total == (2 if placed else 0)
    finally:
        if placement is not None:
            await placement.stop(grace_s=0)
            await connection.close()


async def test_an_engine_that_hangs_in_a_step_is_left_though_its_worker_answers(
    fleet: FakeFleet, client: Client
) -> None:
    for worker in ("w0", "w1"):
        await fleet.start(worker, fake_tokens_per_s=200)
    await ready(client, 2)
    ids: list[int] = []
    hung, let_go = "", threading.Event()
    try:
        async with client.generate(Generation("demo", SAMPLING, PROMPT)) as stream:
            async for event in stream:
                if isinstance(event, Tokens):
                    ids += event.ids
                    if len(ids) >= 10 and not hung:
                        hung = str(stream.worker)
                        runner: Any = fleet.workers[hung].thread._engine.runner
                        runner._sleep = lambda _: let_go.wait(30)
    finally:
        let_go.set()
    assert (stream.attempts, stream.worker != hung, len(ids)) == (2, True, 60)
    assert client.counters.lost_total == 1


async def test_one_that_is_slow_queues_or_prefills_is_waited_for(fleet: FakeFleet, client: Client) -> None:
    await fleet.start("w0", slots=1, fake_tokens_per_s=20)
    await fleet.start("w1", slots=1, fake_tokens_per_s=20)
    await ready(client, 2)
    asked = [Generation("demo", Sampling(max_tokens=20, ignore_eos=True), tuple(range(i, i + 40))) for i in range(5)]

    async def attempts(generation: Generation) -> int:
        async with client.generate(generation) as stream:
            async for _ in stream:
                pass
        return stream.attempts

    assert await asyncio.gather(*map(attempts, asked)) == [1] * 5
    assert client.counters.resends_total > 0, "they were asked"
