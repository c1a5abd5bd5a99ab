"""Loop: what placement hears without asking: members, heartbeats, block events, milestones, other replicas.

Owns those subscriptions and the members view.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from kvfleet.placement import events
from kvfleet.placement.core import PlacementCore
from kvfleet.placement.index.changes import read_changes
from kvfleet.placement.io import intake
from kvfleet.placement.io.replica import Replica, let_go
from kvproto.connection import Connection, Message, Subscription, is_no_responders
from kvproto.errors import CodecError
from kvproto.fleet_view import Change, WorkerView
from kvproto.ids import is_token
from kvproto.members import Members
from kvproto.messages import BookedBatch, MemberRecord, Milestones, ReturnExpected, Role, Snapshot, WorkerRecord

log = logging.getLogger(__name__)

DISCONNECTS = "$SYS.ACCOUNT.*.DISCONNECT"


@dataclass(eq=False)
class Subscriptions:
    """`tell` takes events, `core` what calls for no action; `system` is a connection as the server's SYS user."""

    replica: Replica
    members: Members
    tell: Callable[[events.Event], None]
    core: PlacementCore
    system: Connection | None
    malformed_events_total: int = 0
    _subscriptions: list[Subscription] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.members.listeners.append(self._on_worker)
        self.members.member_listeners.append(self._on_other_member)

    async def start(self) -> None:
        """Returns when all registered members are known. Raises Unavailable."""
        subjects = self.replica.subjects
        for subject, callback in (
            (f"{self.replica.snapshots}>", self._on_snapshot),
            (subjects.events_all(), self._on_events),
            (subjects.milestones_all(), self._on_milestones),
            (subjects.placement_bookings(), self._on_bookings),
            (subjects.returns_all(), self._on_return_expected),
        ):
            self._subscriptions.append(await self.replica.listen(subject, callback))
        if self.system is not None:
            guarded = self.replica.guarded(self._on_disconnect)
            self._subscriptions.append(await self.system.subscribe(DISCONNECTS, guarded))
        await self.members.start()

    async def stop(self) -> None:
        """Never raises."""
        for subscription in self._subscriptions:
            await let_go(subscription.unsubscribe())
        await self.members.stop()

    async def _on_snapshot(self, message: Message) -> None:
        worker, _, number = message.subject.removeprefix(self.replica.snapshots).partition(".")
        if not number.isdecimal():
            self.replica.malformed_total += 1
            return
        pull = int(number)
        if is_no_responders(message):
            self.core.indexer.on_snapshot_refused(worker, pull, self.replica.now())
            return
        if (part := self.replica.read(Snapshot, message)) is not None:
            self.core.indexer.on_snapshot(worker, part, self.replica.now(), pull)

    async def _on_events(self, message: Message) -> None:
        try:
            changes = read_changes(message.data)
        except CodecError as error:  # a gap, which the next event shows
            log.debug("placement: a message on %s is unreadable: %s", message.subject, error)
            self.replica.malformed_total += 1
            self.malformed_events_total += 1
        else:
            self.core.indexer.on_changes(_last_token(message), changes, self.replica.now())

    async def _on_milestones(self, message: Message) -> None:
        milestones = self.replica.read(Milestones, message)
        if milestones is not None and milestones.worker == _last_token(message):
            self.tell(milestones)

    async def _on_return_expected(self, message: Message) -> None:
        if (said := self.replica.read(ReturnExpected, message)) is not None:
            self.tell(events.ReturnHeard(_last_token(message), said))

    def _on_worker(self, change: Change, view: WorkerView) -> None:
        if not is_token(view.record.id):
            return  # no subject reaches it
        if change is Change.LEFT:
            self.tell(events.WorkerLeft(view.record.id))
        else:
            self.tell(events.WorkerRegistered(self._known_state(view), view.heartbeat))

    def _on_other_member(self, change: Change, record: MemberRecord) -> None:
        if record.role is not Role.VAULT or not is_token(record.id):
            return
        if change is Change.LEFT:
            self.core.leave_vault(record.id)
        elif change is not Change.UPDATED:
            self.core.join_vault(record.id, record.epoch)

    def _known_state(self, view: WorkerView) -> WorkerRecord:
        if view.state is view.record.state:  # the usual case; every worker renews its record each second
            return view.record
        return self.members.view.with_state(view.record.id) or view.record

    async def _on_disconnect(self, message: Message) -> None:
        if (worker := intake.read_disconnect(message.data)) is not None:
            self.tell(events.WorkerDisconnected(worker))

    async def _on_bookings(self, message: Message) -> None:
        if (batch := self.replica.read(BookedBatch, message)) is not None:
            self.tell(batch)


def _last_token(message: Message) -> str:
    return message.subject.rsplit(".", 1)[-1]
