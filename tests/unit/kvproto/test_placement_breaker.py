"""A placement that does not answer is asked by one request now and then, until it does."""

from __future__ import annotations

from itertools import pairwise

from kvproto.streams.silence import ASK_AGAIN_S, SILENT_ENOUGH, PlacementBreaker


def an_open_one(now: float = 0.0) -> PlacementBreaker:
    breaker = PlacementBreaker()
    for _ in range(SILENT_ENOUGH):
        assert breaker.may_ask(now)
        breaker.unanswered(now)
    assert breaker.ask_at is not None
    return breaker


def test_some_unanswered_ones_open_it_and_one_answer_in_between_does_not_let_it() -> None:
    breaker = PlacementBreaker()
    for number in range(4 * SILENT_ENOUGH):
        assert breaker.may_ask(number)
        if number % SILENT_ENOUGH == SILENT_ENOUGH - 1:
            breaker.answered()
        else:
            breaker.unanswered(number)
    assert breaker.ask_at is None
    an_open_one()


def test_open_it_lets_one_through_at_a_time() -> None:
    breaker = an_open_one()
    assert not breaker.may_ask(ASK_AGAIN_S * 0.9)
    asked = [at / 1000 for at in range(2_001) if breaker.may_ask(at / 1000)]
    assert len(asked) == 2.0 // ASK_AGAIN_S
    assert all(later - earlier >= ASK_AGAIN_S for earlier, later in pairwise(asked))
    breaker.unanswered(asked[-1] + 0.05)
    assert breaker.ask_at is not None


def test_those_that_were_on_their_way_when_it_opened_do_not_put_off_the_next() -> None:
    breaker = an_open_one(1.0)
    for _ in range(100):
        breaker.unanswered(1.04)
    assert breaker.may_ask(1.0 + ASK_AGAIN_S)


def test_an_answer_closes_it_at_once() -> None:
    breaker = an_open_one()
    assert breaker.may_ask(ASK_AGAIN_S)
    breaker.answered()
    assert breaker.ask_at is None
    assert all(breaker.may_ask(ASK_AGAIN_S) for _ in range(100))
    for _ in range(SILENT_ENOUGH - 1):
        breaker.unanswered(1.0)
    assert breaker.ask_at is None
