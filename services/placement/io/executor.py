"""Carries out what the core wants done, over NATS. Loop: owns the bookings that are still to be shared."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import replace
from enum import Enum
from typing import Any

from kvfleet.placement.actions import (
    Action,
    Answer,
    AnswerOtherRegion,
    AskStillRunning,
    Cancel,
    CarryOn,
    DropMember,
    Fail,
    Forward,
    PassOn,
    PingWorker,
    RecordDecision,
    ShareBookings,
    TakenOver,
    failed_frame,
)
from kvfleet.placement.events import Event, PingUnanswered, WorkerAnswered
from kvfleet.placement.index.kv_indexer import PullSnapshot
from kvfleet.placement.io.subscriptions import Subscriptions
from kvfleet.placement.record.ledger_file import LedgerFile
from kvproto import codec
from kvproto.connection import Connection
from kvproto.errors import KvfleetError, PayloadTooLarge, Unavailable, VersionMismatch, WorkerLost
from kvproto.fleet_view import RECONNECT_GRACE_S, FleetView
from kvproto.messages import (
    AdminCommand,
    AdminRequest,
    Booked,
    BookedBatch,
    CancelRequest,
    Capsule,
    Encoding,
    Failed,
    GenerateRequest,
    Placement,
    Refused,
    Role,
    Watch,
    Watches,
    WentAbroad,
)
from kvproto.nats_message import JSON_HEADER
from kvproto.subjects import Subjects
from kvproto.trace_context import headers_of

log = logging.getLogger(__name__)

MAX_SHARED = 4096
PING_S = 0.05
SHARE_S = 0.002  # bookings of so long go to the other replicas in one message
SHARED_AT_ONCE = 64  # but not more: with the hashes of their blocks these take half a megabyte at most
WATCHES_PER_MESSAGE = 512  # with ids of the longest kind 0.6 MB
HAND_OVER_S, HAND_OVER_TRIES = 1.0, 3  # for another replica to take what this one lets go of
HANDED_AT_ONCE = 64
TAKEN = b"taken"
PASS_ON_S = 0.7  # for another region to take a bare producer's request
INBOX_HEADER = "Kvfleet-Inbox"  # the producer's, whom the other region answers

Spawn = Callable[[Coroutine[Any, Any, None]], object]


class Executor:
    """Owned by the placement loop. `handle` has the core decide on what comes of it; tasks are `spawn`'s to end.
    `offered` makes of a traced request what is sent to a worker."""

    def __init__(
        self,
        placement: str,
        connection: Connection,
        subjects: Subjects,
        subscriptions: Subscriptions,
        handle: Callable[[Event], list[Action]],
        spawn: Spawn,
        ledger_file: LedgerFile | None,
        with_addresses: Callable[[Placement], Placement],
    ) -> None:
        self.unsent_total = 0  # what NATS did not take from us
        self.offered: Callable[[str, str, GenerateRequest], GenerateRequest] = lambda worker, tenant, request: request
        self._placement = placement
        self._connection = connection
        self._subjects = subjects
        self._subscriptions = subscriptions
        self._handle = handle
        self._spawn = spawn
        self._ledger_file = ledger_file
        self._with_addresses = with_addresses
        self._pinger = Pinger(connection, subjects, subscriptions.members.view)
        self._booked: deque[Booked] = deque(maxlen=MAX_SHARED)  # to be shared
        self._refused: deque[Refused] = deque(maxlen=MAX_SHARED)
        self._referred: deque[WentAbroad] = deque(maxlen=MAX_SHARED)
        self.passing = 0  # requests that another region is being asked to take
        self._handing: list[asyncio.Task[None]] = []
        self._hands = asyncio.Semaphore(HANDED_AT_ONCE)

    async def carry_out(self, actions: Iterable[Action]) -> None:
        publish, subjects = self._connection.publish, self._subjects
        waiting = deque(actions)
        while waiting:
            action = waiting.popleft()
            try:
                match action:
                    case Answer(reply, placement):
                        await publish(reply, codec.encode(placement))
                    case AnswerOtherRegion(reply, placement):
                        await publish(reply, codec.encode(self._with_addresses(placement)))
                    case PassOn():
                        self._spawn(self._pass_on(action))
                    case Fail(inbox, failed, encoding):
                        await publish(inbox, _encode_failed(failed, encoding))
                    case Forward(worker, tenant, request, reply):
                        if request.traceparent is not None:
                            request = self.offered(worker, tenant, request)
                        data = self._encode_offer(worker, request)
                        headers = headers_of(request.traceparent, self._connection.max_payload - len(data))
                        await publish(subjects.worker_generate(worker, tenant), data, reply=reply, headers=headers)
                    case Cancel(worker, cancel):
                        await publish(subjects.worker_cancel(worker), codec.encode(cancel))
                    case TakenOver(reply):
                        await publish(reply, TAKEN)
                    case CarryOn(capsule):
                        self._handing.append(asyncio.create_task(self._carry_on(capsule)))
                    case AskStillRunning(worker, question):
                        await publish(subjects.worker_resend(worker), codec.encode(question))
                    case ShareBookings(booked, refused, referred):
                        self._share(booked, refused, referred)
                    case PullSnapshot(worker, _, pull):
                        await self._subscriptions.pull(worker, pull)
                    case RecordDecision():
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
                if isinstance(action, Forward) and action.reply:
                    # As if the worker had refused: the next one, or the producer hears.
                    refusal = failed_frame(error, action.request.request, action.request.attempt)
                    waiting.extend(self._handle(WorkerAnswered(refusal, action.reply.split(".")[-2])))

    def _encode_offer(self, worker: str, request: GenerateRequest) -> bytes:
        """In the version that the worker reads. Raises Unavailable (not this worker) or PayloadTooLarge (none)."""
        view = self._subscriptions.members.view.workers.get(worker)
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
        if verdict is not PingVerdict.NO_DOUBT_OF_LIFE:
            log.info("placement: worker %s does not answer a ping: %s", worker, verdict.value)
            await self.carry_out(self._handle(PingUnanswered(worker, verdict is PingVerdict.NOBODY_LISTENS)))

    async def _drop(self, worker: str) -> None:
        try:
            await self._subscriptions.members.drop(worker)
        except KvfleetError as error:
            log.warning("placement: record of worker %s not deleted: %s", worker, error)

    # ------------------------------------------------------------------ the other replicas

    def has_others(self) -> bool:
        own = self._placement
        return any(
            role is Role.PLACEMENT and member != own for role, member in self._subscriptions.members.view.members
        )

    def _share(
        self, booked: tuple[Booked, ...], refused: tuple[Refused, ...], referred: tuple[WentAbroad, ...]
    ) -> None:
        """Soon, with what else is booked until then. One that gets lost is made good by the worker's heartbeat; and so
        is what a replica that is only just starting was not told."""
        if not self.has_others():  # NATS would bring it back to nobody but us
            return
        if not (self._booked or self._refused or self._referred):
            asyncio.get_running_loop().call_later(SHARE_S, lambda: self._spawn(self._publish_booked()))
        self._booked += booked
        self._refused += refused
        self._referred += referred

    async def _publish_booked(self) -> None:
        batch = BookedBatch(self._placement, tuple(self._booked), tuple(self._refused), tuple(self._referred))
        self._referred.clear()
        self._booked.clear()
        self._refused.clear()
        first, *more = (
            batch.items[at : at + SHARED_AT_ONCE] for at in range(0, max(len(batch.items), 1), SHARED_AT_ONCE)
        )
        try:
            for part in (replace(batch, items=first), *(BookedBatch(self._placement, items) for items in more)):
                await self._connection.publish(self._subjects.placement_bookings(), codec.encode(part))
        except KvfleetError as error:
            self.unsent_total += 1
            log.debug("placement: bookings not shared: %s", error)

    async def _pass_on(self, action: PassOn) -> None:
        """Until the other region has taken it; else it is offered here, or its producer hears why not."""
        event = action.event
        as_json = event.encoding is Encoding.JSON
        data = codec.encode_plain(replace(event.ask, request=event.request, seed=event.seed), as_json=as_json)
        headers = {INBOX_HEADER: event.inbox} | (JSON_HEADER if as_json else {})
        subject = self._subjects.region_generate(action.region, event.tenant, action.model)
        self.passing += 1
        taken = False
        try:
            answer = await self._connection.request(subject, data, PASS_ON_S, headers)
            taken = answer.data == TAKEN
        except (TimeoutError, KvfleetError) as error:
            log.info("request %s: region %s does not answer: %s", event.request, action.region, error or "in time")
        finally:
            self.passing -= 1
        if not taken:
            await self.carry_out(self._handle(replace(event, from_other_region=True)))

    async def _carry_on(self, capsule: Capsule) -> None:
        """Another replica has it, or its producer hears that nobody has."""
        body = capsule.request
        error = await self._handed_over(self._subjects.placement_capsules(), codec.encode(capsule))
        if error is not None:
            gone = Unavailable(f"this placement goes, and no other one took the request ({error}): ask again")
            held = body.attempt if capsule.held_attempt is None else capsule.held_attempt
            failed = Fail(body.inbox, failed_frame(gone, body.request, max(body.attempt, 0)), body.encoding)
            await self.carry_out([failed, Cancel(capsule.worker, CancelRequest(body.request, held))])

    async def hand_on(self, watches: tuple[Watch, ...]) -> None:
        """Have another replica go on watching; returns when that and every capsule is settled. Never raises. What
        nobody takes is watched no more: its worker goes on with it."""
        for start in range(0, len(watches), WATCHES_PER_MESSAGE):
            message = Watches(self._placement, watches[start : start + WATCHES_PER_MESSAGE])
            error = await self._handed_over(self._subjects.placement_watches(), codec.encode(message))
            if error is not None:
                log.warning("placement: %d watches not handed on: %s", len(message.items), error)
        handing, self._handing = self._handing, []
        await asyncio.gather(*handing)

    async def _handed_over(self, subject: str, data: bytes) -> Exception | None:
        """Whether another replica says that it has it, else why not. One that dies in between is followed by a further
        try, which NATS brings to a further one."""
        failure: Exception | None = None
        async with self._hands:
            for _ in range(HAND_OVER_TRIES):
                try:
                    await self._connection.request(subject, data, HAND_OVER_S)
                    return None
                except WorkerLost as error:  # NATS knows of nobody
                    failure = error
                    break
                except (TimeoutError, KvfleetError) as error:
                    failure = error
        self.unsent_total += 1
        return failure


def _encode_failed(failed: Failed, encoding: Encoding) -> bytes:
    if encoding is Encoding.FRAMES:
        return codec.encode_frames([failed])
    return codec.encode_plain_frame(failed, as_json=encoding is Encoding.JSON)


class PingVerdict(Enum):
    NO_DOUBT_OF_LIFE = "answered, or nobody can tell"
    NOBODY_LISTENS = "nobody listens there"
    SILENCE = "no answer"


class Pinger:
    """Pings go to the worker's admin subject, which its event loop answers however busy its engine is."""

    def __init__(self, connection: Connection, subjects: Subjects, view: FleetView) -> None:
        self._connection = connection
        self._subjects = subjects
        self._view = view
        self._asking: set[str] = set()

    async def ask(self, worker: str) -> PingVerdict:
        """Takes at most 50 ms.

        Nobody can tell while our own connection is down, silent or just back (the workers' are too), if the worker's
        record changed meanwhile (it registered again), or while the same question is being asked already.
        """
        known = self._view.workers.get(worker)
        if known is None or worker in self._asking:
            return PingVerdict.NO_DOUBT_OF_LIFE
        revision = known.revision
        self._asking.add(worker)
        try:
            verdict = await self._ping(worker)
        finally:
            self._asking.discard(worker)
        if known.revision != revision or not self._is_steady():
            return PingVerdict.NO_DOUBT_OF_LIFE
        return verdict

    async def _ping(self, worker: str) -> PingVerdict:
        question = codec.encode(AdminRequest(AdminCommand.STATS))
        try:
            await self._connection.request(self._subjects.worker_admin(worker), question, PING_S)
        except WorkerLost:
            return PingVerdict.NOBODY_LISTENS
        except TimeoutError:
            return PingVerdict.SILENCE
        except KvfleetError:
            pass  # our own connection's trouble
        return PingVerdict.NO_DOUBT_OF_LIFE

    def _is_steady(self) -> bool:
        connection = self._connection
        return connection.is_settled(RECONNECT_GRACE_S) and not connection.is_silent
