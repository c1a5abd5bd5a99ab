"""Stream sockets of threads that wait, epoll and poll, on the hub: the data plane's streams may be slow, held, cut,
left half open or damaged. `install` replaces those of the standard library.
"""

from __future__ import annotations

import errno
import select
import socket
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import count
from typing import Any

from tests.dst.hub import Actor, Hub, Place, current_actor
from tests.dst.nats_link import Link

BUFFER = 1 << 18  # bytes on their way or not read yet, from where on a sender waits
FIRST_PORT = 40_000
REAL_FAMILY = socket.AF_INET


class Sockets:
    """Who listens where, and who is connected to whom."""

    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        self.listeners: dict[object, SimSocket] = {}
        self.open: dict[int, SimSocket] = {}
        self.apart: set[str] = set()  # places that reach nobody
        self.latency_range_s = (0.00005, 0.0005)
        self.flips: dict[str, float] = {}  # by place: the chance that what it is sent has a wrong bit
        self._numbers = count(100)
        self._ports = count(FIRST_PORT)

    def latency_s(self) -> float:
        low, high = self.latency_range_s
        return low + self.hub.random.random() * (high - low)

    def number(self, one: SimSocket) -> int:
        number = next(self._numbers)
        self.open[number] = one
        return number

    def port(self) -> int:
        return next(self._ports)

    def of(self, place: Place) -> list[SimSocket]:
        """Its connections to others."""
        mine = [one for one in self.open.values() if one.place is place]
        return [one for one in mine if one.peer is not None and one.peer.place is not place]

    def died(self, place: Place) -> None:
        """Its kernel closes what it had."""
        for one in [one for one in self.open.values() if one.place is place]:
            one.close()


class SimSocket:
    """As `socket.socket`."""

    network: Sockets

    def __init__(self, family: int = -1, type: int = -1, proto: int = -1, fileno: int | None = None) -> None:
        network = self.network
        self.family = socket.AF_INET if family == -1 else family
        self.place = network.hub.here
        self.peer: SimSocket | None = None
        self.watchers: list[Actor] = []
        self.out: Link | None = None
        self._network, self._hub = network, network.hub
        self._number = network.number(self)
        self._timeout: float | None = None
        self._came: deque[bytes] = deque()
        self._waiting = 0  # bytes of them
        self._accepted: deque[SimSocket] = deque()
        self._at: object = None  # where it listens
        self._ended = self._reset = self._shut = False

    # How it is set.

    def fileno(self) -> int:
        return self._number

    def settimeout(self, value: float | None) -> None:
        self._timeout = value

    def setblocking(self, flag: bool) -> None:
        self._timeout = None if flag else 0.0

    def setsockopt(self, *_: object) -> None:
        pass

    def getsockname(self) -> Any:
        return self._at

    # Connections.

    def bind(self, at: object) -> None:
        host, port = at if isinstance(at, tuple) else (at, 0)
        self._at = at if not isinstance(at, tuple) else (host, port or self._network.port())
        if self._at in self._network.listeners:
            raise OSError(errno.EADDRINUSE, "Address already in use")

    def listen(self, backlog: int = 0) -> None:
        self._network.listeners[self._at] = self

    def accept(self) -> tuple[SimSocket, object]:
        self._until(lambda: bool(self._accepted))
        return self._accepted.popleft(), None

    def connect(self, at: object) -> None:
        network, hub = self._network, self._hub
        hub.sleep(2 * network.latency_s())
        there = network.listeners.get(at)
        if self.place.name in network.apart or (there is not None and there.place.name in network.apart):
            hub.sleep(60.0 if self._timeout is None else self._timeout)
            raise TimeoutError("timed out")
        if there is None:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
        here, hub.here = hub.here, there.place
        other = SimSocket(self.family)
        hub.here = here
        self.join(other)
        there._accepted.append(other)
        there.stir()

    def join(self, other: SimSocket) -> None:
        self.peer, other.peer = other, self
        self.out = Link(self._hub, other._arrive, self._network.latency_s)
        other.out = Link(self._hub, self._arrive, self._network.latency_s)

    # Bytes.

    def send(self, data: Any) -> int:
        return self.sendmsg([data])

    def sendmsg(self, buffers: Sequence[Any]) -> int:
        link = self._until(self._has_room)
        assert link is not None
        assert self.peer is not None
        room = BUFFER - link.unread - self.peer._waiting
        parts: list[bytes] = []
        for buffer in buffers:
            part = bytes(memoryview(buffer).cast("B")[:room])
            parts.append(part)
            room -= len(part)
            if not room:
                break
        link.send([part for part in parts if part])
        return sum(map(len, parts))

    def recv_into(self, view: memoryview) -> int:
        self._until(self._is_readable)
        if self._reset:
            raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")
        if not self._came:
            return 0
        part = self._came[0]
        taken = min(len(part), len(view))
        view[:taken] = part[:taken]
        if taken == len(part):
            self._came.popleft()
        else:
            self._came[0] = part[taken:]
        self._waiting -= taken
        if self.peer is not None:
            self.peer.stir()
        return taken

    def recv(self, size: int) -> bytes:
        room = bytearray(size)
        return bytes(room[: self.recv_into(memoryview(room))])

    def shutdown(self, how: int) -> None:
        if self.peer is None:
            raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")
        self._finish()
        self.stir()

    def close(self) -> None:
        network = self._network
        if self._number < 0:
            return
        network.open.pop(self._number, None)
        self._number = -1
        if network.listeners.get(self._at) is self:
            del network.listeners[self._at]
        for one in self._accepted:
            one.close()
        self._finish()
        self.stir()

    def __enter__(self) -> SimSocket:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # What happens to it.

    def lose(self) -> None:
        """The connection is reset; both sides hear of it."""
        for one in (self, self.peer):
            if one is not None:
                one._reset = True
                if one.out is not None:
                    one.out.is_cut = True
                one.stir()

    def forget(self) -> None:
        """Half open from now on: what is sent either way arrives nowhere, and nobody is told."""
        for one in (self, self.peer):
            if one is not None and one.out is not None:
                one.out.is_cut = True

    @property
    def is_ready(self) -> bool:
        return bool(self._accepted) or self._is_readable()

    def stir(self) -> None:
        for actor in self.watchers:
            actor.wake()

    def _arrive(self, parts: list[bytes]) -> None:
        if self._number < 0 or self._reset:
            return
        for part in parts:
            if not part:
                self._ended = True
                continue
            rate, draw = self._network.flips.get(self.place.name, 0.0), self._hub.random.random
            if rate and draw() < rate:
                at = int(draw() * len(part))
                part = part[:at] + bytes([part[at] ^ (1 << int(draw() * 8))]) + part[at + 1 :]
            self._came.append(part)
            self._waiting += len(part)
        self.stir()

    def _finish(self) -> None:
        if not self._shut:
            self._shut = True
            if self.out is not None:
                self.out.send([b""])

    def _is_readable(self) -> bool:
        return bool(self._came) or self._ended or self._shut or self._reset

    def _has_room(self) -> Link | None:
        """Raises OSError."""
        if self._reset:
            raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")
        if self._shut or self.out is None or self.peer is None:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")
        if self.peer._number < 0 and self._ended:
            raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")
        return self.out if self.out.unread + self.peer._waiting < BUFFER else None

    def _until(self, ready: Callable[[], Any]) -> Any:
        if self._number < 0:
            raise OSError(errno.EBADF, "Bad file descriptor")
        if not (found := ready()):
            if self._timeout == 0.0:
                raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
            if not (found := wait(self._hub, [self], ready, self._timeout)):
                raise TimeoutError("timed out")
        return found


def wait(hub: Hub, those: Iterable[SimSocket], ready: Callable[[], Any], timeout_s: float | None) -> Any:
    """What `ready` finds, or what it finds when the time is over."""
    me = current_actor()
    end = None if timeout_s is None else hub.now + timeout_s
    timer = None if end is None else hub.at(end, me.wake)
    watched = list(those)
    for one in watched:
        one.watchers.append(me)
    try:
        while not (found := ready()) and (end is None or hub.now < end):
            me.wait()
        return found
    finally:
        for one in watched:
            one.watchers.remove(me)
        if timer is not None:
            timer.cancel()


class SimEpoll:
    """As `select.epoll`, for what can be read."""

    def __init__(self) -> None:
        self._network = SimSocket.network
        self._watched: dict[int, SimSocket] = {}
        self._polling: Actor | None = None

    def register(self, number: int, mask: int = 0) -> None:
        one = self._network.open.get(number)
        if one is None:
            raise OSError(errno.EBADF, "Bad file descriptor")
        self._watched[number] = one
        if self._polling is not None:
            one.watchers.append(self._polling)
            self._polling.wake()

    def unregister(self, number: int) -> None:
        one = self._watched.pop(number)
        if self._polling is not None and self._polling in one.watchers:
            one.watchers.remove(self._polling)

    def poll(self, timeout: float | None = None) -> list[tuple[int, int]]:
        hub = self._network.hub
        self._polling = me = current_actor()
        end = None if timeout is None else hub.now + timeout
        timer = None if end is None else hub.at(end, me.wake)
        for one in self._watched.values():
            one.watchers.append(me)
        try:
            while not (found := self._found()) and (end is None or hub.now < end):
                me.wait()
            return found
        finally:
            self._polling = None
            for one in self._watched.values():
                if me in one.watchers:
                    one.watchers.remove(me)
            if timer is not None:
                timer.cancel()

    def _found(self) -> list[tuple[int, int]]:
        watched = self._watched.items()  # a closed one is not told of any more
        return [(number, select.EPOLLIN) for number, one in watched if one.fileno() == number and one.is_ready]

    def close(self) -> None:
        self._watched.clear()


class SimPoll:
    """As `select.poll`, for what can be read."""

    def __init__(self) -> None:
        self._watched: list[SimSocket] = []

    def register(self, one: SimSocket, mask: int = 0) -> None:
        if one.fileno() < 0:
            raise ValueError("file descriptor cannot be a negative integer (-1)")
        self._watched.append(one)

    def poll(self, timeout_ms: float | None = None) -> list[tuple[int, int]]:
        ready = lambda: [(one.fileno(), select.POLLIN) for one in self._watched if one.is_ready]  # noqa: E731
        found: list[tuple[int, int]] = ready()
        if found or timeout_ms == 0:
            return found
        within_s = None if timeout_ms is None else timeout_ms / 1000
        return list(wait(SimSocket.network.hub, self._watched, ready, within_s))


def _pair() -> tuple[SimSocket, SimSocket]:
    one, other = SimSocket(), SimSocket()
    one.join(other)
    return one, other


def _connection(at: Any, timeout: float | None = None) -> SimSocket:
    made = SimSocket()
    made.settimeout(timeout)
    try:
        made.connect(at)
    except OSError:
        made.close()
        raise
    return made


def _server(at: Any, *, family: int = REAL_FAMILY, backlog: int = 0) -> SimSocket:
    made = SimSocket(family)
    made.bind(at)
    made.listen(backlog)
    return made


def install() -> None:
    changed: dict[str, Any] = {
        "socket": SimSocket, "socketpair": _pair, "create_connection": _connection, "create_server": _server,
        "getaddrinfo": lambda host, port, **_: [(REAL_FAMILY, 1, 0, "", (host, port))],
        "gethostname": partial(str, "host"),
    }  # fmt: skip
    for name, made in changed.items():
        setattr(socket, name, made)
    select.epoll = SimEpoll  # type: ignore[misc, assignment]
    select.poll = SimPoll  # type: ignore[assignment]
