"""Who may join the queues: by the wait that is expected there, by priority, and what the others are told."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from placement_build import a_generate, accepted, an_ask, finished
from placement_rig import RATE, Rig

from kvfleet.placement.decide.admission import MOST_RETRY_S, TurnedAway, limit_of
from kvfleet.placement.events import Answer, Fail, PlaceAsked, WorkerAnswered
from kvfleet.placement.workers.price_kernel import OUTPUT, STAY
from kvfleet.placement.workers.workloads import Levels, Workloads
from kvproto.messages import Heartbeat, Load, Passed, PriorityLoad, Rates, State

PRIORITIES = st.integers(-100, 100)
AMOUNTS = st.floats(0, 1e6)


def ask(rig: Rig, request: str, **fields: object) -> Answer | Fail:
    (answer,) = [
        action
        for action in rig.core.handle(PlaceAsked("_INBOX.x", "public", an_ask(request, **fields)), rig.now)
        if isinstance(action, (Answer, Fail))
    ]
    return answer


def refusal(rig: Rig, request: str, **fields: object) -> float:
    """When to come back."""
    answer = ask(rig, request, **fields)
    assert isinstance(answer, Fail)
    assert (answer.failed.code, answer.failed.retryable) == ("overloaded", True)
    assert answer.failed.retry_after_s is not None
    return answer.failed.retry_after_s


def is_placed(rig: Rig, request: str, **fields: object) -> bool:
    return isinstance(ask(rig, request, **fields), Answer)


def say(rig: Rig, worker: str, load: Load, rates: Rates) -> None:
    rig.tell(Heartbeat(worker, "e1", State.READY, load, rates))


class TestWait:
    def test_a_queue_longer_than_the_limit_refuses_and_says_when_it_will_not(self) -> None:
        rig = Rig("w1")
        rig.beat("w1", queued=int(5 * RATE))
        assert is_placed(rig, "r0")  # it sets no limit
        assert is_placed(rig, "r1", max_wait_s=5.1)
        wait = refusal(rig, "r2", max_wait_s=2.0)
        assert wait == pytest.approx(3.0, rel=0.01)
        rig.now += wait + 0.001
        assert is_placed(rig, "r2", max_wait_s=2.0)

    def test_nothing_measured_refuses_nobody(self) -> None:
        rig = Rig()
        rig.join("w1")
        rig.beat("w1", rate=0.0, queued=10**9)
        assert is_placed(rig, "r1", max_wait_s=0.0)

    def test_it_goes_where_it_need_not_wait_whatever_is_cached_elsewhere(self) -> None:
        rig = Rig("w1", "w2")
        ids = tuple(range(800))
        rig.store("w1", ids)
        rig.beat("w1", queued=int(0.05 * RATE))
        assert rig.place("r1", ids).worker == "w1"
        assert rig.place("r2", ids, max_wait_s=0.01).worker == "w2"

    def test_bookings_count_before_any_heartbeat_does(self) -> None:
        rig = Rig("w1", "w2")
        prompt = int(RATE)
        admitted = sum(
            is_placed(rig, f"r{i}", prompt_ids=tuple(range(i * prompt, (i + 1) * prompt)), max_wait_s=2.5)
            for i in range(20)
        )
        assert admitted == 6  # a second each at two workers: the third one waits for two

    def test_a_request_that_was_let_in_before_is_not_refused_when_it_goes_on(self) -> None:
        rig = Rig("w1")
        rig.beat("w1", queued=int(50 * RATE))
        refusal(rig, "r1", max_wait_s=1.0)
        assert is_placed(rig, "r1", max_wait_s=1.0, attempt=1, excluded=("w9",))

    def test_who_names_his_worker_waits_there(self) -> None:
        rig = Rig("w1")
        rig.beat("w1", queued=int(50 * RATE))
        assert is_placed(rig, "r1", max_wait_s=1.0, policy="direct", worker="w1")

    def test_slots_that_are_all_taken_become_free_at_the_rate_of_the_steps(self) -> None:
        """8 slots, answers of 100 tokens, steps of 50 ms: a slot every 0.625 s. 16 wait, and one more."""
        rig = Rig("w1", slots=8)
        rates = Rates(RATE, 20.0, 160.0)
        say(rig, "w1", Load(slots=8, running=1), rates)
        rig.place("old", (1, 2, 3))
        rig.pass_("w1", "old", Passed.ACCEPTED, Passed.STARTED, Passed.FIRST_TOKEN)
        rig.now += 0.5  # it was quick, alone as it was
        rig.end("w1", "old", output_tokens=100)
        say(rig, "w1", Load(slots=8, running=8, waiting=16), rates)
        expected = 17 * 100 / 20 / 8
        assert is_placed(rig, "r1", max_wait_s=expected * 1.02)
        assert refusal(rig, "r2", max_wait_s=1.0) == pytest.approx(expected - 1 + 0.625, rel=0.02)  # behind r1

    def test_a_worker_of_whom_nothing_ended_is_taken_for_the_mean(self) -> None:
        rig = Rig("w1", "w2", slots=1)
        first = rig.place("r0", (1,)).worker
        rig.pass_(first, "r0", Passed.ACCEPTED, Passed.STARTED, Passed.FIRST_TOKEN)
        rig.now += 4.0
        rig.pass_(first, "r0", Passed.ENDED)
        for worker in ("w1", "w2"):
            rig.beat(worker, running=1, waiting=2)
        assert refusal(rig, "r1", max_wait_s=4.0) == pytest.approx(8.0, rel=0.05)

    def test_a_producers_request_tells_how_long_slots_stay_taken(self) -> None:
        """Its worker's notice comes before the milestone of its end."""
        rig = Rig("w1", slots=1)
        rig.tell(a_generate("g1"))
        rig.tell(WorkerAnswered(accepted("g1", 0, "w1")))
        rig.pass_("w1", "g1", Passed.ACCEPTED, Passed.STARTED)
        rig.now += 4.0
        rig.tell(WorkerAnswered(finished("g1", 0)))
        rig.end("w1", "g1", output_tokens=9)
        rig.beat("w1", running=1, waiting=1)
        assert refusal(rig, "r1", max_wait_s=1.0) == pytest.approx(7.0, rel=0.01)


class TestPriority:
    def test_only_work_that_is_served_first_counts(self) -> None:
        rig = Rig("w1")
        queues = (PriorityLoad(5, 1, 0, int(1 * RATE)), PriorityLoad(0, 9, 9, int(8 * RATE)))
        say(rig, "w1", Load(slots=64, waiting=10, queued_prefill_tokens=int(9 * RATE), priorities=queues), Rates(RATE))
        assert is_placed(rig, "high", max_wait_s=1.1, priority=5, prompt_ids=(1,))
        assert is_placed(rig, "higher", max_wait_s=0.1, priority=6, prompt_ids=(1,))
        assert is_placed(rig, "between", max_wait_s=1.1, priority=1, prompt_ids=(1,))
        assert refusal(rig, "low", max_wait_s=8.0, prompt_ids=(1,)) == pytest.approx(1.0, rel=0.01)

    def test_a_booking_of_higher_priority_is_ahead_and_one_of_lower_is_not(self) -> None:
        rig = Rig("w1")
        rig.place("high", tuple(range(2 * int(RATE))), priority=3)
        assert is_placed(rig, "r1", max_wait_s=1.0, priority=4)
        refusal(rig, "r2", max_wait_s=1.0, priority=3)
        refusal(rig, "r3", max_wait_s=1.0)

    def test_what_drains_is_the_highest_first(self) -> None:
        levels = Levels({0: 10.0, 5: 3.0})
        levels.drain(4.0)
        assert (levels.ahead(5), levels.ahead(0)) == (0.0, 9.0)
        levels.add(0, -20.0)
        assert not levels.amounts

    def test_background_work_gives_way_first(self) -> None:
        rig = Rig("w1")
        rig.beat("w1", queued=int(3 * RATE))
        refusal(rig, "low", max_wait_s=5.0, priority=-10)
        assert is_placed(rig, "r1", max_wait_s=5.0)

    @given(
        work=st.lists(st.tuples(PRIORITIES, st.integers(0, 100_000)), max_size=8),
        running=st.integers(0, 20),
        low=PRIORITIES,
        more=st.integers(0, 200),
        max_wait_s=st.floats(0, 30),
        later=st.floats(0, 5),
    )
    @settings(deadline=None)
    def test_more_priority_never_turns_an_admission_into_a_refusal(
        self,
        work: Sequence[tuple[int, int]],
        running: int,
        low: int,
        more: int,
        max_wait_s: float,
        later: float,
    ) -> None:
        """The same for more patience, and for time without new work."""
        loads = Workloads()
        column = loads.add(1.0, 16, 0.0)
        loads.report(column, Load(slots=4, running=running), Rates(1000.0, 10.0, 10.0), (), 0.0)
        loads.learn(STAY, column, 2.0)
        loads.learn(OUTPUT, column, 30.0)
        for priority, tokens in work:
            loads.give(column, tokens, 0.0, priority=priority)
        loads.check_integrity()

        def admits(priority: int, patience_s: float, now: float) -> bool:
            waits = loads.view(np.array([column]), now, priority=priority).waits()
            return bool(waits[0] <= limit_of(patience_s, priority))

        high = min(low + more, 100)
        if admits(low, max_wait_s, 0.0):
            assert admits(high, max_wait_s, 0.0)
            assert admits(low, max_wait_s + 1, 0.0)
            assert admits(low, max_wait_s, later)

    @given(st.lists(st.tuples(PRIORITIES, AMOUNTS), max_size=20), AMOUNTS, PRIORITIES)
    def test_levels_are_a_fluid(self, work: Sequence[tuple[int, float]], drained: float, priority: int) -> None:
        levels = Levels()
        for level, amount in work:
            levels.add(level, amount)
        above = sum(amount for level, amount in work if level >= priority)
        levels.drain(drained)
        assert levels.ahead(priority) == pytest.approx(max(0.0, above - drained), abs=1e-3)
        assert levels.ahead(-100) == pytest.approx(levels.total)


class TestWhenToComeBack:
    def test_whoever_is_refused_later_comes_after_those_who_were_before(self) -> None:
        away = TurnedAway()
        told = [away.refuse("m", 0, 3.0, 2.0, 0.5, 0.0).retry_after_s for _ in range(4)]
        assert told == [1.0, 1.5, 2.0, 2.5]
        assert away.refuse("m", 1, 3.0, 2.0, 0.5, 0.0).retry_after_s == 1.0  # but not after lower priorities
        assert away.refuse("other", 0, 3.0, 2.0, 0.5, 0.0).retry_after_s == 1.0
        assert away.refuse("m", 0, 3.0, 2.0, 0.5, 10.0).retry_after_s == 1.0  # they have come

    def test_nobody_is_sent_away_for_long_and_models_do_not_pile_up(self) -> None:
        away = TurnedAway()
        for number in range(5000):
            told = away.refuse(f"m{number % 2}", 0, 1e6, 0.0, 100.0, 0.0).retry_after_s
            assert told == MOST_RETRY_S
            away.refuse(f"n{number}", 0, 1.0, 0.0, 1.0, 0.0)
        assert len(away.outside) <= 1024

    def test_those_who_obey_are_let_in(self) -> None:
        """Three times what the fleet can do in one burst; nobody else comes."""
        rig, prompt = Rig("w1", "w2"), int(RATE / 2)
        waiting = [(0.0, f"r{i}") for i in range(24)]
        asked = 0
        while waiting:
            due, request = min(waiting)
            waiting.remove((due, request))
            rig.now = max(rig.now, due)
            number = int(request[1:])
            ids = tuple(range(number * prompt, (number + 1) * prompt))
            asked += 1
            answer = ask(rig, request, prompt_ids=ids, max_wait_s=1.0)
            if isinstance(answer, Fail):
                waiting.append((rig.now + (answer.failed.retry_after_s or 0.0) + 0.001, request))
        assert asked <= 2 * 24  # each is refused once at most, on average
        assert rig.now <= 24 * 0.5 / 2 + 1
