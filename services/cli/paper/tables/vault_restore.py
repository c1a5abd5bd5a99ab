"""tierKV's table: a long prompt's first token cold, from the device, and from a vault when its worker was killed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from statistics import median
from typing import Any

from kvfleet.cli.paper.paper_fleet import LOOK_S, PaperAnswer, RunningFleet
from kvfleet.cli.paper.paper_models import small_qwen2, words_of
from kvfleet.cli.paper.paper_run import PaperBench
from kvfleet.cli.paper.paper_table import Criterion, FleetSpec, PaperTable, all_of, at_least

LENGTHS = (1_000, 2_000, 4_000, 8_000, 16_000, 30_561)
PRINTED = {8_000: "30.83 s, -, 4.11 s: 7.3 times", 30_561: "10.75 s, 1.19 s, 0.52 s: 20.7 times"}
SOONER_FROM, LONGEST_SOONER = 4_000, 4.0  # tokens from which on a restore is sooner; times, at the longest
ANSWER, BLOCK, WORKER = 8, 16, "w0"
SHORT, SEVERAL = 4_000, 3  # tokens up to which several prompts are asked, as their times are short
TRIES, SETTLES_S = 3, 5.0
WARM = 1_008  # tokens of a prompt that warms up, and is in no row
MOSTLY = 0.95  # of a prompt's tokens
MODEL = small_qwen2("restored", max_position_embeddings=32_768)


@dataclass(frozen=True, slots=True)
class RestoreRow:
    tokens: int
    prompts: int
    cold_s: float
    device_s: float
    vault_s: float
    times_sooner: float  # than cold
    from_vault: int  # tokens, the least of its prompts
    same_tokens: bool  # all three answers
    paper: str


def measure(bench: PaperBench) -> list[RestoreRow]:
    fleet, random = bench.fleet, Random(1)
    several = SEVERAL if bench.quick else 2 * SEVERAL - 1
    lengths = [WARM, *(length for length in LENGTHS for _ in range(several if length <= SHORT else 1))]
    prompts = [words_of(random.randrange(MODEL.vocab_size) for _ in range(length)) for length in lengths]
    # What came once does not go down: it is worth nothing until it is asked for again.
    cold, device = zip(*([fleet.generate(prompt, ANSWER) for _ in range(2)] for prompt in prompts), strict=True)
    for _ in range(TRIES):  # a block that did not get through is given again when its prompt comes again
        if _went_down(fleet, sum(length // BLOCK for length in lengths)):
            break
        for prompt in prompts:
            fleet.generate(prompt, 1)
    fleet.restart(WORKER)
    vault = [fleet.generate(prompt, ANSWER) for prompt in prompts]
    found = [fleet.until("what the worker found", partial(_found, fleet, one.request)) for one in vault]
    return [
        _row(length, [
            (*answers, int(tiers.get("vault", 0)))
            for asked, *answers, tiers in zip(lengths, cold, device, vault, found, strict=True) if asked == length
        ])
        for length in LENGTHS
    ]  # fmt: skip


def _row(length: int, asked: Sequence[tuple[PaperAnswer, PaperAnswer, PaperAnswer, int]]) -> RestoreRow:
    """Medians of prompts of one length."""
    cold, device, vault = (median(one.ttft_s for one in answers) for answers in list(zip(*asked, strict=True))[:3])
    same = all(one.token_ids == two.token_ids == three.token_ids for one, two, three, _ in asked)
    whole = all(len(one.token_ids) == ANSWER for one, *_ in asked)
    least = min(tokens for *_, tokens in asked)
    return RestoreRow(
        length, len(asked), cold, device, vault, cold / vault, least, same and whole, PRINTED.get(length, "")
    )


def _went_down(fleet: RunningFleet, blocks: int) -> bool:
    """Whether so many are in the vault, once no more have come for a while."""
    given, end = -1, 0.0
    while True:
        now = int(fleet.get("/workers")[WORKER]["load"]["tiers"]["vault"]["offloaded_blocks_total"])
        if now > given:
            given, end = now, time.monotonic() + SETTLES_S
        if given >= blocks or time.monotonic() > end:
            return given >= blocks
        time.sleep(LOOK_S)


def _found(fleet: RunningFleet, request: str) -> dict[str, int]:
    """Tokens by tier, once placement has heard of them."""
    said: Any = fleet.get(f"/v1/placements/{request}", 404).get("attempts")
    return ((said[-1].get("actual") or {}).get("cached_tokens") or {}) if said else {}


def judge(rows: Sequence[RestoreRow]) -> list[Criterion]:
    long = [row for row in rows if row.tokens >= SOONER_FROM]
    sooner = min(row.times_sooner for row in long)
    last = max(rows, key=lambda row: row.tokens)
    return [
        at_least(f"first token from the vault, times sooner than cold, from {SOONER_FROM:,} tokens on", sooner, 1.0),
        at_least(
            f"first token from the vault, times sooner than cold, at {last.tokens:,} tokens",
            last.times_sooner,
            LONGEST_SOONER,
        ),
        all_of(f"prompts of which the vault had {MOSTLY:.0%}", sum(row.from_vault >= MOSTLY * row.tokens
               for row in rows), len(rows)),
        all_of("prompts with the same answer cold, from the device and from the vault",
               sum(row.same_tokens for row in rows), len(rows)),
    ]  # fmt: skip


TABLE = PaperTable(
    "vault", "first token cold, from the device and from a vault", "tierKV", measure, judge,
    FleetSpec(("--workers=1", "--vaults=1", f"--vault-max-bytes={2**30}"), (MODEL,)),
)  # fmt: skip
