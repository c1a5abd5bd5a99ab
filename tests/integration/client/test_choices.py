"""Several choices of one request against real worker loops (fake model): each survives what breaks, by itself."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from kvproto.client import Client, Generation
from kvproto.errors import EngineFailure, InvalidRequest, KvfleetError
from kvproto.messages import ChoiceFinished, Finished, FinishReason, Sampling, Started, TokenLogprobs, Tokens
from kvproto.streams.stream import Stream
from tests.support.fake_fleet import FakeFleet
from tests.support.waiting import LIMIT_S

PROMPT = tuple(range(100, 140))
SAMPLING = Sampling(max_tokens=40, temperature=0.9, seed=7, ignore_eos=True, n=3, logprobs=2)


@dataclass
class Told:
    """What a reader has been told of one choice."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    ended: ChoiceFinished | None = None

    @property
    def answer(self) -> tuple[list[int], str, list[TokenLogprobs], FinishReason | None]:
        return self.ids, self.text, self.logprobs, self.ended and self.ended.reason


class Reader:
    """Reads a stream to its end and checks the order of what comes."""

    def __init__(self, n: int = 3) -> None:
        self.told = [Told() for _ in range(n)]
        self.started: Started | None = None
        self.finished: Finished | None = None

    async def read(self, stream: Stream) -> Reader:
        async with stream:
            async for event in stream:
                self.take(event)
        return self

    def take(self, event: Any) -> None:
        assert self.finished is None
        if isinstance(event, Started):
            assert self.started is None
            self.started = event
            return
        assert self.started is not None
        if isinstance(event, Finished):
            self.finished = event
            return
        told = self.told[event.choice]
        assert told.ended is None
        if isinstance(event, ChoiceFinished):
            told.ended = event
            return
        assert event.index == len(told.ids)
        assert len(event.logprobs) == len(event.ids)
        told.ids += event.ids
        told.text += "".join(event.text)
        told.logprobs += event.logprobs

    @property
    def tokens(self) -> int:
        return sum(len(told.ids) for told in self.told)

    @property
    def answers(self) -> list[Any]:
        return [told.answer for told in self.told]


async def ready(client: Client, count: int) -> None:
    async with asyncio.timeout(LIMIT_S):
        while len(list(client.members.view.ready())) < count:
            await asyncio.sleep(0.02)


def asked(**changes: Any) -> Generation:
    return Generation("demo", replace(SAMPLING, **changes), PROMPT)


async def test_choices_differ_and_are_each_what_they_would_be_alone(fleet: FakeFleet, client: Client) -> None:
    await fleet.start("w0")
    await ready(client, 1)
    three = await Reader().read(client.generate(asked()))
    assert three.started is not None
    assert three.finished is not None
    assert three.started.cached == {}, "what one choice leaves another is no reuse"
    assert [len(told.ids) for told in three.told] == [40, 40, 40]
    assert len({tuple(told.ids) for told in three.told}) == 3
    assert (three.finished.prompt_tokens, three.finished.output_tokens) == (40, 120)
    assert all(told.ended is not None and told.ended.output_tokens == 40 for told in three.told)
    one = await Reader(1).read(client.generate(asked(n=1)))
    assert one.told[0].ids == three.told[0].ids
    assert one.told[0].logprobs == three.told[0].logprobs
    assert one.told[0].ended is None, "of one choice Finished says it all"
    two = await Reader(2).read(client.generate(asked(n=2)))
    assert two.answers == three.answers[:2]


async def test_choices_end_at_different_lengths(fleet: FakeFleet, client: Client) -> None:
    await fleet.start("w0")
    await ready(client, 1)
    whole = await Reader().read(client.generate(asked()))
    stops = (whole.told[1].ids[4], whole.told[2].ids[9])
    assert not set(stops) & set(whole.told[0].ids)
    told = await Reader().read(client.generate(asked(stop_ids=stops)))
    ends = [(one.ended.reason, one.ended.output_tokens) for one in told.told if one.ended]
    assert ends == [(FinishReason.LENGTH, 40), (FinishReason.STOP, 4), (FinishReason.STOP, 9)]
    assert told.finished is not None
    assert (told.finished.reason, told.finished.output_tokens) == (FinishReason.LENGTH, 53)


async def test_a_killed_workers_choices_go_on_elsewhere_with_the_same_tokens(fleet: FakeFleet, client: Client) -> None:
    for worker in ("w0", "w1"):
        await fleet.start(worker, fake_tokens_per_s=600)
    await ready(client, 2)
    whole = await Reader().read(client.generate(asked()))
    stop = whole.told[1].ids[3]  # so that one choice has ended when the worker dies
    expected = await Reader().read(client.generate(asked(stop_ids=(stop,))))
    reader, killed = Reader(), None
    async with client.generate(asked(stop_ids=(stop,))) as stream:
        async for event in stream:
            reader.take(event)
            if killed is None and reader.told[1].ended is not None and len(reader.told[0].ids) >= 8:
                killed = stream.worker
                await fleet.workers[str(killed)].kill()
    assert stream.attempts == 2
    assert stream.worker != killed
    assert reader.answers == expected.answers
    assert reader.finished is not None
    assert expected.finished is not None
    assert reader.finished.output_tokens == expected.finished.output_tokens


async def test_a_draining_worker_hands_all_choices_over(fleet: FakeFleet, client: Client) -> None:
    for worker in ("w0", "w1"):
        await fleet.start(worker, fake_tokens_per_s=150, drain_s=0.1)
    await ready(client, 2)
    reader, drained = Reader(), None
    async with client.generate(asked()) as stream:
        async for event in stream:
            reader.take(event)
            if reader.tokens >= 15 and drained is None:
                drained = asyncio.create_task(fleet.workers[str(stream.worker)].stop())
    assert drained is not None
    await drained
    assert stream.attempts == 2
    again = await Reader().read(client.generate(asked()))
    assert reader.answers == again.answers


async def test_lost_frames_of_any_choice_are_asked_for_again(fleet: FakeFleet, client: Client) -> None:
    worker = await fleet.start("w0", fake_tokens_per_s=1200)
    await ready(client, 1)
    expected = await Reader().read(client.generate(asked()))
    sent = 0
    real_send = worker.loop.outbox.send

    def lossy(subject: str, data: bytes) -> None:
        nonlocal sent
        if subject == client.inbox.batch:
            sent += 1
            if sent % 3 == 0:
                return
        real_send(subject, data)

    worker.loop.outbox.send = lossy  # type: ignore[method-assign]
    for _ in range(2):
        assert (await Reader().read(client.generate(asked()))).answers == expected.answers
    assert client.counters.resends_total > 0
    assert client.counters.lost_total == 0


async def settled(worker: Any) -> None:
    """Nothing of any request is left in the engine."""
    async with asyncio.timeout(LIMIT_S):
        while worker.loop.frames.pending_sequences or _busy(worker):
            await asyncio.sleep(0.01)


def _busy(worker: Any) -> int:
    load = worker.thread.engine.load()
    return int(load.running + load.waiting)


async def test_a_choice_that_fails_ends_the_request_and_its_other_choices(fleet: FakeFleet, client: Client) -> None:
    worker = await fleet.start("w0", fake_tokens_per_s=300)
    await ready(client, 1)
    runner: Any = worker.thread.engine.runner
    real = runner._token

    def broken(part: Any, draw: Any) -> Any:
        if draw.choice == 1 and draw.index == 5:
            return EngineFailure("choice 1 broke")
        return real(part, draw)

    runner._token = broken
    with pytest.raises(KvfleetError, match="choice 1 broke"):
        await Reader().read(client.generate(replace(asked(), attempts=1)))
    await settled(worker)


async def test_a_cancelled_request_leaves_no_choice_running(fleet: FakeFleet, client: Client) -> None:
    worker = await fleet.start("w0", fake_tokens_per_s=20)
    await ready(client, 1)
    async with client.generate(asked(max_tokens=2000)) as stream:
        async for event in stream:
            if isinstance(event, Tokens):
                break
        assert worker.loop.frames.pending_sequences == 3
    await settled(worker)


async def test_a_reader_that_stops_parks_all_choices(fleet: FakeFleet, client: Client) -> None:
    worker = await fleet.start("w0", fake_tokens_per_s=3000)
    await ready(client, 1)
    stream = client.generate(asked(max_tokens=300))
    stream._limit = 60
    async with asyncio.timeout(LIMIT_S):
        while stream.paused_since is None or _busy(worker):
            await asyncio.sleep(0.01)
    assert stream._buffered < 900
    reader = await Reader().read(stream)
    assert [len(told.ids) for told in reader.told] == [300] * 3


async def test_a_worker_takes_as_many_choices_as_it_has_room_for(fleet: FakeFleet, client: Client) -> None:
    await fleet.start("w0", slots=2, waiting=2, fake_tokens_per_s=100)
    await ready(client, 1)
    with pytest.raises(InvalidRequest, match="takes at most 4 choices") as refused:
        await Reader(5).read(client.generate(replace(asked(n=5), attempts=1)))
    assert refused.value.field == "n"
    async with client.generate(asked()) as first:
        async for event in first:
            if isinstance(event, Tokens):
                break
        with pytest.raises(KvfleetError, match="has all it takes"):
            await Reader(2).read(client.generate(replace(asked(n=2), patience_s=0.0)))
    assert (await Reader(2).read(client.generate(asked(n=2)))).tokens == 80


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"n": 0}, "sampling.n"),
        ({"n": 129}, "sampling.n"),
        ({"logit_bias": {-5: 1.0}}, "sampling.logit_bias.-5"),
        ({"logit_bias": {5: float("nan")}}, "sampling.logit_bias.5"),
        ({"min_p": 2.0}, "sampling.min_p"),
        ({"logprobs": -1}, "sampling.logprobs"),
    ],
)
async def test_sampling_that_no_worker_would_read_is_refused_at_once(
    client: Client, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        client.generate(asked(**changes))
    assert refused.value.field == named
    assert client.streams == 0
