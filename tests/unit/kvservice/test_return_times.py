"""How long tools take: by tenant and tool, bounded, and the old fades."""

from __future__ import annotations

from kvservice.return_times import FEWEST, KEPT, MAX_TENANTS, MAX_TOOLS, SLACK_S, ReturnTimes, said_span


def taught(tool: str = "build", pauses: int = 20, first_s: float = 60.0) -> ReturnTimes:
    times = ReturnTimes()
    for number in range(pauses):
        times.observe("acme", [tool], first_s + number)
    return times


def test_nothing_is_expected_of_an_unknown_tool() -> None:
    times = taught(pauses=FEWEST - 1)
    assert times.expect("acme", ["build"]) is None
    times.observe("acme", ["build"], 61.0)
    assert times.expect("acme", ["build"]) is not None
    assert times.expect("acme", ["build", "other"]) is None
    assert times.expect("acme", []) is None


def test_the_span_holds_most_pauses() -> None:
    span = taught().expect("acme", ["build"])
    assert span == (62.0, 79.0 + SLACK_S)


def test_a_tenant_learns_nothing_of_anothers_tools() -> None:
    assert taught().expect("other", ["build"]) is None


def test_old_pauses_fade() -> None:
    times = taught()
    for _ in range(KEPT):
        times.observe("acme", ["build"], 1.0)
    assert times.expect("acme", ["build"]) == (1.0, 1.0 + SLACK_S)


def test_of_parallel_calls_the_slowest_is_waited_for() -> None:
    times = taught()
    for _ in range(20):
        times.observe("acme", ["read"], 1.0)
    for _ in range(20):
        times.observe("acme", ["read", "build"], 100.0)
    assert times.expect("acme", ["read"]) == (1.0, 1.0 + SLACK_S)
    both = times.expect("acme", ["read", "build"])
    assert both is not None
    assert both.latest_s == 100.0 + SLACK_S


def test_tables_are_bounded() -> None:
    times = ReturnTimes()
    for number in range(2 * MAX_TENANTS):
        times.observe(f"t{number}", ["x"], 1.0)
    for number in range(2 * MAX_TOOLS):
        times.observe("acme", [f"tool {number}"], 1.0)
    assert len(times._tools) == MAX_TENANTS
    assert len(times._tools["acme"]) == MAX_TOOLS


def test_a_client_that_says_when_is_believed_about() -> None:
    span = said_span(30.0)
    assert span.soonest_s < 30 < span.latest_s
