"""Workers come and go all the time: who stays keeps its conversations, and no request fails.

An hour of real conversations, as fast as they were, on 8 workers of 40,000 prefill tokens/s, 2 placements. Every 10 s
one leaves without a word and another one joins, so that a worker lives for 80 s. One that leaves has to give up its 1/8
of the sessions: `value` is the share of sessions that a change moved, over 1/8.

Workers of 8,000 tokens/s, as in the other benchmarks, are run too, but not judged: half loaded by the trace alone, and
with streams about as long as their lives, they are overloaded by what they lose, and whoever loses ten fails.
"""

from __future__ import annotations

from benchmarks._report import finish, parser, progress
from benchmarks._simulated import WORKERS, conversations, rounded
from services.placement.policies import DEFAULT_POLICY
from services.placement.simulate.sim_worker import Speed
from services.placement.simulate.simulation import FleetShape
from services.placement.simulate.study import make_study

NAME, UNIT = "churn", "sessions moved by a change, over 1/N"
FLOOR = 1.5
CHURN_S = 10.0
FAST = Speed(prefill_tokens_per_s=40_000.0)
OTHERS = ("ring", "bounded_ring", "kv_load")


def main() -> None:
    asked = parser(__doc__).parse_args()
    trace = conversations(NAME, UNIT, FLOOR)
    cases = {"": (FAST, (DEFAULT_POLICY, *(() if asked.quick else OTHERS)))}
    if not asked.quick:
        cases[" on workers of 8,000 tokens/s"] = Speed(), (DEFAULT_POLICY,)
    runs: dict[str, dict[str, float | int | None]] = {}
    for where, (speed, policies) in cases.items():
        shape = FleetShape(workers=WORKERS, cache_blocks=trace.distinct_blocks // 10, churn_s=CHURN_S, speed=speed)
        study = make_study(trace, shape)
        for result in study.run(policies):
            what = f"{result.figures.policy}{where}"
            runs[what] = {
                "moved_over_1_n": round((result.figures.moved_per_change or 0.0) * WORKERS, 3),
                "changes": len(result.run.changes),
                "placed_again": sum(outcome.attempts > 1 for outcome in result.run.outcomes),
                "load": round(study.load or 0.0, 3),
                **rounded(result.figures),
            }
            progress(f"{what}: {runs[what]}")
    value, failed = runs[DEFAULT_POLICY]["moved_over_1_n"] or 0.0, runs[DEFAULT_POLICY]["failed"]
    finish(NAME, value, UNIT, floor=FLOOR, ok=value <= FLOOR and not failed, failed=failed, runs=runs)


if __name__ == "__main__":
    main()
