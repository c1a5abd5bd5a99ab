"""Placement as a process sees it. READ THIS FIRST.

Owns the core and the subscriptions, and decides nothing: bytes are read into events (`intake`), the core turns an event
into actions (`core`), and the actions are carried out here. All of it happens on one event loop, so the core needs no
lock; no callback awaits anything but a publish.

    kvf.place.<tenant>.<model>      a Client or ingress asks      ──▶ a Placement, or one Failed frame
    kvf.generate.<tenant>.<model>   a bare producer asks          ──▶ offered to a worker, watched to its end
    _plc.<id>.r.<request>.<attempt> workers answer offers, and report the end of what they accepted
    kvf.placement.stats             what this replica has seen
    kvf.placement.explain           why it decided as it did  ──▶ an Explanation
    kvf.placement.preload           what should a new worker have?      ──▶ a PreloadPlan
    kvf.placement.victim            who is the cheapest to lose?        ──▶ a VictimReport
    kvf.placement.bookings          what it placed, for the other replicas to count it too
    members, events, milestones...  see `hearing`

The first byte after the version byte tells the two answers of `kvf.place` apart: a Placement is a map, frames are an
array. Replicas share the two request subjects, `preload` and `victim` in a queue group.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any

from kvproto import codec
from kvproto.buckets import Bucket
from kvproto.connection import Connection, Message, Subscription, is_json, is_no_responders
from kvproto.errors import CodecError, KvfleetError, PayloadTooLarge, Unavailable, VersionMismatch
from kvproto.ids import new_request_id
from kvproto.members import Fenced, Lease, Members
from kvproto.messages import (
    Booked,
    BookedBatch,
    Encoding,
    ExplainRequest,
    Explanation,
    Failed,
    GenerateRequest,
    MemberRecord,
    Role,
)
from kvproto.subjects import PLACEMENT_INBOX, Subjects, inbox_prefix, request_inboxes
from kvproto.tasks import end
from services.placement import intake
from services.placement.actions import (
    Action,
    Answer,
    AskStillRunning,
    Cancel,
    DropMember,
    Explain,
    Fail,
    Forward,
    PingWorker,
    Record,
    Share,
    failed_frame,
)
from services.placement.alarm import Alarm
from services.placement.core import PlacementCore
from services.placement.events import (
    Event,
    ExplainAsked,
    NobodyListens,
    PingUnanswered,
    Tick,
    WorkerAnswered,
)
from services.placement.hearing import Hearing
from services.placement.index.kv_indexer import KvIndexer, PullSnapshot
from services.placement.ledger_file import LedgerFile
from services.placement.long_questions import LongQuestions
from services.placement.pinger import Pinger, Verdict
from services.placement.policies import DEFAULT_POLICY
from services.placement.prompts import HashedPrompts
from services.placement.warm_up import warm_up

log = logging.getLogger(__name__)

QUEUE = "placement"
MAX_SHARED = 4096
SHARE_S = 0.002  # bookings of so long go to the other replicas in one message


class PlacementLoop:
    """One placement replica on one connection. `start`, then `stop`; owns everything it subscribes and spawns.

    `record` is this process's lease in the members bucket, `chance()` uniform in [0, 1). With the `fleet_key` prompts
    are hashed as workers do; without it nobody knows who holds what. `ledger_file` takes ended decisions. `system` is
    a connection as the server's SYS user: with it a killed worker is noticed in milliseconds, without it in about two
    seconds. `on_fenced` is called if a later process takes this id over: then this one must end. Raises InvalidRequest
    for an unknown policy.
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
        on_fenced: Callable[[Fenced], None] = lambda error: log.error("placement: %s", error),
    ) -> None:
        self.inbox_prefix = inbox_prefix(PLACEMENT_INBOX, record.id)
        self.core = PlacementCore(
            record.id,
            self.inbox_prefix,
            chance,
            prompts=HashedPrompts(fleet_key),
            unix_ms=lambda: int(time.time() * 1000),
            policy=policy,
            indexer=indexer,
            keeps_hashes=ledger_file is not None,
        )
        self.hearing = Hearing(connection, subjects, self.inbox_prefix, self._tell, self._guarded, system)
        self.long_questions = LongQuestions(connection, self.core)
        self.refused_total = 0  # refused, or dropped, because the bytes or a field were wrong
        self.ignored_total = 0  # requests without an inbox to answer to
        self.unsent_total = 0  # what NATS did not take from us
        self.internal_errors_total = 0
        self.decision_seconds_total = 0.0  # own time of `decisions_asked_total` answers to kvf.place
        self.decisions_asked_total = 0
        self._connection = connection
        self._ledger_file = ledger_file
        self._subjects = subjects
        self._record = record
        self._on_fenced = on_fenced
        self._lease: Lease | None = None
        self._renewing: asyncio.Task[None] | None = None
        self._asked: list[Subscription] = []  # what brings new work
        self._heard: list[Subscription] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._pinger = Pinger(connection, subjects, self.members.view)
        self._alarm = Alarm(self._tick)
        self._stopped = False
        self._booked: list[Booked] = []  # to be shared

    # ------------------------------------------------------------------ what can be seen from outside

    @property
    def members(self) -> Members:
        return self.hearing.members

    @property
    def malformed_total(self) -> int:
        """Messages refused, or dropped, because the bytes or a field were wrong."""
        return self.refused_total + self.hearing.malformed_total + self.long_questions.refused_total

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

    # ------------------------------------------------------------------ a Client asks who

    async def _on_place(self, message: Message) -> None:
        began = time.perf_counter()
        if not intake.is_inbox(message.reply):
            self.ignored_total += 1
            return
        read = intake.read_place(message.subject, message.reply, message.data)
        if isinstance(read, Fail):
            self.refused_total += 1
            await self._carry_out([read])
            return
        actions = self._handle(read)
        self.decisions_asked_total += 1
        self.decision_seconds_total += time.perf_counter() - began
        await self._carry_out(actions)

    # ------------------------------------------------------------------ a bare producer asks for tokens

    async def _on_generate(self, message: Message) -> None:
        if not intake.is_inbox(message.reply, of_producer=True):
            self.ignored_total += 1
            return
        read = intake.read_generate(
            message.subject,
            message.reply,
            message.data,
            as_json=is_json(message),
            new_request=new_request_id(),
            new_seed=int.from_bytes(os.urandom(8), "little"),
            unix_ms=int(time.time() * 1000),
        )
        if isinstance(read, Fail):
            self.refused_total += 1
            await self._carry_out([read])
            return
        await self._carry_out(self._handle(read))

    # ------------------------------------------------------------------ workers answer

    async def _on_answer(self, message: Message) -> None:
        own = request_inboxes(self.inbox_prefix).rstrip(">")
        request, _, attempt = message.subject.removeprefix(own).partition(".")
        if is_no_responders(message):
            if _is_attempt(attempt):
                await self._carry_out(self._handle(NobodyListens(request, int(attempt))))
            return
        try:
            frames = intake.read_answer(message.data)
        except CodecError as error:
            self.refused_total += 1
            log.warning("placement: an answer for request %s is unreadable: %s", request, error)
            return
        for frame in frames:
            if frame.request == request:
                await self._carry_out(self._handle(WorkerAnswered(frame)))

    # ------------------------------------------------------------------ what the core wants done

    def _handle(self, event: Event) -> list[Action]:
        if self._stopped:
            return []
        actions = self.core.handle(event, self._now())
        self._alarm.set(self.core.wake_at())
        return actions

    def _tell(self, event: Event) -> None:
        self._do_soon(self._handle(event))

    async def _carry_out(self, actions: Iterable[Action]) -> None:
        waiting = deque(actions)
        while waiting:
            action = waiting.popleft()
            try:
                match action:
                    case Answer(reply, placement):
                        await self._connection.publish(reply, codec.encode(placement))
                    case Fail(inbox, failed, encoding):
                        await self._connection.publish(inbox, _encode_failed(failed, encoding))
                    case Forward(worker, tenant, request, reply):
                        data = self._encode_offer(worker, request)
                        subject = self._subjects.worker_generate(worker, tenant)
                        await self._connection.publish(subject, data, reply=reply)
                    case Cancel(worker, cancel):
                        await self._connection.publish(self._subjects.worker_cancel(worker), codec.encode(cancel))
                    case AskStillRunning(worker, question):
                        await self._connection.publish(self._subjects.worker_resend(worker), codec.encode(question))
                    case Share(booked):
                        self._share(booked)
                    case PullSnapshot(worker, epoch):
                        await self.hearing.pull(worker, epoch)
                    case Explain(reply, decisions):
                        answer = Explanation(self.core.placement, decisions)
                        await self._connection.publish(reply, codec.encode(answer))
                    case Record():
                        if self._ledger_file is not None:
                            self._ledger_file.write(action)
                    case PingWorker(worker):
                        self._spawn(self._ping(worker))
                    case DropMember(worker):
                        log.info("placement: worker %s is gone, deleting its record", worker)
                        self._spawn(self._drop(worker))
            except KvfleetError as error:
                self.unsent_total += 1
                log.warning("placement: %s not carried out: %s", type(action).__name__, error)
                if isinstance(action, Forward):  # as if the worker had refused: the next one, or the producer hears
                    refusal = failed_frame(error, action.request.request, action.request.attempt)
                    waiting.extend(self._handle(WorkerAnswered(refusal)))

    def _encode_offer(self, worker: str, request: GenerateRequest) -> bytes:
        """In the version that the worker reads. Raises Unavailable (not this worker) or PayloadTooLarge (none)."""
        view = self.members.view.workers.get(worker)
        try:
            version = codec.common_version(view.record.versions if view else ())
        except VersionMismatch as error:
            raise Unavailable(f"worker {worker}: {error}") from None
        data = codec.encode(request, version)
        if len(data) > self._connection.max_payload:
            raise PayloadTooLarge(f"{len(data)} bytes, NATS carries {self._connection.max_payload}", field="prompt")
        return data

    async def _ping(self, worker: str) -> None:
        verdict = await self._pinger.ask(worker)
        if verdict is not Verdict.NO_DOUBT_OF_LIFE:
            log.info("placement: worker %s does not answer a ping: %s", worker, verdict.value)
            await self._carry_out(self._handle(PingUnanswered(worker, verdict is Verdict.NOBODY_LISTENS)))

    async def _drop(self, worker: str) -> None:
        try:
            await self.members.drop(worker)
        except KvfleetError as error:
            log.warning("placement: record of worker %s not deleted: %s", worker, error)

    def _share(self, booked: tuple[Booked, ...]) -> None:
        """Soon, with what else is booked until then. One that gets lost is made good by the worker's heartbeat; and so
        is what a replica that is only just starting was not told."""
        if not self._has_others():  # NATS would bring it back to nobody but us
            return
        if not self._booked:
            asyncio.get_running_loop().call_later(SHARE_S, lambda: self._spawn(self._publish_booked()))
        self._booked += booked

    def _has_others(self) -> bool:
        own = self._record.id
        return any(role is Role.PLACEMENT and member != own for role, member in self.members.view.members)

    async def _publish_booked(self) -> None:
        booked, self._booked = self._booked, []
        batch = BookedBatch(self.core.placement, tuple(booked[-MAX_SHARED:]))
        try:
            await self._connection.publish(self._subjects.placement_bookings(), codec.encode(batch))
        except KvfleetError as error:
            self.unsent_total += 1
            log.debug("placement: bookings not shared: %s", error)

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
        await self._carry_out(self._handle(ExplainAsked(message.reply, ask.request, ask.tenant)))

    async def _on_stats(self, message: Message) -> None:
        if not intake.is_inbox(message.reply):
            self.ignored_total += 1
            return
        await self._connection.publish(message.reply, codec.encode(self.core.stats()))

    # ------------------------------------------------------------------ time passes

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _tick(self) -> None:
        self._tell(Tick())

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
        self._heard.append(await subscribe(subjects.placement_stats(), self._guarded(self._on_stats)))
        self._heard.append(await subscribe(subjects.placement_explain(), self._guarded(self._on_explain)))
        await self.hearing.start()
        self._tell(Tick())
        for subject, callback in (
            (subjects.place_all(), self._on_place),
            (subjects.generate_all(), self._on_generate),
            (subjects.placement_preload(), self.long_questions.on_preload),
            (subjects.placement_victim(), self.long_questions.on_victim),
        ):
            self._asked.append(await subscribe(subject, self._guarded(callback), queue=QUEUE))
        await self._connection.synced()
        lease = Lease(await Bucket.open(self._connection, subjects.members_bucket), self._record)
        await lease.renew()
        self._lease = lease
        self._renewing = self._spawn(lease.run(self._on_fenced))

    async def stop(self, grace_s: float = 3.0) -> None:
        """Take no more work, finish what was read, and watch accepted requests for up to `grace_s`. Never raises."""
        if self._stopped:
            return
        if self._renewing is not None:
            await end([self._renewing])
        if self._lease is not None:
            await self._lease.release()
        for asked in self._asked:
            await _quietly(asked.drain(), 1.0)
        until = self._now() + grace_s
        while self.in_flight and self._now() < until:
            await asyncio.sleep(0.02)
        self._stopped = True
        self._alarm.stop()
        for heard in self._heard:
            await _quietly(heard.unsubscribe(), 1.0)
        await self.hearing.stop()
        await end(list(self._tasks))

    # ------------------------------------------------------------------ tasks

    def _do_soon(self, actions: list[Action]) -> None:
        if actions:
            self._spawn(self._carry_out(actions))

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
                self.unsent_total += 1
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


def _encode_failed(failed: Failed, encoding: Encoding) -> bytes:
    if encoding is Encoding.FRAMES:
        return codec.encode_frames([failed])
    return codec.encode_plain_frame(failed, as_json=encoding is Encoding.JSON)
