"""Sliding windows: a model of windows holds no more blocks than its window touches, and says what transformers says."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random
from time import sleep

from kvfleet.cli.paper.paper_fleet import RunningFleet, worker_report
from kvfleet.cli.paper.paper_models import small_mistral, words_of
from kvfleet.cli.paper.paper_run import PaperBench
from kvfleet.cli.paper.paper_table import Criterion, FleetSpec, PaperModel, PaperTable, all_of, at_most, ratio

REPORT = "kvfleet.worker.model.reports.reference_tokens"
WINDOW, CONTEXT, BLOCK = 256, 8192, 16
PROMPTS = (100, 300, 1000)  # below the window, and past it
COMPARED = 64  # tokens of each answer
WINDOWED = small_mistral("windowed", sliding_window=WINDOW, max_position_embeddings=CONTEXT)
WHOLE = small_mistral("whole", sliding_window=None, max_position_embeddings=CONTEXT)
LOOK_S, TRIES = 0.1, 5


@dataclass(frozen=True, slots=True)
class WindowRow:
    model: str
    window: int | None
    prompt_tokens: int
    generated: int
    most_blocks: int | None  # held while it decoded, as heartbeats say; None: it was not looked at
    bound: int  # the blocks that its window touches, or all
    same_tokens: int | None  # as transformers' generate(); None: not compared
    compared: int
    paper: str = ""


def measure(bench: PaperBench) -> list[WindowRow]:
    fleet, random = bench.fleet, Random(1)
    fleet.generate(words_of([1, 2, 3]), 1, model_name=WINDOWED.name)
    prompts = [[random.randrange(WINDOWED.vocab_size) for _ in range(length)] for length in PROMPTS]
    return [*_compared(fleet, prompts, bench.folder), *(
        _held(fleet, model, prompts[-1], 1_500 if bench.quick else 4_000) for model in (WINDOWED, WHOLE)
    )]  # fmt: skip


def _compared(fleet: RunningFleet, prompts: Sequence[Sequence[int]], folder: Path) -> list[WindowRow]:
    asked = {"model": str(folder / WINDOWED.name), "prompts": prompts, "tokens": COMPARED}
    reference = worker_report(REPORT, stdin=json.dumps(asked))
    rows = []
    for prompt, expected in zip(prompts, reference, strict=True):
        said = fleet.generate(words_of(prompt), COMPARED, model_name=WINDOWED.name)
        same = sum(one == other for one, other in zip(said.token_ids, expected, strict=False))
        bound = _bound(len(prompt) + COMPARED, WINDOW)
        rows.append(WindowRow(WINDOWED.name, WINDOW, len(prompt), len(said.token_ids), None, bound, same, COMPARED))
    return rows


def _held(fleet: RunningFleet, model: PaperModel, prompt: Sequence[int], tokens: int) -> WindowRow:
    """The most blocks that heartbeats show while it decodes."""
    window, most, generated = model.config["sliding_window"], 0, 0
    for _ in range(TRIES):  # a quick machine may be done between two heartbeats
        with ThreadPoolExecutor(1) as asker:
            asked = asker.submit(fleet.generate, words_of(prompt), tokens, model_name=model.name)
            while not asked.done():
                loads = [one["load"] for one in fleet.get("/workers").values() if one["model"] == model.name]
                most = max([most, *(load["blocks_used"] for load in loads if load["running"])])
                sleep(LOOK_S)
        generated = len(asked.result().token_ids)
        if most:
            break
    bound = _bound(len(prompt) + tokens, window)
    printed = "Mistral 7B: 4,096" if window else ""
    return WindowRow(model.name, window, len(prompt), generated, most, bound, None, 0, printed)


def _bound(tokens: int, window: int | None) -> int:
    """The blocks of a sequence; its window touches one more than it fills, as it may begin at the end of a block."""
    blocks = -(-tokens // BLOCK)
    return blocks if window is None else min(blocks, -(-(window - 1) // BLOCK) + 1)


def judge(rows: Sequence[WindowRow]) -> list[Criterion]:
    compared = [row for row in rows if row.same_tokens is not None]
    (windowed,) = (row for row in rows if row.most_blocks is not None and row.window is not None)
    (whole,) = (row for row in rows if row.window is None)
    most, without = windowed.most_blocks or 0, whole.most_blocks or 0
    return [
        all_of("tokens equal to those of transformers' generate()", sum(row.same_tokens or 0 for row in compared),
               sum(row.compared for row in compared)),
        Criterion(f"blocks held: some, and at most {windowed.bound}", f"{most}", 0 < most <= windowed.bound),
        at_most("blocks held, of those without a window", ratio(most, without), 0.5),
    ]  # fmt: skip


TABLE = PaperTable(
    "windows", f"a sliding window of {WINDOW} tokens", "the article on stateful inference", measure, judge,
    FleetSpec(("--workers=1", "--vaults=0", "--dtype=float32", "--device=cpu"), (WINDOWED, WHOLE)),
)  # fmt: skip
