"""A client's connection to the simulated nats-server: two directions of a stream that may be slow, held or cut.

The client is nats-py's, with all that it does when it connects, flushes, drains and reconnects. Only its socket is not:
messages travel as objects, commands as their bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any

import nats.errors
from nats.aio.client import NATS_HDR_LINE, Srv
from nats.aio.msg import Msg
from nats.js.client import JetStreamContext

from kvproto import connection as product
from tests.dst.at_once import LATER, AtOnce, Waiting
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
        self._read: Callable[[Any], Coroutine[Any, Any, None] | None] | None = None
        self._waiting: Waiting | None = None
        self._is_closing = self._is_over = self._is_due = False
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

    async def listen(self, read: Callable[[Any], Coroutine[Any, Any, None] | None]) -> Waiting | None:
        """`read` begins with each part as it comes. Returns what has to wait, or None at the end."""
        self._read = read
        self._take_all()
        if self._waiting is None and not (self._is_over or self._is_closing):
            self._reader = self._loop.create_future()
            await self._reader
        self._read = None
        waiting, self._waiting = self._waiting, None
        return waiting

    def _take_all(self) -> None:
        self._is_due = False
        if self._read is None:
            return
        while self._parts and self._waiting is None:
            begun = self._read(self._parts.popleft())
            if begun is None:
                continue
            try:
                waits_for = begun.send(None)
            except StopIteration:
                continue
            self._waiting = Waiting(begun, waits_for)
        if self._waiting is not None:
            self._wake()

    @property
    def takes(self) -> bool:
        return not self._is_closing and self.to_server.unread <= HIGH

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
        if self._read is None or self._is_over:
            self._wake()
        elif not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._take_all)

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

    async def subscribe(self, *of: Any, **how: Any) -> Any:
        made = await super().subscribe(*of, **how)
        if made._cb is not None:
            made._pending_queue = AtOnce(self, made, self.net.hub.random.random)
            made._cb = made._pending_queue.go_on
        return made

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        """The common case alone: a message without headers to a callback."""
        sub = self._subs.get(sid)
        queue = None if sub is None or headers or sub._jsi or sub._max_msgs or sub._future else sub._pending_queue
        if type(queue) is not AtOnce or queue.qsize():
            await super()._process_msg(sid, subject, reply, data, headers)
            return
        self.stats["in_msgs"] += 1
        self.stats["in_bytes"] += len(data)
        sub._received += 1
        sub._pending_size += len(data)
        queue.put_nowait(Msg(self, subject.decode(), reply.decode(), data, None, None, False, sub._id))

    async def _flush_pending(self, force_flush: bool = False) -> Any:
        """At once where the socket has room, mostly: else by nats-py's task for it, whose turn comes later."""
        transport = self._transport
        takes = self.is_connected and transport is not None and transport.takes
        if not takes or self.net.hub.random.random() < LATER or not self._flush_queue.empty():
            return await super()._flush_pending(force_flush)
        if self._pending:
            transport.writelines(self._pending)
            self._pending, self._pending_data_size = [], 0
        return None

    async def _read_loop(self) -> None:
        """What comes is read by callbacks of the loop, without this task's turn; it goes on with what waits."""
        transport = self._transport
        while not (self.is_closed or self.is_reconnecting or transport is None):
            try:
                if transport.at_eof():
                    error = nats.errors.UnexpectedEOF()
                    await self._error_cb(error)
                    await self._process_op_err(error)
                    break
                waits = await transport.listen(self._read)
                if waits is not None:
                    await waits
            except OSError as error:
                await self._process_op_err(error)
                break
            except asyncio.CancelledError:
                break
            transport = self._transport

    def _read(self, part: Any) -> Coroutine[Any, Any, None] | None:
        if type(part) is Delivered:
            return self._process_msg(*part.parts)
        if part == b"PING\r\n":
            return self._process_ping()
        if part == b"PONG\r\n":
            return self._process_pong()
        if part.startswith(b"-ERR"):
            return self._process_err(part[5:].strip().decode().lower())
        return None


async def _no_flow_control(self: Any) -> None:
    """nats-py looks four times a second whether it owes an answer; this server never asks for one."""
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.get_running_loop().create_future()


JetStreamContext._JSI.check_flow_control_response = _no_flow_control


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
