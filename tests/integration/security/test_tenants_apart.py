"""What one tenant can do to another's work and cache over NATS: nothing, even with the id of a request.

Real worker loops and engines around the fake runner, whose blocks hold what a model's would. What NATS lets a producer
publish at all is in tests/integration/nats/test_roles.py: the subjects used here are those that it may.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from kvfleet.vault.store.store import VaultStore
from kvproto import codec
from kvproto.block_hash import TenantRoots
from kvproto.client import Client, Generation
from kvproto.connection import Connection, Message
from kvproto.ids import new_request_id
from kvproto.messages import (
    Bundle,
    CancelRequest,
    Failed,
    Finished,
    Frame,
    GenerateRequest,
    PauseRequest,
    PlaceRequest,
    ProducerRequest,
    ResendRequest,
    Sampling,
    Started,
    Tokens,
)
from kvproto.subjects import INGRESS_INBOX, Subjects, sealed_prefix
from tests.support.fake_fleet import FakeFleet, FakeWorker
from tests.support.kv_blocks import OTHER_ROOT, ROOT, chain, hashes
from tests.support.waiting import LIMIT_S, until

PROMPT = tuple(range(100, 500))
ONE = Sampling(1, temperature=0, ignore_eos=True)
LONG = Sampling(400, temperature=0.7, seed=5, ignore_eos=True)


# ---------------------------------------------------------------------- caches


@pytest.fixture
async def tenants(nats_url: str, fleet_buckets: Subjects) -> AsyncIterator[dict[str, Client]]:
    opened = {
        tenant: await Client.open(nats_url, tenant=tenant, namespace=fleet_buckets.namespace) for tenant in ("a", "b")
    }
    yield opened
    for client in opened.values():
        await client.close()


async def ready(client: Client, count: int) -> None:
    async with asyncio.timeout(LIMIT_S):
        while len(list(client.members.view.ready("demo"))) < count:
            await asyncio.sleep(0.01)


async def ask(
    tenants: dict[str, Client], tenant: str, prompt: tuple[int, ...] = PROMPT
) -> tuple[Started, tuple[int, ...]]:
    """What was cached, and the tokens."""
    asked = Generation("demo", ONE, prompt, tenant=tenant)
    async with tenants[tenant].generate(asked) as stream:
        ids: tuple[int, ...] = ()
        async for event in stream:
            if isinstance(event, Started):
                started = event
            elif isinstance(event, Tokens):
                ids += event.ids
    return started, ids


async def fed(*workers: FakeWorker) -> int:
    """Tokens that engines have computed since they started."""
    return sum([await worker.thread.call(lambda engine: engine.load().fed_tokens_total) for worker in workers])


async def test_a_prompt_that_another_tenant_has_warmed_is_as_cold_as_ever(
    fleet: FakeFleet, tenants: dict[str, Client]
) -> None:
    """Counted: the same tokens are computed for B after A as on a worker that nobody has asked anything."""
    warm = [await fleet.start(name, fleet_key="k") for name in ("w0", "w1")]
    for client in tenants.values():
        await ready(client, 2)
    for _ in range(3):
        await ask(tenants, "a")
    before = await fed(*warm)
    again, ids = await ask(tenants, "a")
    warm_cost = await fed(*warm) - before
    assert again.cached == {"device": len(PROMPT) - 1}
    before = await fed(*warm)
    started, same_ids = await ask(tenants, "b")
    after_a = await fed(*warm) - before
    assert (started.cached_tokens, set(started.cached.values()) | {0}) == (0, {0}), "of no tier, on no worker"
    for worker in warm:
        await worker.stop()
    cold = await fleet.start("w2", fleet_key="k")
    async with asyncio.timeout(LIMIT_S):
        while [one.record.id for one in tenants["b"].members.view.ready("demo")] != ["w2"]:
            await asyncio.sleep(0.01)
    before = await fed(cold)
    await ask(tenants, "b")
    assert await fed(cold) - before == after_a == len(PROMPT)
    assert warm_cost == 1, "the control: what is cached is seen in the count"
    assert ids == same_ids, "the model is the same"


class ModelTime:
    """Seconds that the model computes, and nothing of what else a machine does meanwhile."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def now(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


async def test_the_time_a_prompt_takes_tells_nothing_of_another_tenants_cache(
    fleet: FakeFleet, tenants: dict[str, Client]
) -> None:
    """Interleaved: B after A had the prompt, B with one that nobody had; as a control A with its own again. In the
    model's own time, so that it is exact; benchmarks/ingress/tenant_timing.py takes a real model's, over HTTP."""
    worker = await fleet.start("w0", fleet_key="k", blocks=4096)
    time = ModelTime()
    runner: Any = worker.thread.engine.runner
    runner.pace = replace(runner.pace, prefill_tokens_per_s=1e4, clock=time.now, sleep=time.sleep)
    for client in tenants.values():
        await ready(client, 1)

    async def took(tenant: str, prompt: tuple[int, ...]) -> float:
        began = time.now()
        await ask(tenants, tenant, prompt)
        return round(time.now() - began, 6)

    after_a, cold, warm = [], [], []
    for turn in range(6):
        shared, fresh = (1, turn, *PROMPT), (2, turn, *PROMPT)
        await took("a", shared)
        order = [("b", shared, after_a), ("b", fresh, cold), ("a", shared, warm)]
        for tenant, prompt, into in order if turn % 2 else reversed(order):
            into.append(await took(tenant, prompt))
    assert all(0.0399 < one < 0.0404 for one in (*after_a, *cold)), "a chunk's last token may count as a decode"
    assert max(warm) < min(cold) / 10, "the control: a hit is plain to see"


async def test_a_registered_public_prefix_is_shared_and_nothing_past_it(
    fleet: FakeFleet, tenants: dict[str, Client], tmp_path: Path
) -> None:
    text = "You are a helpful king of all castles. " * 6
    file = tmp_path / "prefixes.json"
    file.write_text(json.dumps([text]))
    worker = await fleet.start("w0", fleet_key="k", public_prefixes_file=file)
    for client in tenants.values():
        await ready(client, 1)
    (prefix,) = worker.loop.record.public_prefixes
    bundle = codec.decode(Bundle, worker.loop.admin._bundle)
    (ids,) = bundle.public_prefixes
    assert len(ids) == prefix.tokens >= 32
    prompt = (*ids, *PROMPT)
    assert (await ask(tenants, "a", prompt))[0].cached_tokens == 0
    shared = prefix.tokens // 16 * 16
    assert (await ask(tenants, "b", prompt))[0].cached_tokens == shared, "the prefix, to its last block"
    assert (await ask(tenants, "b", prompt))[0].cached_tokens == len(prompt) - 1, "its own by now"


def test_roots_follow_from_the_fleets_key_and_the_tenant() -> None:
    roots = {
        (key, tenant): TenantRoots("model", 16, (), key).of(tenant, PROMPT)
        for key in (b"one", b"another", b"")
        for tenant in ("a", "b", "public")
    }
    assert len(set(roots.values())) == len(roots), "whoever has not the key cannot reckon anybody's hashes"


def test_no_body_names_a_tenant_or_a_root() -> None:
    for message in (GenerateRequest, PlaceRequest, ProducerRequest, CancelRequest, ResendRequest, PauseRequest):
        names = {field.name for field in fields(message)}
        assert not {name for name in names if any(word in name for word in ("tenant", "salt", "root"))}, message


def test_a_vault_has_blocks_for_the_root_that_they_belong_to() -> None:
    """Whoever names another root, even with the right hashes, is told that they are not there, and erases none."""
    store = VaultStore(1 << 20)
    blocks = chain(3)
    for one in blocks:
        room = store.reserve(one.header)
        assert room is not None
        room[:] = one.payload
        assert store.commit(one.header, room)
    names = hashes(blocks)
    assert store.has(OTHER_ROOT, names, False) == [False] * 3
    served = store.get(OTHER_ROOT, names, False)
    assert served.blocks == [None] * 3
    served.release()
    assert store.erase(OTHER_ROOT, names) == 0
    assert store.has(ROOT, names, False) == [True] * 3


# ---------------------------------------------------------------------- requests


class Stranger:
    """A producer of the tenant `b`, who has learnt the id of a request of `a`, its worker and its inbox."""

    def __init__(self, connection: Connection, subjects: Subjects) -> None:
        self.connection, self.subjects = connection, subjects
        self.inbox = f"{connection.inbox_prefix}.b"
        self.frames: list[Frame] = []

    @classmethod
    async def open(cls, url: str, subjects: Subjects) -> Stranger:
        self = cls(await Connection.open(url, name="b", inbox_prefix=f"_prd.b.{subjects.namespace}"), subjects)
        await self.connection.subscribe(f"{self.connection.inbox_prefix}.>", self._on_message)
        await self.connection.synced()
        return self

    async def _on_message(self, message: Message) -> None:
        self.frames += codec.decode_frames(message.data)

    async def say(self, subject: str, message: Any, reply: str = "") -> None:
        await self.connection.publish(subject, codec.encode(message), reply=reply)
        await self.connection.synced()
        await asyncio.sleep(0.1)


@pytest.fixture
async def stranger(nats_url: str, fleet_buckets: Subjects) -> AsyncIterator[Stranger]:
    opened = await Stranger.open(nats_url, fleet_buckets)
    yield opened
    await opened.connection.close()


@pytest.fixture
async def worker(fleet: FakeFleet, tenants: dict[str, Client]) -> FakeWorker:
    started = await fleet.start("w0", fleet_key="k", fake_tokens_per_s=200)
    await ready(tenants["a"], 1)
    return started


class Victim:
    """A stream of tenant a. `end` is to find it whole, whatever was said meanwhile."""

    def __init__(self, client: Client, prompt: tuple[int, ...] = PROMPT) -> None:
        self.request = new_request_id()
        self.inbox = client.inbox.batch
        self._stream = client.generate(Generation("demo", LONG, prompt, tenant="a", request=self.request))
        self._events: list[Any] = []
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async with self._stream as stream:
            async for event in stream:
                self._events.append(event)

    @property
    def ids(self) -> list[int]:
        return [one for event in self._events if isinstance(event, Tokens) for one in event.ids]

    async def begun(self) -> None:
        async with asyncio.timeout(LIMIT_S):
            while len(self.ids) < 5:
                await asyncio.sleep(0.01)

    async def end(self) -> list[int]:
        await asyncio.wait_for(self._reading, LIMIT_S)
        assert isinstance(self._events[-1], Finished)
        assert self._stream.attempts == 1
        return self.ids


async def test_with_a_requests_id_another_tenant_can_do_nothing(
    worker: FakeWorker, tenants: dict[str, Client], stranger: Stranger
) -> None:
    """Cancel, park, read along, read again, attach: on the subjects that NATS lets it publish on."""
    names, victim = worker.loop.parts.subjects, Victim(tenants["a"])
    await victim.begun()
    request, before = victim.request, worker.loop.requests.refused_total
    for inbox in ("", victim.inbox, stranger.inbox):
        await stranger.say(names.worker_cancel("w0", "b"), CancelRequest(request, None, inbox))
        await stranger.say(names.worker_cancel("w0", "b"), CancelRequest(request, 0, inbox))
        await stranger.say(names.worker_pause("w0", "b"), PauseRequest(request, 0, True, inbox))
        await stranger.say(names.worker_resend("w0", "b"), ResendRequest(request, 0, 0, inbox or stranger.inbox))
    assert stranger.frames == []
    count = len(victim.ids)
    await until(lambda: len(victim.ids) > count, told="it is not parked")
    body = GenerateRequest(request, 0, "demo", LONG, stranger.inbox, prompt_ids=PROMPT)
    await stranger.say(names.worker_generate("w0", "b"), body, reply=f"{stranger.connection.inbox_prefix}.r.x.0")
    (refused,) = stranger.frames
    assert isinstance(refused, Failed)
    assert refused.code == "invalid_request", "no reader of it, whoever else asks for the same"
    assert len(await victim.end()) == 400
    assert worker.loop.requests.refused_total > before
    # the same after it has ended, while it is kept for repeats
    stranger.frames.clear()
    await stranger.say(names.worker_resend("w0", "b"), ResendRequest(request, 0, 0, stranger.inbox))
    assert stranger.frames == []


async def test_nothing_can_be_written_into_another_tenants_inbox(
    worker: FakeWorker, tenants: dict[str, Client], stranger: Stranger
) -> None:
    """Frames of an own request, under the victim's id and sent to its inbox, would be taken for its worker's."""
    names, victim = worker.loop.parts.subjects, Victim(tenants["a"])
    await victim.begun()
    answers = f"{tenants['a'].connection.inbox_prefix}.r.{victim.request}.0"
    other_ids = tuple(reversed(PROMPT))
    for attempt in (0, 1):
        body = GenerateRequest(victim.request, attempt, "demo", LONG, victim.inbox, prompt_ids=other_ids)
        await stranger.say(names.worker_generate("w0", "b"), body, reply=f"{stranger.connection.inbox_prefix}.r.x.0")
        await stranger.say(names.worker_generate("w0", "b"), body, reply=answers)
    for frame in stranger.frames:
        assert isinstance(frame, Failed)
        assert frame.field in ("inbox", "request")
    unknown = ResendRequest(victim.request, 7, 0, victim.inbox)  # would be told "lost"
    await stranger.say(names.worker_resend("w0", "b"), unknown)
    assert len(worker.loop.frames.running) == 1
    assert len(await victim.end()) == 400


async def test_a_producer_has_nothing_written_to_an_ingress_and_no_priority_of_its_own(
    worker: FakeWorker, nats_url: str, fleet_buckets: Subjects, stranger: Stranger
) -> None:
    """An ingress serves every tenant, so its inbox is nobody's: but only who has the fleet's key can name it."""
    names = fleet_buckets
    prefix = sealed_prefix(INGRESS_INBOX, "i1", b"k")
    connection = await Connection.open(nats_url, name="ingress", inbox_prefix=prefix)
    heard: list[Frame] = []

    async def hear(message: Message) -> None:
        heard.extend(codec.decode_frames(message.data))

    try:
        for known in (prefix, "_ing.i1"):  # what an ingress without a seal would be called
            await connection.subscribe(f"{known}.>", hear)
        await connection.synced()
        for asked in (0, 1):  # of what it knows, and of what is "lost"
            await stranger.say(
                names.worker_resend("w0", "b"), ResendRequest("victim", asked, 0, f"{prefix}.r.victim.0")
            )
        assert heard == []
        for reply, priority in ((f"{prefix}.r.mine.0", 7), ("_ing.i1.r.mine.1", 0), (f"{stranger.inbox}.r.mine.2", 0)):
            attempt = int(reply[-1])
            body = GenerateRequest("mine", attempt, "demo", LONG, f"{stranger.inbox}.f", prompt_ids=PROMPT, priority=7)
            await connection.publish(names.worker_generate("w0", "b"), codec.encode(body), reply=reply)
            async with asyncio.timeout(LIMIT_S):
                while (record := worker.loop.frames.find("mine", attempt)) is None:
                    await asyncio.sleep(0.01)
            assert record.asked.priority == priority, reply
    finally:
        await connection.close()


async def test_its_own_requests_a_producer_can_cancel_park_and_read_again(
    worker: FakeWorker, tenants: dict[str, Client], stranger: Stranger
) -> None:
    """The control: the same words, of the tenant whose request it is."""
    names = worker.loop.parts.subjects
    request = new_request_id()
    body = GenerateRequest(request, 0, "demo", LONG, stranger.inbox, prompt_ids=PROMPT)
    await stranger.say(names.worker_generate("w0", "b"), body, reply=f"{stranger.connection.inbox_prefix}.r.x.0")
    await stranger.say(names.worker_pause("w0", "b"), PauseRequest(request, 0, True))
    (record,) = worker.loop.frames.running
    assert record.paused_at is not None
    seen = len(stranger.frames)
    await stranger.say(names.worker_resend("w0", "b"), ResendRequest(request, 0, 0, stranger.inbox))
    assert any(isinstance(frame, Tokens) and frame.index == 0 for frame in stranger.frames[seen:])
    await stranger.say(names.worker_cancel("w0", "b"), CancelRequest(request, 0, stranger.inbox))
    assert len(worker.loop.frames.running) == 0


async def test_the_fleets_own_roles_speak_for_anybody(
    worker: FakeWorker, tenants: dict[str, Client], stranger: Stranger
) -> None:
    """Ingress and placement: NATS lets nobody else publish there."""
    victim = Victim(tenants["a"])
    await victim.begun()
    await stranger.say(worker.loop.parts.subjects.worker_cancel("w0"), CancelRequest(victim.request, 0))
    assert worker.loop.frames.find(victim.request, 0) is None
    victim._reading.cancel()
    await asyncio.gather(victim._reading, return_exceptions=True)
