"""A histogram of plain integers, and histograms with labels as a scrape shows them."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from kvservice.distribution import Distribution
from kvservice.metrics import LiveCollector, Reading


def test_bounds_belong_to_the_bucket_below_them() -> None:
    found = Distribution((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        found.observe(value)
    found.observe(2.0, times=3)
    assert found.read() == ([("1.0", 2.0), ("2.0", 6.0), ("+Inf", 7.0)], 18.0)
    assert (found.count, found.max) == (7, 9.0)


def test_one_histogram_for_each_label() -> None:
    of = {("a",): Distribution((1.0,)), ("b",): Distribution((1.0,))}
    registry = CollectorRegistry()
    reading = Reading(
        "kvfleet_things_seconds",
        "things",
        labels=("who",),
        read_histograms=lambda: {who: one.read() for who, one in of.items()},
    )
    registry.register(LiveCollector([reading]))
    of["a",].observe(0.5)
    lines = generate_latest(registry).decode().splitlines()
    assert 'kvfleet_things_seconds_bucket{le="1.0",who="a"} 1.0' in lines
    assert 'kvfleet_things_seconds_count{who="b"} 0.0' in lines
    assert "# TYPE kvfleet_things_seconds histogram" in lines


def test_registering_reads_nothing_and_no_name_twice() -> None:
    def unread() -> float:
        raise AssertionError("registering is no scrape")

    registry = CollectorRegistry()
    registry.register(LiveCollector([Reading("kvfleet_things_total", "things", unread)]))
    with pytest.raises(ValueError, match="Duplicated"):
        registry.register(LiveCollector([Reading("kvfleet_things_total", "again", unread)]))
