"""tierKV's codec: how much smaller int8 by groups of a head is, and its signal-to-noise ratio by head size.

The worker's own codec encodes blocks of normal random numbers, and those that models computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvfleet.cli.paper.paper_fleet import worker_report
from kvfleet.cli.paper.paper_models import small_qwen2, write_model
from kvfleet.cli.paper.paper_run import PaperBench
from kvfleet.cli.paper.paper_table import Criterion, PaperTable, all_of, at_least

REPORT = "kvfleet.worker.model.reports.codec_report"
HEADS = (64, 128, 256)
MODELS = [small_qwen2(f"heads-of-{size}", head_dim=size, max_position_embeddings=1024) for size in HEADS]
LEAST_DB, LEAST_SMALLER = 42.0, 3.7
PRINTED = {256: "52 dB at least, 3.9 times"}
NORMAL = "normal"


@dataclass(frozen=True, slots=True)
class CodecRow:
    head_dim: int
    numbers: str
    times_smaller: float  # than float32
    least_snr_db: float
    median_snr_db: float
    paper: str


def measure(bench: PaperBench) -> list[CodecRow]:
    folders = [str(write_model(model, bench.folder)) for model in MODELS]
    found = {(one["head_dim"], one["numbers"]): one for one in worker_report(REPORT, "demo", *folders)}
    return [
        CodecRow(
            size, "normal random" if numbers == NORMAL else f"K and V of {numbers}",
            one["raw_bytes"] / one["int8_bytes"], one["least_snr_db"], one["median_snr_db"], PRINTED.get(size, ""),
        )
        for (size, numbers), one in sorted(found.items())
    ]  # fmt: skip


def judge(rows: Sequence[CodecRow]) -> list[Criterion]:
    by_size = [min(row.times_smaller for row in rows if row.head_dim == size) for size in HEADS]
    grows = sum(smaller < larger for smaller, larger in pairwise(by_size))
    return [
        at_least("dB of the worst block", min(row.least_snr_db for row in rows), LEAST_DB),
        at_least("times smaller than float32", min(by_size), LEAST_SMALLER),
        all_of("larger heads become smaller", grows, len(HEADS) - 1),
    ]


TABLE = PaperTable("snr", "int8 by groups of a head, by head size", "tierKV", measure, judge)
