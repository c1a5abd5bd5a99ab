"""Loop: one request from placement to its terminal frame, over as many attempts as it takes.

    place ──▶ publish ──▶ accepted ──▶ tokens... ──▶ Finished
      ▲          │ no responders          │ worker lost, silent, Moved, retryable Failed
      └──────────┴────────────────────────┘  next attempt, continuing after the tokens already here

`RequestDriver.run` is a stream's one task. It sleeps until a signal other than tokens arrives.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from dataclasses import replace

from kvproto import codec
from kvproto.affinity import ring_key
from kvproto.connection import Connection
from kvproto.errors import (
    Cancelled,
    CodecError,
    DeadlineExceeded,
    InvalidRequest,
    KvfleetError,
    ModelNotFound,
    NotFound,
    NoWorkers,
    PayloadTooLarge,
    Unavailable,
    WorkerLost,
    from_code,
)
from kvproto.fleet_view import RECONNECT_GRACE_S
from kvproto.generation import Counters, Generation
from kvproto.inbox import Inbox
from kvproto.members import Members
from kvproto.messages import (
    CancelRequest,
    Encoding,
    Failed,
    GenerateRequest,
    Moved,
    PauseRequest,
    Placement,
    PlaceRequest,
    ResendRequest,
    State,
)
from kvproto.stream import Signal, Stream
from kvproto.subjects import Subjects

log = logging.getLogger(__name__)

PLACE_TIMEOUT_S = 0.05
POLICY_TIMEOUT_S = 1.0  # where nobody else can decide as the request wants it
DIRECT, RING = "direct", "ring"  # policies that a client can follow by itself
ACK_TIMEOUT_S = 2.0
DEAF_S = 10.0  # a worker that heartbeats but answers no question for this long is given up
RETRY_WAIT_S = 0.2


class RequestDriver:
    """What all requests of a client share: where to publish, whom to ask, what is counted."""

    def __init__(
        self, connection: Connection, subjects: Subjects, members: Members, inbox: Inbox, counters: Counters
    ) -> None:
        self.connection = connection
        self.subjects = subjects
        self.members = members
        self.inbox = inbox
        self.counters = counters

    @staticmethod
    def now() -> float:
        return asyncio.get_running_loop().time()

    async def run(self, stream: Stream, generation: Generation) -> None:
        """One request from placement to its terminal frame, over as many attempts as it takes."""
        deadline = self.now() + generation.deadline_s
        patience = self.now() + generation.patience_s
        excluded: list[str] = []
        accepted = 0  # attempts that a worker took on; a refusal costs patience, not one of these
        try:
            while not stream.closed:
                worker = await self._place(stream, generation, excluded, deadline)
                try:
                    await self._attempt(stream, generation, worker, deadline)
                except KvfleetError as error:
                    await self._cancel_at(worker, stream)
                    if not error.retryable:
                        raise
                    if stream.accepted:
                        accepted += 1
                        patience = self.now() + generation.patience_s
                    if accepted >= generation.attempts or self.now() > min(patience, deadline):
                        raise
                    log.info("request %s: attempt %d at %s ended: %s", stream.request, stream.attempts, worker, error)
                    if isinstance(error, WorkerLost):
                        self.counters.lost_total += 1
                    if worker not in excluded:
                        excluded.append(worker)
                    else:  # everybody was asked: wait for somebody to come back instead of spinning
                        excluded[:] = [worker]
                        await asyncio.sleep(RETRY_WAIT_S * (0.75 + random.random() / 2))
        except KvfleetError as error:
            stream.fail(error)
        except asyncio.CancelledError:
            stream.fail(Cancelled("the client is closing"))
            raise
        except Exception as error:  # the task's top: the reader must learn of it
            log.exception("request %s: the driver failed", stream.request)
            stream.fail(KvfleetError(f"{type(error).__name__}: {error}"))
        finally:
            self.inbox.forget(stream.request)

    async def _place(self, stream: Stream, generation: Generation, excluded: list[str], deadline: float) -> str:
        """Ask placement; without an answer in 50 ms, the plain ring over this client's own view (fail open)."""
        patience = self.now() + generation.patience_s
        while True:
            if stream.closed:
                raise Cancelled("cancelled by the client")
            try:
                placement = await self._ask_placement(stream, generation, excluded)
                stream.placement = placement
                return placement.worker
            except ModelNotFound:
                raise
            except KvfleetError as error:
                # A fresh request with nobody to serve it fails at once; one that lost its worker, or that started in
                # an outage, waits for somebody to come (back).
                waits = bool(excluded) or not self.connection.is_connected or self._in_grace()
                if not (error.retryable and waits) or self.now() + RETRY_WAIT_S > min(patience, deadline):
                    raise
                await asyncio.sleep(RETRY_WAIT_S * (0.75 + random.random() / 2))

    async def _ask_placement(self, stream: Stream, generation: Generation, excluded: list[str]) -> Placement:
        question = PlaceRequest(
            request=stream.request,
            model=generation.model,
            prompt_ids=generation.prompt_ids,
            prompt=generation.prompt,
            session=generation.session,
            attempt=stream.attempts,
            excluded=tuple(excluded),
            max_tokens=generation.sampling.max_tokens * generation.sampling.n,
            policy=_policy(generation),
            worker=generation.worker,
        )
        # A stream that has begun goes on by the ring, whatever policy it asked for; one that has not can still be
        # refused, rather than be placed as it did not ask for.
        insists = question.policy not in (None, RING, DIRECT) and not stream.attempts
        subject = self.subjects.place(generation.tenant, generation.model)
        try:
            timeout_s = POLICY_TIMEOUT_S if insists else PLACE_TIMEOUT_S
            reply = await self.connection.request(subject, codec.encode(question), timeout_s)
            placement = read_placement(reply.data)
            self.counters.placed_total += 1
            return placement
        except (TimeoutError, WorkerLost, Unavailable, CodecError) as error:
            if isinstance(error, NoWorkers):
                raise
            if insists:
                what = f"placement does not answer, and only it can decide by the policy {question.policy!r}"
                raise Unavailable(what, field="policy", retry_after_s=1.0) from None
            self.counters.fallback_total += 1
            log.info("request %s: placement is silent (%s), placed by the ring", stream.request, error)
            return self._ring_placement(question, generation)

    def _ring_placement(self, question: PlaceRequest, generation: Generation) -> Placement:
        if question.policy == DIRECT:
            return self._direct_placement(question)
        key = ring_key(
            generation.tenant,
            session=generation.session,
            prompt_ids=generation.prompt_ids,
            prompt=generation.prompt,
        )
        ring = self.members.ring(generation.model)
        worker = (
            ring.owner(key, excluded=question.excluded)
            or ring.owner(key, excluded=question.excluded[-1:])
            or ring.owner(key)
        )
        if worker is None:
            if generation.model not in {view.record.model for view in self.members.view.workers.values()}:
                raise ModelNotFound(f"no worker serves {generation.model!r}", field="model")
            raise NoWorkers(f"no worker of {generation.model!r} is ready", retry_after_s=2.0)
        return Placement(question.request, worker, question.attempt, policy=RING, why="placement did not answer")

    def _direct_placement(self, question: PlaceRequest) -> Placement:
        """The named worker or an error, as placement would say it."""
        worker = question.worker
        if not worker:
            raise InvalidRequest("the policy direct needs a worker", field="worker")
        record = self.members.view.with_state(worker)
        if record is None or record.state is State.DEAD:
            raise NotFound(f"no worker {worker[:64]!r} is alive", field="worker")
        if record.model != question.model:
            raise NotFound(f"worker {worker} serves {record.model}, not {question.model[:64]}", field="worker")
        if record.state is not State.READY:
            raise Unavailable(f"worker {worker} is {record.state.value}", field="worker")
        return Placement(question.request, worker, question.attempt, policy=DIRECT, why="placement did not answer")

    async def _attempt(self, stream: Stream, generation: Generation, worker: str, deadline: float) -> None:
        """One worker, until its terminal frame. Raises what ended it otherwise; `retryable` says whether to go on."""
        attempt = stream.attempts
        stream.attempts += 1
        stream.worker, stream.worker_epoch, stream.accepted = worker, None, False
        stream.gap_since = stream.paused_since = None
        stream.was_paused = False
        stream.forget_signals()
        assembly = stream.assembly
        assembly.begin(attempt)
        remaining = deadline - self.now()
        if remaining <= 0:
            raise DeadlineExceeded("the request's deadline passed")
        body = GenerateRequest(
            request=stream.request,
            attempt=attempt,
            model=generation.model,
            sampling=generation.sampling,
            inbox=self.inbox.batch,
            prompt_ids=generation.prompt_ids,
            prompt=generation.prompt,
            output_ids=tuple(assembly.ids) if generation.sampling.n == 1 else (),
            text_sent=assembly.chars if generation.sampling.n == 1 else 0,
            encoding=Encoding.FRAMES,
            session=generation.session,
            priority=generation.priority,
            deadline_ms=int(remaining * 1000),
            expires_unix_ms=int((time.time() + remaining) * 1000),
            traceparent=generation.traceparent,
            continuations=assembly.continuations(),
            exact=generation.exact,
        )
        placed = stream.placement
        if placed is not None and placed.worker == worker and placed.source:
            body = replace(body, source=placed.source, source_tokens=placed.source_tokens)
        data = codec.encode(body, self._version_of(worker))
        if len(data) > self.connection.max_payload:
            raise PayloadTooLarge(
                f"{len(data)} bytes on the wire, NATS takes at most {self.connection.max_payload}", field="prompt"
            )
        stream.last_frame_at = self.now()
        subject = self.subjects.worker_generate(worker, generation.tenant)
        await self.connection.publish(subject, data, reply=self.inbox.of(stream.request, attempt))
        published_at = self.now()
        first_probe_at: float | None = None
        while assembly.terminal is None:
            wait = deadline - self.now()
            if not stream.accepted:
                wait = min(wait, ACK_TIMEOUT_S)
            signal = await stream.next_signal(max(wait, 0.0))
            if self.now() >= deadline:
                raise DeadlineExceeded("the request's deadline passed")
            if signal is Signal.CANCELLED:
                raise Cancelled("cancelled by the client")
            if signal is None and not stream.accepted:
                if (
                    self.connection.is_connected
                    and self.now() - max(published_at, self._connected_at()) > ACK_TIMEOUT_S
                ):
                    raise WorkerLost(f"worker {worker} did not accept within {ACK_TIMEOUT_S} s")
            elif signal is Signal.NO_RESPONDERS:
                if not stream.accepted or not self._in_grace():
                    raise WorkerLost(f"worker {worker} is not there")
            elif signal is Signal.WORKER_LOST:
                raise WorkerLost(f"worker {worker} is gone")
            elif signal is Signal.SILENT or signal is Signal.GAP:
                if stream.last_frame_at >= stream.last_probe_at or first_probe_at is None:
                    first_probe_at = self.now()
                if self.connection.is_connected and self.now() - max(first_probe_at, self._connected_at()) > DEAF_S:
                    raise WorkerLost(f"worker {worker} does not answer")
                await self._ask_again(stream, worker)
                if stream.was_paused:  # the message that let it go on may be what was lost
                    await self._pause(stream, worker, paused=False)
            elif signal is Signal.FULL or signal is Signal.DRAINED:
                await self._pause(stream, worker, paused=signal is Signal.FULL)
        terminal = assembly.terminal
        if isinstance(terminal, Failed):
            error = from_code(terminal.code, terminal.message, field=terminal.field)
            if terminal.retryable and not error.retryable:
                error = Unavailable(terminal.message)
            raise error
        if isinstance(terminal, Moved):
            raise WorkerLost(f"worker {worker} moved the request")

    def _version_of(self, worker: str) -> int:
        view = self.members.view.workers.get(worker)
        return codec.common_version(view.record.versions) if view else codec.VERSION

    def _connected_at(self) -> float:
        return self.now() - self.connection.connected_for_s

    def _in_grace(self) -> bool:
        """Just after an outage the worker may still be on its way back: nobody listening proves nothing yet."""
        return self.connection.reconnects_total > 0 and self.connection.connected_for_s < RECONNECT_GRACE_S

    # ------------------------------------------------------------------ what a worker is told

    async def _ask_again(self, stream: Stream, worker: str) -> None:
        self.counters.resends_total += 1
        stream.last_probe_at = self.now()
        assembly = stream.assembly
        inbox = self.inbox.of(stream.request, assembly.attempt)
        first, *others = indices = assembly.next_indices
        question = ResendRequest(stream.request, assembly.attempt, first, inbox, indices if others else ())
        await self.connection.publish(self.subjects.worker_resend(worker), codec.encode(question), reply=inbox)

    async def _cancel_at(self, worker: str, stream: Stream) -> None:
        """Tell a worker to let go of an attempt, if it did not end by itself. Never raises."""
        if stream.assembly.terminal is not None:
            return
        with contextlib.suppress(KvfleetError):
            await self.connection.publish(
                self.subjects.worker_cancel(worker),
                codec.encode(CancelRequest(stream.request, stream.assembly.attempt)),
            )

    async def _pause(self, stream: Stream, worker: str, *, paused: bool) -> None:
        if not paused:
            stream.paused_since = None
        await self.connection.publish(
            self.subjects.worker_pause(worker),
            codec.encode(PauseRequest(stream.request, stream.assembly.attempt, paused)),
        )


def _policy(generation: Generation) -> str | None:
    """Who names a worker and no policy wants that worker."""
    return generation.policy or (DIRECT if generation.worker is not None else None)


def read_placement(data: bytes) -> Placement:
    """Placement's answer: a decision (a map), or its refusal (a `Failed` frame), which is raised."""
    if len(data) > 1 and not codec.is_map_marker(data[1]):
        for frame in codec.decode_frames(data):
            if isinstance(frame, Failed):
                raise from_code(frame.code, frame.message, field=frame.field)
        raise CodecError("neither a placement nor a failure")
    return codec.decode(Placement, data)
