"""One attempt, several readers: they come, leave, and vanish, and the worker works for as long as there is one."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kvproto import codec
from kvproto.client import Client, Generation
from kvproto.connection import Connection, Message
from kvproto.messages import (
    Accepted,
    CancelRequest,
    Encoding,
    Failed,
    Finished,
    Frame,
    GenerateRequest,
    Moved,
    PauseRequest,
    Progress,
    ResendRequest,
    Sampling,
    Started,
    Tokens,
)
from kvproto.subjects import Subjects
from tests.support.fake_fleet import FakeFleet, FakeWorker
from tests.support.waiting import LIMIT_S, until

SAMPLING = Sampling(max_tokens=60, temperature=0.8, seed=3, ignore_eos=True)
ENDLESS = replace(SAMPLING, max_tokens=3000)
PROMPT = tuple(range(100, 140))
FREED_S = 5.0


@pytest.fixture
async def worker(fleet: FakeFleet) -> FakeWorker:
    return await fleet.start("w0", fake_tokens_per_s=200)


class Reader:
    """A process of its own, as far as the worker can tell."""

    def __init__(self, connection: Connection, subjects: Subjects, encoding: Encoding) -> None:
        self.connection = connection
        self.frames: list[Frame] = []
        self._subjects = subjects
        self._encoding = encoding
        self.inbox = f"{connection.inbox_prefix}.b"

    @classmethod
    async def open(
        cls, url: str, subjects: Subjects, name: str, encoding: Encoding = Encoding.FRAMES, tenant: str = "public"
    ) -> Reader:
        self = cls(await Connection.open(url, name=name, inbox_prefix=f"_prd.{tenant}.{name}"), subjects, encoding)
        await self.connection.subscribe(self.inbox, self._on_message)
        await self.connection.subscribe(f"{self.connection.inbox_prefix}.r.>", self._on_reply)
        await self.connection.synced()
        return self

    async def _on_message(self, message: Message) -> None:
        if self._encoding is Encoding.FRAMES:
            self.frames += codec.decode_frames(message.data)
        else:
            self.frames.append(codec.decode_plain_frame(message.data, as_json=self._encoding is Encoding.JSON))

    async def _on_reply(self, message: Message) -> None:
        self.frames += codec.decode_frames(message.data)

    async def ask(self, request: str = "r1", tenant: str = "public", **changes: Any) -> None:
        base = GenerateRequest(request, 0, "demo", SAMPLING, self.inbox, prompt_ids=PROMPT, encoding=self._encoding)
        body = replace(base, **changes)
        subject = self._subjects.worker_generate("w0", tenant)
        reply = f"{self.connection.inbox_prefix}.r.{request}.{body.attempt}"
        await self.connection.publish(subject, codec.encode(body), reply=reply)

    async def leave(self, request: str = "r1", inbox: str | None = None) -> None:
        message = CancelRequest(request, 0, self.inbox if inbox is None else inbox)
        await self.connection.publish(self._subjects.worker_cancel("w0"), codec.encode(message))

    async def until(self, kind: type, count: int = 1) -> Any:
        async with asyncio.timeout(LIMIT_S):
            while len(found := [frame for frame in self.frames if isinstance(frame, kind)]) < count:
                await asyncio.sleep(0.005)
        return found[-1]

    @property
    def ids(self) -> list[int]:
        ids: list[int] = []
        for frame in self.frames:
            if isinstance(frame, Tokens):
                assert frame.index == len(ids)
                ids += frame.ids
        return ids

    def vanish(self) -> None:
        vanish(self.connection)


def vanish(connection: Connection) -> None:
    """As SIGKILL: the socket closes, nobody says good-bye."""
    connection._closing = True
    if connection._watchdog is not None:
        connection._watchdog.cancel()
    connection.raw.options["allow_reconnect"] = False
    connection.raw._transport._io_writer.transport.abort()  # type: ignore[union-attr]


@pytest.fixture
async def readers(nats_url: str, fleet_buckets: Subjects) -> AsyncIterator[Any]:
    opened: list[Reader] = []

    async def open_reader(name: str, encoding: Encoding = Encoding.FRAMES, tenant: str = "public") -> Reader:
        name = f"{fleet_buckets.namespace}-{name}"
        opened.append(await Reader.open(nats_url, fleet_buckets, name, encoding, tenant))
        return opened[-1]

    yield open_reader
    for reader in opened:
        await reader.connection.close()


async def until_idle(worker: FakeWorker, seconds: float = FREED_S) -> None:
    async with asyncio.timeout(seconds):
        while len(worker.loop.frames.running) or worker.thread.engine.load().blocks_used:
            await asyncio.sleep(0.02)


async def test_a_second_reader_gets_everything_from_the_first_token_on(worker: FakeWorker, readers: Any) -> None:
    first, late, json = await readers("a"), await readers("b"), await readers("c", Encoding.JSON)
    await first.ask()
    await first.until(Tokens, 5)
    await late.ask()
    await json.ask()
    for reader in (first, late, json):
        finished = await reader.until(Finished)
        assert finished.output_tokens == 60
        assert len(reader.ids) == 60
        kinds = [type(frame) for frame in reader.frames]
        assert kinds[:2] == [Accepted, Started]
        assert [kinds.count(kind) for kind in (Accepted, Started, Finished, Progress)] == [1, 1, 1, 0]
    assert first.ids == late.ids == json.ids
    assert worker.loop.requests.requests_total == 1
    replayed = await readers("d")
    await replayed.ask()
    assert await replayed.until(Finished) == finished
    assert replayed.ids == first.ids, "of what ended a moment ago there is still everything"
    await first.ask()
    await first.until(Finished, 2)
    assert worker.loop.requests.requests_total == 1
    assert len(worker.loop.frames.leases._leases) == 0


async def test_who_is_asked_again_answers_and_streams_nothing_twice(worker: FakeWorker, readers: Any) -> None:
    """As placement does of what it offered when NATS went away."""
    reader = await readers("a")
    await reader.ask(watcher="p0")
    await reader.until(Tokens, 5)
    await reader.ask(watcher="p0", again=True)
    await reader.until(Accepted, 2)
    await reader.until(Finished)
    await reader.ask(watcher="p0", again=True)
    await reader.until(Accepted, 3)
    await reader.until(Finished, 3)  # its reader's, and the watcher's twice
    await asyncio.sleep(0.1)
    assert len(reader.ids) == 60, "in order, once"
    assert sum(isinstance(frame, Finished) for frame in reader.frames) == 3
    unheard = await readers("b")
    await unheard.ask("r2", again=True)
    assert (await unheard.until(Finished)).output_tokens == 60, "what did not arrive the first time runs now"
    assert worker.loop.requests.requests_total == 2


async def test_a_reader_that_has_some_gets_the_rest(worker: FakeWorker, readers: Any) -> None:
    first, late = await readers("a"), await readers("b")
    await first.ask()
    await first.until(Tokens, 12)
    await late.ask(output_ids=tuple(first.ids[:10]))
    await late.until(Finished)
    assert min(frame.index for frame in late.frames if isinstance(frame, Tokens)) == 10
    assert sum(len(frame.ids) for frame in late.frames if isinstance(frame, Tokens)) == 50


async def test_what_began_elsewhere_cannot_be_joined_at_its_beginning(worker: FakeWorker, readers: Any) -> None:
    first, late = await readers("a"), await readers("b")
    await first.ask(output_ids=(7, 8, 9))
    await first.until(Tokens)
    await late.ask()
    refused = await late.until(Failed)
    assert (refused.code, refused.retryable) == ("unavailable", True)
    await late.ask(output_ids=(7, 8, 9))
    await late.until(Finished)


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt_ids": (*PROMPT, 1)},
        {"sampling": replace(SAMPLING, seed=4)},
        {"tenant": "other"},
        {"exact": True},
    ],
)
async def test_another_request_of_the_same_id_is_refused(
    worker: FakeWorker, readers: Any, changes: dict[str, Any]
) -> None:
    first, other = await readers("a"), await readers("b", tenant=changes.get("tenant", "public"))
    await first.ask()
    await first.until(Tokens)
    await other.ask(**changes)
    refused = await other.until(Failed)
    assert (refused.code, refused.field, refused.retryable) == ("invalid_request", "request", False)
    assert other.frames == [refused]
    await first.until(Finished)
    assert len(first.ids) == 60


async def test_an_attempt_runs_for_as_long_as_it_has_a_reader(worker: FakeWorker, readers: Any) -> None:
    first, second = await readers("a"), await readers("b")
    await first.ask(sampling=ENDLESS)
    await first.until(Tokens, 3)
    await second.ask(sampling=ENDLESS)
    await second.until(Tokens, 3)
    await first.leave(inbox="_prd.public.nobody.b")
    await first.leave()
    await first.leave()
    had = len(second.ids)
    await second.until(Tokens, 20)
    seen = len(first.ids)
    await asyncio.sleep(0.1)
    assert len(first.ids) == seen, "who left is sent nothing more"
    assert len(second.ids) > had
    assert len(worker.loop.frames.running) == 1
    await second.leave()
    failed = await second.until(Failed)
    assert failed.code == "cancelled"
    await until_idle(worker)
    assert not any(isinstance(frame, Failed) for frame in first.frames)


async def test_without_an_inbox_all_readers_leave(worker: FakeWorker, readers: Any) -> None:
    first, second = await readers("a"), await readers("b")
    for reader in (first, second):
        await reader.ask(sampling=ENDLESS)
        await reader.until(Tokens, 2)
    await second.leave(inbox="")
    for reader in (first, second):
        assert (await reader.until(Failed)).code == "cancelled"
    await until_idle(worker)


async def test_who_parked_a_sequence_and_left_holds_nobody_up(worker: FakeWorker, readers: Any) -> None:
    first, second = await readers("a"), await readers("b")
    for reader in (first, second):
        await reader.ask()
        await reader.until(Tokens)
    subject = first._subjects.worker_pause("w0")
    await first.connection.publish(subject, codec.encode(PauseRequest("r1", 0, True)))
    await first.leave()
    await second.until(Finished)
    assert len(second.ids) == 60


async def test_an_attempt_is_parked_while_all_its_readers_want_that(worker: FakeWorker, readers: Any) -> None:
    first, second, third = await readers("a"), await readers("b"), await readers("c")
    for reader in (first, second):
        await reader.ask(sampling=ENDLESS)
        await reader.until(Tokens)
    (record,) = worker.loop.frames.running

    async def pause(reader: Reader, paused: bool = True, inbox: str | None = None) -> None:
        word = PauseRequest("r1", 0, paused, reader.inbox if inbox is None else inbox)
        await reader.connection.publish(reader._subjects.worker_pause("w0"), codec.encode(word))
        await reader.connection.synced()

    async def parked(so: bool) -> None:
        async with asyncio.timeout(LIMIT_S):
            while (record.paused_at is not None) is not so:
                await asyncio.sleep(0.005)

    async def goes_on() -> None:
        had = record.output_tokens
        async with asyncio.timeout(LIMIT_S):
            while record.output_tokens < had + 3:
                await asyncio.sleep(0.005)

    await pause(first)
    await pause(first, inbox="_prd.other.x.b")
    async with asyncio.timeout(LIMIT_S):
        while not record.paused_by:
            await asyncio.sleep(0.005)
    await goes_on()
    assert record.paused_at is None
    await pause(second)
    await parked(True)
    await third.ask(sampling=ENDLESS)  # it has nothing yet
    await third.until(Tokens)
    await goes_on()
    await third.leave()
    await parked(True)
    await pause(second, paused=False)
    await parked(False)
    await second.leave()
    await parked(True)
    await pause(first, paused=False)
    await parked(False)
    await goes_on()
    await first.leave()
    await until_idle(worker)


async def test_every_reader_hears_that_a_request_moves(worker: FakeWorker, readers: Any) -> None:
    first, second = await readers("a"), await readers("b")
    for reader in (first, second):
        await reader.ask(sampling=ENDLESS)
        await reader.until(Tokens)
    frames = worker.loop.frames
    record = frames.running[0]
    worker.thread.cancel("r1", 0)
    worker.loop.outbox.send_frames([frames.end(record, Moved("r1", 0, record.output_tokens), 0.0)])
    for reader in (first, second):
        await reader.until(Moved)
    for attempt, inbox in ((0, first.inbox), (0, "_prd.other.x.b"), (None, "_prd.other.x.b")):
        assert frames.leave_ended("r1", attempt, inbox, None) == []
    assert [reader.inbox for reader in record.readers] == [second.inbox], "it has not begun elsewhere yet"
    assert frames.leave_ended("r1", 0, second.inbox, None) == [], "its blocks are fetched"
    assert record.readers == []


async def test_what_another_tenant_asks_for_is_not_sent(worker: FakeWorker, readers: Any) -> None:
    """Producers may publish these words; ids are no secret."""
    owner, stranger, ingress = await readers("a"), await readers("b"), await readers("c")
    await owner.ask()
    await owner.until(Tokens, 3)
    for subject, inbox in (("_prd.other.x.b", "_prd.other.x.b"), ("_ing.x.b", "_ing.x.b")):
        reader = stranger if inbox.startswith("_prd") else ingress
        await reader.connection.subscribe(subject, reader._on_message)
        await reader.connection.synced()
        asked = codec.encode(ResendRequest("r1", 0, 0, inbox))
        await reader.connection.publish(reader._subjects.worker_resend("w0"), asked)
        await reader.connection.synced()
    await ingress.until(Tokens)
    assert stranger.frames == []
    assert worker.loop.requests.refused_total == 1


async def test_a_cancel_from_where_nobody_reads_it_ends_nothing(worker: FakeWorker, readers: Any) -> None:
    owner = await readers("a")
    await owner.ask()
    await owner.until(Tokens)
    await owner.leave(inbox="_prd.other.x.b")
    await owner.until(Finished)


async def test_a_cancel_right_after_a_long_text_ends_it(worker: FakeWorker, readers: Any) -> None:
    reader = await readers("a")
    desk = worker.loop.requests
    body = GenerateRequest("r1", 0, "demo", SAMPLING, reader.inbox, prompt="a " * 4000, encoding=Encoding.FRAMES)
    cancel = CancelRequest("r1", 0, reader.inbox)
    before = set(worker.loop.tasks.running)
    await desk.on_generate(SimpleNamespace(subject="x.public", reply="", data=codec.encode(body), headers=None))
    spawned = worker.loop.tasks.running - before
    await desk.on_cancel(SimpleNamespace(subject="x", reply="", data=codec.encode(cancel), headers=None))
    await asyncio.wait(spawned, timeout=LIMIT_S)
    assert desk.requests_total == 0


# ---------------------------------------------------------------------------------------------- leases


CLIENT = """
import asyncio, sys
from kvproto.client import Client, Generation
from kvproto.messages import Sampling

async def main():
    client = await Client.open(sys.argv[1], namespace=sys.argv[2])
    sampling = Sampling(max_tokens=3000, ignore_eos=True)
    streams = [client.generate(Generation("demo", sampling, tuple(range(i, i + 40)))) for i in range(4)]
    for stream in streams:
        while not stream.ids:
            await stream.read()
    print("streams", flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


async def test_readers_that_vanish_free_their_blocks(
    worker: FakeWorker, readers: Any, client: Client, nats_url: str
) -> None:
    """A client that is killed, readers of batches (one's request runs, one's is parked) and of single frames whose
    connection ends: all at once. One that stays is not disturbed, nor is one whose connection breaks and comes back."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CLIENT, nats_url, worker.loop.parts.subjects.namespace, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert await asyncio.wait_for(process.stdout.readline(), LIMIT_S) == b"streams\n"
        batch, plain, stays = await readers("a"), await readers("b", Encoding.MSGPACK), await readers("c")
        parked = await readers("d")
        await batch.ask("running", sampling=ENDLESS)
        await parked.ask("parked", sampling=ENDLESS, prompt_ids=(*PROMPT, 1))
        await plain.ask("plain", sampling=ENDLESS, prompt_ids=(*PROMPT, 2))
        await stays.ask("stays", sampling=ENDLESS, prompt_ids=(*PROMPT, 3))
        for reader, count in ((batch, 5), (parked, 5), (plain, 5), (stays, 5)):
            await reader.until(Tokens, count)
        pause = codec.encode(PauseRequest("parked", 0, True))
        await parked.connection.publish(parked._subjects.worker_pause("w0"), pause)
        await parked.connection.synced()
        async with asyncio.timeout(LIMIT_S):
            while not list(client.members.view.ready()):
                await asyncio.sleep(0.02)
        back = client.generate(Generation("demo", ENDLESS, (*PROMPT, 4)))
        await back.read()
        client.connection.raw._transport._io_writer.transport.abort()  # type: ignore[union-attr]
        assert len(worker.loop.frames.running) == 9
        process.kill()
        for reader in (batch, parked, plain):
            reader.vanish()
        async with asyncio.timeout(FREED_S):
            while len(worker.loop.frames.running) > 2 or worker.thread.engine.load().running > 2:
                await asyncio.sleep(0.02)
        had = len(stays.ids)
        await until(lambda: len(stays.ids) > had)
        await stays.leave("stays")
        assert client.connection.reconnects_total == 1
        assert back.attempts == 1
        for _ in range(3):
            assert await back.read()
        await back.cancel()
        await until_idle(worker)
        assert len(worker.loop.frames.leases._leases) == 0
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
