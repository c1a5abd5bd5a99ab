"""The living members, as one reader sees them. Pure: time is passed in, decisions come back as `Change`s.

A worker is alive while either of two independent signals is fresh:

    KV record      written every second, expires after 3 s        fresh for 3.3 s after a write
    heartbeat      core NATS, every 0.5 s                          fresh for 2.5 s

A deleted record (clean stop, or placement found the worker gone) ends the worker at once, until it registers again.
When more than half of the workers vanish within 3 s the fault is taken to be NATS's, and the last view is kept.

Other members (vaults, placements, ingresses) have records alone. When no record is renewed for 2 s, JetStream is away:
no member is given up then, nor in the 5 s after, when old records expire before their owners write them again.

    absent ──record──▶ alive ──stale/expired/deleted──▶ dead ──record or heartbeat──▶ alive
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import Enum

from kvproto.messages import Heartbeat, MemberRecord, Role, State, WorkerRecord

RECORD_FRESH_S = 3.3
HEARTBEAT_FRESH_S = 2.5
MASS_WINDOW_S = 3.0
MASS_HOLD_S = 30.0
RECONNECT_GRACE_S = 5.0
HELD_UP_GRACE_S = 1.0
RECORD_GAP_S = 2.0
FORGET_DEAD_S = 60.0


class Change(Enum):
    """The effect of an event on one member."""

    JOINED = "joined"
    LEFT = "left"
    NEW_EPOCH = "new_epoch"
    UPDATED = "updated"


@dataclass(slots=True)
class WorkerView:
    record: WorkerRecord
    revision: int = 0  # of the record, for compare-and-set deletes
    record_at: float = -1e9
    heartbeat: Heartbeat | None = None
    heartbeat_at: float = -1e9
    deleted: bool = False
    dead_since: float | None = None

    @property
    def state(self) -> State:
        if self.dead_since is not None:
            return State.DEAD
        newest = self.heartbeat if self.heartbeat and self.heartbeat.epoch == self.record.epoch else None
        return newest.state if newest and self.heartbeat_at > self.record_at else self.record.state

    def is_fresh(self, now: float) -> bool:
        if self.deleted:
            return False
        return now - self.record_at < RECORD_FRESH_S or now - self.heartbeat_at < HEARTBEAT_FRESH_S


@dataclass(slots=True)
class FleetView:
    """Owned by the loop that feeds it."""

    hears: bool = True  # heartbeats too, not records alone
    workers: dict[str, WorkerView] = field(default_factory=dict)
    members: dict[tuple[Role, str], tuple[MemberRecord, float]] = field(default_factory=dict)
    _early: dict[str, tuple[Heartbeat, float]] = field(default_factory=dict)  # heartbeats without a record yet
    _blind_until: float = -1e9
    _deaths: list[float] = field(default_factory=list)
    _record_at: float = -1e9  # of any member's newest record
    _records_prove_from: float = -1e9  # until then a record's age proves nothing
    _expired: set[tuple[Role, str]] = field(default_factory=set)  # members whose record expired before that
    held_since: float | None = None
    version: int = 0  # grows with every join and leave

    def on_worker_record(self, record: WorkerRecord, revision: int, now: float) -> Change:
        self._hear_record(now)
        known = self.workers.get(record.id)
        if known is None:
            view = WorkerView(record, revision, now)
            early = self._early.pop(record.id, None)
            if early is not None and early[0].epoch == record.epoch:
                view.heartbeat, view.heartbeat_at = early
            self.workers[record.id] = view
            self.version += 1
            return Change.JOINED
        change = Change.UPDATED
        if known.record.epoch != record.epoch:
            change = Change.NEW_EPOCH
            known.heartbeat, known.heartbeat_at = None, -1e9
        if known.dead_since is not None:
            change = Change.JOINED
        is_as_before = (known.record.state, known.record.adapters) == (record.state, record.adapters)
        if change is not Change.UPDATED or not is_as_before:
            self.version += 1
        known.record, known.revision, known.record_at = record, revision, now
        known.deleted, known.dead_since = False, None
        return change

    def on_worker_gone(self, worker: str, now: float, *, expired: bool) -> Change | None:
        """The record was deleted, or it `expired`: then a fresh heartbeat still counts."""
        self._hear_record(now)
        view = self.workers.get(worker)
        if view is None or view.dead_since is not None:
            return None
        if expired:
            view.record_at = -1e9
            return None  # `sweep` judges by what is left
        view.deleted = True
        return self._bury(view, now)

    def on_heartbeat(self, beat: Heartbeat, now: float) -> Change | None:
        view = self.workers.get(beat.worker)
        if view is None:
            if len(self._early) < 4096:
                self._early[beat.worker] = (beat, now)
            return None
        if beat.epoch != view.record.epoch:
            return None  # of an older life, or of a newer one whose record has not come yet
        if view.state is not beat.state:
            self.version += 1
        view.heartbeat, view.heartbeat_at = beat, now
        if view.dead_since is not None and not view.deleted:
            view.dead_since = None
            self.version += 1
            return Change.JOINED
        return None

    def on_member(self, record: MemberRecord, now: float) -> Change:
        self._hear_record(now)
        key = record.role, record.id
        known = self.members.get(key)
        self.members[key] = (record, now)
        self._expired.discard(key)
        if known is None:
            return Change.JOINED
        return Change.UPDATED if known[0].epoch == record.epoch else Change.NEW_EPOCH

    def on_member_gone(self, role: Role, member: str, now: float, *, expired: bool) -> MemberRecord | None:
        """The member's record, if it is given up now."""
        self._hear_record(now)
        key = role, member
        if expired and now < self._records_prove_from and key in self.members:
            self._expired.add(key)
            return None
        self._expired.discard(key)
        known, _ = self.members.pop(key, (None, now))
        return known

    def sweep_members(self, now: float) -> list[MemberRecord]:
        """Remove and return members, other than workers, with stale records. Call a few times a second."""
        if now < max(self._blind_until, self._records_prove_from):
            return []
        renewed = self._records_are_renewed(now)
        alive = any(view.dead_since is None for view in self.workers.values())
        if not renewed and (alive or not self.members.keys() <= self._expired):  # JetStream went again
            return []
        silent = [
            record
            for key, (record, at) in self.members.items()
            if key in self._expired or (renewed and now - at > RECORD_FRESH_S + 2)
        ]
        for record in silent:
            del self.members[record.role, record.id]
        self._expired.clear()
        return silent

    def _hear_record(self, now: float) -> None:
        """JetStream works. If it did not until now, its records are out of date."""
        if self._record_at > -1e9 and not self._records_are_renewed(now):
            self._records_prove_from = now + RECONNECT_GRACE_S
        self._record_at = now

    def _records_are_renewed(self, now: float) -> bool:
        return now - self._record_at <= RECORD_GAP_S

    def on_disconnected(self) -> None:
        self._blind_until = float("inf")

    def on_reconnected(self, now: float) -> None:
        """Silence counts only after a grace time."""
        self._blind_until = now + RECONNECT_GRACE_S

    def on_held_up(self, now: float) -> None:
        """The reader itself stood still: it first reads what has arrived."""
        self._blind_until = max(self._blind_until, now + HELD_UP_GRACE_S)

    def sweep(self, now: float) -> list[str]:
        """Workers that have just been silent for too long. Call a few times a second."""
        if now < self._blind_until:
            return []
        if not self.hears and (now < self._records_prove_from or not self._records_are_renewed(now)):
            return []
        alive = [view for view in self.workers.values() if view.dead_since is None]
        silent = [view for view in alive if not view.is_fresh(now)]
        self._deaths = [at for at in self._deaths if now - at < MASS_WINDOW_S]
        gone = len(silent) + len(self._deaths)
        if silent and gone >= 2 and 2 * gone > len(alive) + len(self._deaths):
            if self.held_since is None:
                self.held_since = now
            if now - self.held_since < MASS_HOLD_S:
                return []
        elif not silent:
            self.held_since = None
        for view in silent:
            self._bury(view, now)
            self._deaths.append(now)
        for worker in [w for w, v in self.workers.items() if v.dead_since and now - v.dead_since > FORGET_DEAD_S]:
            del self.workers[worker]
        return [view.record.id for view in silent]

    def _bury(self, view: WorkerView, now: float) -> Change:
        view.dead_since = now
        self.version += 1
        return Change.LEFT

    def is_alive(self, worker: str) -> bool:
        view = self.workers.get(worker)
        return view is not None and view.dead_since is None

    def ready(self, model: str | None = None) -> Iterator[WorkerView]:
        """Workers that take new requests, of one model or of all."""
        for view in self.workers.values():
            if view.state is State.READY and (model is None or view.record.serves(model)):
                yield view

    def models(self) -> dict[str, WorkerRecord]:
        """Each served model with its living worker of the smallest id, so that readers agree. An adapter's record names
        another model than it, of which it is."""
        found: dict[str, WorkerRecord] = {}
        for worker in sorted(self.workers):
            view = self.workers[worker]
            if view.dead_since is None and view.state in (State.READY, State.DRAINING):
                found.setdefault(view.record.model, view.record)
                for adapter in view.record.adapters:
                    found.setdefault(adapter.name, view.record)
        return found

    def knows(self, model: str) -> bool:
        """Whether a worker served it, though it may be dead by now."""
        return any(view.record.serves(model) for view in self.workers.values())

    def with_state(self, worker: str) -> WorkerRecord | None:
        """The record with the newest known state."""
        view = self.workers.get(worker)
        return replace(view.record, state=view.state) if view else None
