"""What all placements hear of a worker's requests, however they end, and the snapshot they pull of its blocks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace

import pytest

from kvproto import codec
from kvproto.block_hash import TenantRoots, chain
from kvproto.client import Client
from kvproto.connection import Message
from kvproto.messages import (
    AdminCommand,
    AdminRequest,
    CancelRequest,
    Continuation,
    FinishReason,
    GenerateRequest,
    Milestone,
    Milestones,
    Passed,
    Sampling,
    Snapshot,
    SnapshotRequest,
    Tier,
    WorkerStats,
)
from kvproto.subjects import Subjects
from tests.support.fake_fleet import FakeFleet, FakeWorker
from tests.support.waiting import LIMIT_S

SAMPLING = Sampling(max_tokens=30, temperature=0.0, ignore_eos=True)
ENDLESS = replace(SAMPLING, max_tokens=4000)
PROMPT = tuple(range(40))


class Placement:
    """Hears all milestones of the fleet and asks workers for snapshots."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.messages: list[Milestones] = []

    async def on_milestones(self, message: Message) -> None:
        assert message.subject == self.client.subjects.milestones("w0")
        self.messages.append(codec.decode(Milestones, message.data))

    def of(self, request: str, attempt: int = 0) -> list[Milestone]:
        items = [item for message in self.messages for item in message.items]
        return [item for item in items if (item.request, item.attempt) == (request, attempt)]

    async def until(self, request: str, passed: Passed = Passed.ENDED, attempt: int = 0) -> list[Milestone]:
        """All that was said of an attempt up to there; and it says no more if that was its end."""
        async with asyncio.timeout(LIMIT_S):
            while not any(item.passed is passed for item in self.of(request, attempt)):
                await asyncio.sleep(0.005)
        if passed is Passed.ENDED:
            await asyncio.sleep(0.1)
        return self.of(request, attempt)

    async def snapshot(self, tier: Tier | None = None) -> list[Snapshot]:
        reply = await self.client.connection.request(
            self.client.subjects.blocks("w0"), codec.encode(SnapshotRequest(tier)), 2.0
        )
        part = codec.decode(Snapshot, reply.data)
        assert (part.part, part.parts) == (0, 1)
        return [part]


@pytest.fixture
async def client(nats_url: str, fleet_buckets: Subjects) -> AsyncIterator[Client]:
    """A producer's of the tenant that asks: nobody else's inbox gets its frames."""
    client = await Client.open(nats_url, tenant="acme", namespace=fleet_buckets.namespace)
    yield client
    await client.close()


@pytest.fixture
async def placement(client: Client) -> Placement:
    placement = Placement(client)
    await client.connection.subscribe(client.subjects.milestones_all(), placement.on_milestones)
    await client.connection.synced()
    return placement


@pytest.fixture
async def worker(fleet: FakeFleet) -> FakeWorker:
    return await fleet.start("w0", blocks=128, fake_tokens_per_s=1000, fleet_key="secret")


Send = Callable[..., Awaitable[None]]


@pytest.fixture
def send(client: Client) -> Send:
    """`await send(name, **changes)`: one attempt of the tenant acme."""

    async def send(name: str, **changes: object) -> None:
        base = GenerateRequest(name, 0, "demo", SAMPLING, client.inbox.of(name, 0), prompt_ids=PROMPT)
        body = replace(base, **changes)  # type: ignore[arg-type]
        subject = client.subjects.worker_generate("w0", "acme")
        await client.connection.publish(subject, codec.encode(body), reply=client.inbox.of(name, body.attempt))

    return send


def names(said: list[Milestone]) -> list[Passed]:
    return [item.passed for item in said]


async def test_a_request_that_finishes_and_one_that_finds_it_cached(
    worker: FakeWorker, placement: Placement, send: Send
) -> None:
    await send("r1")
    said = await placement.until("r1")
    assert names(said) == [Passed.ACCEPTED, Passed.STARTED, Passed.FIRST_TOKEN, Passed.ENDED]
    assert {item.tenant for item in said} == {"acme"}
    assert (said[1].prompt_tokens, said[1].cached) == (40, {})
    assert (said[3].output_tokens, said[3].code) == (30, None)
    times = [item.seconds for item in said]
    assert times[0] == 0.0
    assert times == sorted(times)
    assert times[3] - times[2] > 0.025, "30 tokens at 1,000 a second"
    await send("r1", attempt=1)
    again = await placement.until("r1", attempt=1)
    assert again[1].cached == {"device": 39}
    assert {(message.worker, message.epoch) for message in placement.messages} == {("w0", worker.loop.record.epoch)}


async def test_a_request_that_fails(worker: FakeWorker, placement: Placement, send: Send) -> None:
    await send("long", prompt_ids=tuple(range(100)) * 5, sampling=replace(SAMPLING, max_tokens=100_000))
    said = await placement.until("long")
    assert names(said) == [Passed.ACCEPTED, Passed.ENDED], "the engine does not take it"
    assert said[1].code == "context_length_exceeded"


async def test_a_request_that_is_cancelled(
    worker: FakeWorker, placement: Placement, send: Send, client: Client
) -> None:
    await send("r1", sampling=ENDLESS)
    await placement.until("r1", Passed.FIRST_TOKEN)
    await client.connection.publish(client.subjects.worker_cancel("w0"), codec.encode(CancelRequest("r1")))
    said = await placement.until("r1")
    assert names(said) == [Passed.ACCEPTED, Passed.STARTED, Passed.FIRST_TOKEN, Passed.ENDED]
    assert said[3].code == "cancelled"
    assert 0 < said[3].output_tokens < 4000


async def test_a_request_past_its_deadline(worker: FakeWorker, placement: Placement, send: Send) -> None:
    await send("r1", sampling=ENDLESS, deadline_ms=200)
    said = await placement.until("r1")
    assert names(said) == [Passed.ACCEPTED, Passed.STARTED, Passed.FIRST_TOKEN, Passed.ENDED]
    assert said[3].code == "deadline_exceeded"
    assert said[3].seconds >= 0.2


async def test_requests_of_a_worker_that_is_drained(worker: FakeWorker, placement: Placement, send: Send) -> None:
    for at in range(3):
        await send(f"r{at}", sampling=ENDLESS)
    for at in range(3):
        await placement.until(f"r{at}", Passed.FIRST_TOKEN)
    await worker.stop()
    for at in range(3):
        said = await placement.until(f"r{at}")
        assert names(said) == [Passed.ACCEPTED, Passed.STARTED, Passed.FIRST_TOKEN, Passed.ENDED]
        assert said[3].code == "moved"
        assert said[3].output_tokens > 0


async def test_requests_of_an_engine_that_crashes(worker: FakeWorker, placement: Placement, send: Send) -> None:
    def crash(slices: object) -> None:
        raise RuntimeError("broken kernel")

    await send("r1", sampling=ENDLESS)
    await placement.until("r1", Passed.FIRST_TOKEN)
    worker.thread.engine.runner.run = crash  # type: ignore[method-assign, assignment]
    said = await placement.until("r1")
    assert (said[-1].passed, said[-1].code) == (Passed.ENDED, "engine_failure")
    assert worker.fatal == ["the engine failed: RuntimeError: broken kernel"]


async def test_a_worker_that_cannot_take_its_engines_results(
    worker: FakeWorker, placement: Placement, send: Send
) -> None:
    def crash(*_: object) -> None:
        raise RuntimeError("broken frames")

    await send("r1", sampling=ENDLESS)
    await placement.until("r1", Passed.FIRST_TOKEN)
    worker.loop.frames.add = crash  # type: ignore[method-assign, assignment]
    async with asyncio.timeout(LIMIT_S):
        while not worker.fatal:
            await asyncio.sleep(0.005)
    assert worker.fatal == ["the engine failed: RuntimeError: broken frames"]


async def test_a_request_of_which_only_the_end_was_lost(worker: FakeWorker, placement: Placement, send: Send) -> None:
    ended = (Continuation((1, 2), 2, FinishReason.STOP), Continuation((3,), 1, FinishReason.STOP))
    await send("r1", sampling=replace(SAMPLING, n=2), continuations=ended)
    said = await placement.until("r1")
    assert names(said) == [Passed.ACCEPTED, Passed.STARTED, Passed.ENDED]
    assert said[2].output_tokens == 3


async def test_refused_requests_say_nothing_and_repeated_ones_once(
    worker: FakeWorker, placement: Placement, send: Send
) -> None:
    await send("refused", model="other")
    await send("late", expires_unix_ms=1)
    for _ in range(3):
        await send("twice")
    said = await placement.until("twice")
    assert names(said) == [Passed.ACCEPTED, Passed.STARTED, Passed.FIRST_TOKEN, Passed.ENDED]
    assert placement.of("refused") == placement.of("late") == []


async def test_many_requests_are_told_in_few_messages(worker: FakeWorker, placement: Placement, send: Send) -> None:
    began = asyncio.get_running_loop().time()
    for at in range(60):
        await send(f"r{at}", sampling=replace(SAMPLING, max_tokens=8))
    for at in range(60):
        async with asyncio.timeout(LIMIT_S):
            while Passed.ENDED not in names(placement.of(f"r{at}")):
                await asyncio.sleep(0.005)
        assert names(placement.of(f"r{at}")) == [Passed.ACCEPTED, Passed.STARTED, Passed.FIRST_TOKEN, Passed.ENDED]
    took = asyncio.get_running_loop().time() - began
    assert len(placement.messages) <= took / 0.02 + 1
    await asyncio.sleep(0.05)
    assert worker.loop.parts.broadcast._timer is None, "nothing runs while there is nothing to say"


async def test_a_snapshot_of_all_tiers_and_what_a_record_says_of_blocks(
    worker: FakeWorker, placement: Placement, send: Send, client: Client
) -> None:
    (empty,) = await placement.snapshot()
    assert (empty.seq, empty.digest, empty.tier, empty.hashes) == (0, 0, Tier.DEVICE, b"")
    await send("r1")
    await placement.until("r1")
    stats = codec.decode(WorkerStats, await client.admin("w0", AdminRequest(AdminCommand.STATS)))
    record = stats.record
    assert record.block_bytes == 8 * record.block_size, "the fake runner's own"
    roots = TenantRoots(record.model_revision, record.block_size, record.public_prefixes, b"secret")
    own = chain(roots.of("acme", PROMPT), PROMPT, record.block_size)
    (everything,) = await placement.snapshot()
    held = [everything.hashes[at : at + 16] for at in range(0, len(everything.hashes), 16)]
    assert held[: len(own)] == own, "placement computes the hashes that the worker holds"
    assert len(held) == (40 + 29) // record.block_size
    assert (everything.tier, everything.seq, everything.digest) == (
        Tier.DEVICE,
        worker.loop.heartbeat().event_seq,
        worker.loop.heartbeat().digest,
    )
    assert everything.tier_digest == worker.loop.heartbeat().tier_digest
    of_one_tier = replace(everything, tier_digest=None)
    assert await placement.snapshot(Tier.DEVICE) == [of_one_tier]
    (host,) = await placement.snapshot(Tier.HOST)
    assert host == replace(of_one_tier, tier=Tier.HOST, hashes=b"")
