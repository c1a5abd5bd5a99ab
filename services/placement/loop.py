"""Placement as a process sees it. READ THIS FIRST.

Owns the core, the subscriptions and the tasks: bytes are read into events (`io/intake`), the core turns an event into
actions (`core`), and these are carried out (`io/executor`). All of it happens on one event loop, so the core needs no
lock; no callback awaits anything but a publish.

    kvf.place.<tenant>.<model>      a Client or ingress asks  ──▶ a Placement, or one Failed frame     place_desk
    kvf.generate.<tenant>.<model>   a bare producer asks      ──▶ offered to a worker, and watched     producer_desk
    _plc.<id>.r.<request>.<attempt> workers answer offers, and report the end of what they accepted    producer_desk
    kvf.placement.capsules          a draining worker lets go of a producer's request  ──▶ offered     producer_desk
    kvf.placement.watches           a replica that goes hands on what it watched                       producer_desk
    kvf.placement.stats, explain    what this replica has seen, and why it decided as it did           question_desk
    kvf.placement.preload, victim   what a new worker should have, which one is the cheapest to lose   question_desk
    kvf.region...                   other regions                                                      region_desk
    members, events, milestones, bookings of other replicas: heard without asking                      subscriptions

The first byte after the version byte tells the two answers of `kvf.place` apart: a Placement is a map, frames are an
array. Replicas share the two request subjects, `capsules`, `watches`, `preload` and `victim` in a queue group.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from kvfleet.placement.config import PlacementConfig
from kvfleet.placement.core import PlacementCore
from kvfleet.placement.events import Tick
from kvfleet.placement.io.executor import Executor
from kvfleet.placement.io.place_desk import PlaceDesk
from kvfleet.placement.io.producer_desk import ProducerDesk
from kvfleet.placement.io.question_desk import QuestionDesk
from kvfleet.placement.io.region_desk import RegionDesk
from kvfleet.placement.io.replica import QUEUE, Replica, let_go
from kvfleet.placement.io.subscriptions import Subscriptions
from kvfleet.placement.record.decision_trace import DecisionTraces
from kvfleet.placement.record.ledger_file import LedgerFile
from kvfleet.placement.workers.prompts import HashedPrompts
from kvfleet.placement.workers.warm_up import warm_up
from kvproto.buckets import Bucket
from kvproto.connection import Connection, Subscription
from kvproto.members import Fenced, Lease, Members
from kvproto.messages import MemberRecord
from kvproto.subjects import Subjects
from kvproto.tasks import end
from kvservice import tracing
from kvservice.tracing import Tracer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PlacementParts:
    """`system` is a connection as the server's SYS user: it shows a killed worker in milliseconds instead of about two
    seconds."""

    ledger_file: LedgerFile | None = None  # of ended decisions
    system: Connection | None = None
    tracer: Tracer = tracing.NULL


class PlacementLoop(Replica):
    """`record` is this process's lease in the members bucket, `chance()` uniform in [0, 1). With the `fleet_key`
    prompts are hashed as workers do; without it they have no hashes. `on_fenced` is called if a later process takes
    this id over: then this one must end. Raises InvalidRequest for an unknown policy."""

    def __init__(
        self,
        connection: Connection,
        subjects: Subjects,
        record: MemberRecord,
        config: PlacementConfig = PlacementConfig(),
        *,
        chance: Callable[[], float],
        fleet_key: bytes | None = None,
        parts: PlacementParts = PlacementParts(),
        on_fenced: Callable[[Fenced], None] = lambda error: log.error("placement: %s", error),
    ) -> None:
        super().__init__(connection, subjects)
        self._record = record
        self._on_fenced = on_fenced
        self.core = PlacementCore(
            record.id,
            connection.inbox_prefix,
            chance,
            replace(config, region=subjects.region, keeps_hashes=parts.ledger_file is not None),
            prompts=HashedPrompts(fleet_key),
            unix_ms=lambda: int(time.time() * 1000),
        )
        members = Members(connection, subjects, on_heartbeat=lambda beat: self.executor.tell(beat))
        traces = DecisionTraces(parts.tracer, self.core.ledger)
        self.executor = Executor(self, self.core, members, traces, parts.ledger_file, fleet_key)
        self.subscriptions = Subscriptions(self, members, self.executor.tell, self.core, parts.system)
        self.desk = PlaceDesk(self, self.executor, traces, fleet_key or b"", config.max_producer_priority)
        self.producer_desk = ProducerDesk(self, self.executor, traces)
        self.question_desk = QuestionDesk(self, self.core)
        self.regions = RegionDesk(self, self.core, members)
        self._lease: Lease | None = None
        self._deciding: asyncio.Task[None] | None = None
        self._announcing: list[asyncio.Task[None]] = []
        self._asked: list[Subscription] = []  # what brings new work
        self._heard: list[Subscription] = []
        self._stopped = False

    async def start(self) -> None:
        """Returns when requests are answered. Raises Unavailable, or Fenced if this id is taken."""
        try:
            await self._start()
        except BaseException:
            await self.stop(grace_s=0)
            raise

    async def _start(self) -> None:
        await asyncio.to_thread(warm_up)  # seconds on a machine's first time: not in the first request
        subjects, producers, questions = self.subjects, self.producer_desk, self.question_desk
        self._heard.append(await self.listen(f"{self.answers}>", producers.on_answer))
        await self.subscriptions.start()
        self.executor.tell(Tick())
        self._deciding = asyncio.create_task(self.desk.run())
        self._deciding.add_done_callback(self.finished)
        # Not before that: an autoscaler would read the minimum out of it, and let workers go.
        self._heard.append(await self.listen(subjects.placement_stats(), questions.on_stats))
        self._heard.append(await self.listen(subjects.placement_explain(), questions.on_explain))
        asked = [
            (subjects.generate_all(), producers.on_generate),
            (subjects.placement_capsules(), producers.on_capsule),
            (subjects.placement_watches(), producers.on_watches),
            (subjects.placement_preload(), questions.on_preload),
            (subjects.placement_victim(), questions.on_victim),
        ]
        if subjects.region:
            self._heard.append(await self.listen(subjects.region_summaries(), self.regions.on_summary))
            asked.insert(0, (subjects.region_generate_all(), producers.on_generate_from_region))
        for subject, callback in asked:
            self._asked.append(await self.listen(subject, callback, QUEUE))
        await self.desk.start()
        await self.connection.synced()
        lease = Lease(await Bucket.open(self.connection, subjects.members_bucket), self._record)
        await lease.take()
        self._lease = lease
        self._announcing.append(self.spawn(lease.run(self._on_fenced)))
        if subjects.region:
            self._announcing.append(self.spawn(self.regions.run()))

    async def stop(self, grace_s: float = 3.0) -> None:
        """Finishes what was read and watches accepted requests for up to `grace_s`. The rest is handed on; producers
        hear of what neither a worker nor another replica has. Never raises."""
        if self._stopped:
            return
        await end(self._announcing)
        if self._announcing and self.subjects.region:
            await self.regions.leave()
        if self._lease is not None:
            await self._lease.release()
        await self.desk.stop()
        for asked in self._asked:
            await let_go(asked.drain())
        while self._deciding is not None and self.desk.waiting and not self._deciding.done():
            await asyncio.sleep(0)
        until = self.now() + grace_s
        while (len(self.core.in_flight) or self.executor.passing) and self.now() < until:
            await asyncio.sleep(0.02)
        self._stopped = True
        await self.executor.stop()
        for heard in self._heard:
            await let_go(heard.unsubscribe())
        await self.subscriptions.stop()
        await end([*self.tasks, *([self._deciding] if self._deciding is not None else [])])
