"""What is late, whatever the clocks of two hosts say."""

from __future__ import annotations

import pytest

from kvfleet.placement.io.timing import JUMP_S, LONGEST_S, MAX_ASKERS, SHARE, Lateness

DEADLINE_MS = 50  # as of Clients


class Asker:
    """On a host whose clock is ahead by `ahead_s`. `late` is about a request that takes `way_s`, then waits."""

    def __init__(self, lateness: Lateness, ahead_s: float = 0.0, name: str = "a") -> None:
        self.lateness, self.ahead_s, self.name = lateness, ahead_s, name

    def late(self, at: float, way_s: float = 0.001, waits_s: float = 0.0, deadline_ms: int = DEADLINE_MS) -> bool:
        expires = round((at - way_s + self.ahead_s) * 1000) + deadline_ms
        return self.lateness.due(self.name, deadline_ms, expires, at) < at + waits_s


@pytest.mark.parametrize("ahead_s", [0.0, 3.0, -3.0, 1.7e9])
def test_what_was_on_its_way_for_longer_than_usual_is_late(ahead_s: float) -> None:
    asker = Asker(Lateness(), ahead_s)
    assert not asker.late(100.0)
    assert not asker.late(100.1, way_s=0.01)
    assert asker.late(100.2, way_s=0.05)
    assert asker.late(100.3, way_s=1.0)
    assert not asker.late(100.4, way_s=0.4, deadline_ms=10_000)
    assert asker.late(100.5, way_s=0.022, waits_s=0.022), "both together"
    assert not asker.late(100.6)


def test_who_waited_here_is_late_however_patient_and_whatever_it_says() -> None:
    for fields in ((None, None), (50, None), ("50", 10**20), (60_000, 10**14), (True, True), (2**53, 0)):
        assert Lateness().due("a", *fields, 10.0) == pytest.approx(10.0 + SHARE * LONGEST_S)
    asker = Asker(Lateness())
    assert not asker.late(10.0, waits_s=0.036)
    assert asker.late(10.0, waits_s=0.039)


def test_clocks_that_drift_are_followed() -> None:
    asker = Asker(Lateness())
    for second in range(2_000):
        asker.ahead_s = -1e-4 * second  # it falls behind: all seems to take longer and longer
        assert not asker.late(100.0 + second)
        assert asker.late(100.5 + second, way_s=0.05)


def test_a_clock_that_jumps_is_believed_again() -> None:
    asker = Asker(Lateness())
    assert not asker.late(10.0)
    asker.ahead_s = 5.0
    assert not asker.late(11.0)
    asker.ahead_s = -5.0
    at = 12.0
    while asker.late(at):
        at += 0.1
        assert at < 12.5 + JUMP_S
    assert asker.late(at + 0.1, way_s=0.05)


def test_a_long_backlog_is_no_jump() -> None:
    """As long as anything comes in time."""
    asker = Asker(Lateness())
    for tenth in range(1_000):
        assert not asker.late(10.0 + tenth / 10)
        assert asker.late(10.05 + tenth / 10, way_s=0.05)


def test_askers_are_told_apart_and_bounded() -> None:
    lateness = Lateness()
    behind, ahead = Asker(lateness, -9.0, "b"), Asker(lateness, 9.0, "c")
    for at in (1.0, 2.0):
        assert not behind.late(at)
        assert not ahead.late(at)
    for number in range(MAX_ASKERS + 10):
        assert not Asker(lateness, number, f"n{number}").late(3.0)
    assert len(lateness.askers) == MAX_ASKERS
