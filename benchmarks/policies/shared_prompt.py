"""One system prompt of 2,000 tokens under all requests: it is computed once per worker, and no worker is buried.

8 workers, blocks of 16 tokens, 100 to 700 tokens of its own in each request, 2 placements; requests come at several
rates, and all at once. `value` is the largest share of requests, or of prefilled tokens, that one worker had, over the
mean. Of the shared tokens all but the first request's could be had.
"""

from __future__ import annotations

import random

from benchmarks.harness.report import finish, parse_quick, progress
from benchmarks.policies._simulated import WORKERS, prompts
from kvfleet.placement.policies import DEFAULT_POLICY
from kvfleet.placement.simulate.figures import Figures
from kvfleet.placement.simulate.fleet_shape import FleetShape
from kvfleet.placement.simulate.study import make_study
from kvfleet.placement.simulate.trace import Trace

SHARED, TAILS, OUTPUT = 2000, (100, 700), 100
LOADS = (0.02, 0.1, 0.3, 0.6, 0.9)
FLOOR_SHARE, FLOOR_HITS = 1.25, 0.95
CACHE_BLOCKS = 16_384


def arrivals(count: int) -> list[float]:
    """By chance, one a second."""
    chance = random.Random(1)
    at, now = [], 0.0
    for _ in range(count):
        at.append(now)
        now += chance.expovariate(1.0)
    return at


def measure(trace: Trace, load: float | None) -> tuple[Figures, float]:
    """Its figures, and the share of the shared tokens that was found, of those that could be."""
    study = make_study(trace, FleetShape(workers=WORKERS, cache_blocks=CACHE_BLOCKS), load=load)
    (result,) = study.run([DEFAULT_POLICY])
    found = sum(min(outcome.cached_tokens, SHARED) for outcome in result.run.outcomes)
    return result.figures, found / (SHARED * (len(trace.arrivals) - 1))


def main() -> None:
    count = 800 if parse_quick(__doc__) else 2400
    steady = prompts(arrivals(count), [SHARED], TAILS, OUTPUT)
    burst = prompts([0.0] * count, [SHARED], TAILS, OUTPUT)
    cases: dict[str, tuple[Trace, float | None]] = {f"load {load:g}": (steady, load) for load in LOADS}
    cases["all at once"] = burst, None
    details, shares, hits, failed = {}, [], [], 0
    for what, (trace, load) in cases.items():
        one, hit = measure(trace, load)
        shares += [one.requests_max_over_mean, one.load_max_over_mean]
        hits.append(hit)
        failed += one.failed
        details[what] = {
            "requests_max_over_mean": round(one.requests_max_over_mean, 3),
            "tokens_max_over_mean": round(one.load_max_over_mean, 3),
            "shared_hits": round(hit, 4),
            "ttft_p99_s": round(one.ttft_p99_s, 3),
        }
        progress(f"{what}: {details[what]}")
    finish(
        "shared_prompt",
        round(max(shares), 3),
        "largest share of a worker over mean",
        floor=FLOOR_SHARE,
        ok=max(shares) <= FLOOR_SHARE and min(hits) >= FLOOR_HITS and not failed,
        shared_hits=round(min(hits), 4),
        shared_hits_floor=FLOOR_HITS,
        runs=details,
    )


if __name__ == "__main__":
    main()
