"""Many lists of the newest decisions are asked for at once: of one replica, with a full ledger, over NATS."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import numpy as np
import pytest
from fake_fleet import StartPlacement

from kvfleet.placement.io import question_desk
from kvfleet.placement.io.question_desk import MAX_WAITING
from kvfleet.placement.loop import PlacementLoop
from kvfleet.placement.record.ledger import CANDIDATES_KEPT, Considered, LedgerEntry
from kvfleet.placement.workers.price_kernel import COST
from kvproto import codec
from kvproto.connection import Connection, Message
from kvproto.messages import ExplainRequest, Explanation, Placement
from kvproto.subjects import Subjects
from tests.support.waiting import LIMIT_S, until

ASKED = 150


@dataclass
class Asker:
    """Hears in what order its questions are answered to the end; of lists only how many decisions they had."""

    connection: Connection
    subjects: Subjects
    loop: PlacementLoop
    answered: list[str] = field(default_factory=list)
    decisions: dict[str, int] = field(default_factory=dict)

    async def hear(self, message: Message) -> None:
        answer = codec.decode(Explanation, message.data)
        name = message.subject.rpartition(".")[2]
        self.decisions[name] = self.decisions.get(name, 0) + len(answer.decisions)
        if not answer.more:
            self.answered.append(name)

    async def ask(self, name: str, question: ExplainRequest) -> None:
        await self.connection.publish(
            self.subjects.placement_explain(), codec.encode(question), reply=f"_ing.test.x.{name}"
        )

    async def all_are_done(self) -> None:
        questions, loop = self.loop.question_desk, self.loop
        await until(lambda: len(self.answered) + questions.dropped_total > ASKED and len(loop.tasks) <= 1)


@pytest.fixture
async def asker(
    start_placement: StartPlacement, requester: Connection, fleet_buckets: Subjects
) -> AsyncIterator[Asker]:
    loop = await start_placement()
    considered = Considered(
        tuple(f"w{n}" for n in range(CANDIDATES_KEPT)),
        np.ones((COST + 1, CANDIDATES_KEPT)),
        np.ones((4, CANDIDATES_KEPT)),
    )
    for number in range(300):
        placement = Placement(f"r{number}", "w0", 0, placement=loop.core.placement)
        loop.core.ledger.note(LedgerEntry("acme", "m", number, placement, 9, considered, 8, 0, 0, b"", 16))
    asker = Asker(requester, fleet_buckets, loop)
    subscription = await requester.subscribe("_ing.test.x.*", asker.hear)
    await requester.synced()
    yield asker
    await subscription.unsubscribe()


async def test_a_question_about_one_request_waits_for_no_list_and_too_many_lists_are_not_answered(
    asker: Asker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lists wait for their first piece until all have been asked for: only room decides how many are answered."""
    monkeypatch.setattr(question_desk, "EXPLAIN_TIMEOUT_S", LIMIT_S)
    questions, go_on = asker.loop.question_desk, asyncio.Event()
    tell_newest = questions._tell_newest

    async def held_up(ask: ExplainRequest, reply: str, until_s: float) -> None:
        await go_on.wait()
        await tell_newest(ask, reply, until_s)

    monkeypatch.setattr(questions, "_tell_newest", held_up)
    for number in range(ASKED):
        await asker.ask(f"list{number}", ExplainRequest("", "acme", 200 - number % 2))
    await asker.ask("one", ExplainRequest("r7", "other"))
    await until(lambda: asker.answered)
    assert asker.answered == ["one"]
    go_on.set()
    await asker.all_are_done()
    lists = [name for name in asker.answered if name != "one"]
    assert MAX_WAITING <= len(lists) <= MAX_WAITING + 1, "those that found room; the others are met by silence"
    assert {asker.decisions[name] for name in lists} <= {199, 200}, "and none is cut off"
    await asker.ask("again", ExplainRequest("", None, 200))
    await until(lambda: "again" in asker.answered)
    assert asker.decisions["again"] == 200


async def test_what_nobody_waits_for_any_more_is_not_answered(asker: Asker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(question_desk, "EXPLAIN_TIMEOUT_S", 0.0)
    for number in range(ASKED):
        await asker.ask(f"list{number}", ExplainRequest("", None, 200))
    await asker.ask("one", ExplainRequest("r7"))
    await asker.all_are_done()
    assert asker.answered == ["one"]
    assert asker.decisions == {"one": 1}
    assert asker.loop.question_desk.dropped_total == ASKED
