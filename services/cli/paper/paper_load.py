"""Requests that a table sends at once, by `kvfleet bench`'s own client."""

from __future__ import annotations

from dataclasses import dataclass

import httpx
import uvloop

from kvfleet.cli.bench.connection import StreamConnections
from kvfleet.cli.bench.load_run import BenchAsk, LoadRun
from kvfleet.cli.bench.request_record import RequestRecord
from kvfleet.cli.bench.shapes import LoadLimits, Shape, ShapeSizes, sessions
from kvfleet.cli.paper.paper_fleet import LIMIT_S, RunningFleet
from kvfleet.cli.paper.paper_table import FleetSpec

PROMPT_WORDS = 32
DEMO_FLEET = FleetSpec(("--workers=2",))  # each has half of the cores


@dataclass(frozen=True, slots=True)
class PaperLoad:
    """What came of the requests: those that failed are in `failed` alone."""

    seconds: float
    whole: tuple[RequestRecord, ...]
    failed: tuple[RequestRecord, ...]

    @property
    def tokens_per_s(self) -> float:
        return sum(record.output_tokens for record in self.whole) / self.seconds

    @property
    def requests_per_s(self) -> float:
        return len(self.whole) / self.seconds

    @property
    def mean_e2e_s(self) -> float:
        return sum(record.e2e_s for record in self.whole) / max(len(self.whole), 1)


def load(
    fleet: RunningFleet, requests: int, at_once: int, output_tokens: int, *, seed: int, worker: str | None = None
) -> PaperLoad:
    """So many prompts of random words that share nothing, each answered in full; `seed`: of the words."""
    run = LoadRun(
        StreamConnections(httpx.URL(fleet.base)),
        BenchAsk("demo", is_chat=False, timeout_s=LIMIT_S, more={"worker": worker} if worker else {}),
        LoadLimits(requests, None, at_once),
    )
    sizes = ShapeSizes(0, PROMPT_WORDS, output_tokens, 1, 1, 0.0, spread=0.0)
    uvloop.run(run.load(sessions(Shape.ONESHOT, sizes, seed, 1.0, seed)))
    whole = tuple(record for record in run.records if not record.error)
    return PaperLoad(run.duration_s, whole, tuple(record for record in run.records if record.error))
