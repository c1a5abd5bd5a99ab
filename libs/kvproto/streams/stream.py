"""Loop: one request's stream, the signals to its driver, and the one inbox of all streams.

Owned by the client's event loop. The inbox feeds a stream, and the reader takes all events with one await, so that a
busy ingress writes many tokens per send.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from kvproto import codec
from kvproto.connection import Connection, Message, Subscription, is_no_responders
from kvproto.errors import Cancelled, CodecError, KvfleetError
from kvproto.messages import (
    Accepted,
    ChoiceFinished,
    Failed,
    Finished,
    Frame,
    Moved,
    Placement,
    Progress,
    PromptScores,
    Started,
    Tokens,
)
from kvproto.regions import split
from kvproto.streams.silence import Hearing
from kvproto.streams.stream_assembly import StreamAssembly
from kvproto.subjects import batch_inbox, request_inbox, request_inboxes
from kvproto.trace_context import Trail

log = logging.getLogger(__name__)

Event = Started | PromptScores | Tokens | ChoiceFinished | Finished


class Signal(Enum):
    """Wakes a stream's driver."""

    ACCEPTED = "accepted"
    STARTED = "started"
    MOVING = "moving"  # and tokens of the attempt are still missing
    TERMINAL = "terminal"
    NO_RESPONDERS = "no_responders"
    WORKER_LOST = "worker_lost"
    SILENT = "silent"
    GAP = "gap"
    FULL = "full"
    DRAINED = "drained"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Mover:
    """A worker that has moved an attempt and keeps its blocks until the next one has begun."""

    worker: str
    attempt: int


class Stream:
    """Events of one request, each exactly once and in order: `Started`, `PromptScores`... where they are asked for,
    `Tokens`..., `Finished`; or an error raised.

    Use as `async with client.generate(...) as stream: async for event in stream: ...`. Leaving the block early cancels
    the request at the worker. Each of several choices is in order by itself, and ends with `ChoiceFinished`; they share
    one buffer.
    """

    def __init__(
        self, request: str, buffer_tokens: int, clock: Callable[[], float], choices: int = 1, *, scores: bool = False
    ) -> None:
        self.request = request
        self.tenant: str | None = None  # in subjects of messages to a worker; None for roles of the fleet
        self.assembly = StreamAssembly(choices, scores=scores)
        self.placement: Placement | None = None
        self.trail = Trail()
        self.mover: Mover | None = None
        self.successor = ""  # whom the mover has named
        self.worker: str | None = None
        self.worker_epoch: str | None = None
        self.accepted = False
        self.has_first = False  # token of this attempt
        self.attempts = 0
        now = clock()
        self.hearing = Hearing(now, now, now)
        self.lost_why = ""
        self.gap_since: float | None = None
        self.paused_since: float | None = None
        self.received: tuple[int, ...] = ()  # tokens that its reader had when it left
        self.was_paused = False  # in this attempt
        self.trusts_versions = True  # until a worker cannot read a version of its record
        self.trusts_clocks = True  # until a worker wrongly says that the deadline has passed
        self._clock = clock
        self._limit = buffer_tokens
        self._ready: deque[Event] = deque()
        self._buffered = 0
        self._reader: asyncio.Future[None] | None = None
        self._signals: deque[Signal] = deque()
        self._driver_waiter: asyncio.Future[None] | None = None
        self._error: KvfleetError | None = None
        self._done = False
        self.driver: asyncio.Task[None] | None = None

    async def read(self) -> list[Event]:
        """All present events, at least one; an empty list after the last. Raises the request's KvfleetError."""
        while not self._ready:
            if self._error is not None:
                raise self._error
            if self._done:
                return []
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        events = list(self._ready)
        self._ready.clear()
        self._buffered = 0
        if self.paused_since is not None:
            self.signal(Signal.DRAINED)
        return events

    async def __aiter__(self) -> AsyncIterator[Event]:
        while events := await self.read():
            for event in events:
                yield event

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.cancel()

    async def cancel(self, received: Sequence[int] | None = None) -> None:
        """Stop the request, if it has not ended. `received`: how many tokens of each choice its reader has (default:
        all that came); tokens past them are dropped."""
        if not self.closed:
            self.received = tuple(received or ())
            self.fail(Cancelled("cancelled by the client"))
            self.signal(Signal.CANCELLED)
        if self.driver is not None:
            await asyncio.wait([self.driver])

    @property
    def closed(self) -> bool:
        return self._done or self._error is not None

    @property
    def error(self) -> KvfleetError | None:
        """The error that ended the stream."""
        return self._error

    @property
    def ids(self) -> list[int]:
        """Generated token ids of the first choice so far."""
        return self.assembly.ids

    def ids_of(self, choice: int) -> list[int]:
        """Generated token ids of one choice so far."""
        return self.assembly.choices[choice].ids

    def on_frame(self, frame: Frame) -> None:
        if frame.attempt != self.assembly.attempt or self.closed:
            self.assembly.fenced += 1
            return
        self.hearing.heard_at = self._clock()
        if type(frame) is Tokens:
            self.accepted = True  # the acknowledgement may be lost
            if not self.has_first:
                self.has_first = True
                self.trail.first_token()
            self._deliver(self.assembly.accept(frame))
        elif isinstance(frame, Accepted):
            if self.worker is not None and frame.worker == split(self.worker)[1]:
                self.accepted, self.worker_epoch = True, frame.epoch
                self.signal(Signal.ACCEPTED)
        elif isinstance(frame, Progress):
            self.accepted = True
            tokens = self.assembly.tokens
            if frame.next_index > tokens and self.gap_since is None:
                self.gap_since = self.hearing.heard_at
            self.hearing.answered(tokens, frame.step_age_s)
        else:
            if not isinstance(frame, Failed):  # which may be a refusal
                self.accepted = True
            self._deliver(self.assembly.accept(frame))
            if isinstance(frame, Started):
                self.trail.started(frame)
                self.signal(Signal.STARTED)
            elif isinstance(frame, Moved) and self.assembly.is_moving:
                self.signal(Signal.MOVING)

    def on_no_responders(self, attempt: int) -> None:
        if attempt == self.assembly.attempt:
            self.signal(Signal.NO_RESPONDERS)

    def _deliver(self, frames: list[Frame]) -> None:
        for frame in frames:
            if type(frame) is Tokens:
                self._ready.append(frame)
                self._buffered += len(frame.ids)
            elif isinstance(frame, PromptScores):
                self._ready.append(frame)
                self._buffered += len(frame.logprobs)
            elif isinstance(frame, Failed | Moved):
                self.signal(Signal.TERMINAL)
            elif isinstance(frame, Finished):
                self._ready.append(frame)
                self._done = True
                self.signal(Signal.TERMINAL)
            elif isinstance(frame, Started | ChoiceFinished):
                self._ready.append(frame)
        assembly = self.assembly
        if assembly.is_waiting:
            if assembly.missing() is not None and self.gap_since is None:
                self.gap_since = self.hearing.heard_at
        else:
            self.gap_since = None
        if self._buffered > self._limit and self.paused_since is None and not self._done:
            self.paused_since = self.hearing.heard_at
            self.was_paused = True
            self.signal(Signal.FULL)
        self._wake_reader()

    def _wake_reader(self) -> None:
        if self._reader is not None and (self._ready or self.closed):
            _wake(self._reader)

    def signal(self, signal: Signal) -> None:
        self._signals.append(signal)
        if self._driver_waiter is not None:
            _wake(self._driver_waiter)

    async def next_signal(self, timeout_s: float) -> Signal | None:
        """None after the timeout."""
        if not self._signals:
            loop = asyncio.get_running_loop()
            waiter = self._driver_waiter = loop.create_future()
            timer = loop.call_later(timeout_s, _wake, waiter)
            try:
                await waiter
            finally:
                self._driver_waiter = None
                timer.cancel()
        return self._signals.popleft() if self._signals else None

    def begin(self, worker: str, attempt: int) -> None:
        """A new attempt drops all signals of the old one but a cancel."""
        self.worker, self.worker_epoch, self.accepted, self.has_first = worker, None, False, False
        self.gap_since = self.paused_since = None
        self.was_paused = False
        self.hearing.heard_at = self._clock()
        self.hearing.answers, self.hearing.tokens, self.lost_why = 0, -1, ""
        self.assembly.begin(attempt)
        cancelled = Signal.CANCELLED in self._signals
        self._signals.clear()
        if cancelled:
            self._signals.append(Signal.CANCELLED)

    def fail(self, error: KvfleetError) -> None:
        """End the stream with an error, after its buffered events."""
        if not self.closed:
            self._error = error
            self._wake_reader()


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


class Inbox:
    """The one wildcard inbox of a client process: a subscription per request would cost seven times as much."""

    def __init__(self, connection: Connection) -> None:
        self.receivers: dict[str, Stream] = {}  # by request; what they do with a frame must not block
        self.batch = batch_inbox(connection.inbox_prefix)
        self._connection = connection
        self._subscriptions: list[Subscription] = []
        self.orphan_frames_total = 0
        self.malformed_total = 0

    async def start(self) -> None:
        for subject in (request_inboxes(self._connection.inbox_prefix), self.batch):
            self._subscriptions.append(await self._connection.subscribe(subject, self._receive))

    async def stop(self) -> None:
        for subscription in self._subscriptions:
            await subscription.unsubscribe()

    def of(self, request: str, attempt: int) -> str:
        """Reply subject of one attempt: nothing else in a no-responders notice names it."""
        return request_inbox(self._connection.inbox_prefix, request, attempt)

    async def _receive(self, message: Message) -> None:
        if is_no_responders(message):
            *_, request, attempt = message.subject.split(".")
            receiver = self.receivers.get(request)
            if receiver is not None and attempt.isdigit():
                receiver.on_no_responders(int(attempt))
            return
        try:
            frames = codec.decode_frames(message.data)
        except CodecError as error:
            self.malformed_total += 1
            log.warning("inbox: a frame on %s is unreadable: %s", message.subject, error)
            return
        receivers = self.receivers
        for frame in frames:
            receiver = receivers.get(frame.request)
            if receiver is None:
                self.orphan_frames_total += 1
            else:
                receiver.on_frame(frame)
