"""Loop: the listener of a worker or a vault. One thread accepts, and waits on idle connections.

    stranger ──proves itself──▶ served ──no request for a moment──▶ parked
    (a thread each, few)          ▲  (a thread each, at most `ServingLimits.threads`; more wait their turn)
                                  └──────────a request arrives───────┘

Threads with blocking sockets release the interpreter lock and cannot delay a step or a heartbeat. `DataPlaneServer`
owns them and ends them in `close`.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from kvproto.dataplane import addresses, handshake
from kvproto.dataplane.errors import DataPlaneError, HandshakeRefused, PeerGone, PeerTimeout, ProtocolError
from kvproto.dataplane.handshake_bytes import IDENTITY_BYTES, Hello, padded
from kvproto.dataplane.keys import KeyRing
from kvproto.dataplane.link import Link
from kvproto.dataplane.serving import BlockStore, DataPlaneCounters, OnTraced, ServedConnection, ServingLimits, Tally
from kvproto.dataplane.wire import Failure, frame

__all__ = ["DataPlaneCounters", "DataPlaneServer", "ServingLimits"]

log = logging.getLogger(__name__)

_SAY_AGAIN_S = 10.0
_LAST_WORD_S = 0.5
_LINGER_S = 0.05  # a thread's wait for the next request of its connection, unless others wait for a thread


@dataclass(eq=False)
class DataPlaneServer:
    """Serves a store on TCP, a Unix socket, or both. All methods may be called from any thread.

    Clients expect `identity`, 1 to 64 bytes. `tls` is for TCP alone. `on_traced` is called on the connection's thread
    for each Get and Has with a trace context.
    """

    store: BlockStore
    keyring: KeyRing
    identity: str
    _: KW_ONLY
    tcp: tuple[str, int] | None = None
    unix_path: Path | None = None
    tls: ssl.SSLContext | None = None
    limits: ServingLimits = field(default_factory=ServingLimits)
    on_traced: OnTraced | None = None

    def __post_init__(self) -> None:
        padded("identity", self.identity, IDENTITY_BYTES)
        self._tally = Tally()
        self._lock = threading.Lock()
        # `unix:/path`, `tcp:host:port`: the host as given, the port as bound.
        self.addresses: tuple[str, ...] = ()
        self._listeners: list[tuple[socket.socket, addresses.Address]] = []
        self._strangers: dict[threading.Thread, Link] = {}  # in their handshake, oldest first
        self._ending: dict[threading.Thread, Link] = {}  # strangers that made room for others
        self._clients: set[Link] = set()  # authenticated
        self._parked: dict[int, ServedConnection] = {}  # without a request, by socket; idle longest first
        self._ready: deque[ServedConnection] = deque()  # waiting for a thread
        self._serving: set[threading.Thread] = set()
        self._epoll = select.epoll()
        self._closing = False
        self._wake: tuple[socket.socket, socket.socket] | None = None  # a byte in the first ends the accepting thread
        self._accepting = threading.Thread(target=self._accept, name=f"dataplane-{self.identity}", daemon=True)
        self._said_at = -_SAY_AGAIN_S

    def start(self) -> None:
        """Returns when clients can connect. Raises Unavailable naming the address."""
        try:
            if self.unix_path is not None:
                self._listeners.append(addresses.listening_unix(self.unix_path))
            if self.tcp is not None:
                self._listeners.append(addresses.listening_tcp(*self.tcp))
        except BaseException:
            self._stop_listening()
            raise
        self.addresses = tuple(str(address) for _, address in self._listeners)
        self._wake = socket.socketpair()
        self._accepting.start()

    @property
    def counters(self) -> DataPlaneCounters:
        with self._lock:
            counters = self._tally.read()
            links = [*self._strangers.values(), *self._ending.values(), *self._clients]
            open_connections = len(self._clients)
        return replace(
            counters,
            open_connections=open_connections,
            bytes_in=counters.bytes_in + sum(link.bytes_in for link in links),
            bytes_out=counters.bytes_out + sum(link.bytes_out for link in links),
        )

    def close(self, timeout_s: float = 5.0) -> None:
        """End all connections and wait for their threads. May be called again."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            threads = [*self._strangers, *self._ending, *self._serving]
            links = [*self._strangers.values(), *self._clients]
            unserved = [*self._parked.values(), *self._ready]
            self._parked.clear()
            self._ready.clear()
        if self._wake is not None:
            self._wake[0].send(b"x")
        for link in links:
            link.abort()
        for client in unserved:
            self._end(client)
        until = time.monotonic() + timeout_s
        if self._accepting.ident is not None:
            threads.append(self._accepting)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))
        self._stop_listening()
        for sock in self._wake or ():
            sock.close()
        self._epoll.close()

    def _stop_listening(self) -> None:
        for listener, address in self._listeners:
            listener.close()
            if isinstance(address, addresses.UnixAddress):
                with contextlib.suppress(OSError):
                    Path(address.path).unlink()
        self._listeners.clear()

    def _accept(self) -> None:
        by_number = {listener.fileno(): listener for listener, _ in self._listeners}
        assert self._wake is not None
        for number in (*by_number, self._wake[1].fileno()):
            self._epoll.register(number, select.EPOLLIN)
        for listener in by_number.values():
            listener.setblocking(False)
        while not self._closing:
            for number, _ in self._epoll.poll(self._end_idle()):
                if number in by_number:
                    self._take(by_number[number])
                else:
                    self._unpark(number)

    def _end_idle(self) -> float:
        """End connections that are idle for too long. Returns seconds until there may be another one."""
        now = time.monotonic()
        with self._lock:
            idle = [number for number, client in self._parked.items() if client.idle_until <= now]
            ended = [self._parked.pop(number) for number in idle]
            first = next(iter(self._parked.values()), None)
        for client in ended:
            self._epoll.unregister(client.link.fileno())
            self._tally.add(timeouts=1)
            self._end(client)
        return min(1.0, self.limits.idle_s) if first is None else max(0.0, first.idle_until - now) + 0.001

    def _take(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except OSError as error:  # gone again, or no file descriptor is left
            if not isinstance(error, BlockingIOError | ConnectionAbortedError):
                self._say("cannot accept: %s", error)
                time.sleep(0.05)
            return
        addresses.tune(sock)
        link = Link(sock)
        thread = self._thread(self._run, link)
        with self._lock:
            if self._closing:
                sock.close()
                return
            if len(self._strangers) >= self.limits.handshakes:
                # A genuine client needs a millisecond: idle strangers do not shut it out.
                oldest = next(iter(self._strangers))
                self._ending[oldest] = self._strangers.pop(oldest)
                self._ending[oldest].abort()
            self._strangers[thread] = link
            if not self._is_started(thread):
                del self._strangers[thread]
                sock.close()

    def _thread(self, target: Callable[[Any], None], argument: object) -> threading.Thread:
        return threading.Thread(target=target, args=(argument,), name=f"dataplane-{self.identity}-c", daemon=True)

    def _is_started(self, thread: threading.Thread) -> bool:
        """Called under the lock, as a thread that finds this one in a table may join it."""
        try:
            thread.start()
        except RuntimeError as error:
            self._say("cannot start a thread: %s", error)
            return False
        return True

    def _run(self, link: Link) -> None:
        hello = None
        try:
            hello = self._authenticated(link)
        finally:
            if hello is None:
                self._forget(link)
                link.close()
        if hello is not None:
            trusted = partial(self.keyring.get, hello.key_id)
            client = ServedConnection(
                link, hello.identity, trusted, self.store, self._tally, self.limits, self.on_traced
            )
            with self._lock:
                serves = not self._closing and self._may_serve(client, threading.current_thread())
                closing = self._closing
            if closing:
                self._end(client)
            elif serves:
                self._serve_all(client)

    def _authenticated(self, link: Link) -> Hello | None:
        until = time.monotonic() + self.limits.handshake_s
        try:
            if self.tls is not None and not link.is_local:
                link.start_tls(self.tls, until)
            admit = partial(self._admit, link)
            return handshake.answer(link, self.keyring, identity=self.identity, admit=admit, deadline=until)
        except HandshakeRefused as error:
            self._refuse(error.reason, str(error))
        except PeerTimeout:
            self._refuse("timeout", "a connection did not prove itself in time")
        except PeerGone:
            self._refuse("gone", "a connection ended in its handshake")
        return None

    def _admit(self, link: Link) -> bool:
        me = threading.current_thread()
        with self._lock:
            if self._closing or len(self._clients) >= self.limits.connections or me not in self._strangers:
                return False
            del self._strangers[me]
            self._clients.add(link)
        self._tally.add(connections=1)
        return True

    def _forget(self, link: Link) -> None:
        me = threading.current_thread()
        with self._lock:
            known = self._strangers.pop(me, None) or self._ending.pop(me, None)
            known = link if link in self._clients else known
            self._clients.discard(link)
        if known is not None:
            self._tally.add(bytes_in=link.bytes_in, bytes_out=link.bytes_out)

    def _may_serve(self, client: ServedConnection, thread: threading.Thread) -> bool:
        """Called under the lock. If False, the client waits for another thread."""
        if len(self._serving) >= self.limits.threads:
            self._ready.append(client)
            return False
        self._serving.add(thread)
        return True

    def _serve_all(self, client: ServedConnection | None) -> None:
        """Serve this client, then those that wait for a thread."""
        while client is not None:
            if self._serve(client):
                self._park(client)
            else:
                self._end(client)
            with self._lock:
                client = self._ready.popleft() if self._ready else None
                if client is None:
                    self._serving.discard(threading.current_thread())

    def _serve(self, client: ServedConnection) -> bool:
        """Serve until no request comes for a moment. Whether the connection stays open."""
        try:
            while client.link.has_arrived(0.0 if self._ready else _LINGER_S):
                client.serve_one()
            return True
        except ProtocolError as error:
            self._tally.add(malformed=error.reason != "key_withdrawn")
            self._say("%s: %s", client.client, error)
            self._last_word(client.link, error.reason, str(error))
        except PeerTimeout as error:
            self._tally.add(timeouts=1)
            log.debug("%s: %s", client.client, error)
        except DataPlaneError as error:
            log.debug("%s: %s", client.client, error)
        except Exception:  # a thread's top: a store's fault ends this connection, not the listener
            self._tally.add(store_failures=1)
            log.exception("serving %s failed", client.client)
            self._last_word(client.link, "store", "the store failed")
        return False

    def _park(self, client: ServedConnection) -> None:
        client.idle_until = time.monotonic() + self.limits.idle_s
        with self._lock:
            closing = self._closing
            if not closing:
                self._parked[client.link.fileno()] = client
                self._epoll.register(client.link.fileno(), select.EPOLLIN)
        if closing:
            self._end(client)

    def _unpark(self, number: int) -> None:
        """A request arrived, or the end."""
        with self._lock:
            client = self._parked.pop(number, None)
            if client is None or self._closing:
                return
            self._epoll.unregister(number)
            thread = self._thread(self._serve_all, client)
            if not self._may_serve(client, thread) or self._is_started(thread):
                return
            self._serving.discard(thread)
        self._end(client)

    def _end(self, client: ServedConnection) -> None:
        self._forget(client.link)
        client.link.close()

    def _last_word(self, link: Link, reason: str, text: str) -> None:
        with contextlib.suppress(DataPlaneError):
            link.send([frame(Failure(reason, text))], time.monotonic() + _LAST_WORD_S)

    def _refuse(self, reason: str, text: str) -> None:
        self._tally.refuse(reason)
        if reason != "gone":
            self._say("handshake: %s", text)

    def _say(self, text: str, *values: object) -> None:
        """At most every 10 s, as any peer can provoke it."""
        now = time.monotonic()
        if now - self._said_at >= _SAY_AGAIN_S:
            self._said_at = now
            log.warning("data plane %s: " + text, self.identity, *values)  # noqa: G003
