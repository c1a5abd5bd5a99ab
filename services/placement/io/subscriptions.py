"""What placement hears without having asked: members, heartbeats, block events, milestones, other replicas. A loop.

Owns those subscriptions and the members view; reads bytes into events and decides nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from kvfleet.placement import events
from kvfleet.placement.index.changes import read_changes
from kvfleet.placement.index.kv_indexer import KvIndexer
from kvfleet.placement.io import intake
from kvproto import codec
from kvproto.connection import Connection
from kvproto.errors import CodecError
from kvproto.fleet_view import Change, WorkerView
from kvproto.ids import is_token
from kvproto.members import Members
from kvproto.messages import BookedBatch, MemberRecord, Milestones, Role, Snapshot, SnapshotRequest, WorkerRecord
from kvproto.nats_message import Message, Subscription, is_no_responders
from kvproto.subjects import Subjects

log = logging.getLogger(__name__)

DISCONNECTS = "$SYS.ACCOUNT.*.DISCONNECT"

Heard = TypeVar("Heard")
Guard = Callable[[Callable[[Message], Awaitable[None]]], Callable[[Message], Awaitable[None]]]


class Subscriptions:
    """Owned by the placement loop. `tell` takes an event, the core's `indexer` snapshots; `guard` is put around every
    callback."""

    def __init__(
        self,
        connection: Connection,
        subjects: Subjects,
        inbox_prefix: str,
        tell: Callable[[events.Event], None],
        indexer: KvIndexer,
        guard: Guard,
        system: Connection | None,
    ) -> None:
        self.members = Members(connection, subjects, on_heartbeat=tell)
        self.members.listeners.append(self._on_worker)
        self.members.member_listeners.append(self._on_other_member)
        self.malformed_total = 0  # of all that was heard
        self.malformed_events_total = 0
        self.snapshots_asked_total = 0
        self._connection = connection
        self._subjects = subjects
        self._snapshots = f"{inbox_prefix}.s."
        self._tell = tell
        self._indexer = indexer
        self._guard = guard
        self._system = system
        self._subscriptions: list[Subscription] = []

    async def start(self) -> None:
        """Returns when everybody who is registered is known. Raises Unavailable."""
        subjects, subscribe = self._subjects, self._connection.subscribe
        for subject, callback in (
            (f"{self._snapshots}>", self._on_snapshot),
            (subjects.events_all(), self._on_events),
            (subjects.milestones_all(), self._on_milestones),
            (subjects.placement_bookings(), self._on_bookings),
        ):
            self._subscriptions.append(await subscribe(subject, self._guard(callback)))
        if self._system is not None:
            self._subscriptions.append(await self._system.subscribe(DISCONNECTS, self._guard(self._on_disconnect)))
        await self.members.start()

    async def stop(self) -> None:
        """Never raises."""
        for subscription in self._subscriptions:
            try:
                await asyncio.wait_for(subscription.unsubscribe(), 1.0)
            except Exception as error:  # noqa: BLE001 - the connection may be gone: nothing to let go of then
                log.debug("placement: while stopping: %r", error)
        await self.members.stop()

    # ------------------------------------------------------------------ snapshots

    async def pull(self, worker: str, pull: int) -> None:
        """Ask a worker for all it holds. Raises Unavailable; an absent worker's pull is given up."""
        self.snapshots_asked_total += 1
        question = codec.encode(SnapshotRequest())
        await self._connection.publish(
            self._subjects.blocks(worker), question, reply=f"{self._snapshots}{worker}.{pull}"
        )

    async def _on_snapshot(self, message: Message) -> None:
        worker, _, number = message.subject.removeprefix(self._snapshots).partition(".")
        if not number.isdecimal():
            self.malformed_total += 1
            return
        pull = int(number)
        if is_no_responders(message):
            self._indexer.on_snapshot_refused(worker, pull, asyncio.get_running_loop().time())
            return
        part = self._read(message, lambda: codec.decode(Snapshot, message.data))
        if part is not None:
            self._indexer.on_snapshot(worker, part, asyncio.get_running_loop().time(), pull)

    # ------------------------------------------------------------------ workers and vaults

    async def _on_events(self, message: Message) -> None:
        changes = self._read(message, lambda: read_changes(message.data))
        if changes is None:  # a gap, which the next event shows
            self.malformed_events_total += 1
        else:
            self._tell(events.BlocksChanged(_last_token(message), changes))

    async def _on_milestones(self, message: Message) -> None:
        milestones = self._read(message, lambda: codec.decode(Milestones, message.data))
        if milestones is not None and milestones.worker == _last_token(message):
            self._tell(milestones)

    def _on_worker(self, change: Change, view: WorkerView) -> None:
        if not is_token(view.record.id):
            return  # no subject reaches it
        match change:
            case Change.LEFT:
                self._tell(events.WorkerLeft(view.record.id))
            case Change.JOINED:
                self._tell(events.WorkerJoined(self._known_state(view), view.heartbeat))
            case Change.NEW_EPOCH:
                self._tell(events.WorkerNewEpoch(self._known_state(view)))
            case Change.UPDATED:
                self._tell(events.WorkerUpdated(self._known_state(view)))

    def _on_other_member(self, change: Change, record: MemberRecord) -> None:
        if record.role is not Role.VAULT or not is_token(record.id):
            return
        if change is Change.LEFT:
            self._tell(events.VaultLeft(record.id))
        elif change is not Change.UPDATED:
            self._tell(events.VaultJoined(record.id, record.epoch))

    def _known_state(self, view: WorkerView) -> WorkerRecord:
        if view.state is view.record.state:  # as it mostly is, and every worker renews its record each second
            return view.record
        return self.members.view.with_state(view.record.id) or view.record

    async def _on_disconnect(self, message: Message) -> None:
        worker = intake.read_disconnect(message.data)
        if worker is not None:
            self._tell(events.WorkerDisconnected(worker))

    # ------------------------------------------------------------------ replicas

    async def _on_bookings(self, message: Message) -> None:
        batch = self._read(message, lambda: codec.decode(BookedBatch, message.data))
        if batch is not None:
            self._tell(batch)

    def _read(self, message: Message, read: Callable[[], Heard]) -> Heard | None:
        try:
            return read()
        except CodecError as error:
            self.malformed_total += 1
            log.debug("placement: a message on %s is unreadable: %s", message.subject, error)
            return None


def _last_token(message: Message) -> str:
    return message.subject.rsplit(".", 1)[-1]
