"""A worker drains while requests of bare producers run: what happens meanwhile, and for how long it stays."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from kvfleet.worker.port.outputs import StepResult
from kvproto import codec
from kvproto.connection import Connection, Message
from kvproto.messages import CancelRequest, Capsule, Encoding, Failed, Frame, GenerateRequest, Moved, Sampling, Tokens
from kvproto.subjects import Subjects
from tests.support.fake_fleet import FakeFleet, FakeWorker
from tests.support.waiting import LIMIT_S, until

ENDLESS = Sampling(max_tokens=3000, temperature=0.0, ignore_eos=True)
PROMPT = tuple(range(100, 140))
DRAIN_S = 6.0


@pytest.fixture
async def worker(fleet: FakeFleet) -> FakeWorker:
    worker = await fleet.start("w0", fake_tokens_per_s=200, drain_s=DRAIN_S)
    worker.loop.parts.somebody_is_ready = lambda models: True
    return worker


async def nothing(capsule: Capsule) -> None:
    pass


class Placement:
    """Takes capsules, after `meanwhile`; and whoever reads."""

    def __init__(self, connection: Connection, subjects: Subjects) -> None:
        self.connection = connection
        self.subjects = subjects
        self.meanwhile: Callable[[Capsule], Awaitable[None]] = nothing
        self.capsules: list[Capsule] = []
        self.frames: dict[str, list[Frame]] = {}

    async def start(self) -> Placement:
        await self.connection.subscribe(self.subjects.placement_capsules(), self._on_capsule)
        await self.connection.subscribe("_prd.public.>", self._on_frames)
        await self.connection.subscribe("_plc.p1.>", self._on_frames)
        await self.connection.synced()
        return self

    async def _on_capsule(self, message: Message) -> None:
        self.capsules.append(codec.decode(Capsule, message.data))
        await self.meanwhile(self.capsules[-1])
        await self.connection.publish(message.reply, b"taken")

    async def _on_frames(self, message: Message) -> None:
        frames = self.frames.setdefault(message.subject, [])
        if message.subject.startswith("_prd") and message.subject.endswith(".plain"):
            frames.append(codec.decode_plain_frame(message.data, as_json=False))
        else:
            frames += codec.decode_frames(message.data)

    async def ask(self, name: str, *, watched: bool, request: str = "r1") -> None:
        """A reader named `plain` reads plain frames."""
        body = GenerateRequest(
            request,
            0,
            "demo",
            ENDLESS,
            f"_prd.public.{name}",
            prompt_ids=PROMPT,
            encoding=Encoding.MSGPACK if name.endswith("plain") else Encoding.FRAMES,
            watcher="p1" if watched else "",
        )
        subject = self.subjects.worker_generate("w0", "public")
        await self.connection.publish(subject, codec.encode(body), reply=f"_plc.p1.r.{request}.0.{name}")
        await self.until(f"_prd.public.{name}", Tokens)

    async def cancel(self, inbox: str = "", request: str = "r1") -> None:
        cancel = codec.encode(CancelRequest(request, 0, inbox))
        await self.connection.publish(self.subjects.worker_cancel("w0"), cancel)

    async def until(self, inbox: str, kind: type) -> Any:
        async with asyncio.timeout(LIMIT_S):
            while not (found := [one for one in self.frames.get(inbox, []) if isinstance(one, kind)]):
                await asyncio.sleep(0.005)
        return found[-1]


@pytest.fixture
async def placement(nats_url: str, fleet_buckets: Subjects) -> AsyncIterator[Placement]:
    connection = await Connection.open(nats_url, name="p1", inbox_prefix="_plc.p1")
    yield await Placement(connection, fleet_buckets).start()
    await connection.close()


async def test_a_request_that_ends_while_it_is_offered_to_placement_ends_once(
    worker: FakeWorker, placement: Placement
) -> None:
    await placement.ask("a.plain", watched=True)

    async def its_deadline_passes(capsule: Capsule) -> None:
        worker.loop._end_overdue(float("inf"))

    worker.loop.frames.running[0].deadline = 1e12
    placement.meanwhile = its_deadline_passes
    async with asyncio.timeout(DRAIN_S):
        await worker.loop.drain()
    failed = await placement.until("_prd.public.a.plain", Failed)
    assert failed.code == "deadline_exceeded"
    assert worker.loop.hand_over.moved_total == 0
    assert len(worker.loop.frames.leases._leases) == 0


async def test_what_the_engine_makes_of_a_request_while_it_is_offered_is_its_successors_to_say(
    worker: FakeWorker, placement: Placement
) -> None:
    """A step may outlast the time to drain; a bare producer has no way to drop what two workers say."""
    await placement.ask("a.plain", watched=True)
    offered: list[int] = []

    async def a_step_ends(capsule: Capsule) -> None:
        known = len(capsule.request.output_ids)
        offered.append(known)
        worker.loop.on_results([StepResult([Tokens("r1", 0, 0, known, (7,), ("seven",))])])

    placement.meanwhile = a_step_ends
    draining = asyncio.create_task(worker.loop.drain())
    await until(lambda: worker.loop.hand_over.moved_total)
    await placement.cancel("_prd.public.a.plain")
    async with asyncio.timeout(DRAIN_S):
        await draining
    told = [one for one in placement.frames["_prd.public.a.plain"] if isinstance(one, Tokens)]
    assert offered == [sum(len(one.ids) for one in told)]


async def test_a_cancel_while_it_is_offered_to_placement_is_kept(worker: FakeWorker, placement: Placement) -> None:
    await placement.ask("a.plain", watched=True)
    (record,) = worker.loop.frames.running

    async def its_producer_leaves(capsule: Capsule) -> None:
        await placement.cancel("_prd.public.a.plain")
        await until(lambda: record.is_left)

    placement.meanwhile = its_producer_leaves
    async with asyncio.timeout(DRAIN_S):  # nobody will ever say that it goes on
        await worker.loop.drain()
    failed = await placement.until("_plc.p1.r.r1.0.a.plain", Failed)
    assert failed.code == "cancelled"
    assert worker.loop.hand_over.moved_total == 0


@pytest.mark.parametrize("name", ["a", "a.plain"])
async def test_a_cancel_after_the_engine_let_go_is_kept(worker: FakeWorker, placement: Placement, name: str) -> None:
    await placement.ask(name, watched=True)
    (record,) = worker.loop.frames.running
    await worker.thread.let_go([("r1", 0)], keep=False)
    await placement.cancel(f"_prd.public.{name}")
    await until(lambda: record.is_left)
    async with asyncio.timeout(DRAIN_S):
        await worker.loop.drain()
    assert (await placement.until(f"_plc.p1.r.r1.0.{name}", Failed)).code == "cancelled"
    assert placement.capsules == []


async def test_blocks_stay_until_the_successor_has_started(worker: FakeWorker, placement: Placement) -> None:
    await placement.ask("a.plain", watched=True)
    draining = asyncio.create_task(worker.loop.drain())
    await until(lambda: worker.loop.hand_over.moved_total)
    await asyncio.sleep(0.5)
    assert not draining.done(), "its successor has not begun yet"
    await placement.cancel("_prd.public.a.plain")
    async with asyncio.timeout(DRAIN_S / 2):
        await draining
    assert [capsule.request.inbox for capsule in placement.capsules] == ["_prd.public.a.plain"]


async def test_an_engine_that_hangs_does_not_keep_readers_from_being_told(
    worker: FakeWorker, placement: Placement
) -> None:
    await placement.ask("a", watched=False)
    gate = threading.Event()
    worker.thread.post(lambda engine: gate.wait(2 * LIMIT_S) and None)
    try:
        async with asyncio.timeout(LIMIT_S):
            await worker.loop.hand_over.run(1.0)
        assert await placement.until("_prd.public.a", Moved)
    finally:
        gate.set()


async def test_what_only_readers_of_batches_are_left_of_needs_no_placement(
    worker: FakeWorker, placement: Placement
) -> None:
    await placement.ask("a.plain", watched=True)
    await placement.ask("b", watched=False)
    await placement.cancel("_prd.public.a.plain")
    (record,) = worker.loop.frames.running
    await until(lambda: len(record.readers) == 1)
    draining = asyncio.create_task(worker.loop.drain())
    await placement.until("_prd.public.b", Moved)
    assert placement.capsules == []
    await placement.cancel("_prd.public.b")
    await draining
