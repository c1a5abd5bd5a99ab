"""Beam search against real worker loops (fake model): nothing is told before its end, and it survives what breaks."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from kvproto.client import Client, Generation
from kvproto.errors import InvalidRequest, NoWorkers, Unavailable
from kvproto.messages import Beams, Continuation, FinishReason, Grammar, GrammarForm, Sampling, Started
from kvproto.streams.stream import Stream
from tests.integration.client.test_choices import PROMPT, Reader, ready
from tests.support.fake_fleet import FakeFleet
from tests.support.waiting import LIMIT_S

ASKED = Generation("demo", Sampling(30, n=3, beams=Beams(4), logprobs=1, ignore_eos=True), PROMPT)
SLOW = {"fake_tokens_per_s": 100.0}  # 1.2 seconds


async def started(stream: Stream, reader: Reader, steps_s: float = 0.4) -> None:
    """The search runs, and nothing was told of it."""
    async for event in stream:
        reader.take(event)
        assert isinstance(event, Started)
        break
    await asyncio.sleep(steps_s)


async def rest(stream: Stream, reader: Reader) -> None:
    async for event in stream:
        reader.take(event)


async def test_the_best_beams_are_told_at_the_end(fleet: FakeFleet, client: Client) -> None:
    """And counted: the prompt once, and the tokens of what is returned."""
    await fleet.start("w0")
    await ready(client, 1)
    three = await Reader().read(client.generate(ASKED))
    assert three.finished is not None
    assert (three.finished.prompt_tokens, three.finished.output_tokens) == (40, 90)
    assert len({tuple(told.ids) for told in three.told}) == 3
    assert [told.ended and told.ended.reason for told in three.told] == [FinishReason.LENGTH] * 3
    totals = [sum(one.logprob for one in told.logprobs) for told in three.told]
    assert totals == sorted(totals, reverse=True)
    one = await Reader(1).read(client.generate(replace(ASKED, sampling=replace(ASKED.sampling, n=1))))
    assert one.told[0].ids == three.told[0].ids
    alone = await Reader(1).read(client.generate(replace(ASKED, sampling=replace(ASKED.sampling, n=1, beams=None))))
    assert alone.told[0].ids != one.told[0].ids


@pytest.mark.parametrize("way", ["kill", "drain"])
async def test_a_search_goes_on_elsewhere(fleet: FakeFleet, client: Client, way: str) -> None:
    """The client gets the same answer with no error, and nothing twice."""
    for worker in ("w0", "w1"):
        await fleet.start(worker, **SLOW, drain_s=0.1)
    await ready(client, 2)
    expected = await Reader().read(client.generate(ASKED))
    reader, leaving = Reader(), None
    async with client.generate(ASKED) as stream:
        await started(stream, reader)
        first = fleet.workers[str(stream.worker)]
        if way == "kill":
            await first.kill()
        else:
            leaving = asyncio.create_task(first.stop())
        assert reader.tokens == 0
        await rest(stream, reader)
    if leaving is not None:
        await leaving
    assert (stream.attempts, stream.worker != first.id) == (2, True)
    assert reader.answers == expected.answers
    assert reader.finished is not None
    assert expected.finished is not None
    assert reader.finished.output_tokens == expected.finished.output_tokens


async def test_choices_told_in_part_are_told_to_their_ends(fleet: FakeFleet, client: Client) -> None:
    """As after a worker that was lost between them: the first has ended, the second has begun."""
    await fleet.start("w0")
    await ready(client, 1)
    whole = await Reader().read(client.generate(ASKED))
    first, second, third = (told.ids for told in whole.told)
    texts = [told.text for told in whole.told]
    ended, begun = Continuation(tuple(first), len(texts[0]), FinishReason.LENGTH), Continuation(tuple(second[:7]), 5)
    before = ended, begun, Continuation()
    found: dict[int, list[int]] = {0: [], 1: [], 2: []}
    said = ["", "", ""]
    async with client.generate(ASKED, before=before) as stream:
        async for event in stream:
            if (ids := getattr(event, "ids", None)) is not None:
                found[event.choice] += ids
                said[event.choice] += "".join(event.text)
    assert found == {0: [], 1: second[7:], 2: third}
    assert said == ["", texts[1][5:], texts[2]]


async def test_a_client_that_leaves_ends_it(fleet: FakeFleet, client: Client) -> None:
    worker = await fleet.start("w0", **SLOW)
    await ready(client, 1)
    async with client.generate(ASKED) as stream:
        await started(stream, Reader(), 0.2)
    async with asyncio.timeout(LIMIT_S):
        while worker.thread.engine.pool.used or worker.loop.parts.frames.running:
            await asyncio.sleep(0.02)


async def test_a_worker_that_searches_no_beams_is_not_asked(fleet: FakeFleet, client: Client) -> None:
    old = await fleet.start("old")
    old.loop.record = replace(old.loop.record, beams=False)
    await old.loop.parts.lease.set(replace(old.loop.record, state=old.loop.state))
    async with asyncio.timeout(LIMIT_S):
        while any(view.record.beams for view in client.members.view.ready()) or not client.members.view.workers:
            await asyncio.sleep(0.02)
    with pytest.raises((Unavailable, NoWorkers), match="searches no beams"):
        await Reader().read(client.generate(replace(ASKED, patience_s=1.0)))
    await fleet.start("new")
    await ready(client, 2)
    assert (await Reader().read(client.generate(ASKED))).finished is not None


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"beams": Beams(2)}, "best_of"),
        ({"grammar": Grammar(GrammarForm.REGEX, "a+", "tool_choice")}, "tool_choice"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ],
)
async def test_a_worker_refuses_by_name(fleet: FakeFleet, client: Client, changes: dict[str, Any], field: str) -> None:
    await fleet.start("w0")
    await ready(client, 1)
    with pytest.raises(InvalidRequest) as caught:
        await Reader().read(client.generate(replace(ASKED, sampling=replace(ASKED.sampling, **changes))))
    assert caught.value.field == field
