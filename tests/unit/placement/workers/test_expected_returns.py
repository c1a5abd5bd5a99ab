"""Paused conversations at placement: where they go, what is foreseen, what their return saved, and bare producers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from placement_build import a_core, a_generate, a_record, accepted, finished
from placement_rig import Rig, tokens

from kvfleet.placement.core import PlacementCore
from kvfleet.placement.events import Action, Forward, ReturnHeard, TellReturn, WorkerAnswered, WorkerLeft
from kvfleet.placement.events import WorkerRegistered as Registered
from kvfleet.placement.workers.expected_returns import MOST_KEPT, ExpectedReturns
from kvproto.messages import Milestone, Milestones, Passed, ReturnExpected, Tier

SOONEST_S, LATEST_S = 30.0, 90.0
PROMPT = tokens(1, 16_000)


def said(session: str = "s", tenant: str = "public") -> ReturnExpected:
    return ReturnExpected(tenant, "r1", 0, session, SOONEST_S, LATEST_S)


@pytest.fixture
def rig() -> Rig:
    """w0 has a conversation on its host, where it takes a second to restore."""
    made = Rig()
    made.join_tiered("w0", "w1", restore={"host": 1e9}, pauses=True)
    made.store("w0", PROMPT, tier=Tier.HOST)
    return made


def where(rig: Rig, request: str = "r2") -> dict[str, int]:
    placement = rig.place(request, PROMPT, session="s")
    return placement.expected_hit if placement.worker == "w0" else {}


def test_what_a_worker_brings_up_counts_as_on_its_device(rig: Rig) -> None:
    rig.tell(ReturnHeard("w0", said()))
    rig.wait(SOONEST_S)
    assert where(rig).keys() == {"device"}


def test_before_and_after_it_lies_where_the_index_says(rig: Rig) -> None:
    rig.tell(ReturnHeard("w0", said()))
    assert where(rig).keys() == {"host"}
    rig.tell(ReturnHeard("w0", said()))
    rig.wait(LATEST_S + 1)
    assert where(rig, "r3").keys() == {"host"}
    assert len(rig.core.returns) == 0


def test_another_tenants_conversation_of_that_name_is_another(rig: Rig) -> None:
    rig.tell(ReturnHeard("w0", said(tenant="other")))
    rig.wait(SOONEST_S)
    assert where(rig).keys() == {"host"}


def test_it_is_back_once(rig: Rig) -> None:
    rig.tell(ReturnHeard("w0", said()))
    rig.wait(SOONEST_S)
    where(rig)
    assert len(rig.core.returns) == 0
    assert rig.core.returns.tail_tokens > 0


def test_what_comes_back_in_a_moment_is_ahead_of_new_work(rig: Rig) -> None:
    rig.core.returns.tail_tokens = 8000.0
    free = {rig.place(f"a{number}", tokens(number, 100), shared=False).worker for number in range(10, 30)}
    assert free == {"w0", "w1"}
    rig = Rig()
    rig.join_tiered("w0", "w1", restore={"host": 1e9})
    rig.core.returns.tail_tokens = 8000.0
    for number in range(200):
        rig.tell(ReturnHeard("w0", said(f"s{number}")))
    rig.wait(SOONEST_S)
    rig.beat("w0")
    rig.beat("w1")
    assert {rig.place(f"a{number}", tokens(number, 100)).worker for number in range(10, 15)} == {"w1"}


def test_nothing_is_expected_of_a_worker_that_is_gone(rig: Rig) -> None:
    rig.tell(ReturnHeard("w0", said()))
    rig.tell(WorkerLeft("w0"))
    assert len(rig.core.returns) == 0
    rig.tell(ReturnHeard("nobody", said()))
    assert rig.core.stats().paused == 0


def test_the_ledger_says_what_was_saved(rig: Rig) -> None:
    placement = rig.place("r2", PROMPT, session="s")
    started = Milestone("public", "r2", 0, Passed.STARTED, 0.1, 16_000, {"device": 15_000}, saved_s=0.5)
    for _ in range(2):  # repeated after an outage
        rig.tell(Milestones(placement.worker, "e1", (started,)))
    (decision,) = rig.core.ledger.explain("r2")
    assert decision.actual.saved_s == 0.5
    assert rig.core.stats().saved_s_total == 0.5
    rig.end(placement.worker, "r2")
    assert rig.core.ledger.explain("r2")[0].actual.saved_s == 0.5


def test_it_is_bounded() -> None:
    returns = ExpectedReturns()
    for number in range(MOST_KEPT + 10):
        returns.expect("w0", said(f"s{number}"), 0.0)
    assert len(returns) == MOST_KEPT
    returns.expect("w0", said(""), 0.0)
    assert len(returns) == MOST_KEPT
    returns.check_integrity()


def producer(core: PlacementCore, **fields: object) -> str:
    (forward,) = [one for one in core.handle(a_generate(**fields), 0.0) if isinstance(one, Forward)]  # type: ignore[arg-type]
    core.handle(WorkerAnswered(accepted("r1", forward.request.attempt, forward.worker)), 0.01)
    return forward.worker


def told(actions: list[Action]) -> list[TellReturn]:
    return [one for one in actions if isinstance(one, TellReturn)]


def a_core_of_pauses(*, pauses: bool = True) -> PlacementCore:
    core = a_core()
    core.handle(Registered(replace(a_record("w1"), pauses=pauses)), 0.0)
    return core


@pytest.mark.parametrize("by_frame", [True, False])
def test_a_bare_producer_says_when_it_comes_back(*, by_frame: bool) -> None:
    core = a_core_of_pauses()
    worker = producer(core, session="s", expect_return_s=30.0)
    ended = Milestone("public", "r1", 0, Passed.ENDED, 1.0)
    frame, milestone = WorkerAnswered(finished("r1", 0)), Milestones(worker, "e1", (ended,))
    first, second = (frame, milestone) if by_frame else (milestone, frame)
    (tell,) = told(core.handle(first, 1.0))
    assert (tell.worker, tell.said.request, tell.said.session) == (worker, "r1", "s")
    assert tell.said.soonest_s < 30 < tell.said.latest_s
    assert told(core.handle(second, 1.0)) == []


def test_nobody_is_told_of_others_and_of_failures() -> None:
    core = a_core_of_pauses()
    producer(core)
    assert told(core.handle(WorkerAnswered(finished("r1", 0)), 1.0)) == []
    core = a_core_of_pauses()
    worker = producer(core, expect_return_s=30.0)
    ended = Milestone("public", "r1", 0, Passed.ENDED, 1.0, code="cancelled")
    assert told(core.handle(Milestones(worker, "e1", (ended,)), 1.0)) == []
    core = a_core_of_pauses(pauses=False)
    producer(core, expect_return_s=30.0)
    assert told(core.handle(WorkerAnswered(finished("r1", 0)), 1.0)) == []
