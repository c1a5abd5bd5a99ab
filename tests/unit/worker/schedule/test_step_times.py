"""What is known of steps: rates, and the longest of the recent ones. What a prompt costs: see `test_step_pacer`."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfleet.worker.schedule.step_pacer import RECENT_S, RECENT_STEPS, LongestStep, RowCost, StepTimes


def test_mixed_step_counts_as_prefill_beyond_a_decode_step() -> None:
    times = StepTimes()
    times.observe(4, 0, 0.0, 0.1)
    times.observe(4, 100, 0.0, 0.6)
    assert times.prefill_tokens_per_s == pytest.approx(200)
    assert times.decode_steps_per_s == pytest.approx(10)
    assert times.decode_tokens_per_s == pytest.approx(40)


def test_newest_steps_weigh_most_and_nothing_is_divided_by_zero() -> None:
    times = StepTimes()
    times.observe(0, 10, 0.0, 0.0)
    times.observe(0, 0, 0.0, 1.0)
    assert (times.prefill_tokens_per_s, times.decode_steps_per_s, times.decode_tokens_per_s) == (0, 0, 0)
    for _ in range(50):
        times.observe(1, 0, 0.0, 1.0)
    for _ in range(50):
        times.observe(1, 0, 0.0, 0.1)
    assert times.decode_steps_per_s == pytest.approx(10, rel=0.01)


def test_small_prompts_say_nothing_once_a_large_one_was_measured() -> None:
    times = StepTimes()
    for _ in range(20):
        times.observe(0, 5, 0.0, 0.01)
    assert times.prefill_tokens_per_s == pytest.approx(500)
    times.observe(0, 512, 0.0, 0.064)
    assert times.prefill_tokens_per_s == pytest.approx(8000)
    for _ in range(20):
        times.observe(0, 5, 0.0, 0.01)
    assert times.prefill_tokens_per_s == pytest.approx(8000)


def test_the_longest_of_the_recent_steps() -> None:
    longest = LongestStep()
    assert longest.seconds == 0.0
    longest.observe(1.0, 0.5)
    longest.observe(1.1, 0.02)
    assert longest.seconds == 0.5
    longest.observe(2.0, 0.7)
    assert longest.seconds == 0.7


def test_a_long_step_is_forgotten_with_time_or_with_steps() -> None:
    longest = LongestStep()
    longest.observe(1.0, 30.0)
    longest.observe(1.0 + RECENT_S, 0.1)
    assert longest.seconds == 30.0
    longest.observe(1.1 + RECENT_S, 0.02)
    assert longest.seconds == 0.1, "what came after it counts from then on"
    longest.observe(12.0, 3.0)
    for _ in range(RECENT_STEPS - 1):
        longest.observe(12.0, 0.01)
    assert longest.seconds == 3.0
    longest.observe(12.0, 0.01)
    assert longest.seconds == 0.01


def test_an_idle_engine_remembers_its_last_step() -> None:
    longest = LongestStep()
    longest.observe(1.0, 0.2)
    longest.observe(1000.0, 0.1)
    assert longest.seconds == 0.1


@given(st.lists(st.tuples(st.floats(0, 5), st.floats(0, 50)), max_size=200))
def test_it_is_what_looking_at_all_steps_would_say(steps: list[tuple[float, float]]) -> None:
    longest, now, all_steps = LongestStep(), 0.0, []
    for gap, seconds in steps:
        now += gap
        longest.observe(now, seconds)
        all_steps.append((now, seconds))
        recent = [took for ended, took in all_steps[-RECENT_STEPS:] if ended >= now - RECENT_S]
        assert longest.seconds == max(recent)


def test_rows_that_cost_nothing_are_many_and_dear_ones_are_few() -> None:
    free, dear = RowCost(), RowCost()
    assert free.more_rows(4, 0.05) == 1  # nothing is known yet
    for number in range(50):
        decodes = 1 + number % 12
        free.observe(decodes, 0.02)
        dear.observe(decodes, 0.002 * decodes)
    assert free.more_rows(4, 0.05) > 1000
    assert dear.more_rows(4, 0.05) == 0
    assert dear.more_rows(40, 0.05) == 2
    assert free.rows_within(0.01) > 1000  # a step of one row is as long
    assert dear.rows_within(0.011) == 5
    assert dear.rows_within(0.0) == 1
