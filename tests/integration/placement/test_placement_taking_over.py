"""Replicas on a real NATS server: a repeat at any of them, what a draining worker hands over, a replica that goes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fake_fleet import MODEL, BareProducer, FakeWorker, StartPlacement, StartWorker

from kvfleet.placement.loop import QUEUE, PlacementLoop
from kvproto import codec
from kvproto.connection import Connection, Message
from kvproto.messages import (
    Capsule,
    Encoding,
    Load,
    Milestone,
    Milestones,
    Moved,
    Passed,
    PlaceRequest,
    Rates,
    State,
)
from kvproto.subjects import Subjects
from tests.support.waiting import LIMIT_S, until


async def knows(loop: PlacementLoop, *workers: str) -> None:
    await until(lambda: {w.id for w in loop.core.fleet.ready(MODEL).workers} == set(workers))


async def say(worker: FakeWorker, subjects: Subjects, request: str, *passed: Passed, attempt: int = 0) -> None:
    items = tuple(Milestone("public", request, attempt, one) for one in passed)
    data = codec.encode(Milestones(worker.id, worker.epoch, items))
    await worker.connection.publish(subjects.milestones(worker.id), data)


async def test_a_repeat_finds_the_request_whichever_replica_hears_of_it(
    start_placement: StartPlacement, start_worker: StartWorker, producer: BareProducer, fleet_buckets: Subjects
) -> None:
    workers = {name: await start_worker(name, "hold") for name in ("w1", "w2", "w3")}
    first = await start_placement("round_robin")
    await knows(first, *workers)
    inboxes = [await producer.ask(as_json=True, prompt="hi", request="mine")]
    await until(lambda: first.core.forwarding.forwarded_total == 1)
    (has,) = [worker for worker in workers.values() if worker.seen]
    loops = [first, await start_placement("round_robin")]
    await knows(loops[1], *workers)
    await say(has, fleet_buckets, "mine", Passed.ACCEPTED)
    await until(lambda: len(loops[1].core.repeats) == 1)
    while not all(len(loop.core.in_flight) for loop in loops):  # NATS chooses who hears of it
        assert len(inboxes) < 40
        inboxes.append(await producer.ask(as_json=True, prompt="hi", request="mine"))
        await until(lambda: len(has.seen) == len(inboxes))
        await until(lambda: sum(len(loop.core.in_flight) for loop in loops) == len(inboxes))
    assert {(request.attempt, request.sampling.seed) for _, request, _ in has.seen} == {
        (0, has.seen[0][1].sampling.seed)
    }
    assert len({request.inbox for _, request, _ in has.seen}) == len(inboxes)
    assert not any(worker.seen for worker in workers.values() if worker is not has)
    await has.kill()
    for inbox in inboxes:
        (frame,) = await producer.frames(inbox, as_json=True)
        assert (frame["code"], frame["retryable"]) == ("worker_lost", True)


async def test_what_a_draining_worker_hands_over_goes_on_and_the_producer_sees_one_end(
    start_placement: StartPlacement, start_worker: StartWorker, producer: BareProducer, fleet_buckets: Subjects
) -> None:
    loops = [await start_placement() for _ in range(2)]
    drained = await start_worker("w1", "hold")
    for loop in loops:
        await knows(loop, "w1")
    inbox = await producer.ask(as_json=True, prompt="hi", request="mine")
    await until(lambda: bool(drained.seen))
    await until(lambda: sum(len(loop.core.in_flight) for loop in loops) == 1)
    ((_, request, reply),) = drained.seen
    successor = await start_worker("w2", "hold")
    drained.lease.record = replace(drained.lease.record, state=State.DRAINING)
    for loop in loops:
        await knows(loop, "w2")
    capsule = Capsule("public", "w1", request)
    assert await drained.connection.request(fleet_buckets.placement_capsules(), codec.encode(capsule), LIMIT_S)
    await drained.answer(reply, Moved("mine", 0, 0))
    await until(lambda: sum(loop.core.forwarding.forwarded_total for loop in loops) == 2)
    assert not drained.cancelled
    await say(successor, fleet_buckets, "mine", Passed.ACCEPTED, Passed.STARTED, attempt=1)
    await until(lambda: bool(drained.cancelled))
    assert (drained.cancelled[0].request, drained.cancelled[0].attempt) == ("mine", 0)
    ((_, carried, answer),) = successor.seen
    assert (carried.attempt, carried.source, carried.handed_over, carried.inbox) == (1, "w1", True, request.inbox)
    assert (carried.encoding, carried.sampling) == (Encoding.JSON, request.sampling)
    await until(lambda: sum(len(loop.core.in_flight) for loop in loops) == 1)
    await successor.finish(carried, answer)
    frames = await producer.frames(inbox, as_json=True)
    assert [(f["type"], f["attempt"]) for f in frames] == [("tokens", 1), ("finished", 1)]
    await until(lambda: not any(len(loop.core.in_flight) for loop in loops))


async def test_a_replica_that_goes_hands_its_watches_to_another(
    start_placement: StartPlacement, start_worker: StartWorker, producer: BareProducer
) -> None:
    worker = await start_worker("w1", "hold")
    going = await start_placement()
    await knows(going, "w1")
    inboxes = [await producer.ask(as_json=True, prompt="hi") for _ in range(3)]
    await until(lambda: going.core.forwarding.forwarded_total == 3)
    staying = await start_placement()
    await knows(staying, "w1")
    await until(going.executor.has_others)
    await going.stop(grace_s=0.0)
    await until(lambda: len(staying.core.in_flight) == 3)
    await worker.kill()
    for inbox in inboxes:
        (frame,) = await producer.frames(inbox, as_json=True)
        assert frame["code"] == "worker_lost"
    assert len(staying.core.in_flight) == 0


async def test_a_replica_that_goes_lets_nothing_fall_that_no_worker_has(
    start_placement: StartPlacement, start_worker: StartWorker, producer: BareProducer, fleet_buckets: Subjects
) -> None:
    going = await start_placement()
    drained = await start_worker("w1", "hold")
    await knows(going, "w1")
    inboxes = [await producer.ask(as_json=True, prompt="hi", request=f"r{number}") for number in range(2)]
    await until(lambda: going.core.forwarding.forwarded_total == 2)
    drained.lease.record = replace(drained.lease.record, state=State.DRAINING)
    await until(lambda: not going.core.fleet.ready(MODEL).workers)

    async def hand_over(number: int) -> None:
        _, request, reply = drained.seen[number]
        data = codec.encode(Capsule("public", "w1", request))
        assert (await drained.connection.request(fleet_buckets.placement_capsules(), data, LIMIT_S)).data == b"taken"
        await drained.answer(reply, Moved(request.request, 0, 0))

    await hand_over(0)
    staying = await start_placement()
    await until(lambda: going.executor.has_others() and "w1" in staying.core.fleet.workers)
    await going.stop(grace_s=0.0)
    await until(lambda: len(staying.core.in_flight) == 2)  # one is parked there now, one is watched
    await hand_over(1)
    await start_worker("w2")
    for inbox in inboxes:
        tokens, end = await producer.frames(inbox, as_json=True)
        assert (tokens["attempt"], end["type"]) == (1, "finished")


@pytest.mark.parametrize("is_followed", [True, False])
async def test_a_replica_that_dies_with_what_it_was_handed_is_followed_by_another_or_the_producer_hears(
    start_placement: StartPlacement, start_worker: StartWorker, producer: BareProducer, requester: Connection,
    fleet_buckets: Subjects, is_followed: bool,
) -> None:  # fmt: skip
    going = await start_placement()
    drained = await start_worker("w1", "hold")
    await knows(going, "w1")
    inbox = await producer.ask(as_json=True, prompt="hi", request="r0")
    await until(lambda: going.core.forwarding.forwarded_total == 1)
    drained.lease.record = replace(drained.lease.record, state=State.DRAINING)
    await until(lambda: not going.core.fleet.ready(MODEL).workers)
    _, request, reply = drained.seen[0]
    data = codec.encode(Capsule("public", "w1", request))
    assert (await drained.connection.request(fleet_buckets.placement_capsules(), data, LIMIT_S)).data == b"taken"
    await drained.answer(reply, Moved(request.request, 0, 0))

    taken: list[bytes] = []

    async def take(message: Message) -> None:
        taken.append(message.data)
        await requester.publish(message.reply, b"taken")

    async def die(message: Message) -> None:
        if is_followed:
            await requester.subscribe(fleet_buckets.placement_capsules(), take, queue=QUEUE)
        await dying.unsubscribe()
        await requester.synced()

    dying = await requester.subscribe(fleet_buckets.placement_capsules(), die, queue=QUEUE)
    await requester.synced()
    await going.stop(grace_s=0.0)
    if is_followed:
        (carried,) = [codec.decode(Capsule, data) for data in taken]
        assert (carried.request.request, carried.request.inbox, carried.worker) == ("r0", request.inbox, "w1")
        assert not drained.cancelled
    else:
        (end,) = await producer.frames(inbox, as_json=True)
        assert (end["code"], end["retryable"]) == ("unavailable", True)
        await until(lambda: [one.attempt for one in drained.cancelled] == [0])


async def test_the_last_replica_that_goes_tells_the_producer(
    start_placement: StartPlacement, start_worker: StartWorker, producer: BareProducer
) -> None:
    loop = await start_placement()
    silent = await start_worker("w1", "silent")
    await knows(loop, "w1")
    inbox = await producer.ask(as_json=True, prompt="hi")
    await until(lambda: bool(silent.seen))
    await loop.stop(grace_s=0.0)
    (end,) = await producer.frames(inbox, as_json=True)
    assert (end["code"], end["retryable"]) == ("unavailable", True)
    await until(lambda: bool(silent.cancelled))


async def test_garbage_is_neither_taken_over_nor_answered(
    start_placement: StartPlacement, start_worker: StartWorker, requester: Connection, fleet_buckets: Subjects
) -> None:
    loop = await start_placement()
    await start_worker("w1")
    await knows(loop, "w1")
    for subject in (fleet_buckets.placement_capsules(), fleet_buckets.placement_watches()):
        for body in (b"", b"\x01\x80", b"\x81\xa6prompt\xc0", b"{}"):
            await requester.publish(subject, body, reply="_wrk.x.y")
    await until(lambda: loop.malformed_total == 8)
    assert len(loop.core.in_flight) == 0


async def test_an_overloaded_fleet_says_when_to_come_back(
    start_placement: StartPlacement, start_worker: StartWorker, requester: Connection, producer: BareProducer,
    fleet_buckets: Subjects,
) -> None:  # fmt: skip
    loop = await start_placement()
    worker = await start_worker("w1")
    worker.load, worker.rates = Load(waiting=9, queued_prefill_tokens=90_000), Rates(1000.0)
    await until(lambda: "w1" in loop.core.fleet.workers and loop.core.fleet.workers["w1"].load.waiting == 9)
    ask = codec.encode(PlaceRequest("r1", MODEL, (1, 2, 3), max_wait_s=30.0))
    reply = await requester.request(fleet_buckets.place("public", MODEL), ask, LIMIT_S)
    (failed,) = codec.decode_frames(reply.data)
    frame: dict[str, Any]
    (frame,) = await producer.generate(as_json=True, prompt="hi", deadline_ms=40_000)
    for code, retry_after_s, expected in (
        (failed.code, failed.retry_after_s, 60.0),  # type: ignore[union-attr]
        (frame["code"], frame["retry_after_s"], 50.0),
    ):
        assert code == "overloaded"
        assert expected - 5 < retry_after_s <= 60.0
    assert not worker.seen
    (frame,) = await producer.generate(as_json=True, prompt="hi")  # 60 s at most, unless it says otherwise
    assert frame["code"] == "overloaded"
    assert len(await producer.generate(as_json=True, prompt="hi", deadline_ms=100_000)) == 2
