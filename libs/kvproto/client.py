"""Loop: the client of a fleet. Place, publish, order, ask again, go on elsewhere when a worker is lost, cancel.

The ingress is HTTP around this client, so Python producers get the same promises. One request's life is `_drive`:

    place ──▶ publish ──▶ accepted ──▶ tokens... ──▶ Finished
      ▲          │ no responders          │ worker lost, silent, Moved, retryable Failed
      └──────────┴────────────────────────┘  next attempt, continuing after the tokens already here
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from kvproto import codec
from kvproto.affinity import ring_key
from kvproto.connection import Connection
from kvproto.errors import (
    Cancelled,
    CodecError,
    DeadlineExceeded,
    InvalidRequest,
    KvfleetError,
    LimitExceeded,
    ModelNotFound,
    NotFound,
    NoWorkers,
    Unavailable,
    WorkerLost,
    from_code,
)
from kvproto.fleet_view import RECONNECT_GRACE_S, Change, WorkerView
from kvproto.ids import DEFAULT_NAMESPACE, DEFAULT_TENANT, new_process_id, new_request_id
from kvproto.inbox import Inbox
from kvproto.members import Members
from kvproto.messages import (
    AdminCommand,
    AdminReply,
    AdminRequest,
    Bundle,
    CancelRequest,
    Encoding,
    Failed,
    Finished,
    GenerateRequest,
    Moved,
    PauseRequest,
    Placement,
    PlaceRequest,
    ResendRequest,
    Sampling,
)
from kvproto.stream import Signal, Stream
from kvproto.subjects import PRODUCER_INBOX, Subjects, inbox_prefix

log = logging.getLogger(__name__)
T = TypeVar("T")

PLACE_TIMEOUT_S = 0.05
ACK_TIMEOUT_S = 2.0
SILENCE_S = 1.0
DEAF_S = 10.0  # a worker that heartbeats but answers no question for this long is given up
GAP_S = 0.02
WATCH_PERIOD_S = 0.05
PAUSED_LIMIT_S = 60.0
BUFFER_TOKENS = 4096
RETRY_WAIT_S = 0.2


@dataclass(frozen=True, slots=True)
class Generation:
    """What a caller asks for. Either `prompt_ids` or `prompt` (the worker then tokenises it)."""

    model: str
    sampling: Sampling
    prompt_ids: tuple[int, ...] = ()
    prompt: str | None = None
    tenant: str = DEFAULT_TENANT
    session: str | None = None
    priority: int = 0
    deadline_s: float = 600.0
    patience_s: float = 10.0  # how long to look for a worker when there is none
    attempts: int = 8
    policy: str | None = None
    worker: str | None = None
    request: str | None = None
    traceparent: str | None = None


@dataclass(slots=True)
class Counters:
    """What this client has seen, since its start."""

    requests_total: int = 0
    placed_total: int = 0
    fallback_total: int = 0  # placed by the ring because placement did not answer in time
    lost_total: int = 0  # attempts that ended because their worker was lost
    resends_total: int = 0
    place_seconds: list[float] = field(default_factory=list)


def draw_seed() -> int:
    """A seed for a request that names none: stored in the request, so that a later attempt draws the same tokens."""
    return int.from_bytes(os.urandom(8), "little") >> 1


class Client:
    """One process's client. `open` connects; `over` shares a connection that is already there (the ingress does)."""

    def __init__(self, connection: Connection, subjects: Subjects, members: Members) -> None:
        self.connection = connection
        self.subjects = subjects
        self.members = members
        self.counters = Counters()
        self.inbox = Inbox(connection)
        self._streams: dict[str, Stream] = {}
        self._background: set[asyncio.Task[Any]] = set()
        self._watcher: asyncio.Task[None] | None = None
        self._owns_connection = False

    @classmethod
    async def open(
        cls,
        servers: str | Sequence[str] = "nats://127.0.0.1:4222",
        *,
        tenant: str = DEFAULT_TENANT,
        namespace: str = DEFAULT_NAMESPACE,
        **options: Any,
    ) -> Client:
        """Connect as a producer of `tenant`. Options are `Connection.open`'s. Raises Unavailable."""
        prefix = inbox_prefix(f"{PRODUCER_INBOX}.{tenant}", new_process_id())
        connection = await Connection.open(servers, name=prefix, inbox_prefix=prefix, **options)
        try:
            client = await cls.over(connection, Subjects(namespace))
        except BaseException:
            await connection.close()
            raise
        client._owns_connection = True
        return client

    @classmethod
    async def over(cls, connection: Connection, subjects: Subjects) -> Client:
        members = Members(connection, subjects)
        client = cls(connection, subjects, members)
        await client.inbox.start()
        await members.start()
        members.listeners.append(client._on_member)
        connection.on_reconnect.append(client._on_reconnect)
        client._watcher = asyncio.create_task(client._watch(), name="client-watch")
        return client

    async def close(self) -> None:
        """Cancel what runs and let go of everything."""
        await asyncio.gather(*(stream.cancel() for stream in list(self._streams.values())), return_exceptions=True)
        if self._watcher is not None:
            self._watcher.cancel()
        with contextlib.suppress(ValueError):
            self.connection.on_reconnect.remove(self._on_reconnect)
        await self.members.stop()
        with contextlib.suppress(Exception):
            await self.inbox.stop()
        if self._owns_connection:
            await self.connection.close()

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def now(self) -> float:
        return self._loop_time()

    @staticmethod
    def _loop_time() -> float:
        return asyncio.get_running_loop().time()

    @property
    def streams(self) -> int:
        return len(self._streams)

    # ------------------------------------------------------------------ one request

    def generate(self, generation: Generation) -> Stream:
        """Start a request. Errors are raised by the stream's reader."""
        if bool(generation.prompt_ids) == (generation.prompt is not None):
            raise InvalidRequest("exactly one of prompt_ids and prompt must be given and not empty", field="prompt")
        request = generation.request or new_request_id()
        if request in self._streams:
            raise InvalidRequest("this request id is already running", field="request")
        self.subjects.place(generation.tenant, generation.model)  # refuses a tenant that is no subject token
        limit = min(generation.sampling.max_tokens, BUFFER_TOKENS)
        stream = Stream(self, request, limit, self.now())
        self._streams[request] = stream
        self.inbox.register(request, stream)
        self.counters.requests_total += 1
        stream.driver = asyncio.create_task(self._drive(stream, generation), name=f"stream-{request}")
        return stream

    async def _drive(self, stream: Stream, generation: Generation) -> None:
        """One request from placement to its terminal frame, over as many attempts as it takes."""
        deadline = self.now() + generation.deadline_s
        excluded: list[str] = []
        try:
            while not stream.closed:
                if stream.attempts >= generation.attempts:
                    raise Unavailable(f"given up after {stream.attempts} attempts", retry_after_s=1.0)
                worker = await self._place(stream, generation, excluded, deadline)
                try:
                    await self._attempt(stream, generation, worker, deadline)
                except KvfleetError as error:
                    await self._cancel_at(worker, stream)
                    if not error.retryable:
                        raise
                    log.info("request %s: attempt %d at %s ended: %s", stream.request, stream.attempts, worker, error)
                    if isinstance(error, WorkerLost):
                        self.counters.lost_total += 1
                    if worker not in excluded:
                        excluded.append(worker)
        except KvfleetError as error:
            stream.fail(error)
        except asyncio.CancelledError:
            stream.fail(Cancelled("the client is closing"))
            raise
        except Exception as error:
            log.exception("request %s: the driver failed", stream.request)
            stream.fail(KvfleetError(f"{type(error).__name__}: {error}"))
        finally:
            self.inbox.forget(stream.request)
            self._streams.pop(stream.request, None)

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
            max_tokens=generation.sampling.max_tokens,
            policy=generation.policy,
            worker=generation.worker,
        )
        subject = self.subjects.place(generation.tenant, generation.model)
        began = self.now()
        try:
            reply = await self.connection.request(subject, codec.encode(question), PLACE_TIMEOUT_S)
            placement = read_placement(reply.data)
            self.counters.placed_total += 1
            return placement
        except (TimeoutError, WorkerLost, Unavailable, CodecError) as error:
            if isinstance(error, NoWorkers):
                raise
            self.counters.fallback_total += 1
            log.info("request %s: placement is silent (%s), placed by the ring", stream.request, error)
            return self._ring_placement(question, generation)
        finally:
            if len(self.counters.place_seconds) < 4096:
                self.counters.place_seconds.append(self.now() - began)

    def _ring_placement(self, question: PlaceRequest, generation: Generation) -> Placement:
        if generation.worker is not None:
            if not self.members.view.is_alive(generation.worker):
                raise NotFound(f"worker {generation.worker!r} is not alive", field="worker")
            return Placement(question.request, generation.worker, question.attempt, policy="direct")
        key = ring_key(
            generation.tenant,
            session=generation.session,
            prompt_ids=generation.prompt_ids,
            prompt=generation.prompt,
        )
        ring = self.members.ring(generation.model)
        worker = ring.owner(key, excluded=question.excluded) or ring.owner(key, excluded=question.excluded[-1:])
        if worker is None:
            if generation.model not in {view.record.model for view in self.members.view.workers.values()}:
                raise ModelNotFound(f"no worker serves {generation.model!r}", field="model")
            raise NoWorkers(f"no worker of {generation.model!r} is ready", retry_after_s=2.0)
        return Placement(question.request, worker, question.attempt, policy="ring", why="placement did not answer")

    async def _attempt(self, stream: Stream, generation: Generation, worker: str, deadline: float) -> None:
        """One worker, until its terminal frame. Raises what ended it otherwise; `retryable` says whether to go on."""
        attempt = stream.attempts
        stream.attempts += 1
        stream.worker, stream.worker_epoch, stream.accepted = worker, None, False
        stream.gap_since = stream.paused_since = None
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
            output_ids=tuple(assembly.ids),
            text_sent=assembly.chars,
            encoding=Encoding.FRAMES,
            session=generation.session,
            priority=generation.priority,
            deadline_ms=int(remaining * 1000),
            expires_unix_ms=int((time.time() + remaining) * 1000),
            traceparent=generation.traceparent,
        )
        data = codec.encode(body, self._version_of(worker))
        if len(data) > self.connection.max_payload:
            raise InvalidRequest(
                f"{len(data)} bytes on the wire, NATS takes at most {self.connection.max_payload}", field="prompt"
            )
        stream.last_frame_at = self.now()
        subject = self.subjects.worker_generate(worker, generation.tenant)
        await self.connection.publish(subject, data, reply=self.inbox.of(stream.request))
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
        assert isinstance(terminal, Finished)

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
        question = ResendRequest(
            stream.request, stream.assembly.attempt, stream.assembly.next_index, self.inbox.of(stream.request)
        )
        await self.connection.publish(
            self.subjects.worker_resend(worker), codec.encode(question), reply=self.inbox.of(stream.request)
        )

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

    # ------------------------------------------------------------------ watching

    async def _watch(self) -> None:
        """One timer for all streams: gaps, silence, readers that stopped reading."""
        while True:
            await asyncio.sleep(WATCH_PERIOD_S)
            if not self.connection.is_connected:
                continue
            now = self.now()
            for stream in list(self._streams.values()):
                if not stream.accepted:
                    continue
                quiet = now - stream.last_probe_at
                if stream.paused_since is not None:
                    if now - stream.paused_since > PAUSED_LIMIT_S:
                        stream.fail(LimitExceeded(f"the client did not read for {PAUSED_LIMIT_S:.0f} s"))
                        stream.signal(Signal.CANCELLED)
                elif stream.gap_since is not None and now - stream.gap_since > GAP_S and quiet > 10 * GAP_S:
                    stream.signal(Signal.GAP)
                elif now - stream.last_frame_at > SILENCE_S and quiet > SILENCE_S:
                    stream.signal(Signal.SILENT)

    def _on_member(self, change: Change, view: WorkerView) -> None:
        for stream in self._streams.values():
            if stream.worker != view.record.id:
                continue
            if change is Change.LEFT or (
                change is Change.NEW_EPOCH and stream.worker_epoch not in (None, view.record.epoch)
            ):
                stream.signal(Signal.WORKER_LOST)

    async def _on_reconnect(self) -> None:
        """Frames sent while this process was away are lost: ask every worker at once how far it is."""
        for stream in list(self._streams.values()):
            if stream.accepted:
                stream.last_frame_at = self.now()
                stream.signal(Signal.SILENT)

    # ------------------------------------------------------------------ administration

    async def admin(self, worker: str, request: AdminRequest, timeout_s: float = 5.0) -> bytes:
        """Ask a worker's admin subject; the parts of its answer, joined. Raises its error, WorkerLost, TimeoutError."""
        parts: list[bytes] = []
        total = 1
        while len(parts) < total:
            question = codec.encode(replace(request, part=len(parts)))
            message = await self.connection.request(self.subjects.worker_admin(worker), question, timeout_s)
            reply = codec.decode(AdminReply, message.data)
            if reply.code is not None:
                raise from_code(reply.code, reply.message)
            total = reply.parts
            parts.append(reply.data)
        return b"".join(parts)

    async def bundle(self, worker: str) -> Bundle:
        """Tokenizer, template and defaults of the model this worker serves."""
        return codec.decode(Bundle, await self.admin(worker, AdminRequest(AdminCommand.BUNDLE)))


def read_placement(data: bytes) -> Placement:
    """Placement's answer: a decision (a map), or its refusal (a `Failed` frame), which is raised."""
    if len(data) > 1 and not codec.is_map_marker(data[1]):
        for frame in codec.decode_frames(data):
            if isinstance(frame, Failed):
                raise from_code(frame.code, frame.message, field=frame.field)
        raise CodecError("neither a placement nor a failure")
    return codec.decode(Placement, data)
