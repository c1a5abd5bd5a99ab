"""Who does not read is parked, and given up in the end; whoever reads beside it notices nothing."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from kvproto import client as kvproto_client
from kvproto.client import Client, Generation
from kvproto.errors import LimitExceeded
from kvproto.messages import Sampling, Tokens
from tests.support.fake_fleet import FakeFleet
from tests.support.waiting import LIMIT_S

SAMPLING = Sampling(max_tokens=4000, temperature=0.8, seed=3, ignore_eos=True)
PROMPT = tuple(range(100, 140))
BUFFER = 100
GIVEN_UP_S = 1.0


async def test_one_that_does_not_read_costs_nobody_else_anything(
    fleet: FakeFleet, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kvproto_client, "PAUSED_LIMIT_S", GIVEN_UP_S)
    worker = await fleet.start("w0", fake_tokens_per_s=4000)  # what was under way is a small part of it
    async with asyncio.timeout(LIMIT_S):
        while not client.members.view.workers:
            await asyncio.sleep(0.01)
    alone = [event async for event in client.generate(Generation("demo", replace(SAMPLING, seed=9), PROMPT))]
    slow = client.generate(Generation("demo", SAMPLING, PROMPT))
    slow._limit = BUFFER
    reading = client.generate(Generation("demo", replace(SAMPLING, seed=9), PROMPT))
    ids: list[int] = []
    most = 0
    async with asyncio.timeout(LIMIT_S):
        async for event in reading:
            if isinstance(event, Tokens):
                ids += event.ids
                most = max(most, slow._buffered)
        while slow.paused_since is None:
            await asyncio.sleep(0.01)
        held = slow._buffered
        await asyncio.sleep(GIVEN_UP_S / 2)
        assert slow._buffered == held, "it is parked: nothing more comes"
        while len(worker.loop.frames.running):  # it is given up
            await asyncio.sleep(0.01)
    assert ids == [token for event in alone if isinstance(event, Tokens) for token in event.ids]
    assert len(ids) == 4000
    assert BUFFER < max(held, most) < 4000 / 2, "memory is bounded by the buffer and what was under way"
    read = 0
    with pytest.raises(LimitExceeded):
        async for event in slow:
            read += len(event.ids) if isinstance(event, Tokens) else 0
    assert read <= held
    load = await worker.thread.call(lambda engine: engine.load())
    assert (load.running, load.waiting, load.blocks_used) == (0, 0, 0)
    assert client.streams == 0
