"""Lists of decisions: few run at once, whoever asks the same shares one answer, and nothing is kept for long."""

from __future__ import annotations

import asyncio

import pytest

from kvfleet.ingress.fleet import listings as listings_module
from kvfleet.ingress.fleet.listings import MAX_LISTINGS, MAX_LISTINGS_PER_TENANT, Listings, ListQuestion
from kvproto.errors import LimitExceeded, Unavailable
from tests.support.waiting import LIMIT_S


class Desk:
    """Answers when it is let; the answer says which one it is."""

    def __init__(self) -> None:
        self.asked: list[ListQuestion] = []
        self.may_answer = asyncio.Event()
        self.fails = False
        self.listings = Listings(self.answer)

    async def answer(self, question: ListQuestion) -> bytes:
        self.asked.append(question)
        number = len(self.asked)
        await self.may_answer.wait()
        if self.fails:
            raise Unavailable("nobody is there")
        return b"%d" % number

    def ask(self, tenant: str | None, limit: int = 50, model: str | None = None) -> asyncio.Task[bytes]:
        return asyncio.create_task(self.listings.ask(ListQuestion(tenant, model, limit)))


@pytest.fixture(autouse=True)
def kept_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listings_module, "KEPT_S", 0.05)


async def forgotten(listings: Listings) -> None:
    async with asyncio.timeout(LIMIT_S):
        while listings.places:
            await asyncio.sleep(0.005)


async def test_the_same_question_is_asked_once_while_it_runs_and_for_a_moment_after() -> None:
    desk = Desk()
    waiting = [desk.ask("acme") for _ in range(50)]
    await asyncio.sleep(0)
    desk.may_answer.set()
    assert await asyncio.gather(*waiting) == [b"1"] * 50
    assert await desk.ask("acme") == b"1"
    others = [desk.ask("acme", 51), desk.ask("acme", model="m"), desk.ask("other"), desk.ask(None)]
    assert await asyncio.gather(*others) == [b"2", b"3", b"4", b"5"], "of others nobody is shown anything"
    await forgotten(desk.listings)
    assert await desk.ask("acme") == b"6"


async def test_one_tenant_takes_a_few_places_and_all_together_a_few_more() -> None:
    desk = Desk()
    waiting = [desk.ask("acme", limit) for limit in range(1, 201)]
    await asyncio.sleep(0)
    waiting.append(desk.ask("other"))
    waiting += [desk.ask(f"t{number}") for number in range(MAX_LISTINGS)]
    desk.may_answer.set()
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(one, bytes) for one in outcomes[:MAX_LISTINGS_PER_TENANT])
    refused = outcomes[MAX_LISTINGS_PER_TENANT:200]
    assert all(isinstance(one, LimitExceeded) and one.retry_after_s for one in refused)
    assert isinstance(outcomes[200], bytes), "another tenant still finds a place"
    assert len(desk.asked) == len(desk.listings.places) == MAX_LISTINGS
    with pytest.raises(LimitExceeded):
        await desk.ask("acme", 200)
    assert await desk.ask("acme", 1) == b"1", "what is here already costs nothing"
    await forgotten(desk.listings)
    assert await desk.ask("acme", 200)


async def test_one_who_leaves_takes_the_answer_from_nobody_and_a_failure_is_not_kept() -> None:
    desk = Desk()
    leaves, stays = desk.ask("acme"), desk.ask("acme")
    await asyncio.sleep(0)
    leaves.cancel()
    await asyncio.sleep(0)
    desk.fails = True
    desk.may_answer.set()
    with pytest.raises(Unavailable):
        await stays
    await asyncio.sleep(0)
    assert len(desk.listings.places) == 0
    desk.fails = False
    assert await desk.ask("acme") == b"2"


async def test_it_leaves_no_task_behind() -> None:
    desk = Desk()
    waits = desk.ask("acme")
    await asyncio.sleep(0)
    await desk.listings.close()
    with pytest.raises(asyncio.CancelledError):
        await waits
    assert len(desk.listings.places) == 0
