"""Runs seeds of the simulated fleet, says which broke a promise, makes those smaller and tells what happened."""

from __future__ import annotations

import argparse
import hashlib
import logging
import math
import os
import sys
from collections.abc import Iterator
from functools import partial

from tests.dst import threads
from tests.dst.forks import Runner
from tests.dst.plan import Plan
from tests.dst.shrink import shrunk
from tests.dst.trial import WHOLE_S, Outcome, learn

SHRINKING = 80  # runs, at most


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.dst run", description=__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--within", type=float, default=math.inf, help="seconds, after which no further one begins")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at once")
    parser.add_argument("--mutation", help="of tests/dst/mutations: with it until a seed shows it")
    parser.add_argument("--log", default="CRITICAL", help="of the product, from this level on")
    parser.add_argument("--tell", action="store_true", help="what happened, of each")
    parser.add_argument("--shrink", action="store_true", help="what fails, to less that fails alike")
    said = parser.parse_args(arguments)
    logging.basicConfig(level=said.log, stream=sys.stderr, format="%(created).4f %(name)s %(message)s")
    sys.unraisablehook = lambda _: None  # last words of coroutines whose run is over
    began, ran, bad = threads.REAL["perf_counter"](), 0, 0
    try:
        seeds = range(said.first, said.first + said.seeds)
        answers = {hybrid: learn(hybrid=hybrid) for hybrid in sorted({Plan(seed, (), ()).hybrid for seed in seeds})}
    except AssertionError as error:  # of a mutation: what is right cannot be learned with it
        print(f"{said.first} {'0' * 16} none yet\n  WRONG without any fault: {error}")
        return 1
    runner = Runner(answers, said.jobs)

    def plans() -> Iterator[Plan]:
        for seed in seeds:
            if seed == said.first or threads.REAL["perf_counter"]() - began < said.within:
                yield Plan.of(seed)

    for plan, found in runner.outcomes(plans()):
        whole = hashlib.sha256(repr((found.lines, found.wrong)).encode()).hexdigest()[:16]
        counts = ", ".join(f"{found.counts.get(name, 0)} {name}" for name in ("finished", "resumed", "deleted"))
        print(f"{plan.seed} {whole} {len(plan.faults)} faults, {counts}", flush=True)
        ran += 1
        bad += bool(found.wrong)
        if found.wrong and said.shrink:
            plan = shrunk(plan, partial(_fails_alike, runner, found), SHRINKING)
        if said.tell or found.wrong:
            again = runner.outcome(plan, traces=True)
            if plan == Plan.of(plan.seed) and again.wrong != found.wrong:
                print(f"  NOT THE SAME AGAIN: {found.wrong}")
            _tell(plan, again)
        if bad and said.mutation:
            break
    took = threads.REAL["perf_counter"]() - began
    hours = ran * WHOLE_S / 3600 / (took / 60)
    print(f"{ran} seeds, {bad} broke a promise; {ran / took:.2f} a second, {hours:.1f} hours a minute")
    return int(bad > 0)


def _fails_alike(runner: Runner, found: Outcome, plan: Plan) -> bool:
    said = {one.partition(":")[0] for one in found.wrong}
    return not said.isdisjoint(one.partition(":")[0] for one in runner.outcome(plan).wrong)


def _tell(plan: Plan, found: Outcome) -> None:
    fleet = ", ".join(f"{count} {kind}" for kind, count in plan.fleet.items())
    print(f"  {len(plan.faults)} faults, {len(plan.requests)} requests, {fleet}")
    print("\n".join(f"    {line[:400]}" for line in found.lines))
    for wrong in found.wrong:
        print(f"  WRONG {wrong[:400]}")
