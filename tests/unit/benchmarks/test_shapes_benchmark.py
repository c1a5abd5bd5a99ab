"""What the benchmark of made-up traces takes for a promise that does not hold."""

from __future__ import annotations

import pytest
from simulate_build import a_row, a_trace

from benchmarks.policies.trace_shapes import ABLATIONS, busiest_speed, medians, missed
from kvfleet.placement.policies import DEFAULT_POLICY
from kvfleet.placement.simulate.figures import attainable_by_request, capacity_speed
from kvfleet.placement.simulate.fleet_shape import Speed
from kvfleet.placement.simulate.study import POLICIES

GOOD = {"hit_of_attainable": 0.98, "ttft_p50_s": 1.0, "ttft_p99_s": 5.0, "load_cov": 0.05, "goodput_per_s": 10.0}
SPEED = Speed(prefill_tokens_per_s=2000.0, chunk_tokens=256)


def cell(ours: dict[str, float], **others: dict[str, float]) -> dict[str, dict[str, float]]:
    worse = GOOD | {"ttft_p50_s": 2.0, "ttft_p99_s": 9.0, "goodput_per_s": 5.0}
    found = dict.fromkeys(POLICIES, worse) | {DEFAULT_POLICY: GOOD | ours}
    return found | {name.replace("_", " ") if "harm" in name else name: GOOD | one for name, one in others.items()}


@pytest.mark.parametrize(
    ("ours", "theirs", "what"),
    [
        ({}, {}, []),
        ({"ttft_p99_s": 5.09}, {}, []),  # no worse, but for what may be chance
        ({"load_cov": 0.11}, {}, ["load CoV"]),
        ({"ttft_p99_s": 6.0}, {}, ["ttft_p99_s of ring"]),
        ({}, {"goodput_per_s": 10.3}, ["goodput of ring"]),
    ],
)
def test_no_worse_than_any_other(ours: dict[str, float], theirs: dict[str, float], what: list[str]) -> None:
    assert list(missed(cell(ours, ring=theirs))) == what


@pytest.mark.parametrize(
    ("halved", "what"),
    [
        ({"hit_of_attainable": 0.95, "ttft_p50_s": 0.5}, []),  # no more hits
        ({"hit_of_attainable": 0.98, "ttft_p99_s": 6.0}, []),  # more, and a worse first token
        ({"hit_of_attainable": 0.98}, ["hits that harm halved has for nothing"]),
    ],
)
def test_hits_may_be_missed_where_more_of_them_are_worse(halved: dict[str, float], what: list[str]) -> None:
    found = cell({"hit_of_attainable": 0.95}, harm_halved=halved, harm_doubled={"hit_of_attainable": 0.9})
    assert set(ABLATIONS) <= set(found)
    assert list(missed(found)) == what


def test_figures_are_medians_each_by_itself() -> None:
    assert medians([{"a": 1, "b": 9}, {"a": 3, "b": 8}, {"a": 2, "b": 1}]) == {"a": 2, "b": 8}


def test_of_a_trace_that_becomes_harder_the_busiest_part_counts() -> None:
    """Forty requests hit, then forty do not: at the mean of both the second half would come too fast."""
    easy = [a_row(number, ["same"] * 20) for number in range(40)]
    hard = [a_row(40 + number, [number] * 20) for number in range(40)]
    trace = a_trace(*easy, *hard)
    found = list(attainable_by_request(trace, 100))
    assert sum(found[1:40]) > 0.9 * sum(one.prompt_tokens for one in trace.arrivals[1:40])
    assert sum(found[40:]) == 0
    busiest = busiest_speed(trace, 1, SPEED, found)
    assert busiest == pytest.approx(capacity_speed(a_trace(*hard), 1, SPEED, 0), rel=0.1)
    assert capacity_speed(trace, 1, SPEED, sum(found)) > 1.5 * busiest
