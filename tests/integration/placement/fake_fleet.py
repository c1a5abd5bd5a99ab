"""Small workers that speak the wire without an engine, and a bare producer, for placement's tests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgpack
import nats

from kvfleet.placement.config import PlacementConfig
from kvfleet.placement.loop import PlacementLoop, PlacementParts
from kvproto import codec
from kvproto.buckets import Bucket, ensure_buckets
from kvproto.connection import JSON_HEADER, Connection, Message, is_no_responders
from kvproto.ids import new_epoch, new_process_id
from kvproto.members import Lease
from kvproto.messages import (
    Accepted,
    CancelRequest,
    Encoding,
    Failed,
    Finished,
    FinishReason,
    Frame,
    GenerateRequest,
    Heartbeat,
    Load,
    MemberRecord,
    Rates,
    Role,
    State,
    Tokens,
    WorkerRecord,
)
from kvproto.subjects import PLACEMENT_INBOX, WORKER_INBOX, Subjects, inbox_prefix
from tests.support.waiting import LIMIT_S

MODEL = "demo"

StartPlacement = Callable[..., Awaitable[PlacementLoop]]
StartWorker = Callable[..., Awaitable["FakeWorker"]]


class FakeWorker:
    """Takes requests as `behaviour` says.

    serve: accepts, streams two tokens, finishes; hold: accepts and says no more; silent: hears and says nothing;
    refuse: a retryable Failed; reject: one that no worker would lift; deaf: does not even listen.
    """

    def __init__(self, url: str, subjects: Subjects, worker: str, behaviour: str = "serve") -> None:
        self.id = worker
        self.behaviour = behaviour
        self.seen: list[tuple[str, GenerateRequest, str]] = []  # tenant, request, reply
        self.cancelled: list[CancelRequest] = []
        self.load = Load()
        self.rates = Rates()
        self.epoch = new_epoch()
        self._url = url
        self._subjects = subjects
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> FakeWorker:
        prefix = inbox_prefix(WORKER_INBOX, self.id)
        self.connection = await Connection.open(self._url, name=f"worker-{self.id}", inbox_prefix=prefix)
        record = WorkerRecord(
            self.id, self.epoch, "", State.READY, MODEL, "", "localhost", 1, codec.supported_versions(), attaches=True
        )
        subscribe = self.connection.subscribe
        if self.behaviour != "deaf":
            await subscribe(self._subjects.worker_generate_all(self.id), self._on_generate)
            await subscribe(self._subjects.worker_admin(self.id), self._on_admin)
        await subscribe(self._subjects.worker_cancel(self.id), self._on_cancel)
        await self.connection.synced()
        self.lease = Lease(await Bucket.open(self.connection, self._subjects.members_bucket), record)
        await self.lease.register()
        self._tasks = [asyncio.create_task(self.lease.run(lambda error: None)), asyncio.create_task(self._beat())]
        return self

    async def _beat(self) -> None:
        while True:
            beat = Heartbeat(self.id, self.epoch, self.lease.record.state, self.load, self.rates)
            await self.connection.publish(self._subjects.heartbeat(self.id), codec.encode(beat))
            await asyncio.sleep(0.5)

    async def _on_generate(self, message: Message) -> None:
        request = codec.decode(GenerateRequest, message.data)
        self.seen.append((message.subject.rsplit(".", 1)[-1], request, message.reply))
        if self.behaviour in ("refuse", "reject"):
            retryable = self.behaviour == "refuse"
            code = "draining" if retryable else "context_length_exceeded"
            await self.answer(message.reply, Failed(request.request, request.attempt, code, "no", retryable))
        if self.behaviour in ("serve", "hold"):
            await self.accept(request, message.reply)
        if self.behaviour == "serve":
            await self.finish(request, message.reply)

    async def accept(self, request: GenerateRequest, reply: str) -> None:
        await self.answer(reply, Accepted(request.request, request.attempt, self.id, self.epoch))

    async def finish(self, request: GenerateRequest, reply: str) -> None:
        await self._stream(request, Tokens(request.request, request.attempt, 0, 0, (5, 6), ("a", "b")))
        end = Finished(request.request, request.attempt, FinishReason.STOP, 3, 2, worker=self.id)
        await self._stream(request, end)
        await self.answer(reply, end)

    async def answer(self, reply: str, frame: Frame) -> None:
        await self.connection.publish(reply, codec.encode_frames([frame]))

    async def _stream(self, request: GenerateRequest, frame: Frame) -> None:
        data = codec.encode_plain_frame(frame, as_json=request.encoding is Encoding.JSON)
        await self.connection.publish(request.inbox, data)

    async def _on_admin(self, message: Message) -> None:
        await self.connection.publish(message.reply, b"alive")

    async def _on_cancel(self, message: Message) -> None:
        self.cancelled.append(codec.decode(CancelRequest, message.data))

    async def kill(self) -> None:
        """As SIGKILL would: the socket closes, nothing is said."""
        for task in self._tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await self.connection.close()

    async def stop(self) -> None:
        await self.lease.release()
        await self.kill()


class BareProducer:
    """Plain nats-py: what a producer in any language does."""

    def __init__(self, nc: Any, subjects: Subjects) -> None:
        self.nc = nc
        self.subjects = subjects

    @classmethod
    async def open(cls, url: str, subjects: Subjects) -> BareProducer:
        return cls(await nats.connect(url, inbox_prefix=b"_prd.public.test"), subjects)

    async def generate(
        self, *, as_json: bool, tenant: str = "public", timeout_s: float = LIMIT_S, **body: Any
    ) -> list[dict[str, Any]]:
        """All frames up to and including the terminal one, and whatever follows within 0.3 s."""
        inbox = await self.ask(as_json=as_json, tenant=tenant, **body)
        return await self.frames(inbox, as_json=as_json, timeout_s=timeout_s)

    async def ask(self, *, as_json: bool, tenant: str = "public", **body: Any) -> Any:
        reply = f"_prd.{tenant}.test.{uuid.uuid4().hex}"
        inbox = await self.nc.subscribe(reply)
        data = json.dumps(body).encode() if as_json else msgpack.packb(body)
        subject = self.subjects.generate(tenant, MODEL)
        await self.nc.publish(subject, data, reply=reply, headers=JSON_HEADER if as_json else None)
        return inbox

    async def frames(self, inbox: Any, *, as_json: bool, timeout_s: float = LIMIT_S) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        while True:
            ended = bool(found) and found[-1]["type"] in ("finished", "failed", "moved")
            try:
                message = await inbox.next_msg(0.3 if ended else timeout_s)
            except nats.errors.TimeoutError:
                await inbox.unsubscribe()
                return found
            assert not is_no_responders(message)
            found.append(json.loads(message.data) if as_json else msgpack.unpackb(message.data))


async def open_placement(
    url: str,
    subjects: Subjects,
    *,
    policy: str = "bounded_ring",
    system: Connection | None = None,
    fleet_key: bytes | None = None,
) -> tuple[PlacementLoop, Connection]:
    """A replica that has not started yet, and its connection."""
    member = new_process_id()
    prefix = inbox_prefix(PLACEMENT_INBOX, member)
    connection = await Connection.open(url, name=f"placement-{member}", inbox_prefix=prefix)
    record = MemberRecord(
        member, new_epoch(), "", State.READY, Role.PLACEMENT, "localhost", 1, codec.supported_versions()
    )
    loop = PlacementLoop(
        connection,
        subjects,
        record,
        PlacementConfig(policy=policy),
        chance=random.Random(1).random,
        fleet_key=fleet_key,
        parts=PlacementParts(system=system),
    )
    return loop, connection


@dataclass
class OwnFleet:
    """Placement, workers and a producer on a server of the test's own."""

    url: str
    subjects: Subjects
    loop: PlacementLoop
    producer: BareProducer
    workers: list[FakeWorker]

    async def start_worker(self, worker: str, behaviour: str = "serve") -> FakeWorker:
        self.workers.append(await FakeWorker(self.url, self.subjects, worker, behaviour).start())
        return self.workers[-1]


@contextlib.asynccontextmanager
async def fleet_on(url: str, subjects: Subjects, *, system_user: str | None = None) -> AsyncIterator[OwnFleet]:
    """Buckets, a started replica and a producer; everything ends with the block."""
    system = None
    if system_user is not None:
        system = await Connection.open(
            url, name="placement-sys", inbox_prefix="_plc.sys", user=system_user, password=system_user
        )
    loop, connection = await open_placement(url, subjects, system=system)
    await ensure_buckets(connection, subjects)
    await loop.start()
    fleet = OwnFleet(url, subjects, loop, await BareProducer.open(url, subjects), [])
    try:
        yield fleet
        assert loop.internal_errors_total == 0
    finally:
        for worker in fleet.workers:
            await worker.kill()
        await fleet.producer.nc.close()
        await loop.stop(grace_s=0)
        await connection.close()
        if system is not None:
            await system.close()
