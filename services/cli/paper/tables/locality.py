"""Table 5.4: which worker each of 5,000 sequences goes to, and how many go elsewhere when workers come and leave.

The ingress is asked (`GET /kv/route/{seq_id}`), so the ring is the fleet's own. The workers have no model: none is run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from kvfleet.cli.paper.paper_fleet import RunningFleet
from kvfleet.cli.paper.paper_run import PaperBench
from kvfleet.cli.paper.paper_table import Criterion, FleetSpec, PaperTable, all_of, at_most

WORKERS, SEQUENCES, REPEATS = 4, 5_000, 20
PRINTED = ("1,333", "1,230", "1,205", "1,232")
MOST_UNEVEN, MOST_MOVED = 0.1, 1.5  # share beside the fair one; moved, in times of the fair share
ASKERS = 4


@dataclass(frozen=True, slots=True)
class LocalityRow:
    what: str
    kind: str  # worker, repeat, joined, left
    workers: int
    sequences: int
    of: int
    astray: int  # moved, though neither from the one that left nor to the one that joined
    paper: str

    @property
    def of_fair_share(self) -> float:
        return self.sequences / self.of * self.workers


def measure(bench: PaperBench) -> list[LocalityRow]:
    fleet = bench.fleet
    first = _owners(fleet)
    loads = Counter(first)
    rows = [
        LocalityRow(worker, "worker", WORKERS, loads[worker], SEQUENCES, 0, paper)
        for worker, paper in zip(_ready(fleet), PRINTED, strict=True)
    ]
    again = [_owner(fleet, 0) for _ in range(REPEATS)]
    rows.append(
        LocalityRow("one id, again and again", "repeat", WORKERS, again.count(first[0]), REPEATS, 0, "20 of 20")
    )
    five = _scaled(fleet, WORKERS + 1)
    joined = _owners(fleet)
    rows.append(_moved("joined", five - set(loads), WORKERS + 1, first, joined))
    left = five - _scaled(fleet, WORKERS)
    rows.append(_moved("left", left, WORKERS + 1, joined, _owners(fleet)))
    return rows


def _owner(fleet: RunningFleet, number: int) -> str:
    return str(fleet.get(f"/kv/route/seq-{number}")["worker_id"])


def _owners(fleet: RunningFleet) -> list[str]:
    with ThreadPoolExecutor(ASKERS) as askers:
        return list(askers.map(lambda number: _owner(fleet, number), range(SEQUENCES)))


def _ready(fleet: RunningFleet) -> list[str]:
    return sorted(worker for worker, said in fleet.get("/workers").items() if said["state"] == "ready")


def _scaled(fleet: RunningFleet, workers: int) -> set[str]:
    fleet.command("scale", "w", str(workers), "--wait=60")
    return set(fleet.until(f"{workers} workers", lambda: found if len(found := _ready(fleet)) == workers else None))


def _moved(kind: str, whose: set[str], workers: int, before: Sequence[str], after: Sequence[str]) -> LocalityRow:
    moves = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    astray = sum((new if kind == "joined" else old) not in whose for old, new in moves)
    return LocalityRow(f"{', '.join(sorted(whose))} {kind}: moved", kind, workers, len(moves), SEQUENCES, astray, "")


def judge(rows: Sequence[LocalityRow]) -> list[Criterion]:
    uneven = max(abs(row.of_fair_share - 1) for row in rows if row.kind == "worker")
    repeated = next(row for row in rows if row.kind == "repeat")
    changes = [row for row in rows if row.kind in ("joined", "left")]
    stayed = sum(row.of - row.astray for row in changes)
    return [
        at_most("a worker's share beside the fair one", uneven, MOST_UNEVEN),
        all_of("the same id to the same worker", repeated.sequences, repeated.of),
        *(
            at_most(f"moved when one has {row.kind}, of 1/{row.workers}", row.of_fair_share, MOST_MOVED)
            for row in changes
        ),
        all_of("of the others none moved", stayed, sum(row.of for row in changes)),
    ]


TABLE = PaperTable(
    "locality", f"{SEQUENCES:,} sequences over {WORKERS} workers", "the paper, table 5.4", measure, judge,
    FleetSpec((f"--workers={WORKERS}", "--runner=fake", "--vaults=0")),
)  # fmt: skip
