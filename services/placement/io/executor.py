"""Loop: has the core decide and carries its actions out over NATS. Owns the bookings still to be shared."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from kvfleet.placement import events
from kvfleet.placement.core import PlacementCore
from kvfleet.placement.events import Action, Event, failed_frame
from kvfleet.placement.index.kv_indexer import PullSnapshot
from kvfleet.placement.io.replica import Replica
from kvfleet.placement.io.timing import StallTimer
from kvfleet.placement.record.decision_trace import DecisionTraces
from kvfleet.placement.record.ledger_file import LedgerFile
from kvproto import codec
from kvproto.connection import JSON_HEADER
from kvproto.errors import KvfleetError, PayloadTooLarge, Unavailable, VersionMismatch, WorkerLost
from kvproto.fleet_view import RECONNECT_GRACE_S
from kvproto.members import Members
from kvproto.messages import (
    AdminCommand,
    AdminRequest,
    Booked,
    BookedBatch,
    CancelRequest,
    Capsule,
    Encoding,
    GenerateRequest,
    Placement,
    Refused,
    Role,
    SnapshotRequest,
    Watch,
    Watches,
    WentAbroad,
)
from kvproto.regions import qualify, seal
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
BACK_S = 0.8  # after a reconnect: what the others say is on its way by then
PASS_ON_S = 0.7  # for another region to take a bare producer's request
INBOX_HEADER = "Kvfleet-Inbox"  # the producer's, whom the other region answers


@dataclass(eq=False)
class Executor:
    replica: Replica
    core: PlacementCore
    members: Members
    traces: DecisionTraces
    ledger_file: LedgerFile | None
    fleet_key: bytes | None
    snapshots_asked_total: int = 0
    passing: int = 0  # requests that another region is being asked to take
    _stopped: bool = False
    _booked: deque[Booked] = field(default_factory=lambda: deque(maxlen=MAX_SHARED))  # to be shared
    _refused: deque[Refused] = field(default_factory=lambda: deque(maxlen=MAX_SHARED))
    _referred: deque[WentAbroad] = field(default_factory=lambda: deque(maxlen=MAX_SHARED))
    _pinging: set[str] = field(default_factory=set)
    _handing: list[asyncio.Task[None]] = field(default_factory=list)
    _hands: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(HANDED_AT_ONCE))

    def __post_init__(self) -> None:
        self._stall_timer = StallTimer(self._tick)

    def handle(self, event: Event) -> list[Action]:
        if self._stopped:
            return []
        actions = self.core.handle(event, self.replica.now())
        self._stall_timer.set(self.core.in_flight.due())
        return actions

    def tell(self, event: Event) -> None:
        if actions := self.handle(event):
            self.replica.spawn(self.carry_out(actions))

    def _tick(self) -> None:
        connection = self.replica.connection
        self.tell(events.Tick(disconnected=connection.is_silent or not connection.is_settled(BACK_S)))

    async def stop(self) -> None:
        """Later events, and what was watched, are for the replicas that go on. Never raises."""
        self._stopped = True
        await self.carry_out(self.core.forwarding.leave(self.replica.now()))
        await self._hand_on(self.core.in_flight.watches())
        self._stall_timer.stop()

    async def carry_out(self, actions: Iterable[Action]) -> None:
        publish, subjects = self.replica.connection.publish, self.replica.subjects
        waiting = deque(actions)
        while waiting:
            action = waiting.popleft()
            try:
                match action:
                    case events.Answer(reply, placement):
                        await publish(reply, codec.encode(placement))
                    case events.AnswerOtherRegion(reply, placement):
                        await publish(reply, codec.encode(self._with_addresses(placement)))
                    case events.PassOn():
                        self.replica.spawn(self._pass_on(action))
                    case events.Fail(inbox, failed, Encoding.FRAMES):
                        await publish(inbox, codec.encode_frames([failed]))
                    case events.Fail(inbox, failed, encoding):
                        await publish(inbox, codec.encode_plain_frame(failed, as_json=encoding is Encoding.JSON))
                    case events.Forward(worker, tenant, request, reply):
                        if request.traceparent is not None:
                            request = self.traces.offered(worker, tenant, request)
                        data = self._encode_offer(worker, request)
                        headers = headers_of(request.traceparent, self.replica.connection.max_payload - len(data))
                        await publish(subjects.worker_generate(worker, tenant), data, reply=reply, headers=headers)
                    case events.Cancel(worker, cancel):
                        await publish(subjects.worker_cancel(worker), codec.encode(cancel))
                    case events.TellReturn(worker, said):
                        await publish(subjects.worker_returns(worker), codec.encode(said))
                    case events.TakenOver(reply):
                        await publish(reply, TAKEN)
                    case Capsule():
                        self._handing.append(asyncio.create_task(self._carry_on(action)))
                    case events.AskStillRunning(worker, question):
                        await publish(subjects.worker_resend(worker), codec.encode(question))
                    case BookedBatch():
                        self._share(action)
                    case PullSnapshot(worker, _, pull):
                        self.snapshots_asked_total += 1
                        reply = f"{self.replica.snapshots}{worker}.{pull}"  # an absent worker's pull is given up
                        await publish(subjects.blocks(worker), codec.encode(SnapshotRequest()), reply=reply)
                    case events.RecordDecision():
                        if self.ledger_file is not None:
                            self.ledger_file.write(action)
                    case events.PingWorker(worker):
                        self.replica.spawn(self._ping(worker))
                    case events.DropMember(worker):
                        log.info("placement: worker %s is gone, deleting its record", worker)
                        self.replica.spawn(self._drop(worker))
            except KvfleetError as error:
                self.replica.unsent_total += 1
                log.warning("placement: %s not carried out: %s", type(action).__name__, error)
                if isinstance(action, events.Forward) and action.reply:
                    # As if the worker had refused: the next one, or the producer hears.
                    refusal = failed_frame(error, action.request.request, action.request.attempt)
                    waiting.extend(self.handle(events.WorkerAnswered(refusal, action.reply.split(".")[-2])))

    def _encode_offer(self, worker: str, request: GenerateRequest) -> bytes:
        """In the version that the worker reads. Raises Unavailable (ask another worker) or PayloadTooLarge."""
        view = self.members.view.workers.get(worker)
        try:
            version = codec.version_of_offer(view.record, request) if view else codec.common_version(())
        except VersionMismatch as error:
            raise Unavailable(f"worker {worker}: {error}") from None
        data = codec.encode(request, version)
        most = self.replica.connection.max_payload
        if len(data) > most:
            raise PayloadTooLarge(f"{len(data)} bytes, NATS carries {most}", field="prompt")
        return data

    def _with_addresses(self, placement: Placement) -> Placement:
        """The source as a worker of another region can reach it; none if its worker has no TCP address."""
        view = self.members.view.workers.get(placement.source)
        addresses = tuple(one for one in view.record.data_plane if one.startswith("tcp:")) if view else ()
        if not addresses or not self.fleet_key:
            return replace(placement, source="", source_tokens=0)
        source = qualify(self.replica.subjects.region, placement.source)
        sealed = seal(self.fleet_key, source, addresses)
        return replace(placement, source=source, source_addresses=addresses, source_seal=sealed)

    async def _ping(self, worker: str) -> None:
        """A worker's event loop answers within 50 ms, however busy its engine is. Silence says nothing while our own
        connection is down, silent or just back (the workers' are too), or if the worker registered again meanwhile."""
        known, connection = self.members.view.workers.get(worker), self.replica.connection
        if known is None or worker in self._pinging:
            return
        revision, nobody_listens = known.revision, False
        self._pinging.add(worker)
        try:
            question = codec.encode(AdminRequest(AdminCommand.STATS))
            await connection.request(self.replica.subjects.worker_admin(worker), question, PING_S)
            return
        except WorkerLost:
            nobody_listens = True
        except TimeoutError:
            pass
        except KvfleetError:
            return  # our own connection's trouble
        finally:
            self._pinging.discard(worker)
        if known.revision == revision and connection.is_settled(RECONNECT_GRACE_S) and not connection.is_silent:
            why = "nobody listens there" if nobody_listens else "no answer"
            log.info("placement: worker %s does not answer a ping: %s", worker, why)
            await self.carry_out(self.handle(events.PingUnanswered(worker, nobody_listens)))

    async def _drop(self, worker: str) -> None:
        try:
            await self.members.drop(worker)
        except KvfleetError as error:
            log.warning("placement: record of worker %s not deleted: %s", worker, error)

    def has_others(self) -> bool:
        own, members = self.core.placement, self.members.view.members
        return any(role is Role.PLACEMENT and member != own for role, member in members)

    def _share(self, batch: BookedBatch) -> None:
        """A lost message is made good by the worker's heartbeat; so is one before a new replica listens."""
        if not self.has_others():  # NATS would only bring it back to us
            return
        if not (self._booked or self._refused or self._referred):
            asyncio.get_running_loop().call_later(SHARE_S, lambda: self.replica.spawn(self._publish_booked()))
        self._booked += batch.items
        self._refused += batch.refused
        self._referred += batch.abroad

    async def _publish_booked(self) -> None:
        own, items = self.core.placement, tuple(self._booked)
        parts = [BookedBatch(own, items[:SHARED_AT_ONCE], tuple(self._refused), tuple(self._referred))]
        for at in range(SHARED_AT_ONCE, len(items), SHARED_AT_ONCE):
            parts.append(BookedBatch(own, items[at : at + SHARED_AT_ONCE]))
        self._referred.clear()
        self._booked.clear()
        self._refused.clear()
        try:
            for part in parts:
                await self.replica.connection.publish(self.replica.subjects.placement_bookings(), codec.encode(part))
        except KvfleetError as error:
            self.replica.unsent_total += 1
            log.debug("placement: bookings not shared: %s", error)

    async def _pass_on(self, action: events.PassOn) -> None:
        """If the other region does not take it, it is offered here."""
        event = action.event
        as_json = event.encoding is Encoding.JSON
        data = codec.encode_plain(replace(event.ask, request=event.request, seed=event.seed), as_json=as_json)
        headers = {INBOX_HEADER: event.inbox} | (JSON_HEADER if as_json else {})
        subject = self.replica.subjects.region_generate(action.region, event.tenant, action.model)
        self.passing += 1
        taken = False
        try:
            answer = await self.replica.connection.request(subject, data, PASS_ON_S, headers)
            taken = answer.data == TAKEN
        except (TimeoutError, KvfleetError) as error:
            log.info("request %s: region %s does not answer: %s", event.request, action.region, error or "in time")
        finally:
            self.passing -= 1
        if not taken:
            await self.carry_out(self.handle(replace(event, from_other_region=True)))

    async def _carry_on(self, capsule: Capsule) -> None:
        """Hand it to another replica, or tell its producer that none took it."""
        body = capsule.request
        error = await self._handed_over(self.replica.subjects.placement_capsules(), codec.encode(capsule))
        if error is not None:
            gone = Unavailable(f"this placement goes, and no other one took the request ({error}): ask again")
            held = body.attempt if capsule.held_attempt is None else capsule.held_attempt
            failed = events.Fail(body.inbox, failed_frame(gone, body.request, max(body.attempt, 0)), body.encoding)
            await self.carry_out([failed, events.Cancel(capsule.worker, CancelRequest(body.request, held))])

    async def _hand_on(self, watches: tuple[Watch, ...]) -> None:
        """Returns when all watches and capsules are settled. Never raises. Workers go on with what no replica takes."""
        for start in range(0, len(watches), WATCHES_PER_MESSAGE):
            message = Watches(self.core.placement, watches[start : start + WATCHES_PER_MESSAGE])
            error = await self._handed_over(self.replica.subjects.placement_watches(), codec.encode(message))
            if error is not None:
                log.warning("placement: %d watches not handed on: %s", len(message.items), error)
        handing, self._handing = self._handing, []
        await asyncio.gather(*handing)

    async def _handed_over(self, subject: str, data: bytes) -> Exception | None:
        """Why no other replica took it; None: one did. After a replica that died NATS brings it to a further one."""
        failure: Exception | None = None
        async with self._hands:
            for _ in range(HAND_OVER_TRIES):
                try:
                    await self.replica.connection.request(subject, data, HAND_OVER_S)
                    return None
                except WorkerLost as error:  # no replica listens
                    failure = error
                    break
                except (TimeoutError, KvfleetError) as error:
                    failure = error
        self.replica.unsent_total += 1
        return failure
