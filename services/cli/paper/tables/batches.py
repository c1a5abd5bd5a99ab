"""Batch sizes against throughput: how many tokens/s one worker makes of so many requests at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median

from kvfleet.cli.clients.answers import AnswerFailed
from kvfleet.cli.paper.paper_load import DEMO_FLEET, PaperLoad, load
from kvfleet.cli.paper.paper_run import PaperBench
from kvfleet.cli.paper.paper_table import Criterion, PaperTable, all_of, at_least, ratio

SIZES, TOKENS = (1, 2, 4, 8, 16, 32), 48
WORKER = "w0"
LEAST_GAIN, LEAST_KEPT = 1.5, 0.5


@dataclass(frozen=True, slots=True)
class BatchRow:
    """Of the best round: what else a machine does makes the others slower."""

    at_once: int
    requests: int  # of all rounds
    whole: int  # of them, with all of their tokens
    tokens_per_s: float
    per_token_s: float  # of a stream, its first included; the median
    ttft_s: float  # the median
    paper: str = ""


def measure(bench: PaperBench) -> list[BatchRow]:
    load(bench.fleet, 2, 1, TOKENS, seed=1, worker=WORKER)  # the first ones warm up
    rounds = [  # in turn, so that what disturbs for a while spoils no size altogether
        [load(bench.fleet, size, size, TOKENS, seed=2 + 100 * number + size, worker=WORKER) for size in SIZES]
        for number in range(5 if bench.quick else 7)
    ]
    return [_row(size, loads) for size, loads in zip(SIZES, zip(*rounds, strict=True), strict=True)]


def _row(size: int, rounds: Sequence[PaperLoad]) -> BatchRow:
    best = max(rounds, key=lambda one: one.tokens_per_s)
    if not best.whole:
        raise AnswerFailed(f"{size} at once: {best.failed[0].told}")
    whole = sum(record.output_tokens == TOKENS for one in rounds for record in one.whole)
    each = median(record.e2e_s / TOKENS for record in best.whole), median(record.ttft_s for record in best.whole)
    return BatchRow(size, size * len(rounds), whole, best.tokens_per_s, *each)


def judge(rows: Sequence[BatchRow]) -> list[Criterion]:
    rates = [row.tokens_per_s for row in rows]
    kept = min(ratio(rate, best) for rate, best in zip(rates, accumulate(rates, max), strict=True))
    return [
        all_of("requests that had all of their tokens", sum(row.whole for row in rows),
               sum(row.requests for row in rows)),
        at_least("tokens/s of the best batch, of one alone", ratio(max(rates), rates[0]), LEAST_GAIN),
        at_least("tokens/s of a larger batch, of the best before it", kept, LEAST_KEPT),
    ]  # fmt: skip


TABLE = PaperTable(
    "batches", "batch sizes against throughput", "the paper, chapter 5; the article on stateful inference", measure,
    judge, DEMO_FLEET,
)  # fmt: skip
