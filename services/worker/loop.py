"""READ THIS FIRST: a worker's life, from request to frames.

The event loop owns subscriptions, the frame book and the lease; the engine thread alone touches model and blocks. A
request's way: `_on_generate` checks, accepts and hands it over; results of each step come back in `_on_results`, become
frames (one message per step and batch inbox) and cache events.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from kvproto import codec
from kvproto.block_hash import Root, chain
from kvproto.connection import Connection, Message, Subscription
from kvproto.errors import (
    CodecError,
    DeadlineExceeded,
    KvfleetError,
    WorkerLost,
)
from kvproto.members import Fenced, Lease
from kvproto.messages import (
    Accepted,
    Bundle,
    CancelRequest,
    Failed,
    Frame,
    GenerateRequest,
    Heartbeat,
    Load,
    Moved,
    PauseRequest,
    Rates,
    ResendRequest,
    State,
    WorkerRecord,
)
from kvproto.subjects import Subjects, is_inbox
from kvproto.tasks import end
from kvproto.tenant_roots import TenantRoots
from services.worker.admin import AdminDesk
from services.worker.broadcast import Broadcast
from services.worker.engine_thread import EngineThread
from services.worker.frames import FrameBook, Record
from services.worker.kv_publisher import KvPublisher
from services.worker.milestones import MilestoneLog
from services.worker.outbox import Outbox
from services.worker.outputs import SequenceFailed, StepResult
from services.worker.request_intake import check_capacity, check_request, sequences_of
from services.worker.tiers.base import Remote
from services.worker.tiers.break_even import LOOK_WORTH_S
from services.worker.tiers.prospect import Prospect, names_of

log = logging.getLogger(__name__)

HEARTBEAT_PERIOD_S = 0.5
INLINE_CHARACTERS = 4096  # about a millisecond of tokenising


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    waiting: int
    fleet_key: bytes
    drain_s: float


class WorkerLoop:
    """Owned by the process's event loop. `start` when the engine is loaded; `drain` then `stop` to end."""

    def __init__(
        self,
        connection: Connection,
        subjects: Subjects,
        lease: Lease,
        engine: EngineThread,
        publisher: KvPublisher,
        bundle: Bundle,
        encode_prompt: Callable[[str], list[int]],
        limits: WorkerLimits,
        on_fatal: Callable[[str], None],
        remote: Remote | None = None,
    ) -> None:
        self._remote = remote
        self._connection = connection
        self._subjects = subjects
        self._lease = lease
        self._engine = engine
        self._encode_prompt = encode_prompt
        self._limits = limits
        self._on_fatal = on_fatal
        self._publisher = publisher
        self._subscriptions: list[Subscription] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._tokenising: set[tuple[str, int]] = set()
        self._tokenisers = ThreadPoolExecutor(1, thread_name_prefix="tokenise")
        self._state = State.READY
        self._load = Load()
        self._rates = Rates()
        assert isinstance(lease.record, WorkerRecord)
        self.record = lease.record
        self.milestones = MilestoneLog(self.record.id, self.record.epoch)
        self.frames = FrameBook(self.record.id, self.milestones)
        self.outbox = Outbox(connection)
        self._broadcast = Broadcast(connection, self.outbox, subjects, self.record.id, publisher, self.milestones)
        self._roots = TenantRoots(
            self.record.model_revision, self.record.block_size, self.record.public_prefixes, limits.fleet_key
        )
        self.requests_total = 0
        self.refused_total = 0
        self.malformed_total = 0
        self.desk = AdminDesk(
            connection,
            self.record,
            engine,
            bundle,
            self._roots,
            self._broadcast,
            self.heartbeat,
            self.begin_drain,
            remote,
        )

    # ------------------------------------------------------------------ life

    async def start(self) -> None:
        """Subscribe, register, beat. Raises Fenced if a later process has this id, Unavailable without JetStream."""
        me, names = self.record.id, self._subjects
        for subject, callback in (
            (names.worker_generate_all(me), self._on_generate),
            (names.worker_cancel(me), self._on_cancel),
            (names.worker_resend(me), self._on_resend),
            (names.worker_pause(me), self._on_pause),
            (names.worker_admin(me), self.desk.on_admin),
            (names.blocks(me), self.desk.on_snapshot),
        ):
            self._subscriptions.append(await self._connection.subscribe(subject, callback))
        await self._connection.synced()
        await self._lease.set(replace(self.record, state=State.READY))
        self._spawn(self._lease.run(self._on_fenced))
        self._spawn(self.outbox.run())
        self._spawn(self._beat())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """A task of this loop. One that fails ends the process: a worker without its heartbeat only looks alive."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a task of the worker failed", exc_info=error)
            self._on_fatal(f"{type(error).__name__}: {error}")

    def begin_drain(self) -> None:
        """Take no new work; what runs goes on."""
        if self._state is not State.DRAINING:
            self._state = State.DRAINING
            self._spawn(self._announce_drain())

    async def _announce_drain(self) -> None:
        await self._publish_heartbeat()
        try:
            await self._lease.set(replace(self.record, state=State.DRAINING))
        except KvfleetError as error:
            log.warning("the record does not say draining yet: %s", error)

    async def drain(self) -> None:
        """Let running sequences finish for a bounded time; the rest is told to go on elsewhere."""
        self.begin_drain()
        end = asyncio.get_running_loop().time() + self._limits.drain_s
        while self.frames.running_count and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(0.02)
        now = asyncio.get_running_loop().time()
        moved: list[tuple[Record, Frame]] = []
        for record in self.frames.running:
            self._engine.cancel(record.request, record.attempt)
            moved.append(self.frames.end(record, Moved(record.request, record.attempt, record.output_tokens), now))
        self.outbox.send_frames(moved)
        self._broadcast.flush()
        await self.outbox.drain()

    async def stop(self) -> None:
        """Release the lease, so that everybody knows at once, and let go of everything."""
        if self.milestones:  # not drained before
            self._broadcast.flush()
            await self.outbox.drain()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        self._tokenisers.shutdown(wait=False, cancel_futures=True)
        await self._lease.release()
        for subscription in self._subscriptions:
            try:
                await subscription.unsubscribe()
            except Exception as error:  # noqa: BLE001 - the connection may be gone: nothing to let go of then
                log.debug("unsubscribe: %s", error)
        await end(tasks)

    def _on_fenced(self, error: Fenced) -> None:
        self._on_fatal(str(error))

    def on_crash(self, error: BaseException) -> None:
        """A step raised: the engine's state is unknown, so the process ends loudly; its requests go on elsewhere."""
        log.critical("the engine failed", exc_info=error)
        self._spawn(self._end_after_crash(error))

    async def _end_after_crash(self, error: BaseException) -> None:
        self._broadcast.flush()
        await self.outbox.drain()
        self._on_fatal(f"the engine failed: {type(error).__name__}: {error}")

    # ------------------------------------------------------------------ requests

    async def _on_generate(self, message: Message) -> None:
        """Accept one attempt and hand it to the engine, or say why not to whoever waits for the acknowledgement."""
        tenant = message.subject.rsplit(".", 1)[-1]
        request: GenerateRequest | None = None
        try:
            request = codec.decode(GenerateRequest, message.data)
            self._check(request)
            if request.prompt is not None and len(request.prompt) > INLINE_CHARACTERS:
                self._spawn(self._tokenise_aside(message, request, tenant))
                return
            ids = request.prompt_ids or tuple(self._encode_prompt(request.prompt or ""))
        except KvfleetError as error:
            if isinstance(error, CodecError):
                self.malformed_total += 1
            self.refused_total += 1
            await self._refuse(message, request, error)
            return
        self._accept(request, ids, tenant, message.reply)

    async def _tokenise_aside(self, message: Message, request: GenerateRequest, tenant: str) -> None:
        """A long text takes long: on a thread, so that leases and other streams do not wait for it."""
        key = (request.request, request.attempt)
        if key in self._tokenising:
            return
        self._tokenising.add(key)
        try:
            encoded = asyncio.get_running_loop().run_in_executor(
                self._tokenisers, self._encode_prompt, request.prompt or ""
            )
            ids = tuple(await encoded)
            if key in self._tokenising:  # else it was cancelled meanwhile
                self._check(request)  # others came meanwhile
                self._accept(request, ids, tenant, message.reply)
        except KvfleetError as error:
            self.refused_total += 1
            await self._refuse(message, request, error)
        finally:
            self._tokenising.discard(key)

    def _accept(self, request: GenerateRequest, ids: tuple[int, ...], tenant: str, reply: str) -> None:
        if self.frames.knows(request.request, request.attempt):
            return  # delivered twice: the first one runs
        self.requests_total += 1
        now = asyncio.get_running_loop().time()
        record = self.frames.open(request, reply, tenant, now)
        self._broadcast.wake()
        accepted = Accepted(request.request, request.attempt, self.record.id, self.record.epoch)
        if is_inbox(reply):
            self.outbox.send(reply, codec.encode_frames([accepted]))
        remaining = None if request.deadline_ms is None else request.deadline_ms / 1000
        if remaining is not None:
            record.deadline = now + remaining
        if not record.pending:
            self.outbox.send_frames(self.frames.conclude(record, len(ids), now))
            return
        root = self._roots.of(tenant, ids)
        for spec in sequences_of(
            request,
            sorted(record.pending),
            prompt_ids=ids,
            root=root,
            tenant=tenant,
            deadline=None if remaining is None else time.monotonic() + remaining,
            prospect=self._look(request, root, ids),
        ):
            self._engine.submit(spec)

    def _look(self, request: GenerateRequest, root: Root, ids: tuple[int, ...]) -> Prospect | None:
        """Ask vaults, and the peer that placement named, what they have: while the engine is busy with its step."""
        size = self.record.block_size
        rate = self._rates.prefill_tokens_per_s
        if self._remote is None or len(ids) <= size or (rate and len(ids) < LOOK_WORTH_S * rate):
            return None
        known = ids + request.output_ids if request.sampling.n == 1 else ids
        names = names_of(root, chain(root, known, size), known, size)
        return Prospect(
            names,
            self._remote.look(names, exact=request.exact, peer=request.source, on_ready=self._engine.wake),
            request.source,
        )

    def _check(self, request: GenerateRequest) -> None:
        draining = self._state is State.DRAINING
        check_request(request, model=self.record.model, draining=draining, unix_ms=time.time() * 1000)
        limit = self._limits.waiting + self.record.slots
        check_capacity(request, taken=self.frames.pending_sequences, limit=limit)

    async def _refuse(self, message: Message, request: GenerateRequest | None, error: KvfleetError) -> None:
        """Only whoever waits for the acknowledgement hears of a refusal: it decides what the client sees."""
        if not is_inbox(message.reply):
            return
        *_, name, attempt = ("", *message.reply.split("."))  # an inbox of ours ends in both
        failed = Failed(
            request.request if request else name,
            request.attempt if request else int(attempt) if attempt.isdigit() else 0,
            error.code,
            error.message,
            error.retryable,
            error.field,
        )
        self.outbox.send(message.reply, codec.encode_frames([failed]))

    async def _on_cancel(self, message: Message) -> None:
        try:
            cancel = codec.decode(CancelRequest, message.data)
        except CodecError as error:
            self._malformed(message, error)
            return
        self._tokenising -= {
            key for key in self._tokenising if key[0] == cancel.request and cancel.attempt in (None, key[1])
        }
        running = self.frames.attempts(cancel.request)
        for attempt in running if cancel.attempt is None else [a for a in running if a == cancel.attempt]:
            self._engine.cancel(cancel.request, attempt)

    async def _on_pause(self, message: Message) -> None:
        try:
            pause = codec.decode(PauseRequest, message.data)
        except CodecError as error:
            self._malformed(message, error)
            return
        record = self.frames.find(pause.request, pause.attempt)
        if record is not None:
            record.paused_at = asyncio.get_running_loop().time() if pause.paused else None
            if pause.paused:
                self._engine.pause(pause.request, pause.attempt)
            else:
                self._engine.resume(pause.request, pause.attempt)

    async def _on_resend(self, message: Message) -> None:
        """Repeat what is asked for; an attempt nobody knows here is lost, and its owner may go on elsewhere."""
        try:
            asked = codec.decode(ResendRequest, message.data)
            if not is_inbox(asked.inbox):
                raise CodecError("must be an inbox", field="inbox")
        except CodecError as error:
            self._malformed(message, error)
            return
        frames = self.frames.repeat(asked.request, asked.attempt, asked.from_index, asked.from_indices)
        if not frames:
            lost = WorkerLost(f"worker {self.record.id} does not know this attempt")
            frames = [Failed(asked.request, asked.attempt, lost.code, lost.message, retryable=True)]
        for frame in frames:
            self.outbox.send(asked.inbox, codec.encode_frames([frame]))

    def _malformed(self, message: Message, error: CodecError) -> None:
        self.malformed_total += 1
        log.debug("%s: %s", message.subject, error)

    # ------------------------------------------------------------------ results

    def on_results(self, results: list[StepResult]) -> None:
        """Called on the loop with the results of one or more steps, in order."""
        now = asyncio.get_running_loop().time()
        framed: list[tuple[Record, Frame]] = []
        for result in results:
            for output in result.outputs:
                sent = self.frames.add(output, now)
                framed += sent
                if sent and type(output) is SequenceFailed and len(sent[0][0].tracks) > 1:
                    self._engine.cancel(output.request, output.attempt)  # its other choices
        if framed:
            self.outbox.send_frames(framed)
        self._broadcast.changes(results)

    async def _beat(self) -> None:
        while True:
            await self._publish_heartbeat()
            now = asyncio.get_running_loop().time()
            self._end_overdue(now)
            self.frames.sweep(now)
            self._broadcast.wake()  # for those that ended, and for what waited for NATS
            await asyncio.sleep(HEARTBEAT_PERIOD_S)

    def _end_overdue(self, now: float) -> None:
        ended: list[tuple[Record, Frame]] = []
        for record in self.frames.overdue(now):
            self._engine.cancel(record.request, record.attempt)
            late = DeadlineExceeded("the request's deadline passed, or it was paused and nobody came back")
            failed = Failed(record.request, record.attempt, late.code, late.message, output_tokens=record.output_tokens)
            ended.append(self.frames.end(record, failed, now))
        self.outbox.send_frames(ended)

    async def _publish_heartbeat(self) -> None:
        self._load, self._rates = self._engine.measure()
        if self._connection.is_connected:
            self.outbox.send(self._subjects.heartbeat(self.record.id), codec.encode(self.heartbeat()))

    def heartbeat(self) -> Heartbeat:
        return Heartbeat(
            worker=self.record.id,
            epoch=self.record.epoch,
            state=self._state,
            load=self._load,
            rates=self._rates,
            event_seq=self._publisher.seq,
            digest=self._publisher.digest,
            held=self._load.blocks_addressed,
        )
