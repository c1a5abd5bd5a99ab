"""A worker is killed at any token: the reader has the ids, text and log probabilities of a run that nothing failed."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any

import pytest

from kvproto.client import Client, Generation
from kvproto.messages import ChoiceFinished, Finished, Sampling, TokenLogprobs, Tokens
from kvproto.streams.stream import Stream
from tests.support.fake_fleet import FakeFleet
from tests.support.waiting import LIMIT_S

PROMPT = tuple(range(100, 140))
PLAIN = Sampling(max_tokens=40, temperature=0.9, seed=7, ignore_eos=True, logprobs=2)


class Answer:
    """What a reader was told, choice by choice."""

    def __init__(self, choices: int) -> None:
        self.ids: list[list[int]] = [[] for _ in range(choices)]
        self.text = [""] * choices
        self.logprobs: list[list[TokenLogprobs]] = [[] for _ in range(choices)]
        self.ends: dict[int, tuple[Any, int]] = {}
        self.finished: tuple[Any, int] | None = None

    def take(self, event: Any) -> None:
        assert self.finished is None
        if isinstance(event, Tokens):
            assert event.index == len(self.ids[event.choice])
            self.ids[event.choice] += event.ids
            self.text[event.choice] += "".join(event.text)
            self.logprobs[event.choice] += event.logprobs
        elif isinstance(event, ChoiceFinished):
            self.ends[event.choice] = event.reason, event.output_tokens
        elif isinstance(event, Finished):
            self.finished = event.reason, event.output_tokens

    @property
    def tokens(self) -> int:
        return sum(map(len, self.ids))

    def must_equal(self, other: Answer, why: str) -> None:
        assert (self.ids, self.text, self.ends, self.finished) == (
            other.ids,
            other.text,
            other.ends,
            other.finished,
        ), why
        for mine, others in zip(self.logprobs, other.logprobs, strict=True):
            assert [one.logprob for one in mine] == pytest.approx([one.logprob for one in others], abs=1e-4), why
            assert [len(one.top_ids) for one in mine] == [2] * len(mine)


async def read(stream: Stream, choices: int, at: int = -1, then: Any = None) -> Answer:
    answer = Answer(choices)
    async with stream:
        async for event in stream:
            answer.take(event)
            if 0 <= at <= answer.tokens:
                at = -1
                await then(str(stream.worker))
    return answer


async def ready(client: Client, count: int) -> None:
    async with asyncio.timeout(LIMIT_S):
        while len(list(client.members.view.ready())) < count:
            await asyncio.sleep(0.02)


async def compare(
    fleet: FakeFleet, client: Client, sampling: Sampling, kills: int, *, latest: float = 1.0, **settings: Any
) -> None:
    """Workers die one after the other, each at a token drawn by chance of the first `latest` part."""
    for worker in range(kills + 1):
        await fleet.start(f"w{worker}", **settings)
    await ready(client, kills + 1)
    asked = Generation("demo", sampling, PROMPT)
    whole = await read(client.generate(asked), sampling.n)
    assert whole.finished is not None
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    for kill in range(kills):
        at = chance.randrange(1, int(whole.tokens * latest))
        stream = client.generate(asked)
        broken = await read(stream, sampling.n, at, lambda worker: fleet.workers[worker].kill())
        broken.must_equal(whole, f"chance {seed}, kill {kill} at token {at}")
        assert stream.attempts > 1 or at > whole.tokens - 5 * sampling.n


async def test_choices_with_biases(fleet: FakeFleet, client: Client) -> None:
    sampling = replace(PLAIN, n=3, logit_bias={500: 3.0}, min_tokens=5)
    await compare(fleet, client, sampling, kills=2, fake_tokens_per_s=900)


async def test_stop_strings(fleet: FakeFleet, client: Client) -> None:
    """One that the text really has, in its later half: it may be held back when the worker dies."""
    probe = await fleet.start("probe")
    await ready(client, 1)
    text = (await read(client.generate(Generation("demo", PLAIN, PROMPT)), 1)).text[0]
    await probe.stop()
    stop = text[len(text) * 2 // 3 :][:3]
    await compare(fleet, client, replace(PLAIN, stop=(stop, "never")), kills=2, fake_tokens_per_s=600)


async def test_penalties_of_a_real_model(fleet: FakeFleet, client: Client) -> None:
    penalties = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 1.5, "min_p": 0.02}
    sampling = replace(PLAIN, n=2, max_tokens=96, **penalties)  # type: ignore[arg-type]
    # As nothing paces it, it may be far ahead of a client that waits for its turn on a busy machine.
    await compare(fleet, client, sampling, kills=1, latest=0.25, runner="torch", blocks=256)
