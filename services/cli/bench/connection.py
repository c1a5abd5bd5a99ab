"""Adapter of httptools: kept-alive HTTP/1.1 connections that hand each piece of a body on as it comes.

httpx takes 50 microseconds of a core for each piece, which is all that this client may cost; here a token takes 13. No
redirects, no proxies: a load goes to the address that was named.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from dataclasses import dataclass, field
from typing import Any, cast

import httptools
import httpx

from kvfleet.cli.bench.answer_stream import AnswerStream

MOST_TOLD = 2000  # bytes of an error's body that are kept


class ConnectionBroken(Exception):
    """The server closed the connection, or sent what is no HTTP, before the answer's end."""


class StreamConnection(asyncio.Protocol):
    """One request at a time. `status` and `told`, the body of an answer that is no stream, are the last answer's."""

    def __init__(self) -> None:
        self.status = 0
        self.told = b""
        self.is_reusable = True
        self.has_answered = False  # a byte of the current answer came
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._into: AnswerStream | None = None
        self._ended: asyncio.Future[None] | None = None
        self._now = 0.0

    async def ask(self, request: bytes, into: AnswerStream) -> None:
        """Raises ConnectionBroken. If it is cancelled the connection is of no more use."""
        assert self._transport is not None
        self.status, self.told, self.has_answered = 0, b"", False
        self._into, self._ended = into, asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            await self._ended
        except asyncio.CancelledError:
            self.close()
            raise
        finally:
            self._into = self._ended = None

    @property
    def refusal(self) -> str:
        """The message of an error's body, whatever its form."""
        answer = httpx.Response(self.status, content=self.told)
        try:
            error = answer.json()["error"]
            return str(error["message"] if isinstance(error, dict) else error)
        except (ValueError, LookupError, TypeError):
            return answer.text.strip()

    def close(self) -> None:
        self.is_reusable = False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is of no class of asyncio's

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        self.has_answered = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(ConnectionBroken(f"no HTTP: {error}"))
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_reusable = False
        is_whole = self._into is not None and (self._into.done or self._into.finished)
        if is_whole or self.status not in (0, 200):  # a body without a length ends so
            self._end(None)
        else:
            self._end(ConnectionBroken(str(exc or "the server closed the connection before the answer's end")))

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self.status == 200 and self._into is not None:
            self._into.feed(body, self._now)
        if len(self.told) < MOST_TOLD and not (self._into and self._into.times):
            self.told += body[:MOST_TOLD]

    def on_message_complete(self) -> None:
        if self.status >= 200:
            self.is_reusable = self.is_reusable and self._parser.should_keep_alive()
            self._end(None)

    def _end(self, error: Exception | None) -> None:
        if self._ended is not None and not self._ended.done():
            if error is None:
                self._ended.set_result(None)
            else:
                self._ended.set_exception(error)


@dataclass(eq=False)
class StreamConnections:
    """To one server: `base` is its address, without `/v1`."""

    base: httpx.URL
    api_key: str | None = field(default=None, repr=False)
    _idle: list[StreamConnection] = field(default_factory=list)

    def request(self, path: str, body: bytes) -> bytes:
        key = f"Authorization: Bearer {self.api_key}\r\n" if self.api_key else ""
        target = (self.base.raw_path.rstrip(b"/") + path.encode()).decode()
        return (
            f"POST {target} HTTP/1.1\r\nHost: {self.base.netloc.decode()}\r\nContent-Type: application/json\r\n"
            f"Accept: text/event-stream\r\nAccept-Encoding: identity\r\nUser-Agent: kvfleet-bench\r\n{key}"
            f"Content-Length: {len(body)}\r\n\r\n"
        ).encode() + body

    async def post(self, path: str, body: bytes, into: AnswerStream) -> StreamConnection:
        """The connection that the answer came on, to be given back. Raises ConnectionBroken and OSError."""
        request = self.request(path, body)
        while self._idle:
            known = self._idle.pop()
            if not known.is_reusable:
                continue
            try:
                await known.ask(request, into)
                return known
            except ConnectionBroken:
                if known.has_answered:
                    raise  # else the server had let the idle connection go
        fresh = await self._connect()
        await fresh.ask(request, into)
        return fresh

    def give_back(self, connection: StreamConnection) -> None:
        if connection.is_reusable:
            self._idle.append(connection)
        else:
            connection.close()

    def close(self) -> None:
        for connection in self._idle:
            connection.close()

    async def _connect(self) -> StreamConnection:
        secure = self.base.scheme == "https"
        how: dict[str, Any] = {"ssl": ssl.create_default_context()} if secure else {}
        port = self.base.port or (443 if secure else 80)
        _, made = await asyncio.get_running_loop().create_connection(StreamConnection, self.base.host, port, **how)
        return made
