"""Four placements decide at once: do they all run to the same idle worker?

An hour of real conversations on 8 workers at nine tenths of what they can do. Replicas tell one another at once what
they booked; or do not; or do not and draw among the workers that cost about as little, as those do that share nothing.
The product shares. `value` is the better of the others' p99 of TTFT over that of sharing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from benchmarks._report import finish, parser, progress
from benchmarks._simulated import WORKERS, conversations, rounded
from services.placement.policies import DEFAULT_POLICY, Choice, Policy, Question, build_policies
from services.placement.policies.cost import Cost
from services.placement.simulate.figures import Figures, figures
from services.placement.simulate.simulation import Delays, FleetShape, Simulation
from services.placement.simulate.study import Study, make_study

NAME, UNIT = "herd", "TTFT p99 of the better one that does not share, over sharing"
FLOOR = 1.0
REPLICAS, CACHE_SHARE = 4, 10
NEAR, NEAR_S = 0.1, 0.01  # what is about equal to those who draw


class Sampling:
    """The default policy's costs; among those near the least, chance."""

    name = DEFAULT_POLICY

    def __init__(self, chance: Callable[[], float]) -> None:
        self._chance, self._cost = chance, Cost()

    def choose(self, question: Question) -> Choice | None:
        choice = self._cost.choose(question)
        if choice is None:
            return None
        costs = sum(choice.terms.values(), np.zeros(len(question.candidates)))
        near = np.flatnonzero(costs <= costs.min() * (1 + NEAR) + NEAR_S)
        number = int(near[int(self._chance() * len(near))])
        return Choice(question.candidates[number].id, "drawn", choice.terms)


def sampling(chance: Callable[[], float]) -> Mapping[str, Policy]:
    return {**build_policies(chance), DEFAULT_POLICY: Sampling(chance)}


def measure(
    study: Study, booking_s: float | None, policies: Callable[[Callable[[], float]], Mapping[str, Policy]]
) -> Figures:
    shape = FleetShape(
        workers=WORKERS,
        cache_blocks=study.shape.cache_blocks,
        replicas=REPLICAS,
        delays=Delays(booking_s=booking_s),
    )
    run = Simulation(study.trace, shape, DEFAULT_POLICY, policies).run()
    return figures(DEFAULT_POLICY, study.trace, run, study.attainable)


def main() -> None:
    asked = parser(__doc__).parse_args()
    trace = conversations(NAME, UNIT, FLOOR)
    shape = FleetShape(workers=WORKERS, cache_blocks=trace.distinct_blocks // CACHE_SHARE)
    details, ratios, covs = {}, [], []
    for load in (0.9,) if asked.quick else (0.5, 0.9):
        study = make_study(trace, shape, load=load)
        ways = {
            "shared": measure(study, Delays().booking_s, build_policies),
            "not shared": measure(study, None, build_policies),
            "not shared, drawn": measure(study, None, sampling),
        }
        for way, one in ways.items():
            details[f"load {load:g}, {way}"] = rounded(one)
            progress(f"load {load:g}, {way}: {rounded(one)}")
        shared = ways.pop("shared")
        ratios.append(min(one.ttft_p99_s for one in ways.values()) / shared.ttft_p99_s)
        covs.append(min(one.load_cov for one in ways.values()) / shared.load_cov)
    finish(
        NAME,
        round(min(ratios), 3),
        UNIT,
        floor=FLOOR,
        ok=min(ratios) >= FLOOR and min(covs) >= FLOOR,
        load_cov_over_sharing=round(min(covs), 3),
        runs=details,
    )


if __name__ == "__main__":
    main()
