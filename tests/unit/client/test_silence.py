"""When a silent stream's worker is asked, and when it is given up: played through against workers of every kind."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvproto.fleet_view import RECONNECT_GRACE_S
from kvproto.streams.silence import DEAF_S, LATE_S, LEAST_S, RARELY_S, UNMEASURED_S, Ear, Hearing, Verdict, judge

TICK_S = 0.05
NEVER = 1e9


@dataclass
class Played:
    """A stream whose last token came at 0, its worker and its NATS server, in steps of the client's watch."""

    answers_until: float = NEVER  # the worker
    beats_until: float = NEVER
    server_until: float = NEVER
    hung_since: float = NEVER  # in one step
    step_s: float = 0.02
    stands_still: tuple[float, float] = (NEVER, NEVER)  # this process
    away: tuple[float, float] = (NEVER, NEVER)  # NATS

    def run(self, until: float) -> tuple[Verdict, float, list[float]]:
        """The first verdict that is neither to wait nor to ask, or WAIT; when; and when it was asked."""
        ear, hearing, asks = Ear(0.0), Hearing(0.0, 0.0, 0.0), []
        server_at = beat_at = now = 0.0
        while now < until:
            now += TICK_S
            if self.stands_still[0] <= now < self.stands_still[1]:
                continue
            listens = not self.away[0] <= now < self.away[1]
            if listens and now < self.server_until:
                server_at = now
                if now < self.beats_until:
                    beat_at = max(beat_at, now // 0.5 * 0.5)
            if not ear.tick(now, listens=listens):
                continue
            verdict = judge(now, ear, hearing, 0, step_s=self.step_s, beat_at=beat_at, server_at=server_at)
            if verdict is Verdict.ASK:
                asks.append(now)
                hearing.asks(now)
                if now < min(self.answers_until, self.server_until):
                    hearing.heard_at = now + 0.001
                    hearing.answered(0, max(0.0, now - self.hung_since))
            elif verdict is not Verdict.WAIT:
                return verdict, now, asks
        return Verdict.WAIT, now, asks


def test_a_worker_that_stops_is_given_up_within_two_seconds() -> None:
    verdict, at, asks = Played(answers_until=0.0, beats_until=0.0).run(5.0)
    assert verdict is Verdict.GONE
    assert 1.3 < at < 2.0
    assert asks[0] < 0.5


def test_one_of_long_steps_too_since_its_heartbeats_are_missed() -> None:
    verdict, at, _ = Played(answers_until=0.0, beats_until=0.0, step_s=2.0).run(9.0)
    assert verdict is Verdict.GONE
    assert at < 2.6


def test_a_worker_that_answers_is_waited_for_for_ever_and_asked_ever_more_rarely() -> None:
    verdict, _, asks = Played().run(600.0)
    assert verdict is Verdict.WAIT
    assert len(asks) < 600 / RARELY_S + 10
    assert asks[0] < LEAST_S + 2 * TICK_S


def test_a_worker_of_long_steps_is_not_asked_before_they_are_over() -> None:
    verdict, _, asks = Played(step_s=2.0).run(60.0)
    assert verdict is Verdict.WAIT
    assert asks[0] >= 12.0


def test_one_that_stops_after_it_has_been_waited_for_for_long_is_found_as_quickly() -> None:
    verdict, at, _ = Played(answers_until=100.0, beats_until=100.0).run(120.0)
    assert verdict is Verdict.GONE
    assert at < 103.5


def test_heartbeats_without_answers() -> None:
    verdict, at, _ = Played(answers_until=0.0).run(30.0)
    assert verdict is Verdict.DEAF
    assert DEAF_S < at < DEAF_S + 1


def test_answers_without_heartbeats_are_enough() -> None:
    assert Played(beats_until=0.0).run(60.0)[0] is Verdict.WAIT


@pytest.mark.parametrize(("step_s", "least", "most"), [(0.02, 3.0, 3.9), (0.5, 10.0, 13.5), (0.0, UNMEASURED_S, 36.0)])
def test_an_engine_that_hangs_in_a_step(step_s: float, least: float, most: float) -> None:
    verdict, at, _ = Played(hung_since=0.0, step_s=step_s).run(60.0)
    assert verdict is Verdict.HUNG
    assert least < at < most


def test_what_this_process_could_not_hear_is_held_against_nobody() -> None:
    """It stood still itself; when it goes on, everything waits to be read."""
    for length in (1.0, 5.0, 60.0):
        played = Played(stands_still=(2.0, 2.0 + length))
        assert played.run(90.0)[0] is Verdict.WAIT


def test_a_nats_that_went_away_is_no_dead_worker() -> None:
    verdict, at, _ = Played(away=(1.0, 11.0), beats_until=1.0, answers_until=1.0).run(60.0)
    assert verdict is Verdict.GONE
    assert at > 11.0 + RECONNECT_GRACE_S


def test_a_nats_that_says_nothing_is_no_dead_worker() -> None:
    """It is connected, nothing comes, and it does not answer itself."""
    verdict, at, _ = Played(server_until=0.7).run(9.0)
    assert verdict is Verdict.WAIT, at


@settings(max_examples=60)
@given(
    stopped=st.floats(0.0, 20.0),
    step_s=st.floats(0.0, 0.2),
    away=st.tuples(st.floats(0.0, 30.0), st.floats(0.0, 12.0)),
    still=st.tuples(st.floats(0.0, 30.0), st.floats(LATE_S, 8.0)),
)
def test_the_living_are_kept_and_the_dead_are_found(
    stopped: float, step_s: float, away: tuple[float, float], still: tuple[float, float]
) -> None:
    gaps = {"away": (away[0], sum(away)), "stands_still": (still[0], sum(still))}
    assert Played(step_s=step_s, **gaps).run(60.0)[0] is Verdict.WAIT
    verdict, at, _ = Played(answers_until=stopped, beats_until=stopped, step_s=step_s, **gaps).run(90.0)
    assert verdict is Verdict.GONE
    assert at < max(stopped, sum(away) + RECONNECT_GRACE_S, sum(still)) + 4.0
