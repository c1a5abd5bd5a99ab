"""Milestones that a worker says again after an outage are taken once each, in whatever pieces they come."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvfleet.placement.workers.fleet import GAPS_KEPT, SeenMilestones
from kvproto.messages import Milestone, Milestones, Passed


def said(first: int | None, *numbers: int) -> Milestones:
    items = tuple(Milestone("acme", f"r{number}", 0, Passed.ENDED) for number in numbers)
    return Milestones("w0", "e1", items, first)


def names(heard: Milestones) -> list[int]:
    return [int(one.request[1:]) for one in heard.items]


@given(messages=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)), max_size=25))
def test_each_is_new_once(messages: list[tuple[int, int]]) -> None:
    heard, seen = SeenMilestones(), set[int]()
    for first, count in messages:
        numbers = range(first, first + count)
        assert names(heard.new_of(said(first, *numbers))) == [one for one in numbers if one not in seen]
        seen.update(numbers)


def test_an_older_worker_numbers_none() -> None:
    heard = SeenMilestones()
    for _ in range(2):
        assert names(heard.new_of(said(None, 1, 2))) == [1, 2]


def test_gaps_are_bounded() -> None:
    heard = SeenMilestones()
    for number in range(1, 4 * GAPS_KEPT, 2):
        heard.new_of(said(number, number))
    assert len(heard.gaps) == GAPS_KEPT
    assert names(heard.new_of(said(0, 0))) == [], "the oldest gap is forgotten"
