"""Loop: carries one stream to one client: server-sent events, or gathered into one answer.

Everything `Stream.read` returns becomes ONE send: costs nothing when tokens come one by one, and is what saves the
process when they come faster than it can send. Formats are writers (`openai_events`, `native_events`) that append
ready bytes; no object is made per token.

    read ──▶ Started ──▶ Tokens... ──▶ Finished        the last events are the caller's to send, after its commit
      │  nothing for a while: a comment keeps the connection; client gone: the stream is cancelled
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Protocol

from kvproto.errors import KvfleetError
from kvproto.ids import is_token
from kvproto.messages import ChoiceFinished, Finished, FinishReason, Started, TokenLogprobs, Tokens
from kvproto.stream import Event, Stream
from services.ingress.error_bodies import Headers
from services.ingress.http_exchange import Exchange

QUEUED = b": queued\n\n"
WAITING = b": waiting\n\n"


@dataclass(slots=True)
class ChoiceTranscript:
    """What one choice has brought. `logprobs` are kept, one per token, for an answer that is sent whole."""

    pieces: list[str] = field(default_factory=list)
    ids: tuple[int, ...] = ()  # what was generated, once the stream has finished
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    reason: FinishReason | None = None

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(slots=True)
class Transcript:
    """What one stream has brought. Times are the event loop's."""

    started: Started | None = None
    finished: Finished | None = None
    choices: list[ChoiceTranscript] = field(default_factory=lambda: [ChoiceTranscript()])
    unsent: list[bytes] = field(default_factory=list)  # events of the read that brought the end
    first_token_at: float | None = None
    last_token_at: float | None = None

    @property
    def text(self) -> str:
        """Of the first choice."""
        return self.choices[0].text

    @property
    def ids(self) -> tuple[int, ...]:
        """Of the first choice: it is the one that a conversation goes on with."""
        return self.choices[0].ids


class EventWriter(Protocol):
    """One format of events: appends ready bytes to `out`. `choice_finished` is called only where there are several."""

    def started(self, started: Started, out: list[bytes]) -> None: ...
    def tokens(self, tokens: Tokens, out: list[bytes]) -> None: ...
    def choice_finished(self, ended: ChoiceFinished, out: list[bytes]) -> None: ...
    def finished(self, finished: Finished, transcript: Transcript, out: list[bytes]) -> None: ...
    def failed(self, error: KvfleetError) -> bytes: ...


OnTokens = Callable[[int], None]


async def relay(
    exchange: Exchange,
    stream: Stream,
    writer: EventWriter,
    transcript: Transcript,
    *,
    keepalive_s: float,
    on_tokens: OnTokens,
) -> None:
    """Write a stream as events up to the read that brings its end. Raises the stream's KvfleetError."""
    exchange.error_event = writer.failed
    async with _watched(exchange, stream), _KeptAlive(exchange, keepalive_s):
        while batch := await stream.read():
            out: list[bytes] = []
            _take(batch, stream, transcript, out, writer, on_tokens)
            if transcript.finished is not None:
                transcript.unsent = out
            elif out:
                if not exchange.started:
                    await exchange.start_events(placement_headers(transcript.started))
                await exchange.write(out[0] if len(out) == 1 else b"".join(out))


async def complete(exchange: Exchange, writer: EventWriter, transcript: Transcript) -> None:
    """Send what is left of a finished stream and end it."""
    assert transcript.finished is not None  # a stream ends with Finished or raises
    out = transcript.unsent
    writer.finished(transcript.finished, transcript, out)
    if not exchange.started:
        await exchange.start_events(placement_headers(transcript.started))
    await exchange.end(b"".join(out))


def _take(
    batch: list[Event],
    stream: Stream,
    transcript: Transcript,
    out: list[bytes],
    writer: EventWriter,
    on_tokens: OnTokens,
) -> None:
    """One read's events into the transcript and into bytes."""
    count = 0
    choices = transcript.choices
    write = writer.tokens
    for event in batch:
        if type(event) is Tokens:
            count += len(event.ids)
            choices[event.choice].pieces.extend(event.text)
            write(event, out)
        elif isinstance(event, Started):
            transcript.started = event
            writer.started(event, out)
        elif isinstance(event, ChoiceFinished):
            choices[event.choice].reason = event.reason
            writer.choice_finished(event, out)
        elif isinstance(event, Finished):
            transcript.finished = event
            choices[0].reason = event.reason
            for at, choice in enumerate(choices):
                choice.ids = tuple(stream.ids_of(at))
    if count:
        now = asyncio.get_running_loop().time()
        if transcript.first_token_at is None:
            transcript.first_token_at = now
        transcript.last_token_at = now
        on_tokens(count)


class _Silent:
    """The writer of an answer that is sent whole: events are only kept."""

    def __init__(self, transcript: Transcript) -> None:
        self._choices = transcript.choices

    def started(self, started: Started, out: list[bytes]) -> None:
        pass

    def tokens(self, tokens: Tokens, out: list[bytes]) -> None:
        if tokens.logprobs:
            self._choices[tokens.choice].logprobs.extend(tokens.logprobs)

    def choice_finished(self, ended: ChoiceFinished, out: list[bytes]) -> None:
        pass

    def finished(self, finished: Finished, transcript: Transcript, out: list[bytes]) -> None:
        pass

    def failed(self, error: KvfleetError) -> bytes:
        return b""


async def gather(exchange: Exchange, stream: Stream, transcript: Transcript, *, on_tokens: OnTokens) -> None:
    """Read a stream to its end for an answer that is sent whole. Raises the stream's KvfleetError."""
    writer = _Silent(transcript)
    async with _watched(exchange, stream):
        while batch := await stream.read():
            _take(batch, stream, transcript, [], writer, on_tokens)


def placement_headers(started: Started | None) -> Headers:
    """Which worker serves it and what was cached, for whoever debugs with curl."""
    if started is None or not is_token(started.worker):
        return []
    return [
        (b"x-kvfleet-worker", started.worker.encode()),
        (b"x-kvfleet-cached-tokens", b"%d" % started.cached_tokens),
    ]


@contextlib.asynccontextmanager
async def _watched(exchange: Exchange, stream: Stream) -> AsyncIterator[None]:
    """Cancel the stream as soon as the client leaves, and whenever this block is left early."""

    async def watch() -> None:
        await exchange.until_gone()
        if exchange.gone:
            await stream.cancel()

    watcher = asyncio.create_task(watch(), name=f"disconnect-{stream.request}")
    try:
        async with stream:
            yield
    finally:
        watcher.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watcher


class _KeptAlive:
    """Sends a comment whenever nothing was written for a period. A timer, so that it costs nothing per token."""

    def __init__(self, exchange: Exchange, period_s: float) -> None:
        self._exchange = exchange
        self._period_s = period_s
        self._seen = 0
        self._timer: asyncio.TimerHandle | None = None
        self._sending: asyncio.Task[None] | None = None

    async def __aenter__(self) -> None:
        self._arm()

    async def __aexit__(self, *exc: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._sending is not None:
            self._sending.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._sending

    def _arm(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._period_s, self._tick)

    def _tick(self) -> None:
        if self._exchange.writes == self._seen and (self._sending is None or self._sending.done()):
            self._sending = asyncio.create_task(self._comment(), name="sse-comment")
        self._seen = self._exchange.writes
        self._arm()

    async def _comment(self) -> None:
        waiting = self._exchange.started
        if not waiting:
            await self._exchange.start_events()
        await self._exchange.write(WAITING if waiting else QUEUED)
        self._seen = self._exchange.writes
