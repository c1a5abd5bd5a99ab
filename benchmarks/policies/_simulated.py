"""What the benchmarks of placement share: the trace of real conversations, made-up ones, and runs of policies.

Everything is simulated, so figures do not depend on the machine; `kvfleet simulate` shows the same for other traces.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.harness.report import progress, skip
from kvfleet.placement.simulate.figures import Figures
from kvfleet.placement.simulate.report import seconds
from kvfleet.placement.simulate.study import Study
from kvfleet.placement.simulate.trace import Trace, make_trace, read_trace
from kvfleet.placement.workers.warm_up import warm_up
from kvservice.trace_rows import Row

ROOT = Path(__file__).parents[2]
CONVERSATIONS = "shared/data/mooncake_conversation_trace.jsonl.gz"
BLOCK_TOKENS = 16
WORKERS = 8


def conversations(name: str, unit: str, floor: float) -> Trace:
    """An hour of 12,031 real requests (Mooncake, FAST'25); without the file the benchmark ends here, skipped."""
    places = [place / CONVERSATIONS for place in (ROOT, *list(ROOT.parents)[:2])]
    path = next((place for place in places if place.exists()), None)
    if path is None:
        skip(name, unit, floor=floor, peer=CONVERSATIONS, why=f"no {CONVERSATIONS} here or above")
    warm_up()
    return read_trace(path)


def rounded(figures: Figures) -> dict[str, float | int | None]:
    """What a benchmark's line says of one run."""
    return {
        "hit_of_attainable": round(figures.hit_of_attainable, 4),
        "ttft_p50_s": round(figures.ttft_p50_s, 3),
        "ttft_p99_s": round(figures.ttft_p99_s, 3),
        "load_cov": round(figures.load_cov, 4),
        "goodput_per_s": round(figures.goodput_per_s, 3),
        "moved": round(figures.moved, 4),
        "failed": figures.failed,
    }


def run_all(study: Study, policies: Sequence[str], what: str) -> dict[str, Figures]:
    found = {}
    for result in study.run(policies):
        one = result.figures
        found[one.policy] = one
        progress(
            f"{what}, {one.policy}: {one.hit_of_attainable:.1%} of attainable, TTFT p50 {seconds(one.ttft_p50_s)} "
            f"p99 {seconds(one.ttft_p99_s)}, load CoV {one.load_cov:.3f}, goodput {one.goodput_per_s:.2f}/s"
        )
    return found


def prompts(
    at_s: Iterable[float], shared_tokens: Sequence[int], tails: tuple[int, int], output_tokens: int, seed: int = 0
) -> Trace:
    """Requests of sessions of their own. Each begins with as many tokens that all have in common as its turn of
    `shared_tokens` says, and goes on with a number between those of `tails` that nobody else has."""
    warm_up()
    chance = random.Random(seed)
    rows = []
    for number, at in enumerate(at_s):
        shared = shared_tokens[number % len(shared_tokens)]
        tokens = shared + chance.randint(*tails)
        blocks = [
            f"s{block}" if (block + 1) * BLOCK_TOKENS <= shared else f"{number}.{block}"
            for block in range(tokens // BLOCK_TOKENS)
        ]
        rows.append(Row(at, tokens, output_tokens, blocks))
    trace = make_trace(rows, BLOCK_TOKENS)
    alone = tuple(replace(arrival, session=f"s{arrival.number}") for arrival in trace.arrivals)
    return replace(trace, arrivals=alone)
