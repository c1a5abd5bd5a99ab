"""Batch sizes against throughput: how many tokens/s one worker makes of so many requests at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median

from kvfleet.cli.clients.answers import AnswerFailed
from kvfleet.cli.paper.paper_load import load
from kvfleet.cli.paper.paper_run import PaperBench
from kvfleet.cli.paper.paper_table import Criterion, FleetSpec, PaperTable, all_of, at_least, ratio

SIZES, TOKENS = (1, 2, 4, 8, 16, 32), 64
LEAST_GAIN, LEAST_KEPT = 2.0, 0.7


@dataclass(frozen=True, slots=True)
class BatchRow:
    at_once: int
    requests: int
    whole: int  # with all of their tokens
    tokens_per_s: float
    per_token_s: float  # of a stream, the median
    ttft_s: float  # the median
    paper: str = ""


def measure(bench: PaperBench) -> list[BatchRow]:
    load(bench.fleet, 2, 1, TOKENS, seed=1)  # the first ones warm up
    rounds = 2 if bench.quick else 6
    rows = []
    for size in SIZES:
        done = load(bench.fleet, rounds * size, size, TOKENS, seed=1 + size)
        whole = [record for record in done.whole if record.output_tokens == TOKENS]
        if not whole:
            raise AnswerFailed(f"{size} at once: {done.failed[0].told if done.failed else 'short answers'}")
        each = median(record.itl_s or 0.0 for record in whole), median(record.ttft_s for record in whole)
        rows.append(BatchRow(size, rounds * size, len(whole), done.tokens_per_s, *each))
    return rows


def judge(rows: Sequence[BatchRow]) -> list[Criterion]:
    rates = [row.tokens_per_s for row in rows]
    kept = min(ratio(rate, best) for rate, best in zip(rates, accumulate(rates, max), strict=True))
    return [
        all_of("requests that had all of their tokens", sum(row.whole for row in rows),
               sum(row.requests for row in rows)),
        at_least(f"tokens/s of {rows[-1].at_once} at once, of one alone", ratio(rates[-1], rates[0]), LEAST_GAIN),
        at_least("tokens/s of a larger batch, of the best before it", kept, LEAST_KEPT),
    ]  # fmt: skip


TABLE = PaperTable(
    "batches", "batch sizes against throughput", "the paper, chapter 5; the article on stateful inference", measure,
    judge, FleetSpec(("--workers=1",)),
)  # fmt: skip
