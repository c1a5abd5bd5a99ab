"""Workers come and go all the time: who stays keeps its conversations, and no request fails.

An hour of real conversations, as fast as they were, on 8 workers of 40,000 prefill tokens/s, 2 placements. Every 10 s
one leaves without a word and another one joins, so that a worker lives for 80 s. One that leaves has to give up its 1/8
of the sessions: `value` is the share of sessions that a change moved, over 1/8.
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
SPEED = Speed(prefill_tokens_per_s=40_000.0)  # with slower ones most requests would outlive several workers
OTHERS = ("ring", "bounded_ring", "kv_load")


def main() -> None:
    asked = parser(__doc__).parse_args()
    trace = conversations(NAME, UNIT, FLOOR)
    shape = FleetShape(workers=WORKERS, cache_blocks=trace.distinct_blocks // 10, churn_s=CHURN_S, speed=SPEED)
    study = make_study(trace, shape)
    details, over = {}, {}
    for result in study.run([DEFAULT_POLICY, *(() if asked.quick else OTHERS)]):
        one = result.figures
        over[one.policy] = round((one.moved_per_change or 0.0) * WORKERS, 3)
        placed_again = sum(outcome.attempts > 1 for outcome in result.run.outcomes)
        details[one.policy] = {
            "moved_over_1_n": over[one.policy],
            "changes": len(result.run.changes),
            "placed_again": placed_again,
            **rounded(one),
        }
        progress(f"{one.policy}: {details[one.policy]}")
        if one.policy == DEFAULT_POLICY:
            failed = one.failed
    value = over[DEFAULT_POLICY]
    finish(NAME, value, UNIT, floor=FLOOR, ok=value <= FLOOR and not failed, failed=failed, runs=details)


if __name__ == "__main__":
    main()
