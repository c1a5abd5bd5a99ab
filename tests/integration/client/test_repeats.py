"""A request that is sent again, by another process or the same: it reads along, has its result again, or goes on."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from kvfleet.placement.loop import PlacementLoop
from kvproto import codec
from kvproto.client import Client, Generation
from kvproto.connection import Connection, Message
from kvproto.errors import InvalidRequest
from kvproto.ids import new_process_id
from kvproto.messages import (
    CancelRequest,
    ChoiceFinished,
    Continuation,
    Finished,
    FinishReason,
    Placement,
    PlaceRequest,
    Role,
    Sampling,
    Started,
    Tokens,
)
from kvproto.streams.stream import Stream
from kvproto.subjects import PLACEMENT_INBOX, Subjects, inbox_prefix
from kvservice.membership import member_record
from tests.support.fake_fleet import FakeFleet
from tests.support.waiting import LIMIT_S

PROMPT = tuple(range(100, 140))
SAMPLING = Sampling(max_tokens=60, temperature=0.9, ignore_eos=True)
ONE = Generation("demo", SAMPLING, PROMPT, request="r1")


class Placer:
    """Placement as far as repeats go: an attempt up to `attempt` is attached to `worker`, a later one goes elsewhere,
    under a number from `counts_from` on."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.worker, self.attempt, self.elsewhere, self.counts_from = "w0", 0, "w1", 0
        self.asked: list[PlaceRequest] = []

    async def on_place(self, message: Message) -> None:
        ask = codec.decode(PlaceRequest, message.data)
        self.asked.append(ask)
        if ask.attempt <= self.attempt:
            answer = Placement(ask.request, self.worker, self.attempt, attached=len(self.asked) > 1)
        else:
            answer = Placement(ask.request, self.elsewhere, max(ask.attempt, self.counts_from))
        await self.connection.publish(message.reply, codec.encode(answer))


@pytest.fixture
async def second(nats_url: str, fleet_buckets: Subjects) -> AsyncIterator[Client]:
    client = await Client.open(nats_url, namespace=fleet_buckets.namespace)
    yield client
    await client.close()


@pytest.fixture
async def placer(nats_url: str, fleet_buckets: Subjects) -> AsyncIterator[Placer]:
    connection = await Connection.open(nats_url, name="placer", inbox_prefix="_plc.repeats")
    placer = Placer(connection)
    await connection.subscribe(fleet_buckets.place_all(), placer.on_place)
    await connection.synced()
    yield placer
    await connection.close()


async def start(fleet: FakeFleet, *clients: Client, pace: float = 600) -> None:
    for worker in ("w0", "w1"):
        await fleet.start(worker, fake_tokens_per_s=pace)
    async with asyncio.timeout(LIMIT_S):
        while any(len(list(client.members.view.ready())) < 2 for client in clients):
            await asyncio.sleep(0.02)


async def read(stream: Stream) -> tuple[list[int], str, Finished]:
    ids: list[int] = []
    text, finished, started = "", None, 0
    async for event in stream:
        if isinstance(event, Tokens):
            assert event.index == len(ids)
            ids += event.ids
            text += "".join(event.text)
        elif isinstance(event, Finished):
            finished = event
        else:
            started += isinstance(event, Started)
    assert finished is not None
    assert started == 1
    return ids, text, finished


async def until_tokens(stream: Stream, count: int) -> None:
    async with asyncio.timeout(LIMIT_S):
        while len(stream.ids) < count:
            await asyncio.sleep(0.005)


def taken(fleet: FakeFleet) -> list[int]:
    return [fleet.workers[worker].loop.requests.requests_total for worker in ("w0", "w1")]


async def test_a_repeat_reads_along_and_what_ended_is_had_again(
    fleet: FakeFleet, client: Client, second: Client, placer: Placer
) -> None:
    await start(fleet, client, second)
    first = client.generate(ONE)
    await until_tokens(first, 10)
    with pytest.raises(InvalidRequest, match="already running"):
        client.generate(ONE)
    repeat = second.generate(ONE)
    along, alone = await asyncio.gather(read(repeat), read(first))
    assert along == alone
    assert len(along[0]) == 60
    assert (repeat.attempts, repeat.worker) == (1, "w0")
    for again in (second, client):
        assert await read(again.generate(ONE)) == alone
    assert taken(fleet) == [1, 0]


async def test_another_prompt_under_the_same_id_is_refused(
    fleet: FakeFleet, client: Client, second: Client, placer: Placer
) -> None:
    await start(fleet, client, second)
    first = client.generate(ONE)
    await until_tokens(first, 1)
    with pytest.raises(InvalidRequest) as refused:
        await read(second.generate(replace(ONE, prompt_ids=(*PROMPT, 1))))
    assert refused.value.field == "request"
    assert len((await read(first))[0]) == 60


async def test_whoever_leaves_takes_nothing_with_it(
    fleet: FakeFleet, client: Client, second: Client, placer: Placer
) -> None:
    await start(fleet, client, second)
    first = client.generate(ONE)
    await until_tokens(first, 5)
    repeat = second.generate(ONE)
    await until_tokens(repeat, 5)
    await first.cancel()
    ids, *_ = await read(repeat)
    assert len(ids) == 60
    assert repeat.attempts == 1
    assert taken(fleet) == [1, 0]


async def test_what_another_one_cancels_goes_on_as_a_later_attempt(
    fleet: FakeFleet, client: Client, second: Client, placer: Placer
) -> None:
    await start(fleet, client, second)
    one = replace(ONE, sampling=replace(SAMPLING, seed=11, max_tokens=400))  # it is not over before the cancel is there
    expected = await read(client.generate(replace(one, request="r0")))
    placer.asked.clear()
    first = client.generate(one)
    await until_tokens(first, 5)
    repeat = second.generate(one)
    await until_tokens(repeat, 5)
    everybody = codec.encode(CancelRequest("r1"))
    await client.connection.publish(client.subjects.worker_cancel("w0"), everybody)
    ids, text, _ = await read(repeat)
    assert (ids, text) == expected[:2]
    assert (repeat.attempts, repeat.worker) == (2, "w1")
    await first.cancel()


async def test_attempts_of_others_are_counted(fleet: FakeFleet, client: Client, placer: Placer) -> None:
    """Placement knows of attempts that are lost: a new one has a number of its own."""
    await start(fleet, client)
    placer.attempt, placer.counts_from = -1, 5
    stream = client.generate(ONE)
    assert len((await read(stream))[0]) == 60
    assert (stream.attempts, stream.worker) == (6, "w1")
    known = fleet.workers["w1"].loop.frames.known
    assert known("r1", 5) is not None
    assert known("r1", 0) is None


async def test_the_same_id_draws_the_same_tokens_anywhere(fleet: FakeFleet, client: Client, second: Client) -> None:
    await start(fleet, client, second)
    here = await read(client.generate(replace(ONE, worker="w0")))
    there = await read(second.generate(replace(ONE, worker="w1")))
    assert taken(fleet) == [1, 1]
    assert here[:2] == there[:2]
    assert (await read(client.generate(replace(ONE, request="r2"))))[0] != here[0]


async def test_through_placement(fleet: FakeFleet, client: Client, second: Client) -> None:
    await start(fleet, client, second)
    name = new_process_id()
    connection = await Connection.open(fleet.nats_url, name=name, inbox_prefix=inbox_prefix(PLACEMENT_INBOX, name))
    record = member_record(Role.PLACEMENT, name)
    placement = PlacementLoop(connection, client.subjects, record, chance=random.random)
    await placement.start()
    try:
        first = client.generate(ONE)
        await until_tokens(first, 10)
        repeat = second.generate(ONE)
        along, alone = await asyncio.gather(read(repeat), read(first))
        assert along == alone
        assert sum(taken(fleet)) == 1
        assert await read(second.generate(ONE)) == alone
        assert sum(taken(fleet)) == 1
        assert client.counters.placed_total + second.counters.placed_total == 3
    finally:
        await placement.stop(grace_s=0)
        await connection.close()


# ---------------------------------------------------------------------------------------------- before


async def test_a_stream_begins_after_what_its_caller_has(fleet: FakeFleet, client: Client) -> None:
    await start(fleet, client)
    asked = replace(ONE, sampling=replace(SAMPLING, seed=1))
    whole = [e async for e in client.generate(replace(asked, request="a")) if isinstance(e, Tokens)]
    had = whole[:20]
    before = Continuation(
        tuple(one for piece in had for one in piece.ids), sum(len(text) for piece in had for text in piece.text)
    )
    events = [event async for event in client.generate(replace(asked, request="b"), before=[before])]
    assert isinstance(events[0], Started)
    rest = [event for event in events if isinstance(event, Tokens)]
    assert rest[0].index == len(before.output_ids)
    for part in ("ids", "text"):
        assert [x for e in rest for x in getattr(e, part)] == [x for e in whole[20:] for x in getattr(e, part)]
    assert isinstance(events[-1], Finished)
    assert events[-1].output_tokens == 60


async def test_choices_go_on_where_each_was(fleet: FakeFleet, client: Client) -> None:
    await start(fleet, client, pace=900)
    asked = replace(ONE, sampling=replace(SAMPLING, n=3, seed=5))
    whole: list[list[int]] = [[], [], []]
    async for event in client.generate(replace(asked, request="a")):
        if isinstance(event, Tokens):
            whole[event.choice] += event.ids
    before = [
        Continuation(tuple(whole[0][:7]), 0),
        Continuation(tuple(whole[1]), 0, FinishReason.LENGTH),
        Continuation(),
    ]
    got: list[list[int]] = [[], [], []]
    ended = []
    async for event in client.generate(replace(asked, request="b"), before=before):
        if isinstance(event, Tokens):
            got[event.choice] += event.ids
        elif isinstance(event, ChoiceFinished):
            ended.append(event.choice)
    assert got == [whole[0][7:], [], whole[2]]
    assert sorted(ended) == [0, 2]


@pytest.mark.parametrize(
    ("generation", "before", "field"),
    [
        (ONE, [Continuation(), Continuation()], "before"),
        (ONE, [Continuation((1,), 1, FinishReason.STOP)], "before"),
        (ONE, [Continuation((-1,))], "before"),
        (replace(ONE, request="a.b"), [], "request"),
        (replace(ONE, request="x" * 65), [], "request"),
    ],
)
async def test_what_cannot_be_gone_on_with_is_refused_at_once(
    client: Client, generation: Generation, before: list[Continuation], field: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        client.generate(generation, before=before)
    assert refused.value.field == field
    assert client.streams == 0
