"""Placement as a process sees it. READ THIS FIRST.

Owns the core, the subscriptions and the tasks, and decides nothing: bytes are read into events (`io/intake`), the core
turns an event into actions (`core`), and the actions are carried out (`io/executor`). All of it happens on one event
loop, so the core needs no lock; no callback awaits anything but a publish.

    kvf.place.<tenant>.<model>      a Client or ingress asks  ──▶ a Placement, or one Failed frame     place_desk
    kvf.generate.<tenant>.<model>   a bare producer asks      ──▶ offered to a worker, and watched     producer_desk
    _plc.<id>.r.<request>.<attempt> workers answer offers, and report the end of what they accepted    producer_desk
    kvf.placement.capsules          a draining worker lets go of a producer's request  ──▶ offered     producer_desk
    kvf.placement.watches           a replica that goes hands on what it watched                       producer_desk
    kvf.placement.stats, explain    what this replica has seen, and why it decided as it did           question_desk
    kvf.placement.preload, victim   what a new worker should have, and who is the cheapest to lose     question_desk
    kvf.region...                   other regions                                                      region_desk
    members, events, milestones, bookings of other replicas: heard without asking                      subscriptions

The first byte after the version byte tells the two answers of `kvf.place` apart: a Placement is a map, frames are an
array. Replicas share the two request subjects, `capsules`, `watches`, `preload` and `victim` in a queue group.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from kvfleet.placement.actions import Action
from kvfleet.placement.config import PlacementConfig
from kvfleet.placement.core import PlacementCore
from kvfleet.placement.events import Event, PlaceAsked, Tick
from kvfleet.placement.io.executor import Executor
from kvfleet.placement.io.place_desk import PlaceDesk
from kvfleet.placement.io.producer_desk import ProducerDesk
from kvfleet.placement.io.question_desk import QuestionDesk
from kvfleet.placement.io.region_desk import RegionDesk
from kvfleet.placement.io.stall_timer import StallTimer
from kvfleet.placement.io.subscriptions import Subscriptions
from kvfleet.placement.record.decision_trace import DecisionTraces
from kvfleet.placement.record.ledger_file import LedgerFile
from kvfleet.placement.workers.prompts import HashedPrompts
from kvfleet.placement.workers.warm_up import warm_up
from kvproto.buckets import Bucket
from kvproto.connection import Connection
from kvproto.errors import Unavailable
from kvproto.members import Fenced, Lease
from kvproto.messages import MemberRecord
from kvproto.nats_message import Message, Subscription
from kvproto.subjects import Subjects, request_inboxes
from kvproto.tasks import end
from kvservice import tracing
from kvservice.tracing import Tracer

log = logging.getLogger(__name__)

QUEUE = "placement"
BACK_S = 0.8  # after a reconnect: what the others say is on its way by then


@dataclass(frozen=True, slots=True)
class PlacementParts:
    """What a process may give a replica besides its connection. `ledger_file` takes ended decisions. `system` is a
    connection as the server's SYS user: with it a killed worker is noticed in milliseconds, without it in about two
    seconds."""

    ledger_file: LedgerFile | None = None
    system: Connection | None = None
    tracer: Tracer = tracing.NULL


class PlacementLoop:
    """One placement replica on one connection. `start`, then `stop`; owns everything it subscribes and spawns.

    `record` is this process's lease in the members bucket, `chance()` uniform in [0, 1). With the `fleet_key` prompts
    are hashed as workers do; without it nobody knows who holds what. `on_fenced` is called if a later process takes
    this id over: then this one must end. Raises InvalidRequest for an unknown policy.
    """

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
        self.inbox_prefix = connection.inbox_prefix
        self.internal_errors_total = 0
        self._unsent_total = 0  # of answers that need no decision
        self._connection = connection
        self._subjects = subjects
        self._record = record
        self._on_fenced = on_fenced
        self.core = PlacementCore(
            record.id,
            self.inbox_prefix,
            chance,
            replace(config, region=subjects.region, keeps_hashes=parts.ledger_file is not None),
            prompts=HashedPrompts(fleet_key),
            unix_ms=lambda: int(time.time() * 1000),
        )
        guard = self._guarded
        self.subscriptions = Subscriptions(
            connection, subjects, self.inbox_prefix, self._tell, self.core.indexer, guard, parts.system
        )
        members = self.subscriptions.members
        self.regions = RegionDesk(record.id, connection, subjects, self.core, members, fleet_key)
        self.executor = Executor(
            record.id,
            connection,
            subjects,
            self.subscriptions,
            self._handle,
            self._spawn,
            parts.ledger_file,
            self.regions.with_addresses,
        )
        self.traces = DecisionTraces(parts.tracer, self.core.ledger)
        self.executor.offered = self.traces.offered
        priority = config.max_producer_priority
        self.desk = PlaceDesk(self._decide, self.executor.carry_out, guard, self._spawn, fleet_key or b"", priority)
        self.producer_desk = ProducerDesk(connection, self._handle, self.executor, self.traces)
        self.question_desk = QuestionDesk(connection, self.core, self._spawn)
        self._lease: Lease | None = None
        self._renewing: asyncio.Task[None] | None = None
        self._telling: asyncio.Task[None] | None = None
        self._deciding: asyncio.Task[None] | None = None
        self._asked: list[Subscription] = []  # what brings new work
        self._heard: list[Subscription] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._stall_timer = StallTimer(self._tick)
        self._stopped = False

    # ------------------------------------------------------------------ what can be seen from outside

    @property
    def unsent_total(self) -> int:
        """What NATS did not take from us."""
        return self._unsent_total + self.executor.unsent_total + self.question_desk.unsent_total

    @property
    def malformed_total(self) -> int:
        """Messages refused, or dropped, because the bytes or a field were wrong."""
        desks = (self.desk, self.producer_desk, self.question_desk)
        return self.subscriptions.malformed_total + sum(one.refused_total for one in desks)

    @property
    def tasks(self) -> int:
        """Tasks of its own, for leak tests."""
        return len(self._tasks)

    # ------------------------------------------------------------------ what the core decides

    def _decide(self, asked: PlaceAsked, headers: dict[str, str] | None) -> list[Action]:
        return self._handle(asked) if headers is None else self.traces.place(asked, headers, self._handle)

    def _handle(self, event: Event) -> list[Action]:
        if self._stopped:
            return []
        actions = self.core.handle(event, self._now())
        self._stall_timer.set(self.core.in_flight.due())
        return actions

    def _tell(self, event: Event) -> None:
        if actions := self._handle(event):
            self._spawn(self.executor.carry_out(actions))

    # ------------------------------------------------------------------ time passes

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _tick(self) -> None:
        connection = self._connection
        self._tell(Tick(disconnected=connection.is_silent or not connection.is_settled(BACK_S)))

    # ------------------------------------------------------------------ start and stop

    async def start(self) -> None:
        """Returns when requests are answered. Raises Unavailable, or Fenced if this id is taken."""
        try:
            await self._start()
        except BaseException:
            await self.stop(grace_s=0)
            raise

    async def _start(self) -> None:
        await asyncio.to_thread(warm_up)  # seconds on a machine's first time: not in the first request
        subscribe, subjects = self._connection.subscribe, self._subjects
        producers, questions = self.producer_desk, self.question_desk
        self._heard.append(await subscribe(request_inboxes(self.inbox_prefix), self._guarded(producers.on_answer)))
        await self.subscriptions.start()
        self._tell(Tick())
        self._deciding = asyncio.create_task(self.desk.run())
        self._deciding.add_done_callback(self._finished)
        # Not before that: an autoscaler would read the minimum out of it, and let workers go.
        self._heard.append(await subscribe(subjects.placement_stats(), self._guarded(questions.on_stats)))
        self._heard.append(await subscribe(subjects.placement_explain(), self._guarded(questions.on_explain)))
        asked = [
            (subjects.generate_all(), producers.on_generate),
            (subjects.placement_capsules(), producers.on_capsule),
            (subjects.placement_watches(), producers.on_watches),
            (subjects.placement_preload(), questions.on_preload),
            (subjects.placement_victim(), questions.on_victim),
        ]
        if subjects.region:
            summaries = self._guarded(self.regions.on_summary)
            self._heard.append(await subscribe(subjects.region_summaries(), summaries))
            asked.insert(0, (subjects.region_generate_all(), producers.on_generate_from_region))
        for subject, callback in asked:
            self._asked.append(await subscribe(subject, self._guarded(callback), queue=QUEUE))
        await self.desk.start(self._listen_to_clients)
        await self._connection.synced()
        lease = Lease(await Bucket.open(self._connection, subjects.members_bucket), self._record)
        await lease.renew()
        self._lease = lease
        self._renewing = self._spawn(lease.run(self._on_fenced))
        if subjects.region:
            self._telling = self._spawn(self.regions.run())

    async def _listen_to_clients(self) -> list[Subscription]:
        subscribe, subjects = self._connection.subscribe, self._subjects
        asked = [(subjects.place_all(), self.desk.on_place)]
        if subjects.region:
            asked.append((subjects.region_place_all(), partial(self.desk.on_place, from_other_region=True)))
        return [await subscribe(subject, self._guarded(callback), queue=QUEUE) for subject, callback in asked]

    async def stop(self, grace_s: float = 3.0) -> None:
        """Take no more work, finish what was read, and watch accepted requests for up to `grace_s`; what is left is
        handed on, and producers hear of what neither a worker nor another replica has. Never raises."""
        if self._stopped:
            return
        if self._renewing is not None:
            await end([self._renewing])
        if self._telling is not None:
            await end([self._telling])
            await self.regions.leave()
        if self._lease is not None:
            await self._lease.release()
        await self.desk.stop()
        for asked in self._asked:
            await _quietly(asked.drain(), 1.0)
        while self._deciding is not None and self.desk.waiting and not self._deciding.done():
            await asyncio.sleep(0)
        until = self._now() + grace_s
        while (len(self.core.in_flight) or self.executor.passing) and self._now() < until:
            await asyncio.sleep(0.02)
        self._stopped = True  # what comes from here on is for the replicas that go on
        await self.executor.carry_out(self.core.forwarding.leave(self._now()))
        await self.executor.hand_on(self.core.in_flight.watches())
        self._stall_timer.stop()
        for heard in self._heard:
            await _quietly(heard.unsubscribe(), 1.0)
        await self.subscriptions.stop()
        await end([*self._tasks, *([self._deciding] if self._deciding is not None else [])])

    # ------------------------------------------------------------------ tasks

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.internal_errors_total += 1
            log.error("placement: a task failed", exc_info=error)

    def _guarded(self, callback: Callable[[Message], Awaitable[None]]) -> Callable[[Message], Awaitable[None]]:
        """The top of every callback: a fault of ours costs one message, never the subscription."""

        async def run(message: Message) -> None:
            try:
                await callback(message)
            except Unavailable as error:
                self._unsent_total += 1
                log.warning("placement: an answer to %s was not sent: %s", message.subject, error)
            except Exception:  # a callback's top: counted, logged, and the next message is read
                self.internal_errors_total += 1
                log.exception("placement: a message on %s was not handled", message.subject)

        return run


async def _quietly(work: Coroutine[Any, Any, None], timeout_s: float) -> None:
    try:
        await asyncio.wait_for(work, timeout_s)
    except Exception as error:  # the connection may be gone; stopping goes on
        log.debug("placement: while stopping: %r", error, exc_info=True)
