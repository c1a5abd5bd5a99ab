"""Calls come when they are due, whatever one of them does."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator

import pytest

from kvfleet.worker.tiers.transfers import Deadlines
from tests.support.waiting import LIMIT_S


@pytest.fixture
def deadlines() -> Iterator[Deadlines]:
    made = Deadlines()
    yield made
    made.close()
    assert not made._thread.is_alive()


def test_calls_come_in_order_and_not_before_their_time(deadlines: Deadlines) -> None:
    began, heard, done = time.monotonic(), [], threading.Event()
    for name, seconds in (("c", 0.06), ("a", 0.0), ("b", 0.03)):
        deadlines.after(seconds, lambda name=name: heard.append((name, time.monotonic() - began)))  # type: ignore[misc]
    deadlines.after(0.07, done.set)
    assert done.wait(LIMIT_S)
    assert [name for name, _ in heard] == ["a", "b", "c"]
    assert heard[1][1] >= 0.03
    assert heard[2][1] >= 0.06


def test_one_call_that_fails_keeps_no_other(deadlines: Deadlines, caplog: pytest.LogCaptureFixture) -> None:
    done = threading.Event()
    with caplog.at_level(logging.CRITICAL + 1):
        deadlines.after(0.0, lambda: 1 / 0)
        deadlines.after(0.01, done.set)
        assert done.wait(LIMIT_S)


def test_what_waits_is_called_when_it_closes_and_later_only_what_is_due_at_once() -> None:
    deadlines, heard = Deadlines(), []
    deadlines.after(100.0, lambda: heard.append("waited"))
    deadlines.after(50.0, lambda: deadlines.after(50.0, lambda: heard.append("again")))
    deadlines.close()
    assert heard == ["waited"]
    deadlines.after(0.0, lambda: heard.append("at once"))
    deadlines.after(0.1, lambda: heard.append("never"))
    deadlines.close()
    assert heard == ["waited", "at once"]


def test_calls_may_be_asked_for_from_many_threads(deadlines: Deadlines) -> None:
    heard: list[int] = []

    def ask(start: int) -> None:
        for at in range(start, start + 100):
            deadlines.after((at % 7) / 500, lambda at=at: heard.append(at))  # type: ignore[misc]

    threads = [threading.Thread(target=ask, args=(100 * at,)) for at in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    end = time.monotonic() + LIMIT_S
    while len(heard) < 500 and time.monotonic() < end:
        time.sleep(0.002)
    assert sorted(heard) == list(range(500))
