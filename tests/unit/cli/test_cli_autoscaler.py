"""What `kvfleet up --autoscale` decides."""

from __future__ import annotations

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from kvfleet.cli.embedded.autoscaler import LocalAutoscaler, ScaleLimits, WantedWorkers, merged, read_limits, steps
from kvfleet.cli.embedded.processes import Child
from kvfleet.cli.operator.operator_login import Login
from kvproto.messages import ModelSignals, PlacementStats, ScaleReply, ScaleRequest


def a_replica(name: str, **desired: int) -> PlacementStats:
    models = tuple(ModelSignals(model, desired=number) for model, number in desired.items())
    return PlacementStats(name, "cost", (), 0, 0, 0, 0, models=models)


def test_limits_are_read() -> None:
    assert read_limits("2:5") == ScaleLimits(2, 5)
    assert read_limits("1:1") == ScaleLimits(1, 1)
    assert read_limits("0:4") == ScaleLimits(0, 4)
    assert read_limits(None) is None


@pytest.mark.parametrize("said", ["", "2", "0:0", "3:2", "a:b", "1:", "1:2:3", "-1:2"])
def test_other_limits_are_refused(said: str) -> None:
    with pytest.raises(typer.BadParameter, match="MIN:MAX"):
        read_limits(said)


def test_what_is_missing_starts_at_once_and_one_at_a_time_drains() -> None:
    assert steps(WantedWorkers(5, 2), running=2, draining=0) == 3
    assert steps(WantedWorkers(2, 5), running=5, draining=0) == -1
    assert steps(WantedWorkers(2, 4), running=4, draining=1) == 0
    assert steps(WantedWorkers(2, 1), running=1, draining=1) == 1
    assert steps(WantedWorkers(2, 2), running=2, draining=0) == 0


def test_what_is_not_known_lowers_nothing() -> None:
    assert steps(WantedWorkers(1, 3), running=3, draining=0) == -1
    assert steps(WantedWorkers(1, 3, known=False), running=3, draining=0) == 0
    assert steps(WantedWorkers(1, 2), running=3, draining=0) == 0  # it does not see the one that has just been started
    assert steps(WantedWorkers(4, 3, known=False), running=3, draining=0) == 1


@given(st.integers(0, 20), st.integers(0, 20))
def test_it_comes_to_what_is_desired(desired: int, running: int) -> None:
    for _ in range(40):
        running += steps(WantedWorkers(desired, running), running, 0)
    assert running == desired


def test_the_replica_that_desires_most_counts() -> None:
    found = merged([a_replica("p0", a=2, b=1), a_replica("p1", a=3), a_replica("p2")])
    assert {model: one.desired for model, one in found.items()} == {"a": 3, "b": 1}
    assert merged([]) == {}


def test_all_replicas_must_know_and_see_it() -> None:
    def says(name: str, living: int, *, known: bool = True) -> PlacementStats:
        one = ModelSignals("a", desired=1, living=living, known=known)
        return PlacementStats(name, "cost", (), 0, 0, 0, 0, models=(one,))

    assert merged([says("p0", 3), says("p1", 2)]) == {"a": WantedWorkers(1, 2)}
    assert merged([says("p0", 3), says("p1", 3, known=False)]) == {"a": WantedWorkers(1, 3, known=False)}
    assert merged([says("p0", 3), a_replica("p1")]) == {"a": WantedWorkers(1, 3, known=False)}


def a_fleet(*models: str, placement_decides: bool = False) -> LocalAutoscaler:
    workers = [Child(f"w{at}", lambda: None, model=model) for at, model in enumerate(models)]  # type: ignore[arg-type, return-value]
    names = sorted(set(models))
    return LocalAutoscaler(
        Login(""), "kvf", names, lambda model: workers[0], workers, placement_decides=placement_decides
    )


def test_what_is_asked_for_is_taken_and_what_was_there_is_told() -> None:
    fleet = a_fleet("a", "a", "b")
    assert fleet.retarget(ScaleRequest(5, "a")) == ScaleReply("a", 2)
    fleet.workers[0].draining = True
    assert fleet.retarget(ScaleRequest(1, "a")) == ScaleReply("a", 1)
    assert fleet.targets == {"a": 1}
    only = a_fleet("a")
    assert only.retarget(ScaleRequest(2)) == ScaleReply("a", 1)


@pytest.mark.parametrize(
    ("fleet", "asked", "why"),
    [
        (a_fleet("a", "b"), ScaleRequest(2), "name one of its models: a, b"),
        (a_fleet("a"), ScaleRequest(0, "a"), "from 1 to 256"),
        (a_fleet("a"), ScaleRequest(257, "a"), "from 1 to 256"),
        (a_fleet("a", placement_decides=True), ScaleRequest(2, "a"), "--autoscale"),
    ],
)
def test_what_cannot_be_had_changes_nothing(fleet: LocalAutoscaler, asked: ScaleRequest, why: str) -> None:
    reply = fleet.retarget(asked)
    assert reply.code == "invalid_request"
    assert why in reply.message
    assert not fleet.targets
