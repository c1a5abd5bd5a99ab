"""A worker moves its requests: the client goes on elsewhere at once, with every token that was generated."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from kvproto import codec
from kvproto.client import Client, Generation
from kvproto.connection import Message
from kvproto.messages import CancelRequest, GenerateRequest, Moved, Sampling, Tokens
from tests.support.fake_fleet import FakeFleet, FakeWorker
from tests.support.waiting import LIMIT_S, until

PROMPT = tuple(range(100, 140))
SAMPLING = Sampling(max_tokens=60, temperature=0.0, ignore_eos=True)


class Overheard:
    """What is published to every worker's generate and cancel subjects."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, GenerateRequest]] = []
        self.cancelled: list[tuple[str, CancelRequest]] = []

    async def start(self, client: Client, *workers: str) -> Overheard:
        for worker in workers:
            await client.connection.subscribe(client.subjects.worker_generate_all(worker), self._on_generate)
            await client.connection.subscribe(client.subjects.worker_cancel_all(worker), self._on_cancel)
        await client.connection.synced()
        return self

    async def _on_generate(self, message: Message) -> None:
        self.asked.append((message.subject.split(".")[2], codec.decode(GenerateRequest, message.data)))

    async def _on_cancel(self, message: Message) -> None:
        self.cancelled.append((message.subject.split(".")[2], codec.decode(CancelRequest, message.data)))

    async def until_cancelled(self) -> tuple[str, CancelRequest]:
        async with asyncio.timeout(LIMIT_S):
            while not self.cancelled:
                await asyncio.sleep(0.01)
        return self.cancelled[0]


async def ready(client: Client, count: int) -> None:
    async with asyncio.timeout(LIMIT_S):
        while len(list(client.members.view.ready())) < count:
            await asyncio.sleep(0.02)


def move(worker: FakeWorker) -> int:
    """What a draining worker does to all its requests; how many tokens they had."""
    worker.loop.begin_drain()
    tokens = 0
    for record in worker.loop.frames.running:
        worker.thread.cancel(record.request, record.attempt)
        tokens += record.output_tokens
        moved = Moved(record.request, record.attempt, record.output_tokens)
        worker.loop.outbox.send_frames([worker.loop.frames.end(record, moved, 0.0)])
    return tokens


async def test_the_next_attempt_restores_from_whoever_moved_and_then_lets_it_go(
    fleet: FakeFleet, client: Client
) -> None:
    for worker in ("w0", "w1"):
        await fleet.start(worker, fake_tokens_per_s=300)
    await ready(client, 2)
    heard = await Overheard().start(client, "w0", "w1")
    ids: list[int] = []
    mover, moved_tokens, told = "", 0, 0
    async with client.generate(Generation("demo", SAMPLING, PROMPT, attempts=1)) as stream:
        async for event in stream:
            if isinstance(event, Tokens):
                ids += event.ids
                if len(ids) >= 10 and not mover:
                    mover = str(stream.worker)
                    moved_tokens = move(fleet.workers[mover])
                if len(ids) == 59:
                    told = len(heard.cancelled)
    assert told == 1, "as soon as its successor has begun"
    assert len(ids) == 60, "a hand-over costs none of the attempts"
    (first, _), (second, body) = heard.asked
    assert (first, second) == (mover, stream.worker)
    assert first != second
    assert body.attempt == 1
    assert (body.source, body.handed_over) == (mover, True)
    assert body.source_tokens == len(PROMPT) + len(body.output_ids)
    assert len(body.output_ids) == moved_tokens
    released, word = await heard.until_cancelled()
    assert (released, word.attempt, word.inbox) == (mover, 0, client.inbox.batch)
    assert len(heard.cancelled) == 1
    assert client.counters.lost_total == 0
    fresh = client.generate(Generation("demo", SAMPLING, PROMPT))
    assert [one async for event in fresh if isinstance(event, Tokens) for one in event.ids] == ids


async def test_tokens_lost_before_moved_are_asked_for_first(fleet: FakeFleet, client: Client) -> None:
    for worker in ("w0", "w1"):
        await fleet.start(worker, fake_tokens_per_s=300)
    await ready(client, 2)
    heard = await Overheard().start(client, "w0", "w1")
    moved_tokens, lost = 0, 0
    ids: list[int] = []
    async with client.generate(Generation("demo", SAMPLING, PROMPT)) as stream:
        async for event in stream:
            if not isinstance(event, Tokens):
                continue
            ids += event.ids
            if len(ids) >= 10 and not moved_tokens:
                worker = fleet.workers[str(stream.worker)]
                real = worker.loop.outbox.send
                worker.loop.outbox.send = lambda *_, **__: None  # type: ignore[method-assign]
                record = worker.loop.frames.running[0]
                had = record.output_tokens
                while record.output_tokens < had + 5:
                    await asyncio.sleep(0.005)
                worker.loop.outbox.send = real  # type: ignore[method-assign]
                moved_tokens = move(worker)
                lost = moved_tokens - len(ids)
    assert lost >= 5
    assert len(ids) == 60
    assert len(heard.asked[1][1].output_ids) == moved_tokens, "nothing is generated twice"
    assert client.counters.resends_total > 0


async def test_tokens_that_will_not_come_are_generated_again(fleet: FakeFleet, client: Client) -> None:
    """The mover has more than was delivered, and is gone before it can be asked."""
    for worker in ("w0", "w1"):
        await fleet.start(worker, fake_tokens_per_s=300)
    await ready(client, 2)
    ids: list[int] = []
    killed = False
    async with client.generate(Generation("demo", SAMPLING, PROMPT)) as stream:
        async for event in stream:
            if isinstance(event, Tokens):
                ids += event.ids
                if len(ids) >= 10 and not killed:
                    killed = True
                    await fleet.workers[str(stream.worker)].kill()
                    stream.on_frame(Moved(stream.request, 0, len(ids) + 7))
    assert len(ids) == 60
    assert stream.attempts == 2


async def test_a_request_that_moves_before_it_starts_goes_on(fleet: FakeFleet, client: Client) -> None:
    first = await fleet.start("w0", slots=1, fake_tokens_per_s=50)
    await ready(client, 1)
    running = client.generate(Generation("demo", replace(SAMPLING, max_tokens=500), PROMPT))
    await running.read()
    queued = client.generate(Generation("demo", SAMPLING, (*PROMPT, 1)))
    async with asyncio.timeout(LIMIT_S):
        while not queued.accepted:
            await asyncio.sleep(0.01)
    await fleet.start("w1", fake_tokens_per_s=300)
    await ready(client, 2)
    move(first)
    ids = [one async for event in queued if isinstance(event, Tokens) for one in event.ids]
    assert len(ids) == 60
    assert queued.worker == "w1"
    await running.cancel()


async def test_what_a_worker_gave_up_is_handed_over_also_when_that_worker_is_gone(
    fleet: FakeFleet, client: Client
) -> None:
    """Nobody was there to pull its blocks: they are in vaults, and its successor looks there as patiently."""
    first = await fleet.start("w0", fake_tokens_per_s=300)
    await ready(client, 1)
    heard = await Overheard().start(client, "w0", "w1")
    ids: list[int] = []
    async with client.generate(Generation("demo", SAMPLING, PROMPT)) as stream:
        async for event in stream:
            if not isinstance(event, Tokens):
                continue
            ids += event.ids
            if len(ids) >= 10 and len(fleet.workers) == 1:
                move(first)
                await first.stop()
                await until(lambda: not client.members.view.is_alive("w0"))
                await fleet.start("w1", fake_tokens_per_s=300)
    assert len(ids) == 60
    (_, before), (successor, body) = heard.asked
    assert not before.handed_over
    assert (successor, body.source, body.handed_over) == ("w1", "", True)
