"""A failing plan becomes as small as what fails in it."""

from __future__ import annotations

from tests.dst.cases import requests
from tests.dst.plan import FLEET, Plan, names_in
from tests.dst.schedule import Kind, drawn
from tests.dst.shrink import shrunk


def test_what_has_nothing_to_do_with_it_goes() -> None:
    seed = next(seed for seed in range(1000) if len(drawn(seed, names_in(FLEET), 30.0)) == 16)
    plan = Plan(seed, drawn(seed, names_in(FLEET), 30.0), tuple(requests(seed)))
    culprit, asked = plan.faults[9], plan.requests[23]
    runs = 0

    def fails(one: Plan) -> bool:
        nonlocal runs
        runs += 1
        kinds = {fault.kind: fault for fault in one.faults if fault.target == culprit.target}
        return culprit.kind in kinds and asked in one.requests

    assert isinstance(culprit.kind, Kind)
    small = shrunk(plan, fails, 300)
    assert fails(small)
    assert len(small.faults) == 1
    assert small.requests == (asked,)
    assert sum(small.fleet.values()) < sum(FLEET.values())
    assert small.faults[0].for_s <= 0.2 or small.faults[0].for_s <= culprit.for_s
    assert runs <= 301


def test_it_gives_up_after_so_many_runs() -> None:
    plan = Plan.of(7)
    runs: list[Plan] = []
    shrunk(plan, lambda one: bool(runs.append(one)), 10)
    assert len(runs) == 10
