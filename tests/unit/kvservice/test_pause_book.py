"""When something is to be done about a paused conversation."""

from __future__ import annotations

import math

import pytest

from kvservice.pause_book import MOST_PAUSED, PauseBook, Paused, is_long_enough


def book(*pauses: tuple[str, float, float]) -> PauseBook[str, str]:
    made: PauseBook[str, str] = PauseBook()
    for key, up_at, over_at in pauses:
        made.begin(key, Paused(f"chain of {key}", up_at, over_at))
    return made


def steps(made: PauseBook[str, str], now: float) -> list[tuple[str, bool]]:
    return [(key, is_over) for key, _, is_over in made.due(now)]


def test_each_pause_is_brought_up_once_and_ends_once() -> None:
    made = book(("a", 10.0, 20.0), ("b", 5.0, 30.0))
    assert made.next_at == 5.0
    assert steps(made, 4.9) == []
    assert steps(made, 12.0) == [("b", False), ("a", False)]
    assert steps(made, 12.0) == []
    assert steps(made, 40.0) == [("a", True), ("b", True)]
    assert made.next_at == math.inf
    assert not made.paused


def test_what_is_back_is_not_due() -> None:
    made = book(("a", 10.0, 20.0))
    assert made.back("a") is not None
    assert made.back("a") is None
    assert steps(made, 50.0) == []


def test_a_new_pause_takes_the_place_of_the_last() -> None:
    made = book(("a", 10.0, 20.0), ("a", 30.0, 40.0))
    assert steps(made, 25.0) == []
    assert steps(made, 30.0) == [("a", False)]


def test_a_late_look_does_all_that_is_due() -> None:
    assert steps(book(("a", 10.0, 20.0)), 25.0) == [("a", False), ("a", True)]


def test_it_is_bounded() -> None:
    made = book(*[(str(number), 10.0, 20.0) for number in range(2 * MOST_PAUSED)])
    assert len(made.paused) == MOST_PAUSED
    for number in range(10 * MOST_PAUSED):
        made.begin("same", Paused("chain", 10.0 + number, 1e9))
    assert len(made._due) <= 2 * MOST_PAUSED + 1


@pytest.mark.parametrize(("on_device", "saved_s"), [(0, 0.0), (10, 0.0), (15, 1.0), (20, 2.0), (99, 2.0)])
def test_a_return_saves_what_it_finds_of_what_was_brought(on_device: int, saved_s: float) -> None:
    pause = Paused("chain", 1.0, 2.0, start=10, brought=10, seconds=2.0)
    assert pause.saved_s(on_device) == saved_s


def test_short_pauses_do_not_pay() -> None:
    assert is_long_enough(10.0, 1.0, 1.0)
    assert not is_long_enough(3.0, 1.0, 1.0)
