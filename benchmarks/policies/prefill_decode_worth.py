"""When are workers for prompts worth it? The same 8 simulated workers, whole or apart, on one trace after the other.

    python -m benchmarks.prefill_decode_worth [--quick]

The trace of real conversations, the four shapes of `_shapes`, and short prompts with long answers, at two loads. Each
is simulated with all workers for both, and with 2, 4 and 6 of the 8 for prompts alone: that costs the same. All have
the same links, and steps as long as a worker's ITL target makes them beside running streams (2.5 decode steps). The
value is the median over all traces and loads of the time between two tokens (p99) of the best split over that of the
whole fleet; a split counts only where its p99 of TTFT is no more than 1.2 times the whole fleet's, and else the whole
fleet is the best. `worth` says for each trace and load which split is best. `kvfleet simulate --prefill-workers` shows
the same for other traces.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random
from statistics import median

from benchmarks.harness.report import finish, parse_quick, progress
from benchmarks.policies._shapes import BLOCK_TOKENS, RATE, SHAPES, SPREAD, make_shape
from benchmarks.policies._simulated import WORKERS, conversations
from kvfleet.placement.policies import DEFAULT_POLICY
from kvfleet.placement.simulate.figures import Figures
from kvfleet.placement.simulate.fleet_shape import FleetShape, Speed
from kvfleet.placement.simulate.report import seconds
from kvfleet.placement.simulate.study import make_study
from kvfleet.placement.simulate.trace import Trace, make_trace
from kvservice.trace_rows import Row

NAME, UNIT, FLOOR = "prefill_decode_worth", "times the whole fleet's ITL p99, at most", 1.0
SPLITS, QUICK_SPLITS = (0, 2, 4, 6), (0, 4)
LOADS, QUICK_LOADS = (0.3, 0.6), (0.6,)
REQUESTS, QUICK_REQUESTS = 1500, 500
LATER = 1.2  # times the TTFT p99 of the whole fleet, that a split may have
LINK = 10e9  # bytes/s
SPEED = Speed(chunk_tokens=256)  # beside 20 sequences a step of 21 ms takes 53 ms


def traces(requests: int) -> Iterator[tuple[str, Trace]]:
    real = conversations(NAME, UNIT, FLOOR)
    yield "conversations", replace(real, arrivals=real.arrivals[:requests])
    for shape in SHAPES:
        yield shape, make_shape(shape, requests, seed=1)
    yield "answers", answers(requests)


def answers(requests: int) -> Trace:
    """Short prompts that share nothing, and answers that are longer than they are."""
    chance, rows, at_s = Random(1), [], 0.0
    for number in range(requests):
        at_s += chance.expovariate(RATE)
        tokens = int(chance.lognormvariate(5.5, SPREAD))
        blocks = [f"{number}.{block}" for block in range(-(-tokens // BLOCK_TOKENS))]
        rows.append(Row(at_s, tokens, int(chance.lognormvariate(6.0, SPREAD)) + 2, blocks))
    return make_trace(rows, BLOCK_TOKENS)


def run(name: str, trace: Trace, load: float, split: int) -> Figures:
    blocks = max(trace.distinct_blocks // 10, 1)
    shape = FleetShape(WORKERS, blocks, speed=SPEED, prefill_workers=split, link_bytes_per_s=LINK)
    found = next(make_study(trace, shape, load=load).run((DEFAULT_POLICY,))).figures
    progress(
        f"{name} at {load:g}, {split} for prompts: "
        f"TTFT p50 {seconds(found.ttft_p50_s)} p99 {seconds(found.ttft_p99_s)}, "
        f"ITL p50 {seconds(found.itl_p50_s)} p99 {seconds(found.itl_p99_s)}, hits {found.hit_rate:.1%}"
    )
    return found


def best_of(found: dict[int, Figures]) -> int:
    """The split with the least ITL p99 among those that do not make first tokens wait."""
    limit_s = LATER * found[0].ttft_p99_s
    return min(
        (split for split, one in found.items() if one.ttft_p99_s <= limit_s), key=lambda one: found[one].itl_p99_s
    )


def main() -> None:
    quick = parse_quick(__doc__)
    ratios, worth = [], {}
    for name, trace in traces(QUICK_REQUESTS if quick else REQUESTS):
        for load in QUICK_LOADS if quick else LOADS:
            found = {split: run(name, trace, load, split) for split in (QUICK_SPLITS if quick else SPLITS)}
            best, whole = best_of(found), found[0]
            ratios.append(found[best].itl_p99_s / whole.itl_p99_s)
            worth[f"{name} at {load:g}"] = {
                "prefill_workers": best,
                **{
                    f"{what}_{side}": round(getattr(one, what), 3)
                    for what in ("itl_p99_s", "ttft_p50_s", "ttft_p99_s")
                    for side, one in (("whole", whole), ("best", found[best]))
                },
            }
    value = median(ratios)
    finish(NAME, round(value, 3), UNIT, floor=FLOOR, ok=value <= FLOOR, peer="all workers for both", worth=worth)


if __name__ == "__main__":
    main()
