"""One request at a time: an idle fleet is used evenly, so that caches fill everywhere and none is worn alone.

8 workers; prompts of 100 to 700 tokens that have nothing in common, and such that begin with a chat template of 16 to
48 tokens, as real ones do; the next request comes seconds, and minutes, after the last one. `value` is the largest
share of requests that one worker had, over the mean.
"""

from __future__ import annotations

from benchmarks.harness.report import finish, parse_quick, progress
from benchmarks.policies._simulated import WORKERS, prompts
from kvfleet.placement.policies import DEFAULT_POLICY
from kvfleet.placement.simulate.fleet_shape import FleetShape
from kvfleet.placement.simulate.study import make_study

TAILS, OUTPUT = (100, 700), 32
TEMPLATES: dict[str, tuple[int, ...]] = {
    "distinct": (0,),
    "template of 16": (16,),
    "template of 48": (48,),
    "templates of 16 to 48": (16, 32, 48),
}
GAPS_S = (2.0, 20.0, 120.0)
FLOOR = 1.5
CACHE_BLOCKS = 16_384


def main() -> None:
    count = 400 if parse_quick(__doc__) else 1200
    details = {}
    for template, shared in TEMPLATES.items():
        for gap in GAPS_S:
            trace = prompts([gap * number for number in range(count)], shared, TAILS, OUTPUT)
            study = make_study(trace, FleetShape(workers=WORKERS, cache_blocks=CACHE_BLOCKS))
            (result,) = study.run([DEFAULT_POLICY])
            what = f"{template}, every {gap:g} s"
            details[what] = round(result.figures.requests_max_over_mean, 3)
            progress(f"{what}: {details[what]}")
    worst = max(details.values())
    finish("low_load", worst, "largest share of a worker over mean", floor=FLOOR, ok=worst <= FLOOR, runs=details)


if __name__ == "__main__":
    main()
