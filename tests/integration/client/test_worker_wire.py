"""What a worker says beside its frames: events and digests an index can follow, snapshots, refusals, duplicates."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvfleet.worker.serve import request_desk
from kvfleet.worker.text.model_text import ModelText
from kvfleet.worker.tiers import looking_tiers
from kvproto import codec
from kvproto.block_hash import HASH_BYTES, Root, chain, digest_term
from kvproto.client import Client, Generation
from kvproto.connection import Message
from kvproto.messages import (
    Accepted,
    AdminCommand,
    AdminRequest,
    CancelRequest,
    Encoding,
    Failed,
    Finished,
    Frame,
    GenerateRequest,
    Heartbeat,
    Inspection,
    KvEvents,
    Sampling,
    Snapshot,
    SnapshotRequest,
    Tokens,
    WorkerStats,
)
from kvproto.subjects import Subjects
from tests.support.fake_fleet import FakeFleet, FakeWorker
from tests.support.kv_events import decode_events
from tests.support.waiting import LIMIT_S

SAMPLING = Sampling(max_tokens=30, temperature=0.0, ignore_eos=True)


@pytest.fixture
async def worker(nats_url: str, fleet_buckets: Subjects) -> AsyncIterator[FakeWorker]:
    fleet = FakeFleet(nats_url, fleet_buckets)
    yield await fleet.start("w0", blocks=24, fake_tokens_per_s=1000)
    await fleet.stop()


async def ask(client: Client, prompt: tuple[int, ...]) -> None:
    async with client.generate(Generation("demo", SAMPLING, prompt)) as stream:
        async for _ in stream:
            pass


async def settle(client: Client, worker: FakeWorker) -> Heartbeat:
    """A heartbeat that is newer than all events."""
    await asyncio.sleep(0.1)
    seen = asyncio.get_running_loop().time()
    view = client.members.view.workers["w0"]
    async with asyncio.timeout(LIMIT_S):
        while view.heartbeat is None or view.heartbeat_at < seen + 0.6:
            await asyncio.sleep(0.02)
    return view.heartbeat


async def snapshot(client: Client) -> tuple[list[bytes], Snapshot]:
    reply = await client.connection.request(client.subjects.blocks("w0"), codec.encode(SnapshotRequest()), LIMIT_S)
    part = codec.decode(Snapshot, reply.data)
    assert part.parts == 1
    raw = part.hashes
    return [raw[i : i + HASH_BYTES] for i in range(0, len(raw), HASH_BYTES)], part


async def test_events_digest_and_snapshot_tell_the_same(worker: FakeWorker, client: Client) -> None:
    heard: list[KvEvents] = []

    async def on_event(message: Message) -> None:
        heard.append(decode_events(message.data))

    await client.connection.subscribe(client.subjects.events_all(), on_event)
    await client.connection.synced()
    for i in range(12):  # more than 24 blocks hold: some are evicted
        await ask(client, tuple(range(i * 50, i * 50 + 40)))
    beat = await settle(client, worker)
    assert [event.seq for event in heard] == list(range(1, len(heard) + 1))
    assert {event.epoch for event in heard} == {worker.loop.record.epoch}
    held: set[bytes] = set()
    digest = 0
    removed = 0
    for event in heard:
        for change in event.changes:
            for run in change.runs:
                for one in run.hashes:
                    digest ^= digest_term(one)
                    (held.discard if change.removed else held.add)(one)
                    removed += change.removed
    assert removed > 0
    assert (beat.event_seq, beat.digest, beat.held) == (len(heard), digest, len(held))
    hashes, part = await snapshot(client)
    assert set(hashes) == held
    assert len(hashes) == len(held)
    assert (part.seq, part.digest, part.epoch) == (len(heard), digest, beat.epoch)


async def test_stats_inspection_and_kv(worker: FakeWorker, client: Client) -> None:
    prompt = tuple(range(40))
    await ask(client, prompt)
    stats = codec.decode(WorkerStats, await client.admin("w0", AdminRequest(AdminCommand.STATS)))
    assert stats.record.id == "w0"
    found = await client.admin("w0", AdminRequest(AdminCommand.INSPECT, tenant="public", ids=prompt))
    assert codec.decode(Inspection, found).cached_tokens == 40
    other = await client.admin("w0", AdminRequest(AdminCommand.INSPECT, tenant="other", ids=prompt))
    assert codec.decode(Inspection, other).cached_tokens == 0
    assert await client.admin("w0", AdminRequest(AdminCommand.READ_KV, tenant="public", ids=prompt))


def request(client: Client, **changes: object) -> GenerateRequest:
    base = GenerateRequest("r1", 0, "demo", SAMPLING, client.inbox.of("r1", 0), prompt_ids=tuple(range(40)))
    return replace(base, **changes)  # type: ignore[arg-type]


class Receiver:
    """Collects one request's frames from the client's inbox."""

    def __init__(self, client: Client, name: str = "r1") -> None:
        self.frames: list[Frame] = []
        self.no_responders = 0
        client.inbox.receivers[name] = self

    def on_frame(self, frame: Frame) -> None:
        self.frames.append(frame)

    def on_no_responders(self, attempt: int) -> None:
        self.no_responders += 1

    async def until(self, kind: type) -> Frame:
        async with asyncio.timeout(LIMIT_S):
            while not any(isinstance(frame, kind) for frame in self.frames):
                await asyncio.sleep(0.01)
        return next(frame for frame in self.frames if isinstance(frame, kind))


async def send(client: Client, body: GenerateRequest) -> None:
    subject = client.subjects.worker_generate("w0", "public")
    await client.connection.publish(subject, codec.encode(body), reply=client.inbox.of("r1", 0))


async def test_a_request_delivered_twice_runs_once(worker: FakeWorker, client: Client) -> None:
    receiver = Receiver(client)
    for _ in range(3):
        await send(client, request(client))
    await receiver.until(Finished)
    await asyncio.sleep(0.2)
    assert sum(isinstance(frame, Accepted) for frame in receiver.frames) == 3, "whoever waits for it has it"
    assert sum(isinstance(frame, Finished) for frame in receiver.frames) == 1
    tokens = [one for frame in receiver.frames if isinstance(frame, Tokens) for one in frame.ids]
    assert len(tokens) == 30
    assert worker.loop.requests.requests_total == 1


@pytest.mark.parametrize(
    ("changes", "code", "field"),
    [
        ({"expires_unix_ms": 1_000}, "unavailable", "expires_unix_ms"),
        ({"model": "other"}, "model_not_found", "model"),
        ({"inbox": "kvf.events.w0"}, "invalid_request", "inbox"),
        ({"inbox": "_ing.*"}, "invalid_request", "inbox"),
        ({"prompt_ids": ()}, "invalid_request", "prompt"),
        ({"prompt_ids": (), "prompt": ""}, "invalid_request", "prompt"),
    ],
)
async def test_refusals_go_to_whoever_waits_for_the_acknowledgement(
    worker: FakeWorker, client: Client, changes: dict[str, object], code: str, field: str
) -> None:
    receiver = Receiver(client)
    await send(client, request(client, **changes))
    failed = await receiver.until(Failed)
    assert isinstance(failed, Failed)
    assert (failed.code, failed.field) == (code, field)
    assert receiver.frames == [failed]


async def test_a_late_request_is_refused_after_the_fact(worker: FakeWorker, client: Client) -> None:
    """As after a reconnect, when what was buffered is delivered at last."""
    receiver = Receiver(client)
    await send(client, request(client, expires_unix_ms=int(time.time() * 1000) - 1, encoding=Encoding.FRAMES))
    assert isinstance(await receiver.until(Failed), Failed)
    assert worker.loop.requests.requests_total == 0


LONG_TEXT = "Good morrow, cousin. " * 300


async def test_a_cancel_of_one_attempt_leaves_the_others_tokenising(worker: FakeWorker, client: Client) -> None:
    receiver = Receiver(client)
    long = request(client, prompt_ids=(), prompt=LONG_TEXT, sampling=replace(SAMPLING, max_tokens=1))
    cancel = codec.encode(CancelRequest("r1", 0))
    await send(client, replace(long, attempt=1, inbox=client.inbox.of("r1", 1)))
    await client.connection.publish(client.subjects.worker_cancel("w0"), cancel)
    assert isinstance(await receiver.until(Accepted), Accepted)
    await receiver.until(Failed)  # more tokens than this worker's 24 blocks hold, said by the engine
    assert receiver.frames[-1].attempt == 1


async def test_what_is_long_is_hashed_beside_the_loop(
    nats_url: str, fleet_buckets: Subjects, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[tuple[int, str]] = []

    def noted(root: Root, ids: Sequence[int], block_size: int) -> list[bytes]:
        hashed.append((len(ids), threading.current_thread().name.partition("_")[0]))
        return chain(root, ids, block_size)

    monkeypatch.setattr(looking_tiers, "chain", noted)
    monkeypatch.setattr(looking_tiers, "LOOK_WORTH_S", 0.0)
    monkeypatch.setattr(request_desk, "INLINE_IDS", 64)
    fleet = FakeFleet(nats_url, fleet_buckets)
    await fleet.start("w0", sockets=tmp_path)
    async with asyncio.timeout(LIMIT_S):
        while not list(client.members.view.ready()):
            await asyncio.sleep(0.01)
        for tokens in (200, 40):
            await ask(client, tuple(range(tokens)))
        receiver = Receiver(client)
        sampling = replace(SAMPLING, max_tokens=230)
        await send(client, request(client, sampling=sampling, prompt_ids=(1, 2, 3), output_ids=tuple(range(200))))
        await receiver.until(Finished)
    await fleet.stop()
    assert hashed == [(200, "prepare"), (40, "MainThread"), (203, "prepare")]


async def test_a_text_that_breaks_the_tokenizer_fails_alone(worker: FakeWorker, client: Client) -> None:
    class Broken:
        def encode(self, text: str, add_special_tokens: bool) -> None:
            raise RuntimeError("a tokenizer's fault")

    own = worker.loop.parts.text
    assert isinstance(own, ModelText)
    own._tokenizer = Broken()
    for text in ("short", LONG_TEXT):
        receiver = Receiver(client)
        await send(client, request(client, prompt_ids=(), prompt=text))
        failed = await receiver.until(Failed)
        assert isinstance(failed, Failed)
        assert (failed.code, failed.field) == ("invalid_request", "prompt")
    assert worker.fatal == []
    await ask(client, tuple(range(40)))


@pytest.mark.parametrize("encoding", [Encoding.JSON, Encoding.MSGPACK])
async def test_a_producer_is_not_told_of_an_attempt_that_placement_took_back(
    worker: FakeWorker, client: Client, encoding: Encoding
) -> None:
    """It was accepted too late and runs elsewhere, on the same inbox: one of the two ends there, and it is not this."""
    watcher = Receiver(client)
    plain: list[bytes] = []

    async def on_plain(message: Message) -> None:
        plain.append(message.data)

    inbox = f"{client.connection.inbox_prefix}.plain"
    await client.connection.subscribe(inbox, on_plain)
    sampling = replace(SAMPLING, max_tokens=300)
    await send(client, request(client, inbox=inbox, encoding=encoding, watcher="p0", sampling=sampling))
    async with asyncio.timeout(LIMIT_S):
        while len(plain) < 3:
            await asyncio.sleep(0.01)
    await client.connection.publish(
        client.subjects.worker_cancel("w0"), codec.encode(CancelRequest("r1", 0, inbox)), reply=""
    )
    failed = await watcher.until(Failed)
    assert isinstance(failed, Failed)
    assert failed.code == "cancelled"
    await asyncio.sleep(0.1)
    assert not any(b"failed" in frame for frame in plain)


async def test_many_of_high_priority_at_once_send_no_more_away_than_they_are(
    nats_url: str, fleet_buckets: Subjects, client: Client
) -> None:
    """The engine answers none of them before all are here."""
    fleet = FakeFleet(nats_url, fleet_buckets)
    try:
        worker = await fleet.start("w9", slots=1, waiting=15, fake_tokens_per_s=100, max_producer_priority=5)
        desk, frames = worker.loop.requests, worker.loop.frames
        endless = replace(SAMPLING, max_tokens=3000)

        async def come(name: str, count: int, priority: int) -> None:
            for number in range(count):
                prompt = (ord(name[0]), number, *range(20))
                body = GenerateRequest(
                    f"{name}{number}", 0, "demo", endless, f"_prd.public.{name}", prompt_ids=prompt, priority=priority
                )
                data = codec.encode(body)
                await desk.on_generate(SimpleNamespace(subject="x.public", reply="", data=data, headers=None))

        await come("low", 16, 0)
        async with asyncio.timeout(LIMIT_S):
            while worker.thread.measured[0].waiting < 15:
                await asyncio.sleep(0.02)
        gate = threading.Event()
        worker.thread.post(lambda engine: gate.wait(2 * LIMIT_S) and None)
        await come("high", 6, 5)
        gate.set()
        assert frames.pending_sequences == 22
        async with asyncio.timeout(LIMIT_S):
            while frames.pending_sequences > 16:
                await asyncio.sleep(0.02)
        await asyncio.sleep(0.2)  # no more than those go
        left = [record.request for record in frames.running]
        assert sum(name.startswith("high") for name in left) == 6
        assert len(left) == 16
        assert desk.refused_total == 0
        for record in frames.running:
            worker.thread.cancel(record.request, record.attempt)
    finally:
        await fleet.stop()
