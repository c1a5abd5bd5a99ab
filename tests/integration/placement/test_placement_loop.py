"""Placement on a real NATS server: decisions, forwarding, lost workers, garbage."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_fleet import MODEL, BareProducer, StartPlacement, StartWorker, fleet_on

from kvfleet.placement.events import Action, Event, Tick
from kvfleet.placement.loop import PlacementLoop
from kvfleet.placement.producers import in_flight
from kvproto import codec
from kvproto.buckets import Bucket
from kvproto.connection import Connection
from kvproto.errors import CodecError, InvalidRequest, KvfleetError, NotFound, NoWorkers
from kvproto.hash_ring import ring_key
from kvproto.messages import Load, PlacementStats, PlaceRequest
from kvproto.subjects import Subjects
from kvproto.testing.fixtures import ProcessFactory
from tests.support.placement_answers import read_placement
from tests.support.waiting import LIMIT_S, until


async def knows(loop: PlacementLoop, *workers: str) -> None:
    await until(lambda: set(loop.core.fleet.workers) == set(workers))


async def place(requester: Connection, subjects: Subjects, *, tenant: str = "public", **fields: Any) -> Any:
    ask = PlaceRequest(**({"request": "r1", "model": MODEL, "prompt_ids": (1, 2, 3)} | fields))
    reply = await requester.request(subjects.place(tenant, MODEL), codec.encode(ask), LIMIT_S)
    return read_placement(reply.data)


class TestPlace:
    async def test_answers_with_the_rings_worker(
        self, start_placement: StartPlacement, start_worker: StartWorker, requester: Connection, fleet_buckets: Subjects
    ) -> None:
        for worker in ("w1", "w2", "w3"):
            await start_worker(worker)
        loop = await start_placement("ring")
        for i in range(20):
            placement = await place(requester, fleet_buckets, request=f"r{i}", prompt_ids=(i,), tenant="acme")
            key = ring_key("acme", session=None, prompt_ids=(i,))  # the tenant of the subject
            assert placement.worker == loop.subscriptions.members.ring(MODEL).owner(key)
            assert (placement.policy, placement.placement) == ("ring", loop.core.placement)
        assert (loop.core.decider.decisions_total, len(loop.core.bookings)) == (20, 20)
        assert loop.desk.decision_seconds_total / loop.desk.decisions_total < 0.005  # 50 us on an idle machine
        await until(lambda: len(loop.core.bookings) == 0)  # heartbeats take over

    async def test_errors_come_back_as_errors(
        self, start_placement: StartPlacement, start_worker: StartWorker, requester: Connection, fleet_buckets: Subjects
    ) -> None:
        loop = await start_placement()
        with pytest.raises(NoWorkers):
            await place(requester, fleet_buckets)
        worker = await start_worker("w1")
        await knows(loop, "w1")
        with pytest.raises(InvalidRequest) as error:
            await place(requester, fleet_buckets, policy="best")
        assert error.value.field == "policy"
        with pytest.raises(NotFound):
            await place(requester, fleet_buckets, policy="direct", worker="w9")
        with pytest.raises(InvalidRequest) as error:
            await place(requester, fleet_buckets, model="other")
        assert error.value.field == "model"
        await worker.stop()
        await knows(loop)
        with pytest.raises(NoWorkers):
            await place(requester, fleet_buckets)

    async def test_replicas_share_the_work_and_each_tells_its_part(
        self, start_placement: StartPlacement, start_worker: StartWorker, requester: Connection, fleet_buckets: Subjects
    ) -> None:
        await start_worker("w1")
        loops = [await start_placement(), await start_placement()]
        for i in range(40):
            await place(requester, fleet_buckets, request=f"r{i}")
        assert sum(loop.core.decider.decisions_total for loop in loops) == 40
        assert all(loop.core.decider.decisions_total for loop in loops)
        told: list[PlacementStats] = []

        async def hear(message: Any) -> None:
            told.append(codec.decode(PlacementStats, message.data))

        await requester.subscribe("_ing.test.stats", hear)
        await requester.publish(fleet_buckets.placement_stats(), b"", reply="_ing.test.stats")
        await until(lambda: len(told) == 2)
        assert {t.placement for t in told} == {loop.core.placement for loop in loops}
        assert all(t.workers == ("w1",) for t in told)

    async def test_reported_load_counts(
        self, start_placement: StartPlacement, start_worker: StartWorker, requester: Connection, fleet_buckets: Subjects
    ) -> None:
        loop = await start_placement()
        workers = {w: await start_worker(w) for w in ("w1", "w2")}
        await knows(loop, "w1", "w2")
        first = (await place(requester, fleet_buckets, session="s")).worker
        workers[first].load = Load(waiting=30)
        await until(lambda: loop.core.fleet.workers[first].load.waiting == 30)
        assert (await place(requester, fleet_buckets, request="r2", session="s")).worker != first


@pytest.mark.parametrize("as_json", [True, False], ids=["json", "msgpack"])
class TestGenerate:
    async def test_a_worker_answers_the_producer_itself(
        self, as_json: bool, start_placement: StartPlacement, start_worker: StartWorker, producer: BareProducer
    ) -> None:
        loop = await start_placement()
        worker = await start_worker("w1")
        await knows(loop, "w1")
        frames = await producer.generate(as_json=as_json, tenant="acme", prompt="hi", max_tokens=2, temperature=0)
        assert [f["type"] for f in frames] == ["tokens", "finished"]
        assert frames[0]["ids"] == [5, 6]
        ((tenant, request, reply),) = worker.seen
        assert tenant == "acme"
        assert (request.prompt, request.watcher, request.attempt) == ("hi", loop.core.placement, 0)
        assert reply.startswith(f"{loop.connection.inbox_prefix}.r.{request.request}.")
        await until(lambda: len(loop.core.in_flight) == 0)
        forwarding = loop.core.forwarding
        assert (forwarding.forwarded_total, forwarding.producer_failures_total, len(loop.core.bookings)) == (1, 0, 0)

    async def test_a_bad_field_is_named_in_kind(
        self, as_json: bool, start_placement: StartPlacement, start_worker: StartWorker, producer: BareProducer
    ) -> None:
        loop = await start_placement()
        await start_worker("w1", "reject")
        await knows(loop, "w1")
        (frame,) = await producer.generate(as_json=as_json, prompt="", request="mine")
        assert (frame["type"], frame["code"], frame["field"]) == ("failed", "invalid_request", "prompt")
        assert frame["request"] == "mine"
        (frame,) = await producer.generate(as_json=as_json, prompt="x", max_tokens=0)
        assert frame["field"] == "max_tokens"
        (frame,) = await producer.generate(as_json=as_json, prompt="x")  # the worker's own refusal
        assert (frame["code"], frame.get("retryable", False)) == ("context_length_exceeded", False)
        assert len(loop.core.in_flight) == len(loop.core.bookings) == 0


class TestLostWorker:
    async def test_the_producer_hears_of_a_kill(
        self, start_placement: StartPlacement, start_worker: StartWorker, producer: BareProducer
    ) -> None:
        """Nothing tells but silence: no system account, and no other request runs into it."""
        loop = await start_placement()
        worker = await start_worker("w1", "hold")
        await knows(loop, "w1")
        inboxes = [(as_json, await producer.ask(as_json=as_json, prompt="hi")) for as_json in (True, False)]
        await until(lambda: loop.core.forwarding.forwarded_total == 2)
        await worker.kill()
        killed = time.monotonic()
        await until(lambda: len(loop.core.in_flight) == 0)
        assert time.monotonic() - killed < 4.0
        for as_json, inbox in inboxes:
            (frame,) = await producer.frames(inbox, as_json=as_json)
            assert (frame["type"], frame["code"], frame["retryable"]) == ("failed", "worker_lost", True)
        assert (len(loop.core.bookings), loop.core.forwarding.producer_failures_total) == (0, 2)

    async def test_with_a_system_account_at_once(
        self, nats_process: ProcessFactory, tmp_path: Path, namespace: str
    ) -> None:
        config = tmp_path / "nats.conf"
        config.write_text(
            """
            jetstream: enabled
            accounts {
              FLEET { jetstream: enabled, users: [ { user: fleet, password: fleet } ] }
              SYS { users: [ { user: sys, password: sys } ] }
            }
            system_account: SYS
            no_auth_user: fleet
            """
        )
        server = nats_process(config)
        async with fleet_on(server.url, Subjects(namespace), system_user="sys") as fleet:
            worker = await fleet.start_worker("w1", "hold")
            await knows(fleet.loop, "w1")
            inbox = await fleet.producer.ask(as_json=True, prompt="hi")
            await until(lambda: fleet.loop.core.forwarding.forwarded_total == 1)
            await worker.kill()
            killed = time.monotonic()
            await until(lambda: len(fleet.loop.core.in_flight) == 0 and not fleet.loop.core.fleet.workers)
            assert time.monotonic() - killed < 2.0  # without the system account it takes as long to be noticed
            (frame,) = await fleet.producer.frames(inbox, as_json=True)
            assert frame["code"] == "worker_lost"
            cut = await fleet.start_worker("w2", "hold")
            await knows(fleet.loop, "w2")
            inbox = await fleet.producer.ask(as_json=True, prompt="hi")
            await until(lambda: fleet.loop.core.forwarding.forwarded_total == 2)
            cut.connection.raw._transport.close()  # its connection alone: it comes back by itself
            await until(lambda: cut.connection.reconnects_total == 1)
            await asyncio.sleep(1.5)  # longer than the grace
            assert len(fleet.loop.core.in_flight) == 1
            ((_, request, reply),) = cut.seen
            await cut.finish(request, reply)
            assert [f["type"] for f in await fleet.producer.frames(inbox, as_json=True)] == ["tokens", "finished"]

    async def test_an_outage_of_nats_loses_no_accepted_request(
        self, nats_process: ProcessFactory, namespace: str
    ) -> None:
        server = nats_process()
        async with fleet_on(server.url, Subjects(namespace)) as fleet:
            worker = await fleet.start_worker("w1", "hold")
            await knows(fleet.loop, "w1")
            inbox = await fleet.producer.ask(as_json=True, prompt="hi")
            await until(lambda: fleet.loop.core.forwarding.forwarded_total == 1)
            await asyncio.to_thread(server.kill)
            await asyncio.sleep(3.6)  # longer than any sign of life stays fresh
            await asyncio.to_thread(server.start)
            await until(lambda: worker.connection.is_connected and fleet.loop.connection.is_connected)
            await asyncio.sleep(0.5)
            assert len(fleet.loop.core.in_flight) == 1
            ((_, request, reply),) = worker.seen
            await worker.finish(request, reply)
            await until(lambda: len(fleet.loop.core.in_flight) == 0)
            assert [f["type"] for f in await fleet.producer.frames(inbox, as_json=True)] == ["tokens", "finished"]
            assert fleet.loop.core.forwarding.producer_failures_total == 0

    async def test_an_outage_while_a_worker_was_asked_does_not_have_another_asked(
        self, nats_process: ProcessFactory, namespace: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Both would stream to the producer, and it would see two ends."""
        monkeypatch.setattr(in_flight, "ACKNOWLEDGE_S", 1.0)
        server = nats_process()
        async with fleet_on(server.url, Subjects(namespace)) as fleet:
            first, second = [await fleet.start_worker(worker, "silent") for worker in ("w1", "w2")]
            await knows(fleet.loop, "w1", "w2")
            await fleet.producer.ask(as_json=True, prompt="hi")
            await until(lambda: bool(first.seen or second.seen))
            asked, other = (first, second) if first.seen else (second, first)
            await asyncio.to_thread(server.kill)
            await until(lambda: not asked.connection.is_connected)
            ((_, request, reply),) = asked.seen
            await asyncio.sleep(1.0)
            await asyncio.to_thread(server.start)
            await until(lambda: len(asked.seen) == 2)  # what it answered may be lost
            assert asked.seen[1] == (asked.seen[0][0], replace(request, again=True), reply)
            await asked.accept(request, reply)
            await until(lambda: fleet.loop.core.forwarding.forwarded_total == 1)
            assert (other.seen, asked.cancelled, len(fleet.loop.core.in_flight)) == ([], [], 1)

    async def test_a_server_that_hangs_says_nothing_of_workers(
        self, nats_process: ProcessFactory, namespace: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        server = nats_process()
        async with fleet_on(server.url, Subjects(namespace)) as fleet:
            heard: list[Tick] = []
            handle = fleet.loop.core.handle

            def listen(event: Event, now: float) -> list[Action]:
                heard.extend([event] if isinstance(event, Tick) else [])
                return handle(event, now)

            monkeypatch.setattr(fleet.loop.core, "handle", listen)
            await until(lambda: bool(heard))
            assert not any(tick.disconnected for tick in heard)
            server.hang()
            await until(lambda: heard[-1].disconnected)
            server.wake()
            await until(lambda: not heard[-1].disconnected)


class TestNextWorker:
    @pytest.mark.parametrize("bad", ["deaf", "silent", "refuse"])
    async def test_takes_what_the_first_does_not(
        self, bad: str, start_placement: StartPlacement, start_worker: StartWorker, producer: BareProducer
    ) -> None:
        loop = await start_placement("round_robin")
        first = await start_worker("w1", bad)
        second = await start_worker("w2")
        await knows(loop, "w1", "w2")
        began = time.monotonic()
        inbox = await producer.ask(as_json=True, prompt="hi")
        await until(lambda: bool(second.seen))
        took = time.monotonic() - began
        assert took < 0.3
        frames = await producer.frames(inbox, as_json=True)
        assert [(f["type"], f["attempt"]) for f in frames] == [("tokens", 1), ("finished", 1)]
        if bad == "deaf":  # a 503 is followed by a ping, and a second 503 by the end of the record
            await knows(loop, "w2")
        if bad == "silent":  # it wakes
            _, request, reply = first.seen[0]
            await first.accept(request, reply)
            await until(lambda: bool(first.cancelled))
            assert (first.cancelled[0].request, first.cancelled[0].attempt) == (request.request, 0)
        assert len(loop.core.in_flight) == 0

    async def test_nobody_takes_it(
        self, start_placement: StartPlacement, start_worker: StartWorker, producer: BareProducer
    ) -> None:
        loop = await start_placement()
        for worker, behaviour in (("w1", "silent"), ("w2", "refuse")):
            await start_worker(worker, behaviour)
        await knows(loop, "w1", "w2")
        (frame,) = await producer.generate(as_json=True, prompt="hi")
        assert (frame["code"], frame["retryable"]) == ("no_workers", True)
        assert len(loop.core.in_flight) == len(loop.core.bookings) == 0


class TestRestart:
    async def test_what_the_former_life_accepted_is_lost_once(
        self, start_placement: StartPlacement, start_worker: StartWorker, producer: BareProducer
    ) -> None:
        loop = await start_placement()
        worker = await start_worker("w1", "hold")
        await knows(loop, "w1")
        inbox = await producer.ask(as_json=True, prompt="hi")
        await until(lambda: loop.core.forwarding.forwarded_total == 1)
        await worker.kill()
        await asyncio.sleep(0.01)  # epochs of two lives differ by a millisecond at least
        await start_worker("w1")
        (frame,) = await producer.frames(inbox, as_json=True, timeout_s=1.0)
        assert frame["code"] == "worker_lost"
        assert len(await producer.generate(as_json=True, prompt="hi")) == 2


class TestGarbage:
    async def test_leaves_nothing_behind_and_hurts_nobody(
        self,
        start_placement: StartPlacement,
        start_worker: StartWorker,
        requester: Connection,
        producer: BareProducer,
        fleet_buckets: Subjects,
    ) -> None:
        loop = await start_placement()
        await start_worker("w1")
        await knows(loop, "w1")
        await until(lambda: len(loop.tasks) == 1)  # the lease
        bodies = [b"", b"\x01", b"{", b"\x01\x80", b"\x81\xa6prompt\xc0", *(os.urandom(n) for n in (3, 40, 400))]
        subjects = [
            fleet_buckets.place("public", MODEL),
            fleet_buckets.generate("public", MODEL),
            f"{fleet_buckets.namespace}.place.a%b.demo",
            f"{fleet_buckets.namespace}.generate.public.m$x",
        ]
        for subject in subjects:
            for body in bodies:
                reply = await requester.request(subject, body, LIMIT_S) if ".place." in subject else None
                if reply is not None:
                    with pytest.raises(KvfleetError) as error:
                        read_placement(reply.data)
                    assert not isinstance(error.value, CodecError) or error.value.message
                else:
                    message = await producer.nc.request(subject, body, timeout=LIMIT_S)
                    assert message.data
        silent = [
            fleet_buckets.heartbeat("w1"),
            fleet_buckets.heartbeat("w9"),
            fleet_buckets.placement_stats(),
            f"{loop.connection.inbox_prefix}.r.r1",
            f"{loop.connection.inbox_prefix}.r.r1.0",
            f"{loop.connection.inbox_prefix}.r.r1.x.y.z",
            *subjects[:2],
        ]
        for subject in silent:
            for body in bodies:
                await requester.publish(subject, body)
                await requester.publish(subject, body, reply=fleet_buckets.worker_cancel("w1"))
        bucket = await Bucket.open(requester, fleet_buckets.members_bucket)
        for key in ("worker.w7", "placement.p7", "nonsense.x"):
            await bucket.update(key, os.urandom(40), 0)
        assert [f["type"] for f in await producer.generate(as_json=True, prompt="hi")] == ["tokens", "finished"]
        assert (await place(requester, fleet_buckets)).worker == "w1"
        await until(lambda: len(loop.tasks) == 1)
        assert len(loop.core.in_flight) == 0
        assert loop.malformed_total > 0
        assert loop.ignored_total >= 2 * 2 * len(bodies)
        assert loop.internal_errors_total == 0

    async def test_a_prompt_that_nats_cannot_carry_on_is_refused(
        self, start_placement: StartPlacement, start_worker: StartWorker, producer: BareProducer
    ) -> None:
        loop = await start_placement()
        worker = await start_worker("w1")
        await knows(loop, "w1")
        (frame,) = await producer.generate(as_json=True, prompt="x" * (1024 * 1024 - 150))
        assert (frame["code"], frame["field"]) == ("payload_too_large", "prompt")
        assert not worker.seen
        assert len(loop.core.in_flight) == 0


class TestStop:
    async def test_finishes_what_it_accepted_and_takes_no_more(
        self,
        start_placement: StartPlacement,
        start_worker: StartWorker,
        producer: BareProducer,
        requester: Connection,
        fleet_buckets: Subjects,
    ) -> None:
        loop = await start_placement()
        worker = await start_worker("w1", "hold")
        await knows(loop, "w1")
        bucket = await Bucket.open(requester, fleet_buckets.members_bucket)
        assert (await bucket.get(f"placement.{loop.core.placement}")).value is not None
        inbox = await producer.ask(as_json=True, prompt="hi")
        await until(lambda: loop.core.forwarding.forwarded_total == 1)
        stopping = asyncio.create_task(loop.stop(grace_s=3.0))
        await asyncio.sleep(0.3)
        assert not stopping.done()
        assert (await bucket.get(f"placement.{loop.core.placement}")).value is None
        with pytest.raises(KvfleetError):  # nobody listens
            await place(requester, fleet_buckets)
        ((_, request, reply),) = worker.seen
        await worker.finish(request, reply)
        await asyncio.wait_for(stopping, 1.0)
        assert [f["type"] for f in await producer.frames(inbox, as_json=True)] == ["tokens", "finished"]
        assert not loop.tasks
        assert not loop.connection.subscriptions
