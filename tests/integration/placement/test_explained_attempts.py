"""A request of very many attempts is explained by its last ones, in one message that NATS carries."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fake_fleet import MODEL, StartPlacement, StartWorker

from kvfleet.placement.io import timing
from kvfleet.placement.record.ledger import ATTEMPTS_KEPT
from kvproto import codec
from kvproto.connection import Connection
from kvproto.messages import ExplainRequest, Explanation, PlaceRequest
from kvproto.subjects import Subjects
from tests.support.waiting import LIMIT_S

AT_ONCE = 10  # of fewer than 12 a placement is never behind
ATTEMPTS = 2_000  # of a decision of about half a kilobyte each: together more than a message may have


async def test_a_request_of_many_attempts_is_explained_by_its_last_ones(
    start_placement: StartPlacement,
    start_worker: StartWorker,
    requester: Connection,
    fleet_buckets: Subjects,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(timing, "LONGEST_S", LIMIT_S)  # on a slow machine none is late
    for number in range(8):
        await start_worker(f"w{number}")
    loop = await start_placement("cost")
    async with asyncio.timeout(LIMIT_S):
        while len(loop.core.fleet.workers) < 8:
            await asyncio.sleep(0.01)
    answered = 0

    async def count(message: Any) -> None:
        nonlocal answered
        answered += 1

    await requester.subscribe("_ing.test.place.*", count)
    for attempt in range(ATTEMPTS):
        ask = PlaceRequest("mine", MODEL, (1, 2, 3), attempt=attempt)
        subject = fleet_buckets.place("public", MODEL)
        await requester.publish(subject, codec.encode(ask), reply=f"_ing.test.place.{attempt}")
        if attempt % AT_ONCE == AT_ONCE - 1:
            async with asyncio.timeout(LIMIT_S):
                while answered <= attempt:
                    await asyncio.sleep(0.001)
    question = codec.encode(ExplainRequest("mine", "public"))
    answer = await requester.request(fleet_buckets.placement_explain(), question, LIMIT_S)
    assert len(answer.data) < 256 * 1024
    decisions = codec.decode(Explanation, answer.data).decisions
    assert [one.attempt for one in decisions] == list(range(ATTEMPTS - ATTEMPTS_KEPT, ATTEMPTS))
    assert loop.unsent_total == 0
