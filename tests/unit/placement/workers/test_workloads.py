"""The columns in which load is kept: what is booked, drains, is corrected and reported."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvfleet.placement.workers.price_kernel import HARM, PREFILL, QUEUE, RECENT_S, SLOT, STAY, UNMEASURED_RATE
from kvfleet.placement.workers.prompts import COOLS_S
from kvfleet.placement.workers.workloads import Workloads
from kvproto.messages import Load, Rates


def at(*columns: int) -> np.ndarray:
    return np.array(columns, dtype=np.int64)


def backlog(loads: Workloads, column: int, now: float) -> float:
    return float(priced(loads, at(column), now)[QUEUE, 0])


def priced(loads: Workloads, columns: np.ndarray, now: float, *, tokens: int = 0, busy: float = 0.0) -> np.ndarray:
    return loads.view(columns, now).price(np.zeros((3, len(columns))), tokens, busy=busy)


def copied_harm(loads: Workloads, column: int, other: int, now: float) -> float:
    """Harm, per second of it, of computing on `column` what `other` has: of a prefix that 99 asked for lately."""
    matched = np.array([[0.0, 1000.0]] * 4)
    prices = loads.view(at(column, other), now).price(matched, 1000, heat=99.0, others=1.0)
    return float(prices[HARM, 0] / prices[PREFILL, 0])


def rates(loads: Workloads, columns: np.ndarray, now: float) -> list[float]:
    """Prefill tokens/s as a decision takes them."""
    return (1 / priced(loads, columns, now, tokens=1)[PREFILL]).round(6).tolist()


def recent(loads: Workloads, column: int, now: float) -> float:
    """Seconds of prefill given lately, per second."""
    with_harm = priced(loads, at(column), now, tokens=1000, busy=1.0)
    return float(with_harm[HARM, 0] / with_harm[PREFILL, 0])


def a_worker(loads: Workloads, rate: float = 1000.0, **load: int) -> int:
    column = loads.add(1024, 16, 0.0)
    loads.report(column, Load(**load), Rates(rate), (), 0.0)
    return column


def test_a_backlog_grows_by_what_is_given_and_drains_at_the_measured_rate() -> None:
    loads = Workloads()
    column = a_worker(loads, queued_prefill_tokens=500)
    assert backlog(loads, column, 0.0) == pytest.approx(0.5)
    loads.give(column, 1000, 0.1)
    assert backlog(loads, column, 0.1) == pytest.approx(1.4)
    assert backlog(loads, column, 1.0) == pytest.approx(0.5)
    assert backlog(loads, column, 9.0) == 0.0
    loads.give(column, 1000, 9.0)  # what was idle does not count in its favour
    assert backlog(loads, column, 9.0) == pytest.approx(1.0)
    loads.check_integrity()


def test_what_is_told_late_does_not_turn_time_back() -> None:
    loads = Workloads()
    column = a_worker(loads)
    loads.give(column, 1000, 1.0)
    loads.correct(column, 500, 0.2)
    assert loads.now == 1.0
    assert backlog(loads, column, 1.0) == pytest.approx(1.5)


def test_a_report_sets_it_right_but_for_what_it_cannot_have_seen() -> None:
    loads = Workloads()
    column = a_worker(loads)
    loads.give(column, 5000, 0.1)
    loads.report(column, Load(queued_prefill_tokens=700, waiting=1, running=2), Rates(1000.0), [(0, 300.0)], 0.2)
    assert backlog(loads, column, 0.2) == pytest.approx(1.0)
    assert loads.view(at(column), 1.0).requests.tolist() == [4]


def test_what_is_taken_back_never_leaves_less_than_nothing() -> None:
    loads = Workloads()
    column = a_worker(loads)
    loads.give(column, 100, 0.0)
    loads.take(column, 5000, 0.0)
    loads.take(column, 5000, 0.0)
    assert loads.view(at(column), 1.0).requests.tolist() == [0]
    assert backlog(loads, column, 0.0) == 0.0
    loads.check_integrity()


def test_who_has_not_measured_is_taken_for_the_mean_of_those_who_have() -> None:
    loads = Workloads()
    columns = at(a_worker(loads, 1000.0), a_worker(loads, 3000.0), a_worker(loads, 0.0))  # harmonic: 2 / (1 + 1/3)
    assert rates(loads, columns, 0.0) == [1000, 3000, 1500]
    assert rates(loads, at(2), 0.0) == [UNMEASURED_RATE]


def test_rates_that_differ_by_chance_are_alike() -> None:
    loads = Workloads()
    columns = at(*(a_worker(loads, rate) for rate in (900.0, 1000.0, 1100.0)))
    assert rates(loads, columns, 0.0) == pytest.approx([993.311] * 3)


def test_one_bad_measurement_is_forgotten_if_nothing_better_comes() -> None:
    loads = Workloads()
    columns = at(a_worker(loads, 9000.0), a_worker(loads, 9000.0), a_worker(loads, 90.0))
    slow = [rates(loads, columns, now)[2] for now in (0.0, 60.0, 120.0, 1200.0)]
    assert slow == pytest.approx([90, 90 * np.e**0.5, 90 * np.e, 3 / (2 / 9000 + 1 / 90)], rel=1e-4)
    loads.report(2, Load(), Rates(91.0), (), 1200.0)  # it is slow
    assert rates(loads, columns, 1200.0) == [9000, 9000, 91]


def test_what_was_given_lately_fades() -> None:
    loads = Workloads()
    column = a_worker(loads)
    loads.give(column, 6000, 0.0)
    now = recent(loads, column, 0.0)
    assert now == pytest.approx(6 / RECENT_S)
    assert recent(loads, column, RECENT_S) == pytest.approx(now / np.e)


def test_a_full_worker_costs_the_wait_for_a_slot() -> None:
    loads = Workloads()
    free, full = a_worker(loads, slots=4, running=3), a_worker(loads, slots=4, running=4, waiting=1)
    for column in (free, full):
        loads.learn(STAY, column, 8.0)
    assert priced(loads, at(free, full), 0.0)[SLOT].tolist() == [0.0, 2 * 8.0 / 4]


def test_where_requests_wait_the_blocks_tell_how_many_run_at_once() -> None:
    loads = Workloads()
    blocks = {"slots": 256, "running": 2, "blocks_total": 20, "blocks_used": 16}
    all_run, some_wait = a_worker(loads, **blocks), a_worker(loads, **blocks, waiting=6)
    idle = a_worker(loads, slots=256, waiting=6, blocks_total=20)  # these came just now
    few_slots = a_worker(loads, **blocks | {"slots": 1}, waiting=6)
    for column in (all_run, some_wait, idle, few_slots):
        loads.learn(STAY, column, 8.0)
    waits = priced(loads, at(all_run, some_wait, idle, few_slots), 0.0)[SLOT].tolist()
    assert waits == pytest.approx([0.0, (8 - 2.5 + 1) * 8.0 / 2.5, 0.0, 8 * 8.0])


def test_columns_are_used_again_and_remember_nothing() -> None:
    loads = Workloads()
    columns = [a_worker(loads, running=7) for _ in range(100)]
    assert columns == list(range(100))
    loads.trust(41, 0.2)
    loads.drop(41)
    again = loads.add(0, 16, 1.0)
    assert again == 41
    assert loads.requests_of(at(again)).tolist() == [0.0]
    assert loads.credits_of(at(41)).tolist() == [1.0]
    loads.check_integrity()


def test_a_copy_is_for_those_who_come_while_it_lasts() -> None:
    """Of a prefix in demand a hundredth counts as harm, if all who ask for it find the copy; where what the worker is
    given pushes it out before they come, nearly all of it does."""
    loads = Workloads()
    large, small = a_worker(loads, blocks_total=100_000), a_worker(loads, blocks_total=500)
    holder = a_worker(loads, blocks_total=500)
    unknown = a_worker(loads)
    for column in (large, small, holder, unknown):
        loads.give(column, 60_000, 0.0)  # about 1,000 tokens/s
    assert copied_harm(loads, large, holder, 0.0) == pytest.approx(1 / 100)
    assert copied_harm(loads, unknown, holder, 0.0) == pytest.approx(1 / 100)
    comes = 99 * 500 * 16 / 1000 / COOLS_S  # in 8 seconds
    assert copied_harm(loads, small, holder, 0.0) == pytest.approx(1 / math.exp(comes))
    loads.report(small, Load(blocks_total=500, blocks_used=400), Rates(1000.0), (), 0.0)  # running sequences hold most
    assert copied_harm(loads, small, holder, 0.0) == pytest.approx(1 / math.exp(comes / 5))


def test_an_idle_worker_keeps_its_copies() -> None:
    loads = Workloads()
    small, holder = a_worker(loads, blocks_total=500), a_worker(loads, blocks_total=500)
    loads.give(small, 60_000, 0.0)
    assert copied_harm(loads, small, holder, 20 * RECENT_S) == pytest.approx(1 / 100)


def test_rates_that_nobody_can_have_measured_are_none() -> None:
    workloads = Workloads()
    column = workloads.add(1000.0, 16, 0.0)
    workloads.report(column, Load(), Rates(2e-309, 2e-309, 2e-309), (), 1.0)
    workloads.check_integrity()
    assert np.isfinite(workloads.view(np.array([column]), 2.0).waits()).all()
