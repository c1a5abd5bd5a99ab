"""An hour of real conversations on 8 workers: is what could be hit hit, while all work alike and nobody waits longer?

Each worker's cache holds a tenth, and a hundredth, of the trace's blocks; requests come at half and at nine tenths of
what the fleet can do; block events are 50 ms late; 2 placements decide. Attainable is what one cache as large as all of
them would have hit. `value` is the least share of it that the default policy attained in the four.
"""

from __future__ import annotations

from benchmarks.harness.report import finish, parser
from benchmarks.policies._simulated import WORKERS, conversations, rounded, run_all
from kvfleet.placement.policies import DEFAULT_POLICY
from kvfleet.placement.simulate.fleet_shape import FleetShape
from kvfleet.placement.simulate.study import POLICIES, make_study

NAME, UNIT = "trace_hits", "hits attained of attainable"
CACHES, LOADS = (10, 100), (0.5, 0.9)
FLOOR_HITS, FLOOR_COV = 0.98, 0.1


def main() -> None:
    asked = parser(__doc__).parse_args()
    trace = conversations(NAME, UNIT, FLOOR_HITS)
    caches = CACHES[:1] if asked.quick else CACHES
    details, missed, least, most_cov = {}, [], 1e9, 0.0
    for share in caches:
        shape = FleetShape(workers=WORKERS, cache_blocks=trace.distinct_blocks // share)
        for load in LOADS:
            what = f"cache 1/{share}, load {load:g}"
            found = run_all(make_study(trace, shape, load=load), POLICIES, what)
            details[what] = {policy: rounded(one) for policy, one in found.items()}
            ours = found.pop(DEFAULT_POLICY)
            least, most_cov = min(least, ours.hit_of_attainable), max(most_cov, ours.load_cov)
            missed += [f"{what}: {one}" for one in [
                *(["hits"] if ours.hit_of_attainable < FLOOR_HITS else []),
                *(["load CoV"] if ours.load_cov >= FLOOR_COV else []),
                *(f"TTFT p99 of {name}" for name, one in found.items() if one.ttft_p99_s <= ours.ttft_p99_s),
                *(f"goodput of {name}" for name, one in found.items() if one.goodput_per_s >= ours.goodput_per_s),
            ]]  # fmt: skip
    finish(
        NAME,
        round(least, 4),
        UNIT,
        floor=FLOOR_HITS,
        ok=not missed,
        load_cov=round(most_cov, 4),
        load_cov_floor=FLOOR_COV,
        missed=missed,
        default=DEFAULT_POLICY,
        runs=details,
    )


if __name__ == "__main__":
    main()
