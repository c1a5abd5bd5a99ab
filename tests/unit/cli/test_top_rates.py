"""Rates between two looks at a fleet."""

from __future__ import annotations

from typing import Any

import pytest

from kvfleet.cli.clients.top_rates import FleetRates

Fleet = dict[str, dict[str, Any]]


def fleet(**workers: tuple[str, int, int, int]) -> Fleet:
    """Epoch, prompt tokens, hit tokens, generated tokens of each."""
    names = ("prompt_tokens_total", "hit_tokens_total", "generated_tokens_total")
    return {
        worker: {"epoch": epoch, "load": dict(zip(names, counts, strict=True))}
        for worker, (epoch, *counts) in workers.items()
    }


def of(*samples: tuple[float, Fleet]) -> FleetRates:
    rates = FleetRates()
    for at_s, workers in samples:
        rates.add(workers, at_s)
    return rates


def test_one_look_says_nothing() -> None:
    rates = of((10.0, fleet(w0=("e", 100, 50, 10))))
    assert (rates.hit_rate(), rates.tokens_per_s()) == (None, None)


def test_rates_are_of_what_came_between() -> None:
    rates = of(
        (10.0, fleet(w0=("e", 100, 50, 10), w1=("e", 0, 0, 0))),
        (12.0, fleet(w0=("e", 200, 140, 30), w1=("e", 100, 0, 8))),
    )
    assert rates.hit_rate() == pytest.approx(90 / 200)
    assert rates.tokens_per_s() == pytest.approx(28 / 2)
    assert rates.hit_rate("w0") == pytest.approx(0.9)
    assert rates.hit_rate("w1") == 0.0
    assert rates.tokens_per_s("w1") == pytest.approx(4.0)
    assert (rates.hit_rate("w9"), rates.tokens_per_s("w9")) == (None, 0.0)


def test_without_prompts_there_is_no_hit_rate() -> None:
    rates = of((1.0, fleet(w0=("e", 5, 5, 5))), (2.0, fleet(w0=("e", 5, 5, 6))))
    assert (rates.hit_rate(), rates.tokens_per_s()) == (None, 1.0)


def test_a_new_life_counts_from_its_second_look_and_a_death_takes_nothing_back() -> None:
    before = fleet(w0=("e1", 1000, 900, 500), w1=("e1", 1000, 0, 100))
    after = fleet(w0=("e2", 10, 10, 5), w1=("e1", 1010, 5, 110))
    rates = of((1.0, before), (2.0, after))
    assert rates.tokens_per_s() == 10.0
    assert rates.hit_rate() == 0.5
    rates.add(fleet(w0=("e2", 20, 20, 25)), 3.0)
    assert rates.tokens_per_s() == pytest.approx(15.0)
    assert rates.hit_rate() == pytest.approx(15 / 20)


def test_a_counter_that_went_back_adds_nothing() -> None:
    rates = of((1.0, fleet(w0=("e", 10, 10, 10))), (2.0, fleet(w0=("e", 5, 5, 5))))
    assert (rates.hit_rate(), rates.tokens_per_s()) == (None, 0.0)


def test_the_hit_rate_is_of_the_last_minute_and_tokens_of_the_last_seconds() -> None:
    rates = of((0.0, fleet(w0=("e", 0, 0, 0))))
    for at in range(1, 61):
        rates.add(fleet(w0=("e", 100 * at, 0, 10 * at)), float(at))
    for at in range(61, 121):
        rates.add(fleet(w0=("e", 100 * at, 100 * (at - 60), 600)), float(at))
        if at == 62:
            assert rates.tokens_per_s() == pytest.approx(10 * 3 / 5)
    assert rates.hit_rate() == 1.0
    assert rates.tokens_per_s() == 0.0
    assert len(rates.steps) == 60


def test_looks_further_apart_than_the_window() -> None:
    rates = of((0.0, fleet(w0=("e", 0, 0, 0))), (90.0, fleet(w0=("e", 100, 25, 900))))
    assert (rates.hit_rate(), rates.tokens_per_s()) == (0.25, 10.0)


def test_two_looks_at_one_moment_are_one() -> None:
    rates = of((1.0, fleet(w0=("e", 0, 0, 0))), (1.0, fleet(w0=("e", 1, 1, 1))))
    assert rates.tokens_per_s() is None
