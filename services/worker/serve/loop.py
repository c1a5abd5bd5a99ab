"""READ THIS FIRST: a worker's life, from request to frames.

The event loop owns subscriptions, the frame book and the lease; only the engine thread touches model and blocks.
`request_desk` checks and accepts a request; `on_results` turns each step's results into frames and cache events.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from kvfleet.worker.port.outputs import SequenceFailed, StepResult
from kvfleet.worker.serve.admin import REGION_COMMANDS, AdminDesk
from kvfleet.worker.serve.demand import leave_behind
from kvfleet.worker.serve.hand_over import HandOver
from kvfleet.worker.serve.request_desk import RequestDesk
from kvfleet.worker.serve.worker_parts import WorkerParts
from kvfleet.worker.streams.records import AttemptRecord
from kvproto import codec
from kvproto.connection import Subscription
from kvproto.errors import DeadlineExceeded, KvfleetError
from kvproto.messages import Frame, Heartbeat, State, WorkerRole, WorkerStats
from kvproto.subjects import receipt_inboxes
from kvproto.tasks import VitalTasks, end

log = logging.getLogger(__name__)

HEARTBEAT_PERIOD_S = 0.5
ENGINE_FAILED = "the engine failed"


class WorkerLoop:
    """`start` when the engine is loaded; `drain` then `stop` to end."""

    def __init__(
        self, parts: WorkerParts, on_fatal: Callable[[str], None], on_drain: Callable[[], None] = lambda: None
    ) -> None:
        """`on_drain` is called when an operator asks for a drain: the process then drains this loop and ends."""
        self.parts = parts
        self.record, self.milestones = parts.record, parts.milestones
        self.frames, self.outbox = parts.frames, parts.outbox
        self._on_fatal = on_fatal
        self._on_drain = on_drain
        self._subscriptions: list[Subscription] = []
        self.tasks = VitalTasks(on_fatal)
        self._is_draining = False
        self.hand_over = HandOver(parts)
        self.requests = RequestDesk(parts, lambda: self._is_draining, self.tasks.spawn)
        self.admin = AdminDesk(
            parts, lambda: WorkerStats(self.record, self.heartbeat()), self._asked_to_drain, self._announce
        )

    async def start(self) -> None:
        """Subscribe, register, beat. Raises Fenced if a later process has this id, Unavailable without JetStream."""
        me, names, desk = self.record.id, self.parts.subjects, self.requests
        self.parts.connection.on_disconnect.append(self.parts.broadcast.away)
        self.parts.connection.on_reconnect.append(self.parts.broadcast.back)
        own = {
            "generate.*": (names.worker_generate_all(me), desk.on_generate),
            "cancel": (names.worker_cancel(me), desk.on_cancel),
            "cancel.*": (names.worker_cancel_all(me), desk.on_cancel),
            "resend": (names.worker_resend(me), desk.on_resend),
            "resend.*": (names.worker_resend_all(me), desk.on_resend),
            "pause": (names.worker_pause(me), desk.on_pause),
            "pause.*": (names.worker_pause_all(me), desk.on_pause),
        }
        for_regions = {verb: callback for verb, (_, callback) in own.items()}
        for_regions["admin"] = partial(self.admin.on_admin, among=REGION_COMMANDS)
        for subject, callback in (
            *((names.region_worker(me, verb), callback) for verb, callback in for_regions.items() if names.region),
            *own.values(),
            (receipt_inboxes(self.parts.connection.inbox_prefix), desk.on_unheard),
            (names.worker_admin(me), self.admin.on_admin),
            (names.worker_returns(me), desk.on_return_expected),
            (names.blocks(me), self.admin.on_snapshot),
        ):
            self._subscriptions.append(await self.parts.connection.subscribe(subject, callback))
        await self.parts.connection.synced()
        await self.parts.lease.set(replace(self.record, state=self.state))
        self.tasks.spawn(self.parts.lease.run(lambda error: self._on_fatal(str(error))), "lease")
        self.tasks.spawn(self.outbox.run(), "outbox")
        self.tasks.spawn(self._beat(), "heartbeat")

    def _asked_to_drain(self) -> None:
        self.begin_drain()
        self._on_drain()

    @property
    def state(self) -> State:
        if self._is_draining:
            return State.DRAINING
        return State.READY if self.parts.engine.is_ready else State.STARTING

    def begin_drain(self) -> None:
        if not self._is_draining:
            self._is_draining = True
            self.on_state()

    def on_state(self) -> None:
        """The engine went away or came back, its adapters changed, or a drain began."""
        self.tasks.spawn(self._announce(), "state")

    async def _announce(self) -> None:
        if self.parts.adapters is not None:
            loaded = self.parts.adapters.loaded
            self.parts.models.put(loaded)
            self.record = replace(self.record, adapters=loaded)
        await self._publish_heartbeat()
        try:
            await self.parts.lease.set(replace(self.record, state=self.state))
        except KvfleetError as error:
            log.warning("the record does not say %s yet: %s", self.state.value, error)

    async def drain(self) -> None:
        """Take no new work, hand over what runs, and leave blocks in demand to vaults, for a bounded time."""
        clock, limit_s = asyncio.get_running_loop().time, self.parts.settings.drain_s
        until = clock() + limit_s
        self.begin_drain()
        await self.hand_over.run(limit_s)
        await leave_behind(self.parts, until - clock())
        self.parts.broadcast.flush()
        await self.outbox.drain()

    async def stop(self) -> None:
        if self.milestones:  # not drained before
            self.parts.broadcast.flush()
            await self.outbox.drain()
        tasks = list(self.tasks.running)
        for task in tasks:
            task.cancel()
        self.requests.close()
        await self.parts.lease.release()
        for subscription in self._subscriptions:
            try:
                await subscription.unsubscribe()
            except Exception as error:  # noqa: BLE001 - the connection may be gone
                log.debug("unsubscribe: %s", error)
        await end(tasks)

    def on_crash(self, error: BaseException) -> None:
        """A step or `on_results` raised: engine or streams are in an unknown state, so the process ends. Its requests
        go on elsewhere."""
        log.critical(ENGINE_FAILED, exc_info=error)
        self.tasks.spawn(self._end_after_crash(error), "crash")

    async def _end_after_crash(self, error: BaseException) -> None:
        self.parts.broadcast.flush()
        await self.outbox.drain()
        self._on_fatal(f"{ENGINE_FAILED}: {type(error).__name__}: {error}")

    def on_results(self, results: list[StepResult]) -> None:
        now = asyncio.get_running_loop().time()
        framed: list[tuple[AttemptRecord, Frame]] = []
        for result in results:
            for output in result.outputs:
                sent = self.frames.add(output, now)
                framed += sent
                if sent and type(output) is SequenceFailed and len(sent[0][0].tracks) > 1:
                    self.parts.engine.cancel(output.request, output.attempt)  # its other choices
        if framed:
            self.outbox.send_frames(framed)
        self.parts.broadcast.changes(results)
        if self.record.role is WorkerRole.PREFILL and not self._is_draining:
            for record in {id(record): record for record, _ in framed}.values():
                if self.hand_over.claims(record):
                    self.tasks.spawn(self.hand_over.after_prefill(record), "hand-over")

    async def _beat(self) -> None:
        while True:
            await self._publish_heartbeat()
            now = asyncio.get_running_loop().time()
            self._end_overdue(now)
            self.requests.maintain_readers(now)
            self.frames.sweep(now)
            self.parts.broadcast.wake()  # for ended attempts, and for milestones that waited for NATS
            await asyncio.sleep(HEARTBEAT_PERIOD_S)

    def _end_overdue(self, now: float) -> None:
        ended: list[tuple[AttemptRecord, Frame]] = []
        for record in self.frames.overdue(now):
            self.parts.engine.cancel(*record.key)
            late = DeadlineExceeded("the request's deadline passed, or it was paused and nobody came back")
            ended.append(self.frames.end(record, record.failed(late), now))
        self.outbox.send_frames(ended)

    async def _publish_heartbeat(self) -> None:
        if self.parts.connection.is_connected:
            self.outbox.send(self.parts.subjects.heartbeat(self.record.id), codec.encode(self.heartbeat()))

    def heartbeat(self) -> Heartbeat:
        load, rates = self.parts.engine.measured
        return Heartbeat(
            worker=self.record.id,
            epoch=self.record.epoch,
            state=self.state,
            load=load,
            rates=rates,
            event_seq=self.parts.broadcast.publisher.seq,
            digest=self.parts.broadcast.publisher.plain_digest,
            held=load.blocks_addressed,
            step_age_s=self.parts.engine.step_age_s,
            tier_digest=self.parts.broadcast.publisher.digest,
        )
