"""Who asks placement, and whether its answer is still of use, over a real NATS server."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from fake_fleet import MODEL, StartPlacement, StartWorker

from kvfleet.placement.io.place_desk import MAX_WAITING, MOST
from kvfleet.placement.loop import PlacementLoop
from kvproto import codec
from kvproto.connection import Connection
from kvproto.errors import WorkerLost
from kvproto.messages import PlaceRequest
from kvproto.subjects import Subjects, sealed_prefix
from tests.support.placement_answers import read_placement
from tests.support.waiting import LIMIT_S, until

KEY = b"the fleet's"


class Asked:
    """A message on `kvf.place`."""

    subject, headers = f"kvf.place.public.{MODEL}", None

    def __init__(self, name: str, **fields: Any) -> None:
        self.name, self.reply = name, f"_ing.test.a.{name}"
        self.data = codec.encode(PlaceRequest(name, MODEL, (1, 2, 3), **fields))


async def a_placement(start_placement: StartPlacement, start_worker: StartWorker) -> PlacementLoop:
    await start_worker("w1")
    loop = await start_placement("cost", fleet_key=KEY)
    await until(lambda: "w1" in loop.core.fleet.workers)
    return loop


async def test_no_answer_goes_where_a_stream_is_read(
    start_placement: StartPlacement, start_worker: StartWorker, requester: Connection, fleet_buckets: Subjects
) -> None:
    """An ingress's stream of that id would end with the refusal."""
    loop = await a_placement(start_placement, start_worker)
    heard: list[Any] = []

    async def hear(message: Any) -> None:
        heard.append(message)

    await requester.subscribe("_ing.>", hear)
    await requester.synced()
    for inbox in ("_ing.victim.r.r1.0", "_ing.victim.b", "_prd.public.x.r.r1.0"):
        for ask in (PlaceRequest("r1", "another"), PlaceRequest("r1", MODEL, (1, 2, 3))):
            await requester.publish(fleet_buckets.place("public", MODEL), codec.encode(ask), reply=inbox)
    await until(lambda: loop.ignored_total == 6)
    await requester.synced()
    assert heard == []
    assert (len(loop.core.bookings), loop.core.decider.decisions_total) == (0, 0)


async def test_a_priority_is_believed_of_the_fleets_own_alone(
    start_placement: StartPlacement, start_worker: StartWorker, nats_url: str, fleet_buckets: Subjects
) -> None:
    loop = await a_placement(start_placement, start_worker)
    for prefix, believed in (
        (sealed_prefix("_ing", "i1", KEY), 50),
        ("_ing.i1", 0),
        ("_prd.public.x", 0),
        (sealed_prefix("_ing", "i1", b"another"), 0),
    ):
        connection = await Connection.open(nats_url, name="asker", inbox_prefix=prefix)
        ask = PlaceRequest(prefix[-20:], MODEL, (1, 2, 3), priority=50)
        reply = await connection.request(fleet_buckets.place("public", MODEL), codec.encode(ask), LIMIT_S)
        assert read_placement(reply.data).worker == "w1"
        booking = loop.core.bookings.find(("public", ask.request))
        assert booking is not None
        assert booking.priority == believed, prefix
        await connection.close()


async def test_what_comes_late_is_not_decided_and_not_booked(
    start_placement: StartPlacement, start_worker: StartWorker, requester: Connection, fleet_buckets: Subjects
) -> None:
    loop = await a_placement(start_placement, start_worker)
    answered: set[str] = set()

    async def hear(message: Any) -> None:
        answered.add(message.subject.rpartition(".")[2])

    async def ask(name: str, deadline_ms: int = 50, sent_s_ago: float = 0.0) -> None:
        expires = int((time.time() - sent_s_ago) * 1000) + deadline_ms
        asked = PlaceRequest(name, MODEL, (1, 2, 3), deadline_ms=deadline_ms, expires_unix_ms=expires)
        await requester.publish(fleet_buckets.place("public", MODEL), codec.encode(asked), reply=f"_ing.test.a.{name}")

    await requester.subscribe("_ing.test.a.*", hear)
    await ask("first")
    await until(lambda: answered == {"first"})
    for number in range(20):
        await ask(f"late{number}", sent_s_ago=0.3)
    await ask("patient", 60_000, sent_s_ago=0.1)
    await until(lambda: loop.desk.late_total >= 20 and "patient" in answered)
    await ask("next")
    await until(lambda: "next" in answered)
    assert answered == {"first", "patient", "next"}
    assert (loop.desk.late_total, loop.core.decider.decisions_total) == (20, 3)
    assert not any(loop.core.ledger.explain(f"late{number}") for number in range(20))
    assert len(loop.core.bookings) <= 3


async def test_no_more_wait_than_there_is_room_for(
    start_placement: StartPlacement, start_worker: StartWorker, requester: Connection, fleet_buckets: Subjects
) -> None:
    loop = await a_placement(start_placement, start_worker)
    for _ in range(MAX_WAITING + 10):
        await loop.desk.on_place(Asked("w1"))
    assert (len(loop.desk.waiting), loop.desk.late_total) == (MAX_WAITING, 10)
    loop.desk.waiting.clear()


async def test_who_is_behind_stands_back_and_listens_again(
    start_placement: StartPlacement, start_worker: StartWorker, requester: Connection, fleet_buckets: Subjects
) -> None:
    """Meanwhile the server answers in its place: who asks goes by the ring at once."""
    loop = await a_placement(start_placement, start_worker)
    may_go_on = asyncio.Event()
    guard = loop.guarded

    def held(callback: Any) -> Any:
        async def answer(message: Any) -> None:
            await may_go_on.wait()
            await guard(callback)(message)

        return answer

    loop.guarded = held
    subject = fleet_buckets.place("public", MODEL)
    for number in range(MOST + 10):  # more than may wait, however quick decisions were
        await requester.publish(subject, codec.encode(PlaceRequest(f"r{number}", MODEL)), reply=f"_ing.test.a.{number}")
    await until(lambda: len(loop.desk.waiting) >= MOST)
    loop.guarded = guard
    may_go_on.set()
    await until(lambda: loop.desk.stood_back_total >= 1)
    await until(lambda: not loop.desk.waiting and not loop.desk._is_behind)
    assert loop.core.decider.decisions_total + loop.desk.late_total == MOST + 10
    await requester.synced()
    reply = await requester.request(subject, codec.encode(PlaceRequest("next", MODEL, (1, 2, 3))), 5.0)
    assert read_placement(reply.data).worker == "w1"


async def test_whoever_stands_back_is_not_asked(
    start_placement: StartPlacement, start_worker: StartWorker, requester: Connection, fleet_buckets: Subjects
) -> None:
    loop = await a_placement(start_placement, start_worker)
    await loop.desk._let_go()
    subject, data = fleet_buckets.place("public", MODEL), codec.encode(PlaceRequest("r1", MODEL, (1, 2, 3)))
    with pytest.raises(WorkerLost):  # no responders, at once
        await requester.request(subject, data, 30.0)
    other = await start_placement("cost", fleet_key=KEY)
    await until(lambda: "w1" in other.core.fleet.workers)
    reply = await requester.request(subject, data, 5.0)
    assert read_placement(reply.data).placement == other.core.placement


async def test_who_has_the_least_time_left_goes_first(start_placement: StartPlacement, fleet_buckets: Subjects) -> None:
    """However many patient ones came before."""
    loop = await start_placement()
    order: list[str] = []

    async def note(message: Any) -> None:
        order.append(message.name)

    loop.guarded = lambda callback: note
    now = int(time.time() * 1000)
    for name, fields in (
        ("silent", {}),
        ("patient", {"deadline_ms": 900, "expires_unix_ms": now + 900}),
        ("hasty", {"deadline_ms": 300, "expires_unix_ms": now + 300}),
        ("hasty too", {"deadline_ms": 400, "expires_unix_ms": now + 400}),
    ):
        await loop.desk.on_place(Asked(name, **fields))
    await until(lambda: len(order) == 4)
    assert order == ["hasty", "hasty too", "patient", "silent"]
