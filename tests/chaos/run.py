"""Wiring: one chaos run from the command line: `python -m tests.chaos.run --minutes 10 --faults 200 --seed N`.

Progress goes to stderr. Writes the report and its plot; exits 1 if a promise was not kept. The same seed gives the same
schedule of faults, cases and behaviours.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.breaking import Breaker
from tests.chaos.cases import Case, Wanted, catalogue
from tests.chaos.checker import Verdict, check
from tests.chaos.fleet import Fleet
from tests.chaos.history import History
from tests.chaos.layout import REAL, Layout
from tests.chaos.leaks import find_leaks
from tests.chaos.load import Load
from tests.chaos.report import page
from tests.chaos.reuse import ReuseWatch
from tests.chaos.schedule import Kind, Schedule
from tests.chaos.timeline import timeline
from tests.support.near_ties import is_near_tie

USUAL = {"own": (10.0, 200), "vllm": (25.0, 100)}  # minutes and faults of a run


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run does. `users`: at the real model and at the fake one."""

    seed: int
    duration_s: float
    faults: int
    layout: Layout = field(default_factory=Layout.of)
    cases: Wanted = field(default_factory=Wanted)
    users: tuple[int, int] = (3, 9)
    kinds: tuple[Kind, ...] = ()

    @classmethod
    def of_vllm(cls, seed: int, duration_s: float, faults: int, kinds: tuple[Kind, ...] = ()) -> Plan:
        """A stream may wait half a minute for a server that does not answer."""
        cases = Wanted(real=30, fake=0, lengths=(24, 60, 100, 200), limit_s=100.0)
        return cls(seed, duration_s, faults, Layout.of_vllm(), cases, users=(5, 0), kinds=kinds)

    @property
    def engine(self) -> str:
        return "vllm" if self.layout.has_vllm else "own"


@dataclass(slots=True)
class Outcome:
    plan: Plan
    schedule: Schedule
    history: History
    verdict: Verdict
    near_ties: int = 0
    took_s: float = 0.0
    notes: list[str] = field(default_factory=list)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


async def run(plan: Plan, folder: Path) -> Outcome:
    """Start a fleet, learn the right answers, break things under load, and judge. Raises AssertionError where the fleet
    does not come up, or an answer cannot be had without faults."""
    began = time.monotonic()
    schedule = Schedule.of(plan.seed, plan.duration_s, plan.faults, plan.layout, plan.kinds)
    cases = catalogue(plan.seed, plan.cases)
    history = History()
    async with Fleet(plan.layout, folder) as fleet:
        say(f"fleet of {len(fleet.members)} processes ready after {time.monotonic() - began:.1f} s")
        load = Load(fleet, cases, history, plan.seed)
        try:
            await load.open()
            await load.learn()
            say(f"{len(history.answers)} answers learnt after {time.monotonic() - began:.1f} s")
            history.exchanges.clear()
            reuse = ReuseWatch(fleet)
            subscriptions = {tenant: client.connection.subscriptions for tenant, client in load.clients.items()}
            load.start(*plan.users)
            try:
                await Breaker(fleet, history, say).run(schedule, fleet.now() + 1.0)
            except AssertionError as error:
                history.unwell.append(str(error))
            await load.stop()
            history.leaks += await find_leaks(fleet, load.clients, subscriptions)
            history.ends += fleet.ends
            history.counts |= await reuse.stop()
            history.counts |= {f"frames {what}": count for what, count in _mangled(fleet).items()}
            verdict = check(history)
            near_ties = await asyncio.to_thread(_forgive_near_ties, verdict, cases)
        finally:
            await load.close()
    return Outcome(plan, schedule, history, verdict, near_ties, time.monotonic() - began)


def _mangled(fleet: Fleet) -> dict[str, int]:
    total: dict[str, int] = {}
    for way in fleet.ways.values():
        for what, count in way.counts.items():
            total[what] = total.get(what, 0) + count
    return total


def _forgive_near_ties(verdict: Verdict, cases: tuple[Case, ...]) -> int:
    """Answers of the real model that may be what they are."""
    known = {case.name: case for case in cases if case.model == REAL and case.ids}
    forgiven = {
        one.exchange
        for one in verdict.mismatches
        if (case := known.get(one.case)) is not None
        and is_near_tie(case.ids, case.sampling_of(), one.choice, one.expected, one.got)
    }
    verdict.violations = [one for one in verdict.violations if one.exchange not in forgiven]
    return len(forgiven)


def tell(outcome: Outcome, of_each: int = 2) -> str:
    """What went wrong, with the histories of the first requests of each kind."""
    known = {exchange.number: exchange for exchange in outcome.history.exchanges}
    lines = [f"seed {outcome.plan.seed}: {len(outcome.verdict.violations)} promises not kept"]
    kinds = Counter((violation.what, violation.told[:100]) for violation in outcome.verdict.violations)
    lines += [f"{count:4d} x {what}: {told}" for (what, told), count in kinds.most_common()]
    told: Counter[tuple[str, str]] = Counter()
    for violation in outcome.verdict.violations:
        kind = violation.what, violation.told[:25]
        told[kind] += 1
        if told[kind] > of_each:
            continue
        lines.append(f"* {violation.what}: {violation.told}")
        if (exchange := known.get(violation.exchange if violation.exchange is not None else -1)) is None:
            continue
        lines.append(
            f"    request {exchange.request} ({exchange.case}, {exchange.transport.value}, {exchange.behaviour}) from "
            f"{exchange.began:.2f} to {exchange.until:.2f} s, accepted {exchange.accepted_at}, "
            f"{len(exchange.pieces)} pieces, workers {exchange.workers}, ingresses {exchange.ingresses}, "
            f"refused {exchange.refusals[-3:]}, broken {exchange.broken}, ends {exchange.ends}"
        )
        for one in outcome.history.faults:
            if one.began <= exchange.until and one.until + 2.0 >= exchange.began:
                lines.append(
                    f"    {one.fault}: {one.began:.2f} to {one.over_at or 0:.2f}, well at {one.well_at or 0:.2f} s"
                )
    return "\n".join(lines)


@contextlib.contextmanager
def _folder(*, keep: bool) -> Iterator[Path]:
    """For logs and stores; 3.11's temporary folders cannot be kept."""
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    try:
        yield folder
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.run", description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=USUAL, default="own")
    parser.add_argument("--minutes", type=float, help="; ".join(f"{e}: {m:g}" for e, (m, _) in USUAL.items()))
    parser.add_argument("--faults", type=int, help="; ".join(f"{e}: {n}" for e, (_, n) in USUAL.items()))
    parser.add_argument("--seed", type=int, default=int(time.time()) % 1_000_000)
    parser.add_argument("--kind", action="append", default=[], help="only faults of this kind; may be repeated")
    parser.add_argument("--report", type=Path, help="folder for reliability.md and its picture, or reliability-vllm.md")
    parser.add_argument("--keep", action="store_true", help="keep the processes' logs")
    said = parser.parse_args(argv)
    minutes, faults = said.minutes or USUAL[said.engine][0], said.faults or USUAL[said.engine][1]
    make = Plan.of_vllm if said.engine == "vllm" else Plan
    plan = make(said.seed, minutes * 60, faults, kinds=tuple(Kind(kind) for kind in said.kind))
    say(f"seed {plan.seed}: {plan.faults} faults in {minutes:g} minutes")
    with _folder(keep=said.keep) as folder:
        say(f"logs in {folder}")
        outcome = asyncio.run(run(plan, folder))
    say(tell(outcome) if outcome.verdict.violations else "every promise kept")
    if said.report is not None:
        write_report(outcome, minutes, said.report)
    counts = {**outcome.verdict.counts, **outcome.history.counts, "near ties": outcome.near_ties}
    say(f"{counts} in {outcome.took_s:.0f} s")
    return 1 if outcome.verdict.violations else 0


def write_report(outcome: Outcome, minutes: float, folder: Path) -> None:
    plan = outcome.plan
    name = "reliability" if plan.engine == "own" else f"reliability-{plan.engine}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.svg").write_text(timeline(outcome.history, plan.layout))
    text = page(plan.seed, minutes, outcome.history, plan.layout, outcome.verdict, outcome.near_ties)
    (folder / f"{name}.md").write_text(text)
    say(f"written: {folder}/{name}.md and .svg")


if __name__ == "__main__":
    sys.exit(main())
