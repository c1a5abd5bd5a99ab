"""Runs seeds of the simulated fleet, says which broke a promise, makes those smaller and tells what happened."""

from __future__ import annotations

import argparse
import gc
import hashlib
import logging
import resource
import sys
from collections.abc import Callable
from functools import partial

from tests.dst.shrink import shrunk
from tests.dst.trial import WHOLE_S, Outcome, Plan, learn, run

SHRINKING = 150  # runs, at most


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.dst run", description=__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--mutation", help="of tests/dst/mutations: with it until a seed shows it")
    parser.add_argument("--log", default="CRITICAL", help="of the product, from this level on")
    parser.add_argument("--tell", action="store_true", help="what happened, of each")
    parser.add_argument("--shrink", action="store_true", help="what fails, to less that fails alike")
    said = parser.parse_args(arguments)
    logging.basicConfig(level=said.log, stream=sys.stderr, format="%(created).4f %(name)s %(message)s")
    sys.unraisablehook = lambda _: None  # last words of coroutines whose run is over
    began = _cpu_s()
    answers, bad = learn(), 0
    gc.disable()  # what it frees would come to an end at other moments
    gc.freeze()

    def once(plan: Plan, *, traces: bool = False) -> Outcome:
        found = run(plan, answers, traces=traces)
        gc.collect()
        return found

    for seed in range(said.first, said.first + said.seeds):
        plan = Plan.of(seed)
        found = once(plan)
        whole = hashlib.sha256(repr((found.lines, found.wrong)).encode()).hexdigest()[:16]
        counts = ", ".join(f"{found.counts.get(name, 0)} {name}" for name in ("finished", "resumed", "deleted"))
        print(f"{seed} {whole} {len(plan.faults)} faults, {counts}", flush=True)
        bad += bool(found.wrong)
        if found.wrong and said.shrink:
            plan = shrunk(plan, partial(_fails_alike, once, found), SHRINKING)
        if said.tell or found.wrong:
            _tell(plan, once(plan, traces=True))
        if bad and said.mutation:
            break
    took = _cpu_s() - began
    hours = said.seeds * WHOLE_S / 3600 / (took / 60)
    print(f"{said.seeds} seeds, {bad} broke a promise; {said.seeds / took:.2f} a second, {hours:.1f} hours a minute")
    return int(bad > 0)


def _fails_alike(once: Callable[[Plan], Outcome], found: Outcome, plan: Plan) -> bool:
    return not {one.partition(":")[0] for one in found.wrong}.isdisjoint(
        one.partition(":")[0] for one in once(plan).wrong
    )


def _tell(plan: Plan, found: Outcome) -> None:
    fleet = ", ".join(f"{count} {kind}" for kind, count in plan.fleet.items())
    print(f"  {len(plan.faults)} faults, {len(plan.requests)} requests, {fleet}")
    print("\n".join(f"    {line[:400]}" for line in found.lines))
    for wrong in found.wrong:
        print(f"  WRONG {wrong[:400]}")


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
