"""OOM containment: what does not fit into a worker's memory fails alone, and everything beside it is answered right."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from random import Random

from kvfleet.cli.bench.shapes import text_of
from kvfleet.cli.paper.paper_fleet import PaperAnswer
from kvfleet.cli.paper.paper_run import PaperBench
from kvfleet.cli.paper.paper_table import Criterion, FleetSpec, PaperTable, all_of
from kvproto.errors import OutOfMemory

BLOCKS, BLOCK = 40, 16  # 640 tokens in each worker
FITTING, LARGE, GROWING = 8, 3, 1  # requests of each kind


@dataclass(frozen=True, slots=True)
class ContainmentRow:
    what: str
    fits: bool
    requests: int
    answered: int
    failed_as_stated: int  # out_of_memory
    same_as_alone: int
    paper: str


def measure(bench: PaperBench) -> list[ContainmentRow]:
    fleet, random = bench.fleet, Random(1)

    def prompts(count: int, words: int) -> list[str]:
        return [text_of(random, words, 1.0) for _ in range(count)]

    small, large, growing = prompts(FITTING, 60), prompts(LARGE, 500), prompts(GROWING, 400)
    alone = [fleet.attempt(prompt, 24) for prompt in small]
    with ThreadPoolExecutor(FITTING + LARGE + GROWING) as askers:
        asked = [
            [askers.submit(fleet.attempt, prompt, tokens) for prompt in kind]
            for kind, tokens in ((large, 24), (growing, BLOCKS * BLOCK), (small, 24))
        ]
        refused, grown, together = ([one.result() for one in kind] for kind in asked)
    after = [fleet.attempt(prompt, 24) for prompt in small]
    printed = "fails what caused it and nothing else"
    return [
        _row("cannot fit", False, refused, (), printed),
        _row("grows until it does not fit", False, grown, (), printed),
        _row("fits, beside them", True, together, alone, printed),
        _row("fits, after them", True, after, alone, ""),
    ]


def _row(
    what: str, fits: bool, answers: Sequence[PaperAnswer], alone: Sequence[PaperAnswer], paper: str
) -> ContainmentRow:
    same = sum(one.token_ids == other.token_ids for one, other in zip(answers, alone, strict=False))
    failed = sum(one.error == OutOfMemory.code for one in answers)
    return ContainmentRow(what, fits, len(answers), sum(not one.error for one in answers), failed, same, paper)


def judge(rows: Sequence[ContainmentRow]) -> list[Criterion]:
    large, fitting = ([row for row in rows if row.fits is fits] for fits in (False, True))
    of_fitting = sum(row.requests for row in fitting)
    return [
        all_of(f"requests that do not fit end as {OutOfMemory.code}", sum(row.failed_as_stated for row in large),
               sum(row.requests for row in large)),
        all_of("requests that fit are answered", sum(row.answered for row in fitting), of_fitting),
        all_of("with the same tokens as alone", sum(row.same_as_alone for row in fitting), of_fitting),
    ]  # fmt: skip


TABLE = PaperTable(
    "oom", f"what does not fit into {BLOCKS * BLOCK} tokens of memory fails alone", "the article on stateful inference",
    measure, judge, FleetSpec(("--workers=2", f"--blocks={BLOCKS}", "--vaults=0")),
)  # fmt: skip
