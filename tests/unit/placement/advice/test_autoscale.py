"""How many workers a model should have, from samples alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfleet.placement.advice.autoscale import GAP_PERIODS, LoadSample, Rules, Scaler, grown, shrinks

RULES = Rules(minimum=1, maximum=16)
STEP = RULES.period_s


def a_sample(need: float, ready: int, **fields: object) -> LoadSample:
    return replace(LoadSample(ready, ready, work=need, asked=need > 0), **fields)  # type: ignore[arg-type]


class Watched:
    """A model whose workers come and go as is desired, `delay_s` later; `load(at)` is in workers."""

    def __init__(self, ready: int, rules: Rules = RULES, delay_s: float = 0.0) -> None:
        self.scaler, self.rules = Scaler(rules), rules
        self.ready, self.delay_s = ready, delay_s
        self.now = 0.0
        self.desired: list[tuple[float, int]] = []
        self._due: list[tuple[float, int]] = []

    def run(self, seconds: float, load: float | Callable[[float], float]) -> list[tuple[float, int]]:
        """The changes of `desired`."""
        until, changes = self.now + seconds, []
        before = self.scaler.desired if self.now else max(self.ready, self.rules.minimum)  # what is there, at first
        while self.now < until:
            need = load(self.now) if callable(load) else load
            while self._due and self._due[0][0] <= self.now:
                self.ready = self._due.pop(0)[1]
            self.scaler.observe(a_sample(need, self.ready), self.now)
            if self.scaler.desired != before:
                before = self.scaler.desired
                changes.append((self.now, before))
                self._due.append((self.now + self.delay_s, before))
            self.now += self.rules.period_s
        self.desired += changes
        return changes


# ------------------------------------------------------------------ the two rules


def test_up_after_three_minutes_of_overload_and_not_before() -> None:
    watched = Watched(2)
    changes = watched.run(600, 1.9)
    at, desired = changes[0]
    assert 180 - STEP <= at <= 180 + STEP
    assert desired == 4  # 1.9 / 0.6, and not one more alone
    assert len(changes) == 1


def test_a_burst_of_two_minutes_changes_nothing() -> None:
    watched = Watched(2)
    watched.run(300, 0.9)
    assert watched.run(120, 20.0) == []
    assert watched.run(300, 0.9) == []


def test_an_overload_that_is_over_changes_nothing() -> None:
    """However large it was."""
    watched = Watched(2)
    watched.run(300, 1.0)
    assert watched.run(130, 20.0) == []
    assert watched.run(300, 0.7) == []


def test_up_is_twice_as_many_at_most() -> None:
    assert [desired for _, desired in Watched(2, delay_s=60).run(500, 100.0)] == [4, 8]


def test_down_one_after_ten_minutes_each() -> None:
    changes = Watched(4).run(2500, 0.2)
    assert [desired for _, desired in changes] == [3, 2, 1]
    times = [0.0, *(at for at, _ in changes)]
    assert all(later - before >= 600 - STEP for before, later in pairwise(times))
    assert changes[0][0] <= 600 + STEP


def test_down_only_if_the_others_have_room() -> None:
    assert Watched(2, replace(RULES, aim=0.5)).run(2000, 0.55) == []
    assert [desired for _, desired in Watched(2).run(2000, 0.55)] == [1]


def test_one_busy_minute_of_ten_keeps_nobody_but_a_busy_end_does() -> None:
    watched = Watched(4)
    watched.run(540, 0.4)
    assert watched.run(120, 3.0) == []


def test_the_last_one_goes_when_nobody_has_asked_for_anything() -> None:
    rules = replace(RULES, minimum=0)
    assert Watched(1, rules).run(1000, 0.01) == []  # one request in a while
    assert [desired for _, desired in Watched(1, rules).run(1000, 0.0)] == [0]
    assert Watched(1, RULES).run(1000, 0.0) == []


def test_a_model_without_workers_gets_one_as_soon_as_it_is_asked_for() -> None:
    scaler = Scaler(replace(RULES, minimum=0))
    scaler.observe(LoadSample(0, 0), 0.0)
    assert scaler.desired == 0
    scaler.observe(LoadSample(0, 0, asked=True), 5.0)
    assert scaler.desired == 1
    assert LoadSample(0, 0, asked=True).saturation == 1.0


# ------------------------------------------------------------------ what is not known


def test_desired_is_what_is_there_until_more_is_known() -> None:
    scaler = Scaler(RULES)
    assert scaler.desired == RULES.minimum
    for at, living in enumerate((1, 2, 5, 5)):  # they come one after the other
        scaler.observe(LoadSample(living, living), at * STEP)
    assert scaler.desired == 5


def test_without_data_nothing_goes_however_long() -> None:
    watched = Watched(4)
    watched.run(590, 0.1)
    for _ in range(1000):  # workers are there, and nothing is heard of them
        watched.scaler.observe(LoadSample(4, 4, known=False), watched.now)
        watched.now += STEP
    assert watched.scaler.desired == 4
    changes = watched.run(1000, 0.1)
    assert changes[0][0] >= 590 + 1000 * STEP + 600 - STEP  # the ten minutes begin anew


def test_a_gap_begins_the_history_anew() -> None:
    watched = Watched(4)
    watched.run(590, 0.1)
    watched.now += GAP_PERIODS * STEP + STEP
    began = watched.now
    assert watched.run(1000, 0.1)[0][0] >= began + 600 - STEP


def test_workers_that_die_lower_nothing() -> None:
    scaler = Scaler(RULES)
    for step in range(100):
        scaler.observe(a_sample(1.0, 4), step * STEP)
    for step in range(100, 130):
        scaler.observe(a_sample(0.7, 1), step * STEP)
        assert scaler.desired == 4
    scaler.observe(LoadSample(0, 0), 130 * STEP)
    assert scaler.desired == 4


def test_who_adds_workers_is_followed() -> None:
    scaler = Scaler(RULES)
    for step, living in enumerate((2, 2, 3, 3)):
        scaler.observe(LoadSample(2, living), step * STEP)
    assert scaler.desired == 3


def test_a_replica_that_began_anew_holds_the_largest_number_up() -> None:
    """Of several replicas the largest counts: one that has just begun says what is there, and so undoes nothing."""
    old, new = Watched(4), Watched(4)
    old.run(400, 3.9)
    assert old.scaler.desired == 7
    new.run(30, 3.9)
    assert new.scaler.desired == 4
    quiet, newer = Watched(4), Watched(4)
    quiet.run(700, 0.1)
    newer.run(60, 0.1)
    assert max(quiet.scaler.desired, newer.scaler.desired) == 4


# ------------------------------------------------------------------ whatever comes

LOADS = st.lists(st.floats(0, 40), min_size=1, max_size=12)


@given(st.integers(0, 4), st.integers(4, 12), st.integers(0, 20), LOADS, st.floats(0, 300))
@settings(max_examples=60, deadline=None)
def test_never_outside_the_limits(least: int, most: int, ready: int, loads: Sequence[float], delay_s: float) -> None:
    rules = replace(RULES, minimum=least, maximum=most)
    watched = Watched(ready, rules, delay_s)
    for load in loads:
        for _, desired in watched.run(200, load):
            assert least <= desired <= most


@given(st.floats(0, 14), st.integers(1, 16), st.floats(0, 400))
@settings(max_examples=15, deadline=None)
def test_a_constant_load_comes_to_rest_and_stays_there(load: float, ready: int, delay_s: float) -> None:
    watched = Watched(ready, delay_s=delay_s)
    watched.run(10_000, load)
    directions = [b - a for (_, a), (_, b) in pairwise(watched.desired)]
    assert all(one > 0 for one in directions) or all(one < 0 for one in directions)  # never to and fro
    assert watched.run(1300, load) == []
    assert watched.ready == watched.rules.maximum or load / watched.ready <= RULES.up_above + 1e-9


@given(st.integers(1, 15), st.floats(1.001, 10))
@settings(max_examples=60, deadline=None)
def test_sustained_overload_is_answered_within_three_minutes_and_a_step(ready: int, times: float) -> None:
    watched = Watched(ready)
    watched.run(900, 0.5 * ready)
    began = watched.now
    changes = watched.run(400, RULES.up_above * ready * times)
    assert changes
    assert changes[0][0] - began <= RULES.up_s + STEP


@given(st.integers(2, 16), st.floats(0, 0.29))
@settings(max_examples=40, deadline=None)
def test_nothing_goes_before_ten_minutes(ready: int, share: float) -> None:
    watched = Watched(ready)
    assert watched.run(RULES.down_s - 2 * STEP, share * ready) == []


@given(st.floats(0, 100), st.floats(0, 100), st.integers(1, 32))
def test_more_load_never_means_fewer(one: float, other: float, ready: int) -> None:
    less, more = sorted((one, other))
    assert grown(less, ready, RULES) <= grown(more, ready, RULES)
    assert shrinks(less, ready, RULES) >= shrinks(more, ready, RULES)
    assert ready < grown(more, ready, RULES) <= 2 * ready


@given(st.floats(0.85, 3), st.floats(0.85, 3), st.integers(1, 8))
@settings(max_examples=40, deadline=None)
def test_the_heavier_of_two_loads_never_has_fewer(one: float, other: float, ready: int) -> None:
    less, more = sorted((one, other))
    few, many = Watched(ready), Watched(ready)
    few.run(200, less * ready)
    many.run(200, more * ready)
    assert few.scaler.desired <= many.scaler.desired


@pytest.mark.parametrize("part", ["work", "queue", "slots", "blocks"])
def test_the_largest_part_counts(part: str) -> None:
    assert LoadSample(2, 2, **{part: 1.5}).saturation == 0.75  # type: ignore[arg-type]
