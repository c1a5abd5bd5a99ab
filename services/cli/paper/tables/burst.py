"""Table 5.6: twenty requests at once, ten tokens each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvfleet.cli.paper.paper_load import DEMO_FLEET, load
from kvfleet.cli.paper.paper_run import PaperBench
from kvfleet.cli.paper.paper_table import Criterion, PaperTable, all_of, at_least, ratio

REQUESTS, TOKENS = 20, 10
LEAST_GAIN = 1.25


@dataclass(frozen=True, slots=True)
class BurstRow:
    at_once: int
    requests: int
    whole: int  # with all of their tokens
    mean_latency_s: float
    requests_per_s: float
    tokens_per_s: float
    paper: str


def measure(bench: PaperBench) -> list[BurstRow]:
    load(bench.fleet, 4, 2, TOKENS, seed=1)  # the first ones warm up
    rows = []
    for number in range(2 if bench.quick else 5):
        for at_once, paper in ((1, ""), (REQUESTS, "20 of 20, 8.283 s, 1.42 requests/s")):
            done = load(bench.fleet, REQUESTS, at_once, TOKENS, seed=2 + 2 * number + (at_once > 1))
            whole = sum(record.output_tokens == TOKENS for record in done.whole)
            rates = done.requests_per_s, done.tokens_per_s
            rows.append(BurstRow(at_once, REQUESTS, whole, done.mean_e2e_s, *rates, paper=paper))
    return rows


def judge(rows: Sequence[BurstRow]) -> list[Criterion]:
    alone, together = ([row for row in rows if (row.at_once > 1) is many] for many in (False, True))
    best = [max(row.tokens_per_s for row in rows) for rows in (together, alone)]
    return [
        all_of("requests at once that had all of their tokens", sum(row.whole for row in together),
               sum(row.requests for row in together)),
        at_least("tokens/s at once, of one at a time, in the best rounds", ratio(*best), LEAST_GAIN),
    ]  # fmt: skip


TABLE = PaperTable(
    "burst", f"{REQUESTS} requests at once, {TOKENS} tokens each", "the paper, table 5.6", measure, judge,
    DEMO_FLEET,
)  # fmt: skip
