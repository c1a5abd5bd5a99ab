"""Blocks of a prompt that another worker prefills come while they are made, even if its address comes late."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvfleet.worker.blocks.chain_location import BlockName, names_of
from kvfleet.worker.serve import fetch_ahead
from kvfleet.worker.serve.fetch_ahead import FetchAhead
from kvfleet.worker.serve.worker_parts import WorkerParts
from kvproto.block_hash import chain
from kvproto.messages import GenerateRequest, HotChain, Sampling
from tests.support.waiting import LIMIT_S

ROOT, SIZE = b"r" * 16, 16
IDS = tuple(range(8 * SIZE))
NAMES = names_of(ROOT, chain(ROOT, IDS, SIZE), IDS, SIZE)
ASKED = GenerateRequest("r", 1, "demo", Sampling(9), "_INBOX.r", IDS, source="p")


class Prefiller:
    """As the tiers of this worker see it: a block more with each question, once its address is known."""

    def __init__(self, unanswered: int) -> None:
        self.unanswered = unanswered  # questions for its address
        self.asked = 0  # before the address was known
        self.blocks = 0
        self.brought: list[int] = []

    def meet(self, worker: str) -> Awaitable[None] | None:
        return self._look_up() if self.unanswered >= 0 else None

    async def _look_up(self) -> None:
        self.unanswered -= 1

    async def at_peer(self, names: Sequence[BlockName], peer: str, limit_s: float) -> int:
        if self.unanswered >= 0:
            self.asked += 1
            return 0
        self.blocks += 1
        return self.blocks - (len(NAMES) - len(names))

    async def preload(self, chain: HotChain, limit_s: float) -> None:
        self.brought.append(len(chain.hashes) // len(NAMES[0].hash))


def spawn(work: Coroutine[object, object, None], name: str) -> asyncio.Task[None]:
    return asyncio.create_task(cast(Coroutine[Any, Any, None], work), name=name)


@pytest.mark.parametrize("unanswered", [0, 3])
async def test_blocks_come_as_they_are_made(unanswered: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_ahead, "POLL_S", 0.0)
    prefiller = Prefiller(unanswered)
    ahead = FetchAhead(cast(WorkerParts, SimpleNamespace(tiers=prefiller)), spawn)
    ahead.begin(ASKED, "public", ROOT, NAMES)
    async with asyncio.timeout(LIMIT_S):
        while ahead._tasks:
            await asyncio.sleep(0)
    assert prefiller.asked == unanswered
    assert prefiller.brought == [*range(1, len(NAMES) + 1)]
    assert ahead.blocks_total == len(NAMES)
