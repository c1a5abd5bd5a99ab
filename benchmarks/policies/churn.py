"""Workers come and go all the time: who stays keeps its conversations, and no request fails.

An hour of real conversations, as fast as they were, on 8 workers, 2 placements. Every 10 s one leaves and another one
joins, so that a worker is there for 80 s. One that leaves has to give up its 1/8 of the sessions: `value` is the share
of sessions that a change moved, over 1/8, the most of two ways to leave:

* drained: it takes nothing new and goes on with what it has for a minute; what is left then goes on elsewhere;
* killed: it leaves without a word. With workers of 8,000 prefill tokens/s, as in the other benchmarks, the fleet is
  overloaded by what it loses so: each time an eighth of all that runs is fed anew. So these are of 40,000; those of
  8,000 are run too, but not judged.
"""

from __future__ import annotations

from benchmarks.harness.report import finish, parser, progress
from benchmarks.policies._simulated import WORKERS, conversations, rounded
from kvfleet.placement.policies import DEFAULT_POLICY
from kvfleet.placement.simulate.fleet_shape import FleetShape, Speed
from kvfleet.placement.simulate.study import make_study

NAME, UNIT = "churn", "sessions moved by a change, over 1/N"
FLOOR = 1.5
CHURN_S, DRAIN_S = 10.0, 60.0
FAST = Speed(prefill_tokens_per_s=40_000.0)
OTHERS = ("ring", "bounded_ring", "kv_load")


def main() -> None:
    asked = parser(__doc__).parse_args()
    trace = conversations(NAME, UNIT, FLOOR)
    others = () if asked.quick else OTHERS
    cases = {
        "drained": (Speed(), DRAIN_S, (DEFAULT_POLICY, *others)),
        "killed": (FAST, 0.0, (DEFAULT_POLICY, *others)),
    }
    if not asked.quick:
        cases["killed, of 8,000 tokens/s"] = Speed(), 0.0, (DEFAULT_POLICY,)
    runs: dict[str, dict[str, float | int | None]] = {}
    for case, (speed, drain_s, policies) in cases.items():
        shape = FleetShape(
            workers=WORKERS,
            cache_blocks=trace.distinct_blocks // 10,
            churn_s=CHURN_S,
            drain_s=drain_s,
            speed=speed,
        )
        study = make_study(trace, shape)
        for result in study.run(policies):
            what = f"{case}, {result.figures.policy}"
            runs[what] = {
                "moved_over_1_n": round((result.figures.moved_per_change or 0.0) * WORKERS, 3),
                "changes": len(result.run.changes),
                "placed_again": sum(outcome.attempts > 1 for outcome in result.run.outcomes),
                "load": round(study.load or 0.0, 3),
                **rounded(result.figures),
            }
            progress(f"{what}: {runs[what]}")
    judged = [runs[f"{case}, {DEFAULT_POLICY}"] for case in ("drained", "killed")]
    value = max(run["moved_over_1_n"] or 0.0 for run in judged)
    failed = sum(run["failed"] or 0 for run in judged)
    finish(NAME, value, UNIT, floor=FLOOR, ok=value <= FLOOR and not failed, failed=failed, runs=runs)


if __name__ == "__main__":
    main()
