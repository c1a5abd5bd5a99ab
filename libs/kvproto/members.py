"""Adapter: membership over NATS. `Lease` keeps one record; `Members` feeds a `FleetView` from watch and heartbeats.

An expired process takes a new lease under its old epoch (its blocks are still there). One that finds a later life under
its id must end (`Fenced`): of two lives the later one is that which first registered at the higher revision.

    register ──put/s──▶ held ──record gone──▶ register again (new lease, same epoch)
                          └──later life under this id──▶ Fenced
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, TypeVar

from kvproto import codec
from kvproto.buckets import Bucket, BucketFollower, BucketWatch, Entry, StaleRevision
from kvproto.connection import Connection, Message
from kvproto.errors import CodecError, KvfleetError, Unavailable
from kvproto.fleet_view import Change, FleetView, WorkerView
from kvproto.hash_ring import HashRing
from kvproto.ids import new_process_id
from kvproto.messages import Heartbeat, MemberRecord, Role, WorkerRecord
from kvproto.subjects import Subjects, member_key
from kvproto.tasks import end

log = logging.getLogger(__name__)

LEASE_PERIOD_S = 1.0
TAKE_S = 10.0  # in which NATS may come back
SWEEP_PERIOD_S = 0.2
LATE_S = 1.0
WATCH_SILENT_S, WATCH_SILENT_MOST_S = 3.0, 60.0  # records are written every second, unless there are no members


class Fenced(KvfleetError, code="fenced", http_status=409):
    """A later life of this id holds the record: this process must end."""


@dataclass(eq=False)
class Lease:
    """Keeps one record in the members bucket alive. Owned by the process's loop; `run` renews until cancelled."""

    bucket: Bucket
    record: WorkerRecord | MemberRecord

    def __post_init__(self) -> None:
        role = Role.WORKER if isinstance(self.record, WorkerRecord) else self.record.role
        self._key = member_key(role.value, self.record.id)
        self._revision: int | None = None
        self._born = 0  # revision of this life's first record
        self._lock = asyncio.Lock()
        self._released = False

    async def register(self) -> None:
        """Write the record over the present one, which at first is an earlier life's. One under this very lease is a
        write of ours whose answer was lost. Raises Fenced (a later life holds it) or Unavailable."""
        entry = await self.bucket.get(self._key)
        held: WorkerRecord | MemberRecord | None = None
        if entry.value is not None and self._born:
            with contextlib.suppress(CodecError):
                held = codec.decode(type(self.record), entry.value)
                if held.epoch != self.record.epoch and (held.born or entry.revision) > self._born:
                    raise Fenced(f"{self._key} is held by a later process (pid {held.pid} on {held.host})")
        if held is None or not held.lease or held.lease != self.record.lease:
            self.record = replace(self.record, lease=new_process_id())
        self._revision = await self.bucket.update(self._key, codec.encode(self.record), entry.revision)
        self._born = self._born or self._revision
        self.record = replace(self.record, born=self._born)

    async def renew(self) -> None:
        """Raises Fenced, or Unavailable while JetStream is away."""
        async with self._lock:
            if self._released:
                return
            if self._revision is not None:
                try:
                    self._revision = await self.bucket.update(self._key, codec.encode(self.record), self._revision)
                    return
                except StaleRevision:
                    self._revision = None
            before = self.record.lease
            for _ in range(5):
                try:
                    await self.register()
                    if before and self.record.lease != before:
                        log.warning("lease on %s was lost, registered again", self._key)
                    return
                except StaleRevision:
                    continue  # written in between

    async def take(self, patience_s: float = TAKE_S) -> None:
        """For the first time, as soon as JetStream answers. Raises Fenced, or Unavailable after `patience_s`."""
        until = asyncio.get_running_loop().time() + patience_s
        while True:
            try:
                return await self.renew()
            except Unavailable:
                if asyncio.get_running_loop().time() > until:
                    raise
            await asyncio.sleep(0.1)

    async def set(self, record: WorkerRecord | MemberRecord) -> None:
        """Replace the record, keeping the lease, and write it at once."""
        self.record = replace(record, lease=self.record.lease, born=self.record.born)
        await self.renew()

    async def run(self, on_fenced: Callable[[Fenced], None], refresh: Callable[[], None] = lambda: None) -> None:
        """Renew every second, also over outages of NATS. `refresh` is called before, and may replace the record."""
        while True:
            await asyncio.sleep(LEASE_PERIOD_S)
            refresh()
            try:
                await self.renew()
            except Fenced as error:
                on_fenced(error)
                return
            except Unavailable as error:
                log.warning("lease on %s not renewed: %s", self._key, error)

    async def release(self) -> None:
        """Delete the record if it is still ours, so that watchers learn at once. Never raises."""
        self._released = True
        async with self._lock:
            revision, self._revision = self._revision, None
            if revision is not None:
                with contextlib.suppress(KvfleetError, asyncio.TimeoutError):
                    await asyncio.wait_for(self.bucket.delete(self._key, revision), 1.0)


Subject = TypeVar("Subject", WorkerView, MemberRecord)
Listener = Callable[[Change, WorkerView], None]
MemberListener = Callable[[Change, MemberRecord], None]


def _tell_all(listeners: list[Callable[[Change, Subject], None]], change: Change, subject: Subject) -> None:
    for listener in listeners:
        try:
            listener(change, subject)
        except Exception:  # one listener's fault must not end the watch that all depend on
            log.exception("a listener of members failed")


@dataclass(eq=False)
class Members:
    """Owns a `FleetView`. Tells `listeners` of changes to workers, and `member_listeners` of all other members.

    Listeners run on the loop and must not block. Without `hears` only records are read: workers do not need the
    heartbeats of all others.
    """

    connection: Connection
    subjects: Subjects
    _: KW_ONLY
    on_heartbeat: Callable[[Heartbeat], None] | None = None
    hears: bool = True  # heartbeats
    role: Role | None = None  # reads records of this role alone

    def __post_init__(self) -> None:
        self.view = FleetView(hears=self.hears)
        self.listeners: list[Listener] = []
        self.member_listeners: list[MemberListener] = []
        pattern = ">" if self.role is None else f"{self.role.value}.>"
        self._follower = BucketFollower(
            self.connection, self.subjects.members_bucket, pattern, "members", self._read_watch
        )
        self._sweeping: asyncio.Task[None] | None = None
        self._subscription: Any = None
        self._watch_heard_at = 0.0
        self._watch_patience_s = WATCH_SILENT_S
        self._rings: dict[str, tuple[int, HashRing]] = {}

    async def start(self, timeout_s: float = 10.0) -> None:
        """Returns when all registered members are known. Raises Unavailable."""
        if self.hears:
            self._subscription = await self.connection.subscribe(self.subjects.heartbeat_all(), self._heartbeat)
        self.connection.on_disconnect.append(self.view.on_disconnected)
        self.connection.on_reconnect.append(self._on_reconnected)
        self._watch_heard_at = self._now()
        self._sweeping = asyncio.create_task(self._sweep(), name="members-sweep")
        try:
            await self._follower.start(timeout_s)
        except Unavailable:
            await self.stop()
            raise

    async def stop(self) -> None:
        if self._sweeping is not None:
            await end([self._sweeping])
        await self._follower.stop()
        with contextlib.suppress(Exception):
            await self._subscription.unsubscribe()
        with contextlib.suppress(ValueError):
            self.connection.on_reconnect.remove(self._on_reconnected)
        with contextlib.suppress(ValueError):
            self.connection.on_disconnect.remove(self.view.on_disconnected)

    def ring(self, model: str) -> HashRing:
        """The plain ring over the model's ready workers."""
        version, ring = self._rings.get(model, (-1, None))
        if ring is None or version != self.view.version:
            ring = (ring or HashRing()).with_nodes(view.record.id for view in self.view.ready(model))
            self._rings[model] = (self.view.version, ring)
        return ring

    async def drop(self, worker: str, revision: int | None = None) -> None:
        """Delete a dead worker's record if it is still at `revision` (default: the newest seen), so that every watcher
        acts now; a living worker registers again. Never raises."""
        view = self.view.workers.get(worker)
        expected = revision if revision is not None else (view.revision if view is not None else 0)
        if expected:
            with contextlib.suppress(KvfleetError):
                bucket = await Bucket.open(self.connection, self.subjects.members_bucket)
                await bucket.delete(member_key(Role.WORKER.value, worker), expected)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _tell(self, change: Change | None, worker: str) -> None:
        view = self.view.workers.get(worker)
        if change is not None and view is not None:
            _tell_all(self.listeners, change, view)

    async def _on_reconnected(self) -> None:
        self._watch_heard_at = self._now()
        self.view.on_reconnected(self._now())

    async def _watch_again_if_silent(self) -> None:
        """A cluster does not report that it lost the server of this watch's consumer."""
        if self.connection.is_connected and self._now() - self._watch_heard_at > self._watch_patience_s:
            self._watch_patience_s = min(2 * self._watch_patience_s, WATCH_SILENT_MOST_S)
            self._watch_heard_at = self._now()
            await self._follower.begin()

    async def _read_watch(self, watch: BucketWatch) -> None:
        async for entry in watch.entries():
            if entry is None:
                self._follower.listed.set()
            else:
                self._apply(entry)

    def _apply(self, entry: Entry) -> None:
        role, _, member = entry.key.partition(".")
        now = self._watch_heard_at = self._now()
        self._watch_patience_s = WATCH_SILENT_S
        try:
            if role == Role.WORKER:
                if entry.value is None:
                    self._tell(self.view.on_worker_gone(member, now, expired=entry.expired), member)
                else:
                    record = codec.decode(WorkerRecord, entry.value)
                    if record.id == member:
                        self._tell(self.view.on_worker_record(record, entry.revision, now), member)
            elif entry.value is None:
                if role not in set(Role):
                    return
                gone = self.view.on_member_gone(Role(role), member, now, expired=entry.expired)
                if gone is not None:
                    _tell_all(self.member_listeners, Change.LEFT, gone)
            else:
                other = codec.decode(MemberRecord, entry.value)
                if (other.role.value, other.id) == (role, member):
                    _tell_all(self.member_listeners, self.view.on_member(other, now), other)
        except CodecError as error:
            log.warning("members: record %s is unreadable: %s", entry.key, error)

    async def _heartbeat(self, message: Message) -> None:
        try:
            beat = codec.decode(Heartbeat, message.data)
        except CodecError as error:
            log.debug("heartbeat on %s is unreadable: %s", message.subject, error)
            return
        if message.subject.rsplit(".", 1)[-1] != beat.worker:
            return
        self._tell(self.view.on_heartbeat(beat, self._now()), beat.worker)
        if self.on_heartbeat is not None:
            self.on_heartbeat(beat)

    async def _sweep(self) -> None:
        silent = False
        while True:
            before = self._now()
            await asyncio.sleep(SWEEP_PERIOD_S)
            if self._now() - before > SWEEP_PERIOD_S + LATE_S:
                self.view.on_held_up(self._now())
            was_silent, silent = silent, self.connection.is_silent
            if silent and not was_silent:
                self.view.on_disconnected()
            elif was_silent and self.connection.is_connected and not silent:
                self.view.on_reconnected(self._now())
            await self._watch_again_if_silent()
            for worker in self.view.sweep(self._now()):
                self._tell(Change.LEFT, worker)
            for gone in self.view.sweep_members(self._now()):
                _tell_all(self.member_listeners, Change.LEFT, gone)
