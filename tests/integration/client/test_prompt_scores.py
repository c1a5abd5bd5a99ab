"""Scores of a prompt through what breaks: each once, in order, before all tokens; none computed again that is here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvproto import client as client_module
from kvproto import codec
from kvproto.client import Client, Generation
from kvproto.errors import NoWorkers, Unavailable
from kvproto.messages import (
    Finished,
    FinishReason,
    Frame,
    GenerateRequest,
    PromptScores,
    Sampling,
    Started,
    TokenLogprobs,
    Tokens,
)
from kvproto.streams import stream as stream_module
from kvproto.streams.stream import Stream
from tests.support.fake_fleet import FakeFleet
from tests.support.waiting import LIMIT_S, until

PROMPT = tuple(at % 997 for at in range(1000))
ASKED = Generation("demo", Sampling(8, temperature=0.9, seed=7, ignore_eos=True, prompt_logprobs=2), PROMPT)
SLOW = {"fake_prefill_tokens_per_s": 2000.0, "fake_tokens_per_s": 50.0, "step_tokens": 100}  # half a second, ten steps


class ScoredAnswer:
    def __init__(self) -> None:
        self.scores: list[TokenLogprobs] = []
        self.ids: list[int] = []
        self.started = 0
        self.finished: Finished | None = None

    def take(self, event: Any) -> None:
        match event:
            case Started():
                self.started += 1
            case PromptScores():
                assert self.started == 1
                assert not self.ids
                assert event.index == 1 + len(self.scores)
                self.scores += event.logprobs
            case Tokens():
                assert len(self.scores) == len(PROMPT) - 1
                assert event.index == len(self.ids)
                self.ids += event.ids
            case Finished():
                self.finished = event


async def read(stream: Stream, at: int = -1, then: Callable[[str], Any] | None = None) -> ScoredAnswer:
    """`then` is awaited once, with the worker, when `at` scores are here."""
    answer = ScoredAnswer()
    async with stream:
        async for event in stream:
            answer.take(event)
            if then is not None and 0 <= at <= len(answer.scores):
                await then(str(stream.worker))
                then = None
    assert answer.finished is not None
    return answer


async def ready(client: Client, count: int) -> None:
    async with asyncio.timeout(LIMIT_S):
        while len(list(client.members.view.ready())) < count:
            await asyncio.sleep(0.02)


async def expected(fleet: FakeFleet, client: Client) -> ScoredAnswer:
    """From a worker that nothing happens to; it ends before others come."""
    probe = await fleet.start("probe")
    await ready(client, 1)
    answer = await read(client.generate(ASKED))
    assert len(answer.scores) == len(PROMPT) - 1
    assert len(answer.ids) == 8
    await probe.stop()
    return answer


@pytest.fixture
def asked_of(monkeypatch: pytest.MonkeyPatch) -> list[GenerateRequest]:
    """What workers were asked for."""
    seen: list[GenerateRequest] = []
    decode = codec.decode

    def noting(kind: Any, data: bytes, **limits: Any) -> Any:
        message = decode(kind, data, **limits)
        if kind is GenerateRequest:
            seen.append(message)
        return message

    monkeypatch.setattr(codec, "decode", noting)
    return seen


@pytest.mark.parametrize("at", [0, 1, 500, len(PROMPT) - 1])
async def test_a_worker_is_killed_in_the_midst_of_a_prompt(
    fleet: FakeFleet, client: Client, asked_of: list[GenerateRequest], at: int
) -> None:
    whole = await expected(fleet, client)
    for worker in ("w0", "w1"):
        await fleet.start(worker, **SLOW)
    await ready(client, 2)
    asked_of.clear()
    stream = client.generate(ASKED)
    broken = await read(stream, at, lambda worker: fleet.workers[worker].kill())
    assert (broken.scores, broken.ids, broken.finished.reason) == (whole.scores, whole.ids, FinishReason.LENGTH)  # type: ignore[union-attr]
    assert stream.attempts == 2
    first, second = asked_of
    assert (first.scored, first.attempt) == (1, 0)
    assert second.scored > at


async def test_frames_are_lost(fleet: FakeFleet, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = await expected(fleet, client)
    worker = await fleet.start("w0", **SLOW)
    await ready(client, 1)
    lost = 0
    decode = codec.decode_frames

    def losing(data: bytes) -> list[Frame]:
        """The third frame with scores, the last one, and what comes with them, the first time."""
        nonlocal lost
        frames = decode(data)
        scores = [frame for frame in frames if isinstance(frame, PromptScores)]
        if any(lost < 2 and frame.index in (201, 901) for frame in scores):
            lost += 1
            return []
        return frames

    monkeypatch.setattr(stream_module.codec, "decode_frames", losing)
    answer = await read(client.generate(ASKED))
    assert lost == 2
    assert (answer.scores, answer.ids) == (whole.scores, whole.ids)
    assert client.counters.resends_total > 0
    assert not worker.fatal


async def test_a_worker_drains_in_the_midst_of_a_prompt(fleet: FakeFleet, client: Client) -> None:
    whole = await expected(fleet, client)
    for worker in ("w0", "w1"):
        await fleet.start(worker, **SLOW)
    await ready(client, 2)
    stream = client.generate(ASKED)
    draining: list[asyncio.Task[None]] = []

    async def drain(worker: str) -> None:
        draining.append(asyncio.create_task(fleet.workers[worker].stop()))

    answer = await read(stream, 200, drain)
    await asyncio.gather(*draining)
    assert (answer.scores, answer.ids) == (whole.scores, whole.ids)


async def test_a_caller_goes_on_after_the_scores_that_it_has(
    fleet: FakeFleet, client: Client, asked_of: list[GenerateRequest]
) -> None:
    await fleet.start("w0")
    await ready(client, 1)
    whole = await read(client.generate(ASKED))
    events = []
    async with client.generate(replace(ASKED, scored=901)) as stream:
        events = [event async for event in stream]
    assert next(event.index for event in events if isinstance(event, PromptScores)) == 901
    rest = [one for event in events if isinstance(event, PromptScores) for one in event.logprobs]
    assert rest == whole.scores[900:]
    assert asked_of[-1].scored == 901


async def test_nothing_is_generated(fleet: FakeFleet, client: Client) -> None:
    await fleet.start("w0")
    await ready(client, 1)
    whole = await read(client.generate(ASKED))
    alone = await read(client.generate(replace(ASKED, sampling=Sampling(0, prompt_logprobs=2))))
    assert alone.scores == whole.scores
    assert alone.finished is not None
    assert (alone.ids, alone.finished.output_tokens, alone.finished.reason) == ([], 0, FinishReason.LENGTH)
    sampling = Sampling(0, n=3, prompt_logprobs=2)
    assert (await read(client.generate(replace(ASKED, sampling=sampling)))).scores == whole.scores
    several = await read(client.generate(Generation("demo", Sampling(0, n=2), PROMPT)))
    assert several.scores == []


async def test_an_older_worker_is_not_asked(fleet: FakeFleet, client: Client) -> None:
    old = await fleet.start("old")
    old.loop.record = replace(old.loop.record, scores=False)
    await old.loop.parts.lease.set(replace(old.loop.record, state=old.loop.state))
    async with asyncio.timeout(LIMIT_S):
        while any(view.record.scores for view in client.members.view.ready()) or not client.members.view.workers:
            await asyncio.sleep(0.02)
    with pytest.raises((Unavailable, NoWorkers), match="scores no prompts"):
        await read(client.generate(replace(ASKED, patience_s=1.0)))
    await fleet.start("new")
    await ready(client, 2)
    assert len((await read(client.generate(ASKED))).scores) == len(PROMPT) - 1
    plain = [event async for event in client.generate(replace(ASKED, sampling=Sampling(3)))]
    assert isinstance(plain[-1], Finished)


async def test_a_reader_that_does_not_read_pauses_the_prompt(
    fleet: FakeFleet, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It neither fills the client's memory nor loses a score."""
    monkeypatch.setattr(client_module, "BUFFER_TOKENS", 300)
    worker = await fleet.start("w0", **SLOW)
    await ready(client, 1)
    prompt = tuple(at % 997 for at in range(4000))
    stream = client.generate(replace(ASKED, prompt_ids=prompt))
    async with asyncio.timeout(LIMIT_S):
        while stream.paused_since is None:
            await asyncio.sleep(0.02)
    await until(lambda: worker.thread.measured[0].running == 0)
    assert stream._buffered < 1500
    scores = 0
    async with stream:
        async for event in stream:
            scores += len(event.logprobs) if isinstance(event, PromptScores) else 0
    assert scores == len(prompt) - 1
