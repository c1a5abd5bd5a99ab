"""An estimate that follows what fetches really take."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfleet.worker.tiers.link_speed import (
    PROBE_AFTER_S,
    PROBE_SOON_S,
    LinkSpeed,
    LinkSpeedMeter,
    is_laggard,
    seconds_of,
    slowest,
)

MB = 1_000_000


def probed(latency: float = 0.001, rate: float = 1e9, now: float = 0.0) -> LinkSpeedMeter:
    meter = LinkSpeedMeter()
    meter.probed(latency, MB, latency + MB / rate, now)
    return meter


def test_nothing_is_known_before_a_measurement() -> None:
    meter = LinkSpeedMeter()
    assert meter.speed is None
    assert meter.due(0.0)
    meter.given_up(0, 5.0, 1.0)
    assert meter.speed is None, "a failure alone tells no speed"


def test_a_probe_seeds_both_parts() -> None:
    speed = probed(0.002, 5e8).speed
    assert speed is not None
    assert speed.latency_s == pytest.approx(0.002)
    assert speed.bytes_per_s == pytest.approx(5e8)


@pytest.mark.parametrize(("latency", "rate"), [(0.0002, 3e9), (0.001, 1e8), (0.05, 1e9), (0.001, 2e7)])
def test_fetches_lead_to_the_true_speed(latency: float, rate: float) -> None:
    meter = probed()
    sizes = [400_000, 16 * MB, 50 * MB, 4 * MB] * 15
    for at, size in enumerate(sizes):
        meter.fetched(size, latency + size / rate, float(at), size)
    speed = meter.speed
    assert speed is not None
    for size in sizes[:4]:
        assert seconds_of(speed, size) == pytest.approx(latency + size / rate, rel=0.35)


def test_one_outlier_moves_it_little_and_a_change_that_lasts_is_followed() -> None:
    meter = probed(rate=1e9)
    for at in range(10):
        meter.fetched(50 * MB, 0.051, float(at), 50 * MB)
    meter.fetched(50 * MB, 0.5, 10.0, 50 * MB)
    assert meter.speed is not None
    assert seconds_of(meter.speed, 50 * MB) < 0.2
    for at in range(20):
        meter.fetched(50 * MB, 0.051, 11.0 + at, 50 * MB)
    assert meter.speed.bytes_per_s == pytest.approx(1e9, rel=0.05)


def test_a_fetch_that_was_given_up_is_believed_at_once() -> None:
    meter = probed(rate=1e9)
    meter.given_up(1 * MB, 0.1, 1.0)
    assert meter.speed is not None
    assert meter.speed.bytes_per_s == pytest.approx(1e7, rel=0.05)
    meter = probed(rate=1e9)
    meter.given_up(0, 3.0, 1.0)
    assert meter.speed is not None
    assert meter.speed.latency_s == 3.0
    meter = probed(rate=1e9)
    for nbytes, seconds in ((50 * MB, 0.001), (0, 0.0), (0, 0.001), (MB, 0.002)):
        meter.given_up(nbytes, seconds, 20.0)
    assert meter.speed is not None
    assert meter.speed.bytes_per_s == pytest.approx(1e9), "given up sooner than could be expected: says nothing"
    assert not meter.due(20.0 + PROBE_SOON_S)


def test_after_a_failure_a_probe_comes_soon_and_is_believed_at_once() -> None:
    meter = probed(rate=1e9, now=0.0)
    assert not meter.due(PROBE_AFTER_S - 1)
    assert meter.due(PROBE_AFTER_S)
    meter.given_up(0, 3.0, 40.0)
    assert not meter.due(40.0 + PROBE_SOON_S / 2)
    assert meter.due(40.0 + PROBE_SOON_S)
    meter.probed(0.001, MB, 0.002, 43.0)
    assert meter.speed is not None
    assert meter.speed.latency_s == pytest.approx(0.001)
    assert meter.speed.bytes_per_s == pytest.approx(1e9)


def test_probes_after_failures_become_rarer_until_a_fetch_comes_through() -> None:
    meter, now, waits = probed(), 0.0, []
    for _ in range(8):
        meter.given_up(0, 3.0, now)
        waits.append(next(wait for wait in range(1, 100) if meter.due(now + wait)))
        now += waits[-1]
        meter.probed(0.001, MB, 0.002, now)
    assert waits[0] == PROBE_SOON_S
    assert waits == sorted(waits)
    assert waits[-1] == PROBE_AFTER_S
    meter.fetched(MB, 0.002, now, MB)
    meter.given_up(0, 3.0, now)
    assert meter.due(now + PROBE_SOON_S)


def test_who_seems_too_slow_to_be_asked_gets_another_chance_soon() -> None:
    meter = probed(rate=1e7)
    meter.doubt()
    assert meter.due(PROBE_SOON_S)
    meter.probed(0.001, MB, 0.101, 2.0)
    assert not meter.due(2.0 + PROBE_SOON_S), "it is slow indeed"
    meter.doubt()
    assert not meter.due(2.0 + PROBE_SOON_S)
    meter.probed(0.001, MB, 0.002, 30.0)
    assert meter.speed is not None
    assert meter.speed.bytes_per_s == pytest.approx(1e9)


def test_blocks_that_travel_smaller_than_they_are_make_a_probe_count_for_more() -> None:
    meter = probed(rate=1e9)
    for at in range(20):  # int8 of fp32: a quarter of the bytes
        meter.fetched(40 * MB, 0.011, float(at), 10 * MB)
    assert meter.speed is not None
    assert meter.speed.bytes_per_s == pytest.approx(4e9, rel=0.1)
    for at in range(20):
        meter.probed(0.001, MB, 0.002, 100.0 + at)
    assert meter.speed.bytes_per_s == pytest.approx(4e9, rel=0.1)


@given(
    st.lists(
        st.tuples(st.sampled_from(["fetched", "given_up", "probed"]), st.integers(0, 10**9), st.floats(0, 100)),
        max_size=50,
    )
)
def test_it_is_a_speed_whatever_comes(events: list[tuple[str, int, float]]) -> None:
    meter = LinkSpeedMeter()
    for at, (kind, nbytes, seconds) in enumerate(events):
        match kind:
            case "fetched":
                meter.fetched(nbytes, seconds, float(at), nbytes // 2)
            case "given_up":
                meter.given_up(nbytes, seconds, float(at))
            case _:
                meter.probed(seconds / 2, nbytes + 1, seconds, float(at))
        if meter.speed is not None:
            assert 0 <= meter.speed.latency_s < 1e3
            assert 0 < meter.speed.bytes_per_s < 1e17


def test_a_laggard_is_told_from_its_fellows_and_the_slowest_decides() -> None:
    fast, fair, slow = LinkSpeed(0.001, 2e9), LinkSpeed(0.001, 1e9), LinkSpeed(0.001, 2e7)
    every = [fast, fair, slow]
    assert [is_laggard(one, every) for one in every] == [False, False, True]
    assert not is_laggard(LinkSpeed(0.001, 6e8), [LinkSpeed(0.001, 6e9), LinkSpeed(0.001, 6e8)]), "milliseconds"
    assert not is_laggard(slow, [slow]), "alone there is nothing to compare it with"
    assert slowest([fast, fair]) == fair
    assert slowest([]) is None
