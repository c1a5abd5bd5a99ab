"""`kvfleet simulate --autoscale`: the real autoscaler on simulated workers."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from xml.etree import ElementTree

import pytest
from simulate_build import BLOCK, a_row, a_trace, run

from kvfleet.placement.advice.autoscale import Rules
from kvfleet.placement.simulate.figures import held
from kvfleet.placement.simulate.fleet_shape import Autoscale, FleetShape, Speed, Victim
from kvfleet.placement.simulate.plot import plot
from kvfleet.placement.simulate.report import as_values, autoscale_table
from kvfleet.placement.simulate.study import Autoscaled, Study, run_autoscaled
from kvfleet.placement.simulate.trace import Trace

RULES = Rules(minimum=1, maximum=4, up_s=18, down_s=30)
SCALE = Autoscale(RULES, start_s=5.0)
SPEED = Speed(prefill_tokens_per_s=1000.0, chunk_tokens=256, decode_base_s=0.002, decode_each_s=0.0)
SHAPE = FleetShape(workers=4, cache_blocks=2000, speed=SPEED, drain_s=5.0, autoscale=SCALE)


@pytest.fixture(scope="module")
def trace() -> Trace:
    """A minute and a half for two or three workers, then two minutes with next to nothing."""
    chance = Random(3)
    rows, at = [], 0.0
    while at < 90:
        at += chance.expovariate(8)
        rows.append(a_row(at, [f"{len(rows)}.{block}" for block in range(16)], output=5))
    rows += [a_row(90 + 5.0 * number, ["late", number], output=5) for number in range(28)]
    return a_trace(*rows)


@pytest.fixture(scope="module")
def found(trace: Trace) -> Autoscaled:
    return run_autoscaled(trace, SHAPE, "cost", 1, 2.0)


def test_it_grows_and_shrinks_within_its_limits(found: Autoscaled) -> None:
    ready = [moment.ready for moment in found.scaling.timeline]
    assert ready[0] == 1
    assert max(ready) in (3, 4)
    assert ready[-1] < max(ready)
    assert all(1 <= one <= 4 for one in ready)
    assert found.figures.failed == 0
    assert found.worker_hours < found.fixed_worker_hours
    assert found.scaling.ups == max(ready) - 1
    first_up = next(moment.at_s for moment in found.scaling.timeline if moment.ready > 1)
    assert 18 <= first_up <= 18 + 5 + 4


def test_a_run_can_be_repeated(trace: Trace, found: Autoscaled) -> None:
    assert run_autoscaled(trace, SHAPE, "cost", 1, 2.0) == found


def test_it_waits_less_than_too_few_and_costs_less_than_too_many(trace: Trace, found: Autoscaled) -> None:
    one, four = (run(trace, replace(SHAPE, workers=count, autoscale=None)) for count in (1, 4))
    assert held(one, 2.0) < found.ttft_held <= held(four, 2.0)


@pytest.mark.parametrize("victim", list(Victim))
def test_what_goes_with_a_worker_is_counted(victim: Victim) -> None:
    """Conversations on both of two workers; then silence, one of them goes, and all come back."""
    rows = [
        a_row(40.0 * 0 + 0.05 * number, [f"s{number % 40}.{block}" for block in range(8)], output=5)
        for number in range(800)
    ]
    rows += [a_row(60 + 10.0 * number, ["idle"], output=1) for number in range(10)]
    rows += [a_row(200 + number, [f"s{number}.{block}" for block in range(8)], output=5) for number in range(40)]
    scale = Autoscale(replace(RULES, minimum=1, maximum=2, up_s=9), 1.0, victim)
    slow = replace(SPEED, prefill_tokens_per_s=250.0)
    found = run_autoscaled(a_trace(*rows), replace(SHAPE, speed=slow, autoscale=scale), "round_robin", 1, 2.0)
    assert len(found.scaling.downs) >= 1
    assert found.figures.failed == 0
    assert found.scaling.lost_tokens <= found.scaling.lost_blocks * BLOCK


def test_a_swell_moves_requests_and_loses_none(trace: Trace) -> None:
    swollen = trace.swollen(0.8)
    times = [arrival.at_s for arrival in swollen.arrivals]
    assert times == sorted(times)
    assert swollen.duration_s == pytest.approx(trace.duration_s)
    assert trace.swollen(0.0).duration_s == trace.duration_s
    even = a_trace(*(a_row(float(number), [number]) for number in range(1001)))
    thirds = [sum(low <= arrival.at_s < low + 333 for arrival in even.swollen(1.0).arrivals) for low in (0, 333, 667)]
    assert thirds[1] > 3 * max(thirds[0], thirds[2])


def test_a_study_says_and_draws_it(trace: Trace, found: Autoscaled) -> None:
    study = Study(trace, SHAPE, 1, None)
    for _ in study.run(("cost",)):
        pass
    study.autoscaled.append(found)
    lines = autoscale_table(study)
    assert any(line.startswith("fixed ") for line in lines)
    assert any(line.startswith("cheapest goes, ready workers: 1 at 0:00, ") for line in lines)
    values = as_values(study)["autoscaled"][0]
    assert values["scale_down"] == "cheapest"
    assert len(values["replicas_by_minute"]) == len(found.by_minute()) == int(found.ended_s // 60) + 1
    root = ElementTree.fromstring(plot(study))
    assert any("Workers over time" in (text.text or "") for text in root.iter("{http://www.w3.org/2000/svg}text"))
