"""Placement as a process sees it. READ THIS FIRST.

Owns the core and the subscriptions, and decides nothing: bytes are read into events (`intake`), the core turns an event
into actions (`core`), and the actions are carried out (`courier`). All of it happens on one event loop, so the core
needs no lock; no callback awaits anything but a publish.

    kvf.place.<tenant>.<model>      a Client or ingress asks      ──▶ a Placement, or one Failed frame
    kvf.generate.<tenant>.<model>   a bare producer asks          ──▶ offered to a worker, watched to its end
    _plc.<id>.r.<request>.<attempt> workers answer offers, and report the end of what they accepted
    kvf.placement.stats             what this replica has seen
    kvf.placement.explain           why it decided as it did  ──▶ an Explanation; its last decisions ──▶ several
    kvf.placement.preload           what should a new worker have?      ──▶ a PreloadPlan
    kvf.placement.victim            who is the cheapest to lose?        ──▶ a VictimReport
    kvf.placement.capsules          a draining worker lets go of a producer's request  ──▶ offered to another one
    kvf.placement.watches           a replica that goes hands on what it watched
    kvf.region...                   other regions: see `region_desk`
    kvf.placement.bookings          what it placed, for the other replicas to count it too
    members, events, milestones...  see `hearing`

The first byte after the version byte tells the two answers of `kvf.place` apart: a Placement is a map, frames are an
array. Replicas share the two request subjects, `capsules`, `watches`, `preload` and `victim` in a queue group.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import replace
from typing import Any

from kvfleet.placement.actions import Action, Fail
from kvfleet.placement.advice.autoscale import Rules
from kvfleet.placement.core import PlacementCore
from kvfleet.placement.decide.region_summaries import SPILL_S, RegionSummaries
from kvfleet.placement.events import (
    Event,
    ExplainAsked,
    GenerateAsked,
    NobodyListens,
    PlaceAsked,
    Tick,
    WorkerAnswered,
)
from kvfleet.placement.index.kv_indexer import KvIndexer
from kvfleet.placement.io import intake
from kvfleet.placement.io.executor import INBOX_HEADER, TAKEN, Executor
from kvfleet.placement.io.long_questions import LongQuestions
from kvfleet.placement.io.place_desk import PlaceDesk, say_placed
from kvfleet.placement.io.region_desk import RegionDesk
from kvfleet.placement.io.stall_timer import StallTimer
from kvfleet.placement.io.subscriptions import Subscriptions
from kvfleet.placement.policies import DEFAULT_POLICY
from kvfleet.placement.record.decision_trace import DecisionTraces
from kvfleet.placement.record.ledger_file import LedgerFile
from kvfleet.placement.workers.bookings import PhantomLimits
from kvfleet.placement.workers.prompts import HashedPrompts
from kvfleet.placement.workers.warm_up import warm_up
from kvproto import codec
from kvproto.buckets import Bucket
from kvproto.connection import Connection
from kvproto.errors import CodecError, InvalidRequest, Unavailable
from kvproto.ids import new_request_id
from kvproto.members import Fenced, Lease, Members
from kvproto.messages import ExplainRequest, MemberRecord
from kvproto.nats_message import Message, Subscription, is_json, is_no_responders
from kvproto.subjects import Subjects, is_inbox, request_inboxes
from kvproto.tasks import end
from kvservice import tracing
from kvservice.tracing import Tracer

log = logging.getLogger(__name__)

QUEUE = "placement"
REFUSED = b"refused"
BACK_S = 0.8  # after a reconnect: what the others say is on its way by then
MAX_WAIT_S = 60.0


class PlacementLoop:
    """One placement replica on one connection. `start`, then `stop`; owns everything it subscribes and spawns.

    `record` is this process's lease in the members bucket, `chance()` uniform in [0, 1). With the `fleet_key` prompts
    are hashed as workers do; without it nobody knows who holds what. `ledger_file` takes ended decisions. `system` is
    a connection as the server's SYS user: with it a killed worker is noticed in milliseconds, without it in about two
    seconds. `max_wait_s` is the patience of producers that state no deadline, `max_producer_priority` the highest they
    can have, `phantoms` how much of a tenant counts that no worker has accepted. `rules`, `models` and `by_ordinal` are
    the autoscaler's. `on_fenced` is called if a later process takes this id over: then this one must end. Raises
    InvalidRequest for an unknown policy.
    """

    def __init__(
        self,
        connection: Connection,
        subjects: Subjects,
        record: MemberRecord,
        *,
        chance: Callable[[], float],
        fleet_key: bytes | None = None,
        policy: str = DEFAULT_POLICY,
        indexer: KvIndexer | None = None,
        ledger_file: LedgerFile | None = None,
        system: Connection | None = None,
        max_wait_s: float | None = MAX_WAIT_S,
        max_producer_priority: int = 0,
        phantoms: PhantomLimits = PhantomLimits(),
        spill_s: float = SPILL_S,
        rules: Rules | None = None,
        models: Iterable[str] = (),
        by_ordinal: bool = False,
        on_fenced: Callable[[Fenced], None] = lambda error: log.error("placement: %s", error),
        tracer: Tracer = tracing.NULL,
    ) -> None:
        self.inbox_prefix = connection.inbox_prefix
        self.core = PlacementCore(
            record.id,
            self.inbox_prefix,
            chance,
            prompts=HashedPrompts(fleet_key),
            unix_ms=lambda: int(time.time() * 1000),
            policy=policy,
            indexer=indexer,
            keeps_hashes=ledger_file is not None,
            max_wait_s=max_wait_s,
            max_producer_priority=max_producer_priority,
            phantoms=phantoms,
            region_summaries=RegionSummaries(subjects.region, spill_s),
            rules=rules,
            models=models,
            by_ordinal=by_ordinal,
        )
        self.subscriptions = Subscriptions(connection, subjects, self.inbox_prefix, self._tell, self._guarded, system)
        self.long_questions = LongQuestions(connection, self.core, self._spawn)
        self.refused_total = 0  # refused, or dropped, because the bytes or a field were wrong
        self.ignored_total = 0  # without an inbox to answer to
        self.internal_errors_total = 0
        self._unsent_total = 0  # of answers that need no decision
        self.regions = RegionDesk(
            record.id, connection, subjects, self.core, self.subscriptions.members, self._tell, fleet_key
        )
        self.executor = Executor(
            record.id,
            connection,
            subjects,
            self.subscriptions,
            self._handle,
            self._spawn,
            ledger_file,
            self.regions.with_addresses,
        )
        self.traces = DecisionTraces(tracer, self.core.ledger)
        self.executor.offered = self.traces.offered
        self.desk = PlaceDesk(
            self._decide, self.executor.carry_out, self._guarded, self._spawn, fleet_key or b"", max_producer_priority
        )
        self._connection = connection
        self._subjects = subjects
        self._record = record
        self._on_fenced = on_fenced
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
    def members(self) -> Members:
        return self.subscriptions.members

    @property
    def unsent_total(self) -> int:
        """What NATS did not take from us."""
        return self._unsent_total + self.executor.unsent_total

    @property
    def malformed_total(self) -> int:
        """Messages refused, or dropped, because the bytes or a field were wrong."""
        others = self.subscriptions.malformed_total + self.desk.refused_total + self.long_questions.refused_total
        return self.refused_total + others

    @property
    def decisions_total(self) -> int:
        return self.core.decider.decisions_total

    @property
    def no_worker_total(self) -> int:
        return self.core.decider.no_worker_total

    @property
    def forwarded_total(self) -> int:
        """Requests of bare producers that a worker accepted."""
        return self.core.forwarding.forwarded_total

    @property
    def producer_failures_total(self) -> int:
        """Terminal failures sent to bare producers."""
        return self.core.forwarding.producer_failures_total

    @property
    def booked(self) -> int:
        return len(self.core.bookings)

    @property
    def in_flight(self) -> int:
        """Requests of bare producers, offered or watched."""
        return self.core.forwarding.in_flight

    @property
    def tasks(self) -> int:
        """Tasks of its own, for leak tests."""
        return len(self._tasks)

    # ------------------------------------------------------------------ a bare producer asks for tokens

    async def _on_generate(self, message: Message) -> None:
        if not intake.is_inbox(message.reply, of_producer=True, tenant=intake.tenant_in(message.subject)):
            self.ignored_total += 1
            return
        read = self._read_generate(message, message.reply)
        if isinstance(read, Fail):
            self.refused_total += 1
            await self.executor.carry_out([read])
            return
        actions = self.traces.forward(read, message.headers, self._handle)
        if log.isEnabledFor(logging.DEBUG):
            say_placed(read.request, actions)
        await self.executor.carry_out(actions)

    def _read_generate(self, message: Message, inbox: str) -> GenerateAsked | Fail:
        return intake.read_generate(
            message.subject,
            inbox,
            message.data,
            as_json=is_json(message),
            new_request=new_request_id(),
            new_seed=int.from_bytes(os.urandom(8), "little"),
            unix_ms=int(time.time() * 1000),
        )

    async def _on_generate_abroad(self, message: Message) -> None:
        """Another region passes a producer's request on. What would be refused here at once is left to that one."""
        inbox = (message.headers or {}).get(INBOX_HEADER, "")
        tenant = intake.tenant_in(message.subject)
        if not intake.is_inbox(inbox, of_producer=True, tenant=tenant) or not is_inbox(message.reply):
            self.ignored_total += 1
            return
        read = self._read_generate(message, inbox)
        actions = (
            [read]
            if isinstance(read, Fail)
            else self.traces.forward(replace(read, abroad=True), message.headers, self._handle)
        )
        refused = any(isinstance(action, Fail) and action.inbox == inbox for action in actions)
        await self._connection.publish(message.reply, REFUSED if refused else TAKEN)
        await self.executor.carry_out(
            action for action in actions if not (isinstance(action, Fail) and action.inbox == inbox)
        )

    # ------------------------------------------------------------------ workers answer

    async def _on_answer(self, message: Message) -> None:
        own = request_inboxes(self.inbox_prefix).rstrip(">")
        key, _, attempt = message.subject.removeprefix(own).partition(".")
        if is_no_responders(message):
            if _is_attempt(attempt):
                await self.executor.carry_out(self._handle(NobodyListens(key, int(attempt))))
            return
        try:
            frames = intake.read_answer(message.data)
        except CodecError as error:
            self.refused_total += 1
            about = {"request": key.partition("~")[0]}
            log.warning("placement: an answer for request %s is unreadable: %s", key, error, extra=about)
            return
        for frame in frames:
            if frame.request == key.partition("~")[0]:
                await self.executor.carry_out(self._handle(WorkerAnswered(frame, key)))

    # ------------------------------------------------------------------ what others let go of

    async def _on_capsule(self, message: Message) -> None:
        await self._take_over(message, lambda: intake.read_capsule(message.reply, message.data))

    async def _on_watches(self, message: Message) -> None:
        await self._take_over(message, lambda: intake.read_watches(message.reply, message.data))

    async def _take_over(self, message: Message, read: Callable[[], Event]) -> None:
        try:
            event = read()
        except InvalidRequest as error:
            self.refused_total += 1
            log.warning("placement: a message on %s is refused: %s", message.subject, error)
            return
        await self.executor.carry_out(self._handle(event))

    # ------------------------------------------------------------------ what the core decides

    def _decide(self, asked: PlaceAsked, headers: dict[str, str] | None) -> list[Action]:
        return self._handle(asked) if headers is None else self.traces.place(asked, headers, self._handle)

    def _handle(self, event: Event) -> list[Action]:
        if self._stopped:
            return []
        actions = self.core.handle(event, self._now())
        self._stall_timer.set(self.core.wake_at())
        return actions

    def _tell(self, event: Event) -> None:
        self._do_soon(self._handle(event))

    # ------------------------------------------------------------------ who wants to know

    async def _on_explain(self, message: Message) -> None:
        if not intake.is_inbox(message.reply):
            self.ignored_total += 1
            return
        try:
            ask = codec.decode(ExplainRequest, message.data)
        except CodecError as error:
            self.refused_total += 1
            log.debug("placement: a question about a request is unreadable: %s", error)
            return
        if ask.newest:
            self.long_questions.on_newest(ask, message.reply)
            return
        await self.executor.carry_out(self._handle(ExplainAsked(message.reply, ask.request, ask.tenant)))

    async def _on_stats(self, message: Message) -> None:
        if not intake.is_inbox(message.reply):
            self.ignored_total += 1
            return
        await self._connection.publish(message.reply, codec.encode(self.core.stats()))

    # ------------------------------------------------------------------ time passes

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _tick(self) -> None:
        connection = self._connection
        self._tell(Tick(deaf=connection.is_silent or not connection.is_settled(BACK_S)))

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
        self._heard.append(await subscribe(request_inboxes(self.inbox_prefix), self._guarded(self._on_answer)))
        await self.subscriptions.start()
        self._tell(Tick())
        self._deciding = asyncio.create_task(self.desk.run())
        self._deciding.add_done_callback(self._finished)
        # Not before that: an autoscaler would read the minimum out of it, and let workers go.
        self._heard.append(await subscribe(subjects.placement_stats(), self._guarded(self._on_stats)))
        self._heard.append(await subscribe(subjects.placement_explain(), self._guarded(self._on_explain)))
        abroad: tuple[tuple[str, Callable[[Message], Awaitable[None]]], ...] = ()
        if subjects.region:
            self._heard += await self.regions.start(self._guarded)
            abroad = ((subjects.region_generate_all(), self._on_generate_abroad),)
        for subject, callback in (
            *abroad,
            (subjects.generate_all(), self._on_generate),
            (subjects.placement_capsules(), self._on_capsule),
            (subjects.placement_watches(), self._on_watches),
            (subjects.placement_preload(), self.long_questions.on_preload),
            (subjects.placement_victim(), self.long_questions.on_victim),
        ):
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
            asked.append((subjects.region_place_all(), self.desk.on_place_abroad))
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
        while (self.in_flight or self.executor.passing) and self._now() < until:
            await asyncio.sleep(0.02)
        self._stopped = True  # what comes from here on is for the replicas that go on
        forwarding = self.core.forwarding
        await self.executor.carry_out(forwarding.leave(self._now()))
        await self.executor.hand_on(forwarding.watching.watches())
        self._stall_timer.stop()
        for heard in self._heard:
            await _quietly(heard.unsubscribe(), 1.0)
        await self.subscriptions.stop()
        await end([*self._tasks, *([self._deciding] if self._deciding is not None else [])])

    # ------------------------------------------------------------------ tasks

    def _do_soon(self, actions: list[Action]) -> None:
        if actions:
            self._spawn(self.executor.carry_out(actions))

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


def _is_attempt(token: str) -> bool:
    return token.isascii() and token.isdecimal() and len(token) < 10
