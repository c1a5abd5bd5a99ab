"""READ THIS FIRST: a vault's life, and what it tells the fleet.

    connection threads ──get, has, reserve, commit, erase──▶ VaultStores ◀──next_spill, spilled── disk threads
                                                                 │ take_changes, holdings           (if any)
                                                                 ▼
                                  event loop: members record · events · snapshots · heartbeats

Blocks move on threads of the data plane (`kvproto.dataplane.server`, one for each connection). The event loop never
touches bytes: it owns the lease, the event log and the subscriptions. The store keeps changes in order and wakes the
loop, which makes an event of them, at most every 50 ms.

A snapshot is complete up to an event: the changes so far and all that is held are taken together under the store's
lock, the changes become events first, and the snapshot names the last of them. Hybrid models' states are in a store of
their own; the fleet is told behind which blocks they stand.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from kvfleet.vault.store.block_table import BLOCKS_PER_EVENT, StoredChange, net, state_events, tier_events
from kvfleet.vault.store.store import VaultStore
from kvproto import codec
from kvproto.connection import Connection, Message, Subscription
from kvproto.dataplane.server import DataPlaneServer
from kvproto.errors import CodecError, KvfleetError, Unavailable
from kvproto.members import Lease
from kvproto.messages import Heartbeat, Load, MemberRecord, SnapshotRequest, State, Tier, TierLoad
from kvproto.subjects import Subjects, is_inbox
from kvproto.tasks import VitalTasks, end
from kvservice.event_log import IDLE_PERIOD_S, EventLog

log = logging.getLogger(__name__)

HEARTBEAT_PERIOD_S = 0.5
TOLD_FAILURES = ("not_genuine", "malformed", "too_large", "no_room", "wrong_root", "unreadable")
CLOSE_S = 3.0  # for connections to end


@dataclass(eq=False)
class VaultLoop:
    """Owned by the process's event loop. `start`, then `stop`. `on_fatal` is called when this process must end."""

    connection: Connection
    subjects: Subjects
    lease: Lease
    store: VaultStore
    server: DataPlaneServer
    on_fatal: Callable[[str], None]
    reachable: Callable[[Sequence[str]], tuple[str, ...]] = tuple
    states: VaultStore | None = None  # of hybrid models
    snapshots_total: int = 0
    malformed_total: int = 0
    unsent_total: int = 0  # messages NATS did not take
    _state: State = State.READY
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _telling: asyncio.Lock = field(default_factory=asyncio.Lock)  # events leave in the order of their numbers
    _subscription: Subscription | None = None

    def __post_init__(self) -> None:
        assert isinstance(self.lease.record, MemberRecord)
        self.record = self.lease.record
        self.log = EventLog(self.record.epoch)
        self._tasks = VitalTasks(self.on_fatal)

    async def start(self) -> None:
        """Listen, subscribe, register, beat. Raises Fenced if a later process has this id, Unavailable."""
        self.server.start()
        self.record = replace(self.record, data_plane=self.reachable(self.server.addresses))
        loop = asyncio.get_running_loop()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._changed.set)

        for store in self._stores:
            store.table.on_change = wake
        self._changed.set()  # for blocks of the disk
        blocks = self.subjects.blocks(self.record.id)
        self._subscription = await self.connection.subscribe(blocks, self._on_snapshot)
        await self.connection.synced()
        self.lease.record = self.record
        await self.lease.take()
        self._tasks.spawn(self.lease.run(lambda error: self.on_fatal(str(error))), "lease")
        self._tasks.spawn(self._tell(), "events")
        self._tasks.spawn(self._beat(), "heartbeat")

    async def stop(self) -> None:
        self._state = State.DRAINING
        await self._publish_heartbeat()
        try:
            await asyncio.wait_for(self.lease.set(replace(self.record, state=State.DRAINING)), 1.0)
        except (KvfleetError, TimeoutError) as error:
            log.warning("the record does not say draining: %s", error)
        await self.close_data_plane()
        tasks = list(self._tasks.running)
        for task in tasks:
            task.cancel()
        await self.lease.release()
        if self._subscription is not None:
            try:
                await asyncio.wait_for(self._subscription.unsubscribe(), 1.0)
            except Exception as error:  # noqa: BLE001 - the connection may be gone: nothing to let go of then
                log.debug("unsubscribe: %r", error)
        await end(tasks)

    async def close_data_plane(self) -> None:
        """May be called again."""
        await asyncio.get_running_loop().run_in_executor(None, self.server.close, CLOSE_S)

    async def _tell(self) -> None:
        """The first change leaves at once, those of the next 50 ms together."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            async with self._telling:
                for store in self._stores:
                    await self._publish_changes(store, store.take_changes())
            await asyncio.sleep(IDLE_PERIOD_S)

    async def _publish_changes(self, store: VaultStore, changes: Sequence[StoredChange]) -> None:
        """Numbers move on whether NATS takes an event or not: a reader that misses one sees the gap."""
        events, different = [], net(changes)
        events_of = state_events if store is self.states else tier_events
        for start in range(0, len(different), BLOCKS_PER_EVENT):
            self.log.note(events_of(different[start : start + BLOCKS_PER_EVENT]))
            event = self.log.flush(asyncio.get_running_loop().time())
            if event is not None:
                events.append(codec.encode_events(event))
        for data in events:
            await self._publish(self.subjects.events(self.record.id), data)

    async def _on_snapshot(self, message: Message) -> None:
        if not is_inbox(message.reply):
            return
        try:
            asked = codec.decode(SnapshotRequest, message.data).tier
        except CodecError as error:
            self.malformed_total += 1
            log.debug("snapshot: %s", error)
            return
        self._tasks.spawn(self._snapshot(message.reply, asked), "snapshot")

    async def _snapshot(self, reply: str, asked: Tier | None) -> None:
        async with self._telling:
            held = {}
            for store in self._stores:
                changes, headers = store.holdings()
                await self._publish_changes(store, changes)
                if store is not self.states:
                    held[Tier.VAULT] = [header.hash for header in headers]
                elif headers:  # who reads of no states takes it that there are none
                    held[Tier.STATE] = [header.parent for header in headers]
            parts = self.log.snapshot(held, self.log.digest, asked)
        self.snapshots_total += 1
        for part in parts:
            await self._publish(reply, codec.encode(part))

    async def _publish(self, subject: str, data: bytes) -> None:
        try:
            await self.connection.publish(subject, data)
        except Unavailable as error:
            self.unsent_total += 1
            log.debug("not sent: %s", error)

    async def _beat(self) -> None:
        while True:
            await self._publish_heartbeat()
            await asyncio.sleep(HEARTBEAT_PERIOD_S)

    async def _publish_heartbeat(self) -> None:
        if self.connection.is_connected:
            await self._publish(self.subjects.heartbeat(self.record.id), codec.encode(self.heartbeat()))

    @property
    def _stores(self) -> list[VaultStore]:
        return [self.store] if self.states is None else [self.store, self.states]

    def heartbeat(self) -> Heartbeat:
        return Heartbeat(
            worker=self.record.id,
            epoch=self.record.epoch,
            state=self._state,
            load=Load(tiers=self._loads()),
            event_seq=self.log.seq,
            digest=self.log.plain_digest,
            held=self.store.table.held_blocks,
            tier_digest=self.log.digest,
        )

    def _loads(self) -> dict[str, TierLoad]:
        blocks = _load(self.store)
        failures = blocks.failures_total | {"checksum": self.server.counters.checksum_failures}
        loads = {Tier.VAULT.value: replace(blocks, failures_total={why: n for why, n in failures.items() if n})}
        if self.states is not None and self.states.counters.stored_total + self.states.table.held_blocks:
            loads[Tier.STATE.value] = _load(self.states)
        return loads


def _load(store: VaultStore) -> TierLoad:
    table, counters = store.table, store.counters
    failures = {reason: counters.refused.get(reason, 0) + counters.misses.get(reason, 0) for reason in TOLD_FAILURES}
    failures["damaged"] = counters.damaged_total
    return TierLoad(
        blocks=table.held_blocks,
        bytes_used=table.memory.used_bytes,
        bytes_total=table.memory.max_bytes,
        restores_total=counters.hits_total,
        restored_bytes_total=counters.hit_bytes_total,
        offloaded_blocks_total=counters.stored_total,
        evictions_total=counters.evictions_total,
        failures_total={reason: count for reason, count in failures.items() if count},
    )
