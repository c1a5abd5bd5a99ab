"""Who gives way when a worker has all it takes: lower priorities that nobody has seen anything of, and nobody else."""

from __future__ import annotations

import pytest
from engine_rig import make_engine, spec

from kvfleet.worker.engine.engine import Engine
from kvfleet.worker.port.capacity import Departures
from kvfleet.worker.port.outputs import SequenceFailed
from kvfleet.worker.serve.request_intake import check_capacity
from kvproto.errors import Overloaded
from kvproto.messages import ChoiceFinished, GenerateRequest, Load, PriorityLoad, Rates, Sampling

PROMPT = tuple(range(20, 28))


def prompt(name: str) -> tuple[int, ...]:
    """No two begin alike: who shares a prompt waits for whoever computes it."""
    return (ord(name[0]), *PROMPT)


def an_engine(*requests: tuple[str, int], slots: int = 2) -> Engine:
    """Each with its priority; after a step as many as there are slots have begun."""
    engine = make_engine(slots=slots, token_budget=64)
    for name, priority in requests:
        engine.add(spec(name, prompt(name), 30, priority=priority))
    engine.step()
    return engine


def shed(engine: Engine) -> list[str]:
    failed = [output for output in engine.step().outputs if isinstance(output, SequenceFailed)]
    engine.check_integrity()
    for one in failed:
        assert isinstance(one.error, Overloaded)
        assert one.error.retryable
        assert one.error.retry_after_s is not None
        assert one.error.retry_after_s >= 1.0
    return [one.request for one in failed]


def finished(engine: Engine) -> set[str]:
    ended = set()
    while engine.has_work:
        ended |= {output.request for output in engine.step().outputs if isinstance(output, ChoiceFinished)}
    return ended


def test_load_is_told_by_priority_where_there_is_more_than_one() -> None:
    assert an_engine(("a", 0), ("b", 0)).load().priorities == ()
    engine = an_engine(("a", 5), ("b", 5), ("c", 0), ("d", 5), ("e", -3))
    levels = engine.load().priorities
    assert [(one.priority, one.requests, one.unstarted) for one in levels] == [(5, 3, 1), (0, 1, 1), (-3, 1, 1)]
    assert sum(one.queued_prefill_tokens for one in levels) == engine.load().queued_prefill_tokens
    assert Load(priorities=(PriorityLoad(1),)).priorities[0].requests == 0


def test_the_lowest_goes_first_and_of_it_who_came_last() -> None:
    engine = an_engine(("a", 1), ("b", 1), ("c", 0), ("d", -1), ("e", -1), ("f", 0))
    engine.add(spec("new", PROMPT, 4, priority=1))
    engine.make_room("new", 0, 1)
    assert shed(engine) == ["e"]
    engine.make_room("new", 0, 2)
    assert shed(engine) == ["d", "f"]
    assert finished(engine) == {"a", "b", "c", "new"}


def test_what_has_begun_is_never_sent_away() -> None:
    engine = an_engine(("a", -5), ("b", -5))
    engine.add(spec("goes-on", PROMPT, 8, priority=-5, attempt=1, output_ids=(1, 2)))
    engine.add(spec("new", PROMPT, 4, priority=50))
    engine.make_room("new", 0, 1)
    assert shed(engine) == ["new"]  # there is no room after all, and nobody has seen anything of it either
    assert finished(engine) == {"a", "b", "goes-on"}


def test_a_paused_one_that_had_begun_is_not_sent_away() -> None:
    engine = an_engine(("a", 0), slots=1)
    engine.pause("a", 0)
    engine.add(spec("b", prompt("b"), 30, priority=1))
    engine.step()
    engine.resume("a", 0)
    engine.add(spec("new", PROMPT, 4, priority=2))
    engine.make_room("new", 0, 1)
    assert shed(engine) == ["new"]
    assert finished(engine) == {"a", "b"}


def test_choices_of_one_attempt_go_together() -> None:
    engine = an_engine(("a", 0), slots=1)
    for choice in range(3):
        engine.add(spec("several", PROMPT, 8, priority=-1, choice=choice))
    engine.add(spec("new", PROMPT, 4))
    engine.make_room("new", 0, 1)
    assert shed(engine) == ["several"] * 3
    assert finished(engine) == {"a", "new"}


def test_equals_do_not_give_way_and_a_newcomer_that_began_meanwhile_stays() -> None:
    engine = an_engine(("a", 0), ("b", 0), slots=1)
    engine.add(spec("new", PROMPT, 4))
    engine.make_room("new", 0, 1)
    assert shed(engine) == ["new"]
    engine.add(spec("high", PROMPT, 4, priority=9))
    engine.step()  # it has pushed the running one out
    engine.make_room("high", 0, 5)
    assert shed(engine) == []
    engine.make_room("nobody", 0, 1)
    assert finished(engine) == {"a", "b", "high"}


def test_the_engine_says_who_goes() -> None:
    engine = an_engine(("a", 1), ("b", 1), ("c", 0), ("d", -1))
    engine.load = None  # type: ignore[assignment, method-assign] - all there is, by tier and priority, is not measured
    engine.add(spec("new", PROMPT, 4, priority=1))
    assert engine.make_room("new", 0, 1) == {("d", 0)}
    assert engine.make_room("new", 0, 1) == {("c", 0)}
    assert engine.make_room("new", 0, 1) == {("new", 0)}
    assert engine.make_room("new", 0, 1) == set()


def test_who_was_asked_to_go_is_not_counted_again() -> None:
    """Newcomers ask for one each, however late the engine answers: not 1 + 2 + 3."""
    limit = 20
    load = Load(waiting=15, priorities=(PriorityLoad(0, 20, 15, 0),))
    pending = dict.fromkeys([(f"low{number}", 0) for number in range(20)], 1)
    departures = Departures()
    asked = []
    for number in range(15):
        newcomer = GenerateRequest(f"high{number}", 0, "demo", Sampling(9), "_ing.x.b", prompt_ids=(1,), priority=5)
        leaving = departures.count(lambda attempt: pending.get(attempt, 0))
        asked.append(
            check_capacity(newcomer, taken=len(pending), limit=limit, load=load, rates=Rates(), leaving=leaving)
        )
        pending[newcomer.request, 0] = 1
        departures.asked += asked[-1]
        if number >= 5:  # the engine has answered; what it ended comes with its next results
            departures.answered(1, [(f"low{number - 5}", 0)])
        if number >= 8:
            del pending[f"low{number - 8}", 0]
    assert asked == [1] * 15
    leaving = departures.count(lambda attempt: pending.get(attempt, 0))
    assert len(pending) - leaving == limit
    load = Load(waiting=8, priorities=(PriorityLoad(5, 15, 0, 0), PriorityLoad(0, 13, 8, 0)))
    with pytest.raises(Overloaded):  # there is nobody left to go
        check_capacity(newcomer, taken=len(pending), limit=limit, load=load, rates=Rates(), leaving=leaving)
