"""Workers that stop, hang in a step, or are merely slow: what a reader sees of it."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from kvfleet.placement.loop import PlacementLoop
from kvproto.client import Client, Generation
from kvproto.connection import Connection
from kvproto.ids import new_process_id
from kvproto.messages import Role, Sampling, Tokens
from kvproto.streams.stream import Stream
from kvproto.subjects import PLACEMENT_INBOX, inbox_prefix
from kvservice.membership import member_record
from tests.support.fake_fleet import FakeFleet, FakeWorker
from tests.support.waiting import LIMIT_S

PROMPT = tuple(range(100, 140))
SAMPLING = Sampling(max_tokens=60, temperature=0.0, ignore_eos=True)
GAP_S = 3.5


async def ready(client: Client, count: int) -> None:
    async with asyncio.timeout(LIMIT_S):
        while len(list(client.members.view.ready())) < count:
            await asyncio.sleep(0.02)


class Reading:
    """One stream, read to its end; something happens to its worker after ten tokens."""

    def __init__(self, fleet: FakeFleet) -> None:
        self.workers = fleet.workers
        self.ids: list[int] = []
        self.came: list[float] = []
        self.first_worker = ""

    async def run(self, stream: Stream, happens: Callable[[FakeWorker], Awaitable[None]]) -> Reading:
        async with stream:
            async for event in stream:
                if isinstance(event, Tokens):
                    self.ids += event.ids
                    self.came.append(time.monotonic())
                    if len(self.ids) >= 10 and not self.first_worker:
                        self.first_worker = str(stream.worker)
                        await happens(self.workers[self.first_worker])
        assert len(self.ids) == 60
        assert stream.attempts == 2
        assert stream.worker != self.first_worker
        return self

    @property
    def gap(self) -> float:
        return max(after - before for before, after in itertools.pairwise(self.came))


async def test_workers_that_stop_or_hang_in_a_step_cost_a_gap(fleet: FakeFleet, client: Client) -> None:
    """The one says nothing any more, the other answers that it does not get on."""
    for worker in ("w0", "w1", "w2"):
        await fleet.start(worker, fake_tokens_per_s=200)
    await ready(client, 3)
    let_go = threading.Event()

    async def hang(worker: FakeWorker) -> None:
        runner: Any = worker.thread.engine.runner
        runner.pace = replace(runner.pace, sleep=lambda _: let_go.wait(2 * LIMIT_S))

    asked = [Generation("demo", SAMPLING, PROMPT, worker=worker) for worker in ("w0", "w1")]
    try:
        stopped, hung = await asyncio.gather(
            Reading(fleet).run(client.generate(asked[0]), FakeWorker.freeze),
            Reading(fleet).run(client.generate(asked[1]), hang),
        )
    finally:
        let_go.set()
    assert 0.3 < stopped.gap < GAP_S
    assert 3.0 < hung.gap < 6.0
    assert client.counters.lost_total == 2


async def test_a_worker_that_stops_under_placement(fleet: FakeFleet, client: Client) -> None:
    for worker in ("w0", "w1"):
        await fleet.start(worker, fake_tokens_per_s=200)
    name = new_process_id()
    connection = await Connection.open(fleet.nats_url, name=name, inbox_prefix=inbox_prefix(PLACEMENT_INBOX, name))
    record = member_record(Role.PLACEMENT, name)
    placement = PlacementLoop(connection, client.subjects, record, chance=random.random)
    await placement.start()
    try:
        await ready(client, 2)
        reading = await Reading(fleet).run(client.generate(Generation("demo", SAMPLING, PROMPT)), FakeWorker.freeze)
        assert 0.3 < reading.gap < GAP_S
        assert client.counters.placed_total == 2
    finally:
        await placement.stop(grace_s=0)
        await connection.close()


async def test_one_that_is_slow_queues_or_prefills_is_waited_for(fleet: FakeFleet, client: Client) -> None:
    """One sequence at a time, 0.1 s a token; nobody says anything to those that wait, the last for 3 s."""
    await fleet.start("w0", slots=1, fake_tokens_per_s=10)
    await ready(client, 1)
    asked = [Generation("demo", Sampling(max_tokens=8, ignore_eos=True), tuple(range(i, i + 40))) for i in range(5)]

    async def attempts(generation: Generation) -> int:
        async with client.generate(generation) as stream:
            async for _ in stream:
                pass
        return stream.attempts

    assert await asyncio.gather(*map(attempts, asked)) == [1] * 5
    assert client.counters.resends_total > 0, "they were asked"
