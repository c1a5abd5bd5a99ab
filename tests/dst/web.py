"""HTTP between clients and ingresses, simulated: httpx's transport here, an ASGI server there. Each request has a
connection of its own, which may be slow, held or cut.

    client ──to_server──▶ request, its body, that there is room, that it has left ──▶ app
    client ◀──to_client── head, body, end, or that it is cut or reset ─────────────── app

The server's half does as uvicorn's, on the event loop of its process. Nothing of a dead process is touched.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import count
from typing import Any
from urllib.parse import unquote

import httpx
from starlette.types import ASGIApp, Message, Scope

from tests.dst.hub import Hub, Place
from tests.dst.loop import SimLoop
from tests.dst.nats_link import Link

HIGH, LOW = 65_536, 16_384  # bytes on their way or not read: from where on a sender waits, and until when
CONNECT_S = 127.0  # after which a kernel gives up that hears nothing
FIRST_PORT = 30_000


class _Sign(Enum):
    """What is sent beside bytes."""

    REQUEST, HEAD, ROOM, LEFT, END, CUT, RESET = range(7)

    def __len__(self) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class Listener:
    place: Place
    loop: SimLoop
    app: ASGIApp


class WebConnection(httpx.AsyncByteStream):
    """Carries one request and its answer, whose stream it is. Each of its links may be held by itself."""

    def __init__(self, web: SimWeb, client: Place, listener: Listener) -> None:
        self.client, self.server = client, listener.place
        self.to_server = Link(web.hub, self._server_hears, web.latency_s)
        self.to_client = Link(web.hub, self._client_hears, web.latency_s)
        self._web, self._listener, self._port = web, listener, next(web.ports)
        self._scope: Scope
        self._head: tuple[int, list[tuple[bytes, bytes]]]
        self._read_s: float | None = None
        self._parts: deque[Any] = deque()  # that have come to the client
        self._unread = 0  # bytes of the answer that it has not taken
        self._is_closed = False  # by it
        self._body, self._has_body = b"", False  # that have come to the server
        self._is_gone = self._is_started = self._is_complete = False
        self._came, self._heard, self._room = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._room.set()
        web.connections[self] = None

    # What happens to it.

    def hold(self) -> None:
        self.to_server.hold()
        self.to_client.hold()

    def let_go(self) -> None:
        self.to_server.let_go()
        self.to_client.let_go()

    def lose(self) -> None:
        """It is reset. What is on its way is lost, and both sides hear of it."""
        web, hub = self._web, self._web.hub
        self.to_server.is_cut = self.to_client.is_cut = True
        hub.at(hub.now + web.latency_s(), partial(self._server_hears, [_Sign.LEFT]))
        hub.at(hub.now + web.latency_s(), partial(self._client_hears, [_Sign.RESET]))
        web.connections.pop(self, None)

    def died(self, place: Place) -> None:
        """One of its processes: what that has sent still comes, and then the kernel's word."""
        if place is self.client:
            self.close()
        else:
            self.to_server.is_cut = True
            self.to_client.send([_Sign.RESET])
            if self._is_closed:
                self._web.connections.pop(self, None)

    # The client.

    async def ask(self, request: httpx.Request) -> httpx.Response:
        """Until its head is here. Raises httpx.TransportError."""
        url, self._read_s = request.url, request.extensions.get("timeout", {}).get("read")
        path, _, query = url.raw_path.partition(b"?")
        self._scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "state": {},
            "server": ("127.0.0.1", url.port or 80), "client": ("127.0.0.1", self._port), "scheme": url.scheme,
            "method": request.method, "root_path": "", "path": unquote(path.decode("ascii")), "raw_path": path,
            "query_string": query, "headers": [(name.lower(), value) for name, value in request.headers.raw],
        }  # fmt: skip
        for part in (_Sign.REQUEST, request.content, _Sign.END):  # of which each may come later
            self.to_server.send([part])
        if await self.take() is not _Sign.HEAD:
            raise httpx.RemoteProtocolError("Server disconnected without sending a response.")
        status, headers = self._head
        return httpx.Response(status, headers=headers, stream=self)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (part := await self.take()) is not _Sign.END:
            if part is _Sign.RESET:
                raise httpx.ReadError("the connection was reset")
            if part is _Sign.CUT:
                raise httpx.RemoteProtocolError("peer closed connection without sending complete message body")
            yield part

    async def aclose(self) -> None:
        self.close()

    async def take(self) -> Any:
        """The next part. Raises httpx.ReadTimeout."""
        if not self._parts:
            try:
                async with asyncio.timeout(self._read_s):
                    while not self._parts:
                        self._came.clear()
                        await self._came.wait()
            except TimeoutError:
                raise httpx.ReadTimeout("nothing came in time") from None
        part = self._parts.popleft()
        self._unread -= len(part)
        if self._unread <= LOW and not self._room.is_set():
            self.to_server.send([_Sign.ROOM])
        return part

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = self.to_client.is_cut = True
            if self.to_server.is_cut:
                self._web.connections.pop(self, None)
            self.to_server.send([_Sign.LEFT])

    def _client_hears(self, parts: list[Any]) -> None:
        if not self.client.is_dead:
            self._parts += parts
            self._came.set()

    # The server.

    def _server_hears(self, parts: list[Any]) -> None:
        if self.server.is_dead:
            return
        for part in parts:
            if part is _Sign.REQUEST:
                hub, loop = self._web.hub, self._listener.loop
                here, hub.here = hub.here, self.server
                task = loop.create_task(self._serve(), name=f"http-{self._port}")
                hub.here = here
                self._web.tasks.add(task)
                task.add_done_callback(self._web.tasks.discard)
            elif part is _Sign.ROOM:
                self._room.set()
            elif part is _Sign.LEFT:
                self._is_gone = True
                self._room.set()
                self._heard.set()
                self._web.connections.pop(self, None)
            else:
                self._has_body = part is _Sign.END
                self._body += b"" if self._has_body else part
                self._heard.set()

    async def _serve(self) -> None:
        try:
            await self._listener.app(self._scope, self._receive, self._send)
        except Exception as error:  # noqa: BLE001 - the top of a request's task: the trial tells it
            self._web.failures.append(f"{self.server.name}: {self._scope['path']}: {error!r}")
        if not self._is_complete:
            self.to_client.send([_Sign.CUT])

    async def _receive(self) -> Message:
        if not self._is_gone and not self._is_complete:
            await self._heard.wait()
            self._heard.clear()
        if self._is_gone or self._is_complete:
            return {"type": "http.disconnect"}
        body, self._body = self._body, b""
        return {"type": "http.request", "body": body, "more_body": not self._has_body}

    async def _send(self, message: Message) -> None:
        if not self._room.is_set():
            await self._room.wait()
        if self._is_gone:
            return
        if (message["type"] == "http.response.start") == self._is_started or self._is_complete:
            raise RuntimeError(f"{message['type']} does not come now")
        if not self._is_started:
            self._is_started = True
            self._head = message["status"], list(message.get("headers", ()))
            self.to_client.send([_Sign.HEAD])
            return
        body = message.get("body", b"")
        self._unread += len(body)
        if self._unread > HIGH:
            self._room.clear()
        if message.get("more_body", False):
            self.to_client.send([body])
        else:
            self._is_complete = True
            self._heard.set()
            self.to_client.send([body, _Sign.END] if body else [_Sign.END])


class SimWeb:
    """Who listens under which name, and who is connected to whom. `apart`: places and names that do not reach one
    another any more; what they have open is held connection by connection. `failures`: what apps raised."""

    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        self.latency_range_s = (0.0001, 0.001)
        self.listeners: dict[str, Listener] = {}
        self.connections: dict[WebConnection, None] = {}  # as they were opened
        self.apart: set[tuple[str, str]] = set()
        self.failures: list[str] = []
        self.tasks: set[asyncio.Task[None]] = set()  # held while they run
        self.ports = count(FIRST_PORT)

    def latency_s(self) -> float:
        low, high = self.latency_range_s
        return low + self.hub.random.random() * (high - low)

    def serve(self, place: Place, loop: SimLoop, name: str, app: ASGIApp) -> None:
        """It listens as host `name`, for as long as it lives or until another does."""
        self.listeners[name] = Listener(place, loop, app)

    def connections_of(self, place: Place) -> list[WebConnection]:
        """Of a client or a server."""
        return [one for one in self.connections if place in (one.client, one.server)]

    def died(self, place: Place) -> None:
        """Called once it is dead."""
        for one in self.connections_of(place):
            one.died(place)

    async def connect(self, name: str, timeout_s: float | None) -> WebConnection:
        """From the place where it runs. Raises httpx.ConnectError, httpx.ConnectTimeout."""
        client = self.hub.here
        try:
            async with asyncio.timeout(CONNECT_S if timeout_s is None else timeout_s):
                for _ in range(2):
                    await asyncio.sleep(self.latency_s())
                    while (client.name, name) in self.apart:
                        await asyncio.sleep(CONNECT_S)  # it is not said again
                    listener = self.listeners.get(name)
                    if listener is None or listener.place.is_dead:
                        raise httpx.ConnectError(f"nobody listens at {name}")
        except TimeoutError:
            raise httpx.ConnectTimeout(f"{name} does not answer") from None
        assert listener is not None
        return WebConnection(self, client, listener)


class SimHttpTransport(httpx.AsyncBaseTransport):
    """Of the place where it is used: a connection for each request, to the URL's host."""

    def __init__(self, web: SimWeb) -> None:
        self._web = web

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        await request.aread()
        timeout_s = request.extensions.get("timeout", {}).get("connect")
        connection = await self._web.connect(request.url.host, timeout_s)
        try:
            return await connection.ask(request)
        except BaseException:
            connection.close()
            raise
