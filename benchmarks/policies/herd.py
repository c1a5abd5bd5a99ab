"""Four placements decide at once: do they all run to the same idle worker?

An hour of real conversations on 8 workers, at half and at nine tenths of what they can do; as recorded, which is about
ten at the same millisecond every three seconds, and spread evenly. Replicas tell one another at once what they booked;
or do not; each with the default policy, and with one that draws among the workers that cost about as little. As a
replica that hears nothing sees a quarter of what workers are given, one way reckons with four times that.

The product shares and does not draw. `value` is the load CoV of the evenest that does not share over that of the
product, the least of all four cases: below 1 somebody spreads load better without sharing. The p99 of TTFT, likewise,
stands beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from benchmarks.harness.report import finish, parser, progress
from benchmarks.policies._simulated import WORKERS, conversations, rounded
from kvfleet.placement.policies import DEFAULT_POLICY, Choice, Policy, Question
from kvfleet.placement.policies.cost import BUSY, Cost
from kvfleet.placement.simulate.figures import Figures, figures
from kvfleet.placement.simulate.fleet_shape import Delays, FleetShape
from kvfleet.placement.simulate.simulation import Simulation
from kvfleet.placement.simulate.study import Study, make_study
from kvfleet.placement.workers.price_kernel import COST

NAME, UNIT = "herd", "load CoV of the evenest that does not share, over sharing"
FLOOR = 1.0
REPLICAS, CACHE_SHARE = 4, 10
LOADS = (0.5, 0.9)


@dataclass(frozen=True, slots=True)
class Way:
    """How replicas decide."""

    shares: bool
    draws: bool = False
    busy: float = BUSY


PRODUCT = "shared"
WAYS = {
    PRODUCT: Way(shares=True),
    "not shared": Way(shares=False),
    "not shared, drawn": Way(shares=False, draws=True),
    "not shared, four times": Way(shares=False, busy=REPLICAS * BUSY),
    "shared, drawn": Way(shares=True, draws=True),
}
NEAR, NEAR_S = 0.1, 0.01  # what is about equal to those who draw


class Sampling:
    """The default policy's costs; among those near the least, chance."""

    name = DEFAULT_POLICY

    def __init__(self, chance: Callable[[], float], cost: Cost) -> None:
        self._chance, self._cost = chance, cost

    def choose(self, question: Question) -> Choice | None:
        choice = self._cost.choose(question)
        if choice is None or choice.prices is None:
            return None
        costs = choice.prices[COST]
        near = np.flatnonzero(costs <= costs.min() * (1 + NEAR) + NEAR_S)
        number = int(near[int(self._chance() * len(near))])
        return Choice(question.candidates[number].id, "drawn", choice.prices)


def measure(study: Study, way: Way) -> Figures:
    shape = FleetShape(
        workers=WORKERS,
        cache_blocks=study.shape.cache_blocks,
        replicas=REPLICAS,
        delays=Delays(booking_s=Delays().booking_s if way.shares else None),
    )

    def policies(chance: Callable[[], float]) -> Mapping[str, Policy]:
        cost = Cost(busy=way.busy)
        return {DEFAULT_POLICY: Sampling(chance, cost) if way.draws else cost}

    run = Simulation(study.trace, shape, DEFAULT_POLICY, policies).run()
    return figures(DEFAULT_POLICY, study.trace, run, study.attainable)


def main() -> None:
    asked = parser(__doc__).parse_args()
    recorded = conversations(NAME, UNIT, FLOOR)
    shape = FleetShape(workers=WORKERS, cache_blocks=recorded.distinct_blocks // CACHE_SHARE)
    details: dict[str, dict[str, float | int | None]] = {}
    p99: dict[str, float] = {}
    cov: dict[str, float] = {}
    for load in LOADS[-1:] if asked.quick else LOADS:
        for arrivals, trace in {"spread": recorded.spread(), "at once": recorded}.items():
            study = make_study(trace, shape, load=load)
            found = {}
            for name, way in WAYS.items():
                found[name] = measure(study, way)
                what = f"{arrivals}, load {load:g}, {name}"
                details[what] = rounded(found[name])
                progress(f"{what}: {details[what]}")
            others = [one for name, one in found.items() if not WAYS[name].shares]
            case = f"{arrivals}, load {load:g}"
            p99[case] = round(min(one.ttft_p99_s for one in others) / found[PRODUCT].ttft_p99_s, 3)
            cov[case] = round(min(one.load_cov for one in others) / found[PRODUCT].load_cov, 3)
    value = min(cov.values())
    finish(
        NAME, value, UNIT, floor=FLOOR, ok=value >= FLOOR, p99_over_sharing=p99, load_cov_over_sharing=cov, runs=details
    )


if __name__ == "__main__":
    main()
