"""What the processes of an embedded fleet do until it serves: a table on a terminal, lines elsewhere.

members bucket ── watched by a thread ──▶ records ──┐
the processes, the ingress's /health ───────────────┴──▶ a row for each process
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from kvfleet.cli.console import err
from kvfleet.cli.embedded.fleet import EmbeddedFleet
from kvfleet.cli.embedded.processes import StartFailed, StopRequest
from kvfleet.cli.operator.operator_login import Login
from kvproto.errors import KvfleetError
from kvproto.members import Members
from kvproto.messages import Loading, MemberRecord, State, WorkerRecord
from kvproto.subjects import Subjects
from kvservice.byte_size import readable

START_TIMEOUT_S = 600.0
LOOK_EVERY_S = 0.05
RECORDS_EVERY_S = 0.2
LINE_EVERY_S = 5.0  # of one worker, where lines are printed
MOST_ROWS = 18  # of a screen; of more processes those that are ready are counted
BAR = 24

Record = WorkerRecord | MemberRecord
Row = tuple[str, str, float | None]  # a process's name, what it does, and the share of its weights that is loaded


@dataclass(frozen=True, slots=True)
class FleetParts:
    """What a fleet must have to serve."""

    workers: int
    placements: int
    vaults: int


@dataclass(eq=False)
class RecordsWatch:
    """A thread that follows the members bucket. `records` is replaced, never changed; it stays empty without NATS."""

    login: Login
    namespace: str
    records: Mapping[str, Record] = field(default_factory=dict)
    stopping: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._run, name="records", daemon=True)

    def _run(self) -> None:
        try:
            asyncio.run(self._watch())
        except (KvfleetError, OSError) as error:
            if not self.stopping.is_set():
                err.print(f"kvfleet: what the processes do is not shown: {error}")

    async def _watch(self) -> None:
        async with self.login.connected("kvfleet-up") as connection:
            members = Members(connection, Subjects(self.namespace), hears=False)
            await members.start()
            while not self.stopping.is_set():
                view = members.view
                workers = {one.record.id: one.record for one in view.workers.values() if one.dead_since is None}
                self.records = {**workers, **{record.id: record for record, _ in view.members.values()}}
                await asyncio.sleep(RECORDS_EVERY_S)
            await members.stop()


def words(record: Record | None) -> str:
    """What the process of this record does. Pure."""
    if record is None:
        return State.STARTING.value
    loading = record.loading if isinstance(record, WorkerRecord) else None
    return record.state.value if loading is None else loading_words(loading)


def loading_words(loading: Loading) -> str:
    parts = [loading.doing]
    if loading.weight_bytes:
        total = f" of {readable(loading.total_bytes)}" if loading.total_bytes else ""
        parts.append(readable(loading.weight_bytes) + total)
    if loading.kernels:
        parts.append(f"{loading.kernels} kernels compiled" if loading.kernels > 1 else "1 kernel compiled")
    return ", ".join(parts)


def share_loaded(record: Record | None) -> float | None:
    """Of the weights."""
    loading = record.loading if isinstance(record, WorkerRecord) else None
    if loading is None or not loading.total_bytes:
        return None
    return min(loading.weight_bytes / loading.total_bytes, 1.0)


@dataclass(slots=True)
class Lines:
    """Which lines are due, where no table can be shown. Pure."""

    began: float
    said: dict[str, tuple[float, str]] = field(default_factory=dict)  # when, and what
    counted: str = ""

    def due(self, now: float, ready: int, wanted: int, doing: Mapping[str, str]) -> list[str]:
        lines = []
        for name, text in doing.items():
            at, before = self.said.get(name, (self.began, ""))
            if text != before and now - at >= LINE_EVERY_S:
                self.said[name] = now, text
                lines.append(f"{name}: {text}")
        count = f"loading: {ready} of {wanted} workers ready"
        if count != self.counted:
            self.counted = count
            lines.append(count)
        return lines


def table(rows: list[Row], seconds: float, most: int = MOST_ROWS) -> Table:
    grid = Table.grid(padding=(0, 2))
    if len(rows) > most:
        ready = State.READY.value
        count = sum(text == ready for _, text, _ in rows)
        rows = [row for row in rows if row[1] != ready]
        rows = [*rows[: most - 1], ("", f"{count} ready, {len(rows)} not", None)]
    for name, text, share in rows:
        bar: Any = "" if share is None else ProgressBar(total=1.0, completed=share, width=BAR)
        grid.add_row(name, text, bar)
    grid.add_row("", f"{seconds:.0f} s", "")
    return grid


def wait_ready(
    fleet: EmbeddedFleet, base: str, wanted: FleetParts, login: Login, namespace: str, stopping: StopRequest
) -> bool:
    """True when every process serves, False when `stopping` is set. Raises StartFailed."""
    began = time.monotonic()
    watch, lines = RecordsWatch(login, namespace), Lines(began)
    watch.thread.start()
    live = Live(console=err, transient=True)  # drawn a few times a second
    with live, httpx.Client(base_url=base, timeout=2.0, trust_env=False) as http:
        try:
            while not stopping.is_set:
                now = time.monotonic()
                for child in fleet:
                    if not child.running:
                        why = f"it ended with code {child.process.returncode}; see its line above"
                        raise StartFailed(child.name, why)
                if now - began > START_TIMEOUT_S:
                    raise StartFailed("the fleet", f"not ready within {START_TIMEOUT_S:.0f} s")
                health, records = _health(http), watch.records
                ready = health.get("workers_ready", 0)
                if err.is_terminal:
                    live.update(table(_rows(fleet, records, health), now - began))
                else:
                    doing = {child.name: words(records.get(child.name)) for child in fleet.workers}
                    for line in lines.due(now, ready, wanted.workers, doing):
                        err.print(line)
                others = health.get("placements", 0) >= wanted.placements and health.get("vaults", 0) >= wanted.vaults
                serves = health.get("status") == "ok" if wanted.workers else health.get("nats")  # else requests wait
                if ready >= wanted.workers and others and serves:
                    return True
                stopping.wait(LOOK_EVERY_S)
        finally:
            watch.stopping.set()
    return False


def _rows(fleet: EmbeddedFleet, records: Mapping[str, Record], health: Mapping[str, Any]) -> list[Row]:
    rows: list[Row] = []
    answers = {True: State.READY.value, False: State.STARTING.value}
    for child in fleet:
        record = records.get(child.name)
        if child in fleet.nats:
            text = answers[bool(records)]
        elif child in fleet.ingresses:
            text = answers[bool(health)]
        elif child in fleet.engines:  # a worker beside one has a record when that answers
            text = answers[any(one.engine is child and one.name in records for one in fleet.workers)]
        else:
            text = words(record)
        rows.append((child.name, text, share_loaded(record)))
    return rows


def _health(http: httpx.Client) -> dict[str, Any]:
    """The ingress's health, which needs no API key. Empty until it answers."""
    try:
        report: dict[str, Any] = http.get("/health").json()
        return report
    except (httpx.HTTPError, ValueError):
        return {}
