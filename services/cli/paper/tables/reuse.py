"""Table 5.1: a session goes on, and computes what is new of it alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from statistics import median

from kvfleet.cli.paper.paper_models import GPT2, GPT2_FLEET, words_of
from kvfleet.cli.paper.paper_run import PaperBench
from kvfleet.cli.paper.paper_table import Criterion, PaperTable, all_of, at_most, ratio

SHORT, LONG = 6, 900  # tokens of a session's first prompt: the paper's, and one that takes longer than a decode step
ADDED, ANSWER = 5, 15  # tokens of a further prompt, and of every answer
BLOCK = 16
PRINTED = {(SHORT, 1): "1.263 s", (SHORT, 2): "0.795 s"}


@dataclass(frozen=True, slots=True)
class ReuseTurn:
    first_prompt: int
    turn: int
    prompt_tokens: int
    cached_tokens: int
    ttft_s: float
    anew_ttft_s: float  # as many tokens, of which nothing is cached
    paper: str


def measure(bench: PaperBench) -> list[ReuseTurn]:
    fleet, random = bench.fleet, Random(1)

    def words(count: int) -> str:
        return words_of([random.randrange(GPT2.vocab_size) for _ in range(count)])

    fleet.generate(words(SHORT), 1)  # the first one warms up
    rows = []
    for first in (SHORT, LONG):
        for turn in range(1, 4 if bench.quick else 6):
            said = fleet.generate(words(first if turn == 1 else ADDED), ANSWER, seq_id=f"reuse {first}")
            anew = fleet.generate(words(said.prompt_tokens), 1)
            times = said.ttft_s, anew.ttft_s
            rows.append(
                ReuseTurn(
                    first, turn, said.prompt_tokens, said.cached_tokens, *times, paper=PRINTED.get((first, turn), "")
                )
            )
    return rows


def judge(rows: Sequence[ReuseTurn]) -> list[Criterion]:
    later = [row for row in rows if row.turn > 1]
    short, long = ([row for row in later if row.first_prompt == first] for first in (SHORT, LONG))
    cold = next(row.ttft_s for row in rows if row.first_prompt == LONG and row.turn == 1)
    found = [row for row in later if row.prompt_tokens - row.cached_tokens <= ADDED + BLOCK]
    return [
        at_most(f"first token of later turns after {LONG} tokens, of the first turn's", ratio(_ttft(long), cold), 0.5),
        at_most(
            f"first token of later turns after {SHORT} tokens, of as many computed anew",
            ratio(_ttft(short), median(row.anew_ttft_s for row in short)),
            1.5,
        ),
        all_of("later turns that found all of their history but a block", len(found), len(later)),
    ]


def _ttft(rows: Sequence[ReuseTurn]) -> float:
    return median(row.ttft_s for row in rows)


TABLE = PaperTable(
    "reuse", "a session goes on from its cache: first token of turn 1 to n", "the paper, table 5.1", measure, judge,
    GPT2_FLEET,
)  # fmt: skip
