"""Adapter: one HTTP request and its answer, over ASGI. The only file here that knows ASGI's messages. An answer is
either whole (`respond`) or a stream of events (`start_events`, `write`, `end`), each write being one send."""

from __future__ import annotations

import asyncio
import re
import time
import types
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import parse_qs, unquote

from starlette.types import Message, Receive, Scope, Send

from kvfleet.ingress.http.error_bodies import Headers, error_body, error_headers, status_of
from kvfleet.ingress.limits.callers import Caller
from kvfleet.ingress.limits.limiter import RunUsage
from kvproto.errors import Cancelled, InvalidRequest, KvfleetError, PayloadTooLarge, RequestTimeout
from kvservice.tracing import Span

JSON = b"application/json"
SEND_LIMIT_S = 60.0
CALLERS_ID = re.compile(r"[A-Za-z0-9._~:/+=@-]{1,128}")
_EVENT_STREAM: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies must not hold events back
]


class ExchangeTrace(Protocol):
    span: Span
    error: KvfleetError | None

    def end(self, request: str, status: int) -> None: ...


@dataclass(eq=False, slots=True)
class Exchange:
    """Owned by the task that serves it; `gone` once the client has left. The caller may give its request an id of its
    own, which is told and noted beside `request_id`; it names nothing here."""

    scope: Scope
    receive: Receive
    send: Send
    request_id: str
    status: int = 0
    outcome: str = ""  # of a generating request: a finish reason or an error's code
    started: bool = False
    ended: bool = False
    gone: bool = False
    writes: int = 0
    trace: ExchangeTrace | None = None
    error_event: Callable[[KvfleetError], bytes] | None = None  # the last event of a stream that failed
    error_form: Callable[[KvfleetError], bytes] = error_body  # of an error that is the whole answer
    id_headers: tuple[bytes, ...] = (b"x-request-id",)  # of any answer: they have the request's id
    caller: Caller | None = None  # once it is known
    more_headers: Callable[[], Headers] = list  # of any answer; called when it begins
    usage: RunUsage | None = None  # of its run
    repeats: bool = False  # another request began that run
    began_at: float = field(default_factory=time.monotonic)
    callers_id: str | None = field(init=False)

    def __post_init__(self) -> None:
        said = self.header(b"x-request-id") or ""
        self.callers_id = said if CALLERS_ID.fullmatch(said) else None

    def header(self, name: bytes) -> str | None:
        """The last value; names are lower case."""
        value = None
        for key, raw in self.scope["headers"]:
            if key == name:
                value = raw.decode("latin-1")
        return value

    @property
    def method(self) -> str:
        return str(self.scope["method"])

    @property
    def source(self) -> str | None:
        client = self.scope.get("client")
        return client[0] if client else None

    @property
    def path(self) -> str:
        """As it was sent, percent-encoded."""
        return str(self.scope["path"])

    @property
    def path_params(self) -> dict[str, str]:
        params: dict[str, str] = self.scope.get("path_params", {})
        return {name: unquote(value) for name, value in params.items()}

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began_at

    def query_value(self, name: str) -> str | None:
        values = parse_qs(self.scope["query_string"].decode("latin-1")).get(name)
        return values[-1] if values else None

    async def read_body(self, limit: int, within_s: float) -> bytes:
        """Raises PayloadTooLarge before reading more than `limit` bytes, RequestTimeout, Cancelled when the client
        leaves."""
        try:
            async with asyncio.timeout(within_s):
                return await self._read_body(limit)
        except TimeoutError:
            raise RequestTimeout(f"must come within {within_s:g} s", field="body") from None

    async def _read_body(self, limit: int) -> bytes:
        announced = self.header(b"content-length")
        if announced is not None and announced.isdigit() and int(announced) > limit:
            raise PayloadTooLarge(f"at most {limit} bytes, got {announced}", field="body")
        parts: list[bytes] = []
        size = 0
        more = True
        while more:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                self.gone = True
                raise Cancelled("the client left")
            part = message.get("body", b"")
            size += len(part)
            if size > limit:
                raise PayloadTooLarge(f"at most {limit} bytes, got more", field="body")
            parts.append(part)
            more = message.get("more_body", False)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def until_gone(self) -> None:
        """Waits until the client has left (`gone` is set), or the answer is complete."""
        while (await self.receive())["type"] != "http.disconnect":
            pass
        self.gone = not self.ended

    async def respond(self, status: int, body: bytes, *, content_type: bytes = JSON, headers: Headers = []) -> None:  # noqa: B006  never changed
        await self._start(status, [(b"content-type", content_type), (b"content-length", b"%d" % len(body)), *headers])
        self.ended = True
        await self.send({"type": "http.response.body", "body": body})

    async def respond_empty(self, headers: Headers = []) -> None:  # noqa: B006  never changed
        """Status 204."""
        await self._start(204, headers)
        self.ended = True
        await self.send({"type": "http.response.body"})

    async def refuse(self, error: KvfleetError) -> None:
        """The error as the whole answer, or as the last event of a stream that has begun."""
        if self.trace is not None:
            self.trace.error = error
        if self.started:
            await self.end(self.error_event(error) if self.error_event is not None else b"")
            return
        await self.respond(status_of(error), self.error_form(error), headers=error_headers(error))

    async def start_events(self, headers: Headers = []) -> None:  # noqa: B006  never changed
        await self._start(200, [*_EVENT_STREAM, *headers])

    async def _start(self, status: int, headers: Headers) -> None:
        self.status = status
        self.started = True
        own = self.request_id.encode()
        told = own if self.callers_id is None else self.callers_id.encode()
        headers = [*headers, *self.more_headers(), *((name, told) for name in self.id_headers)]
        headers.append((b"x-kvfleet-request-id", own))
        if self.trace is not None:
            headers.append((b"x-trace-id", self.trace.span.ids.trace_id.encode()))
        await self.send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, data: bytes) -> None:
        """One send. Waits while the client reads too slowly, which in time pauses the sequence at its worker."""
        self.writes += 1
        await self._send_in_time({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes = b"") -> None:
        self.ended = True
        await self._send_in_time({"type": "http.response.body", "body": data, "more_body": False})

    async def _send_in_time(self, message: Message) -> None:
        """Raises Cancelled for a client that does not read: it must not hold slot and session for ever. A timer costs
        several times a send, so it is started only for the rare send that waits."""
        sending = self.send(message).__await__()
        try:
            waits_for = next(sending)
        except StopIteration:
            return
        try:
            async with asyncio.timeout(SEND_LIMIT_S):
                await _rest(sending, waits_for)
        except TimeoutError:
            self.gone = True
            raise Cancelled(f"the client did not read for {SEND_LIMIT_S:.0f} s") from None


@types.coroutine
def _rest(begun: Generator[Any, Any, Any], waits_for: Any) -> Generator[Any, Any, None]:
    """The rest of an awaitable that has begun, and waits."""
    try:
        while True:
            try:
                value = yield waits_for
            except BaseException as error:  # noqa: BLE001  a cancellation, for instance, goes to the awaitable
                waits_for = begun.throw(error)
            else:
                waits_for = begun.send(value)
    except StopIteration:
        return


def flag_query(exchange: Exchange, name: str) -> bool:
    """Raises InvalidRequest naming the parameter."""
    value = exchange.query_value(name)
    if value not in (None, "true", "false", "True", "False"):
        raise InvalidRequest(f"must be true or false, got {value[:40]!r}", field=name)
    return value in ("true", "True")


def integer_query(exchange: Exchange, name: str, default: int) -> int:
    """Raises InvalidRequest naming the parameter."""
    value = exchange.query_value(name)
    if value is None:
        return default
    if not value.isascii() or not value.isdigit() or len(value) > 9:
        raise InvalidRequest(f"must be an integer, at least 0, got {value[:40]!r}", field=name)
    return int(value)
