"""Makes a failing plan smaller while it still fails: fewer faults, requests and processes, shorter faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.dst.plan import Plan

Fails = Callable[[Plan], bool]


def shrunk(plan: Plan, fails: Fails, runs: int) -> Plan:
    """After so many runs at most."""
    left = iter(range(runs))

    def still(candidate: Plan) -> bool:
        return next(left, None) is not None and fails(candidate)

    before = None
    while before != plan:
        before = plan
        for name in ("faults", "requests"):
            plan = _fewer(plan, name, still)
        for smaller in (*_smaller_fleets(plan), *_shorter(plan)):
            if still(smaller):
                plan = smaller
    return plan


def _fewer(plan: Plan, name: str, still: Fails) -> Plan:
    """By leaving out halves, then quarters, down to single ones."""
    size = max(1, len(getattr(plan, name)) // 2)
    while True:
        at = 0
        while at < len(items := getattr(plan, name)):
            smaller = replace(plan, **{name: (*items[:at], *items[at + size :])})
            if still(smaller):
                plan = smaller
            else:
                at += size
        if size == 1:
            return plan
        size //= 2


def _smaller_fleets(plan: Plan) -> Iterator[Plan]:
    for kind, count in plan.fleet.items():
        for less in range(1 if kind != "v" else 0, count):
            gone = {f"{kind}{at}" for at in range(less, count)}
            if not any(fault.target in gone for fault in plan.faults):
                yield replace(plan, fleet={**plan.fleet, kind: less})
                break


def _shorter(plan: Plan) -> Iterator[Plan]:
    for at, fault in enumerate(plan.faults):
        if fault.for_s > 0.2:
            less = replace(fault, for_s=fault.for_s / 2)
            yield replace(plan, faults=(*plan.faults[:at], less, *plan.faults[at + 1 :]))
