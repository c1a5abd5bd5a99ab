"""A client's connection to the simulated nats-server: two directions of a stream that may be slow, held or cut.

The client is nats-py's, with all that it does when it connects, flushes, drains and reconnects. Only its socket is not:
messages travel as objects, commands as their bytes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import nats.errors
from nats.aio.client import NATS_HDR_LINE, Srv

from kvproto import connection as product
from tests.dst.hub import Hub

if TYPE_CHECKING:
    from tests.dst.nats_server import SimNats

HIGH = 65_536  # bytes that were not taken, from where on a writer waits
_END = b""


class Published:
    """A PUB or HPUB on its way to the server."""

    __slots__ = ("data", "headers", "reply", "subject")

    def __init__(self, subject: str, reply: str, data: bytes, headers: bytes) -> None:
        self.subject, self.reply, self.data, self.headers = subject, reply, data, headers

    def __len__(self) -> int:
        return len(self.data) + len(self.headers) + len(self.subject) + 16


class Delivered:
    """A MSG or HMSG on its way to the client."""

    __slots__ = ("parts", "size")

    def __init__(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        self.parts = sid, subject, reply, data, headers
        self.size = len(data) + len(headers) + len(subject) + 16

    def __len__(self) -> int:
        return self.size


class Link:
    """One direction. What is sent arrives in order, each part a while later. `is_held`: nothing arrives until it is let
    go, as in a partition or where the other side does not read."""

    def __init__(self, hub: Hub, arrive: Callable[[list[Any]], None], latency_s: Callable[[], float]) -> None:
        self._hub, self._arrive, self._latency_s = hub, arrive, latency_s
        self._due = 0.0
        self._kept: list[Any] = []
        self.is_held = self.is_cut = False
        self.unread = 0  # bytes
        self.on_read: Callable[[], None] = lambda: None

    def send(self, parts: list[Any]) -> None:
        if self.is_cut:
            return
        self.unread += sum(map(len, parts))
        self._due = max(self._due, self._hub.now + self._latency_s())
        self._hub.at(self._due, partial(self._reach, parts))

    def _reach(self, parts: list[Any]) -> None:
        if self.is_cut:
            return
        if self.is_held:
            self._kept += parts
            return
        self.unread -= sum(map(len, parts))
        self._arrive(parts)
        self.on_read()

    def hold(self) -> None:
        self.is_held = True

    def let_go(self) -> None:
        self.is_held = False
        kept, self._kept = self._kept, []
        if kept:
            self._reach(kept)


class SimTransport:
    """What nats-py has of a socket."""

    def __init__(self, server: SimNats, hub: Hub) -> None:
        self.server, self._hub = server, hub
        self.to_server = Link(hub, partial(server.read, self), server.latency_s)
        self.to_client = Link(hub, self._came, server.latency_s)
        self.to_server.on_read = self._writable
        self._parts: deque[Any] = deque()
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None
        self._is_closing = self._is_over = False
        self.place = hub.here
        self._loop = asyncio.get_running_loop()

    # As nats-py uses it.

    def write(self, part: Any) -> None:
        self.writelines([part])

    def writelines(self, parts: list[Any]) -> None:
        if not self._is_closing:
            self.to_server.send(list(parts))

    async def drain(self) -> None:
        while self.to_server.unread > HIGH and not self._is_closing:
            if self._writer is None:
                self._writer = self._loop.create_future()
            await asyncio.shield(self._writer)
        if self._is_over:
            raise ConnectionResetError("Connection lost")

    async def readline(self) -> bytes:
        part = await self.take()
        assert isinstance(part, bytes)
        return part

    async def take(self) -> Any:
        """The next part; b"" at the end."""
        while not self._parts:
            if self._is_over or self._is_closing:
                return _END
            self._reader = self._loop.create_future()
            await self._reader
        return self._parts.popleft()

    def at_eof(self) -> bool:
        return self._is_over and not self._parts

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            self.to_server.send([_END])
            self._wake()

    async def wait_closed(self) -> None:
        await asyncio.sleep(0)

    def abort(self) -> None:
        self._is_closing = True
        self.lose()

    def is_closing(self) -> bool:
        return self._is_closing

    @property
    def transport(self) -> SimTransport:  # as of a StreamWriter
        return self

    def get_extra_info(self, name: str) -> None:
        return None

    # What happens to it.

    def lose(self) -> None:
        """The connection is reset, and both sides hear of it; or the client's process has died."""
        if self._is_over:
            return
        self._is_over = self.to_client.is_cut = True
        self._hub.at(self._hub.now + self.server.latency_s(), partial(self.server.lost, self))
        self._wake()

    def _came(self, parts: list[Any]) -> None:
        if self.place.is_dead:
            return
        if parts[-1] == _END:
            parts = parts[:-1]
            self._is_over = True
        self._parts += parts
        self._wake()

    def _wake(self) -> None:
        if self.place.is_dead:
            return
        for future in (self._reader, self._writer):
            if future is not None and not future.done():
                future.set_result(None)
        self._reader = self._writer = None

    def _writable(self) -> None:
        if self._writer is not None and self.to_server.unread <= HIGH:
            self._wake()


class SimClient(product._Client):
    """nats-py's client, as the product has it, beside a simulated server."""

    net: Net

    @property
    def writer(self) -> Any:
        return self._transport

    async def _connect_to_server(self, s: Srv) -> None:
        s.last_attempt = asyncio.get_running_loop().time()
        if self._transport is not None:
            self._transport.abort()
        self._transport = await self.net.connect(s.uri.netloc, self.options["connect_timeout"])

    async def _send_publish(
        self, subject: str, reply: str, payload: bytes, payload_size: int, headers: dict[str, Any] | None
    ) -> None:
        if subject == "":
            raise nats.errors.BadSubjectError
        written = b""
        if headers is not None:
            lines = b"".join(b"%s: %s\r\n" % (k.strip().encode(), v.strip().encode()) for k, v in headers.items())
            written = NATS_HDR_LINE + b"\r\n" + lines + b"\r\n"
        self.stats["out_msgs"] += 1
        self.stats["out_bytes"] += payload_size
        await self._send_command(Published(subject, reply, payload, written))
        if self._flush_queue is not None and self._flush_queue.empty():
            await self._flush_pending()

    async def _read_loop(self) -> None:
        while not (self.is_closed or self.is_reconnecting or self._transport is None):
            try:
                if self._transport.at_eof():
                    error = nats.errors.UnexpectedEOF()
                    await self._error_cb(error)
                    await self._process_op_err(error)
                    break
                part = await self._transport.take()
                if type(part) is Delivered:
                    await self._process_msg(*part.parts)
                elif part == b"PING\r\n":
                    await self._process_ping()
                elif part == b"PONG\r\n":
                    await self._process_pong()
                elif part.startswith(b"-ERR"):
                    await self._process_err(part[5:].strip().decode().lower())
            except OSError as error:
                await self._process_op_err(error)
                break
            except asyncio.CancelledError:
                break


class Net:
    """Which servers there are, by `host:port`, and who reaches them."""

    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        self.servers: dict[str, SimNats] = {}
        self.apart: set[tuple[str, str]] = set()  # of places and servers

    async def connect(self, netloc: str, timeout_s: float) -> SimTransport:
        server = self.servers[netloc]
        if (self.hub.here.name, netloc) in self.apart or server.is_hung:
            await asyncio.sleep(timeout_s)
            raise TimeoutError
        await asyncio.sleep(2 * server.latency_s())
        if not server.is_up:
            raise ConnectionRefusedError(f"nobody listens at {netloc}")
        transport = SimTransport(server, self.hub)
        server.greet(transport)
        return transport
