"""Measured rates."""

from __future__ import annotations

import pytest

from services.worker.step_rates import StepRates


def test_mixed_step_counts_as_prefill_beyond_a_decode_step() -> None:
    rates = StepRates()
    rates.observe(0, 4, 0.1)
    rates.observe(100, 4, 0.6)
    assert rates.prefill_tokens_per_s == pytest.approx(200)
    assert rates.decode_steps_per_s == pytest.approx(10)
    assert rates.decode_tokens_per_s == pytest.approx(40)


def test_newest_steps_weigh_most_and_nothing_is_divided_by_zero() -> None:
    rates = StepRates()
    rates.observe(10, 0, 0.0)
    rates.observe(0, 0, 1.0)
    assert (rates.prefill_tokens_per_s, rates.decode_steps_per_s, rates.decode_tokens_per_s) == (0, 0, 0)
    for _ in range(50):
        rates.observe(0, 1, 1.0)
    for _ in range(50):
        rates.observe(0, 1, 0.1)
    assert rates.decode_steps_per_s == pytest.approx(10, rel=0.01)


def test_small_prompts_say_nothing_once_a_large_one_was_measured() -> None:
    rates = StepRates()
    for _ in range(20):
        rates.observe(5, 0, 0.01)
    assert rates.prefill_tokens_per_s == pytest.approx(500)
    rates.observe(512, 0, 0.064)
    assert rates.prefill_tokens_per_s == pytest.approx(8000)
    for _ in range(20):
        rates.observe(5, 0, 0.01)
    assert rates.prefill_tokens_per_s == pytest.approx(8000)
