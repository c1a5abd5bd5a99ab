"""Rates of vLLM's steps from what its connector tells, and how long a step may take before it hangs."""

from __future__ import annotations

import pytest

from kvfleet.worker.vllm.step_rates import PATIENCE, StepRates
from kvfleet_vllm.wire import EngineStep
from kvproto.streams.silence import HUNG_S, HUNG_STEPS, UNMEASURED_S


def test_rates_follow_from_how_long_the_step_before_took() -> None:
    rates = StepRates()
    rates.alive(10.0)
    assert rates.age(10.5) == 0.5
    now = 11.0
    rates.observe(EngineStep(0.0, 1, 100, 100, ()), now)  # its time is not known yet
    assert rates.rates.prefill_tokens_per_s == 0
    for _ in range(50):
        now += 0.1
        rates.observe(EngineStep(0.1, 4, 4, 0, ()), now)
        assert rates.age(now) == 0
    assert rates.rates.decode_steps_per_s == pytest.approx(10, rel=0.1)
    assert rates.rates.decode_tokens_per_s == pytest.approx(40, rel=0.1)
    before = rates.rates
    rates.observe(EngineStep(0.0, 4, 4, 0, ()), now + 100)  # idle in between
    assert rates.rates == before


def waits(rates: StepRates) -> float:
    """How long a reader waits."""
    return max(HUNG_S, HUNG_STEPS * rates.rates.step_s)


def test_a_step_may_take_as_long_as_its_prompts_do() -> None:
    rates, now = StepRates(), 1.0
    rates.observe(EngineStep(0.0, 1, 32, 32, ()), now)
    rates.observe(EngineStep(0.02, 1, 2000, 2000, ()), now + 0.02)
    assert waits(rates) == rates.patience_s == UNMEASURED_S
    rates.observe(EngineStep(20.0, 1, 1, 0, ()), now + 20)
    for at in range(200):
        rates.observe(EngineStep(0.02, 1, 1, 0, ()), now + 60 + at / 50)
    assert rates.patience_s == 0
    assert waits(rates) == HUNG_S
    rates.observe(EngineStep(0.02, 1, 1000, 1000, ()), now + 65)
    assert waits(rates) == rates.patience_s == pytest.approx(PATIENCE * 10, rel=0.3)
