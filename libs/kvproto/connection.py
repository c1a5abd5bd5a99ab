"""Adapter: a process's connection to NATS. Owns the nats-py client and a watchdog.

nats-py's defaults give up after two minutes, notice a hung server after six, and never fail over while unsent data
waits for one (nats.py #671). Callers see errors of `kvproto.errors` or `TimeoutError`, never nats-py's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Protocol

import nats
import nats.errors
from nats.aio.client import Client as NatsClient

from kvproto.errors import AuthenticationFailed, Unavailable, WorkerLost

log = logging.getLogger(__name__)

SAY_AGAIN_S = 10.0
WATCH_PERIOD_S = 0.2
PENDING_LIMIT = 8 * 1024 * 1024  # bytes of messages that wait during an outage
PROBE_AFTER_S = 0.6  # without a message, the server is pinged
SILENT_S = 1.5  # without a message, the server counts as silent

NO_RESPONDERS = "503"
JSON_HEADER = {"Content-Type": "application/json"}


class Message(Protocol):
    @property
    def subject(self) -> str: ...
    @property
    def reply(self) -> str: ...
    @property
    def data(self) -> bytes: ...
    @property
    def headers(self) -> dict[str, str] | None: ...


class Subscription(Protocol):
    async def unsubscribe(self) -> None:
        """Discards queued messages."""

    async def drain(self) -> None:
        """Delivers queued messages first."""


Callback = Callable[[Message], Awaitable[None]]


def is_no_responders(message: Message) -> bool:
    return not message.data and bool(message.headers) and (message.headers or {}).get("Status") == NO_RESPONDERS


def is_json(message: Message) -> bool:
    headers = message.headers or {}
    return any(
        k.lower() == "content-type" and v.split(";")[0].strip() == "application/json" for k, v in headers.items()
    )


class _Client(NatsClient):  # type: ignore[misc]
    """Insists on TLS where it is configured: nats-py leaves that to the server, or to a machine in between. Closes the
    socket of a failed attempt, which nats-py forgets. Flushes what is pending before it asks whether all arrived."""

    @property
    def writer(self) -> Any:
        """Of the newest transport."""
        return getattr(self._transport, "_io_writer", None)

    async def _connect_to_server(self, s: Any) -> None:
        if self.writer is not None:
            self.writer.transport.abort()
        await super()._connect_to_server(s)

    async def flush(self, timeout: float = 10.0) -> None:
        """nats-py's own writes its PING before pending SUBs, UNSUBs and PUBs, so that a drained subscription may lose
        messages. And it cancels the future of a late PONG, which ends its reader."""
        await self._flush_pending(force_flush=True)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        await self._send_ping(answer)
        done, _ = await asyncio.wait([answer], timeout=timeout)
        if not done:
            raise nats.errors.FlushTimeoutError

    def _connect_command(self) -> bytes:
        writer = self.writer
        is_tls = writer is not None and writer.get_extra_info("ssl_object") is not None
        if is_tls and (protocol := writer.transport.get_protocol()) is not None:
            protocol._over_ssl = True  # else asyncio complains of it when it ends
        elif not is_tls and self.options.get("tls") is not None:
            raise nats.errors.Error("nats: the server speaks no TLS, and no word is said without")
        command: bytes = super()._connect_command()
        return command


class Connection:
    """One process's connection. Create with `Connection.open`.

    `on_reconnect` hooks run in order after every reconnect: a KV watch must be rebuilt then, as it stays blind for up
    to 25 s. `on_closed` runs if nats-py gives up for good: a service then ends its process.
    """

    def __init__(self, name: str, inbox_prefix: str) -> None:
        self.name = name
        self.inbox_prefix = inbox_prefix
        self.on_reconnect: list[Callable[[], Awaitable[None]]] = []
        self.on_disconnect: list[Callable[[], None]] = []
        self.on_closed: Callable[[], None] | None = None
        self.reconnects_total = 0
        self.errors_total = 0
        self.raw = _Client()  # for the other adapters of this package, too
        self._refused = asyncio.Event()
        self._said, self._said_at = "", 0.0
        self._tls_fault = ""  # the last one
        self._closing = False
        self._connected_at = 0.0
        self._away = False  # until a reconnect is complete; nats-py is "connected" before
        self._stalled = False  # the server has not taken pending data
        self._writer: Any = None  # of the newest transport
        self._aborted: Any = None  # the writer that was aborted last
        self._heard = 0  # messages
        self.heard_at = 0.0  # the server's last sign of life, by the loop's clock
        self._probe: asyncio.Future[Any] | None = None
        self._watchdog: asyncio.Task[None] | None = None

    @classmethod
    async def open(
        cls,
        servers: str | Sequence[str],
        *,
        name: str,
        inbox_prefix: str,
        user: str | None = None,
        password: str | None = None,
        nkey_seed: str | None = None,
        credentials: str | None = None,
        tls: Any = None,
        connect_timeout_s: float = 5.0,
    ) -> Connection:
        """Connect to one of `servers`; a string may hold several, separated by commas. Raises Unavailable (no server)
        or AuthenticationFailed, each naming the servers."""
        self = cls(name, inbox_prefix)
        urls = [url.strip() for url in servers.split(",")] if isinstance(servers, str) else list(servers)
        connecting = self.raw.connect(
            urls,
            name=name,
            inbox_prefix=inbox_prefix.encode(),
            allow_reconnect=True,
            max_reconnect_attempts=-1,  # the default gives up for ever after two minutes
            reconnect_time_wait=0.25,
            connect_timeout=2,
            ping_interval=2,  # a hung server is left within 6 s instead of 6 minutes
            max_outstanding_pings=2,
            pending_size=PENDING_LIMIT,
            flush_timeout=1,
            error_cb=self._on_error,
            disconnected_cb=self._on_disconnected,
            reconnected_cb=self._on_reconnected,
            closed_cb=self._on_closed,
            user=user,
            password=None if user is None else password or "",
            nkeys_seed_str=nkey_seed,
            user_credentials=credentials,
            tls=tls,
        )
        try:
            await self._connect_or_refused(connecting, connect_timeout_s)
        except (nats.errors.Error, TimeoutError, OSError) as error:
            self._closing = True
            with contextlib.suppress(Exception):
                await self.raw.close()
            self._abandon()
            where = ", ".join(url.rsplit("@", 1)[-1] for url in urls)
            if "authorization" in str(error).lower() or self._refused.is_set():
                who = f"the credentials {credentials}" if credentials is not None else f"user {user or 'anonymous'}"
                who = who if nkey_seed is None else "the nkey"
                raise AuthenticationFailed(f"NATS at {where} refuses {who}") from None
            why = self._tls_fault or type(error).__name__
            raise Unavailable(f"no NATS server answers at {where} ({why})") from None
        self._connected_at = self.heard_at = asyncio.get_running_loop().time()
        self._watchdog = asyncio.create_task(self._watch(), name="nats-watchdog")
        return self

    async def _connect_or_refused(self, connecting: Coroutine[Any, Any, None], timeout_s: float) -> None:
        """nats-py goes on trying after a refused password; here that is final."""
        trying = asyncio.ensure_future(connecting)
        refused = asyncio.ensure_future(self._refused.wait())
        try:
            await asyncio.wait({trying, refused}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not trying.done():
                raise TimeoutError
            trying.result()
        finally:
            trying.cancel()
            refused.cancel()
            await asyncio.gather(trying, refused, return_exceptions=True)

    @property
    def is_connected(self) -> bool:
        return bool(self.raw.is_connected)

    @property
    def connected_for_s(self) -> float:
        """Seconds since the last (re)connect; 0 while disconnected."""
        is_there = self.is_connected and not self._away
        return asyncio.get_running_loop().time() - self._connected_at if is_there else 0.0

    def is_settled(self, grace_s: float) -> bool:
        """Connected for `grace_s` since the last outage, so that others have had time to come back too."""
        was_away = self._away or self.reconnects_total > 0
        return self.is_connected and (not was_away or self.connected_for_s > grace_s)

    @property
    def is_silent(self) -> bool:
        """Connected to a server that sends and answers nothing: silent members may well be alive."""
        return self.is_connected and asyncio.get_running_loop().time() - self.heard_at > SILENT_S

    @property
    def max_payload(self) -> int:
        return int(self.raw.max_payload)

    @property
    def subscriptions(self) -> int:
        """For leak tests: without the one that nats-py opens for the answers to its first request, and keeps."""
        return len(self.raw._subs) - (self.raw._resp_sub_prefix is not None)

    async def publish(
        self, subject: str, data: bytes, *, reply: str = "", headers: dict[str, str] | None = None
    ) -> None:
        """Send, or buffer while disconnected. Raises Unavailable when the buffer is full or the connection closed.

        Waits for a stalled server only once, for a second: nats-py would wait for every message, buffer it all the
        same, and swallow a cancellation.
        """
        if self._stalled and self.raw.pending_data_size > PENDING_LIMIT:
            raise Unavailable(f"cannot publish to {subject}: the server takes nothing")
        try:
            await self.raw.publish(subject, data, reply, headers)
        except (nats.errors.Error, OSError) as error:
            raise Unavailable(f"cannot publish to {subject}: {error or type(error).__name__}") from None
        self._stalled = self.raw.pending_data_size > PENDING_LIMIT

    async def subscribe(self, subject: str, callback: Callback, *, queue: str = "") -> Subscription:
        """Callbacks of one subscription run one at a time and must not await slow work. A cancellation that escaped one
        would end the subscription silently, so it is caught here."""

        async def guarded(message: Message) -> None:
            try:
                await callback(message)
            except asyncio.CancelledError:
                log.warning("a callback for %s was cancelled", subject)

        subscription: Subscription = await self.raw.subscribe(subject, queue=queue, cb=guarded)
        return subscription

    async def request(
        self, subject: str, data: bytes, timeout_s: float, headers: dict[str, str] | None = None
    ) -> Message:
        """Raises WorkerLost (no subscriber), TimeoutError, or Unavailable."""
        try:
            message: Message = await self.raw.request(subject, data, timeout=timeout_s, headers=headers)
            return message
        except nats.errors.NoRespondersError:
            raise WorkerLost(f"nobody answers on {subject}") from None
        except (nats.errors.TimeoutError, TimeoutError):
            raise TimeoutError(f"no answer on {subject} within {timeout_s} s") from None
        except nats.errors.Error as error:
            raise Unavailable(f"cannot ask {subject}: {error or type(error).__name__}") from None

    async def synced(self, timeout_s: float = 5.0) -> None:
        """Return once the server has processed everything sent so far, or after `timeout_s`."""
        if self.is_connected:
            with contextlib.suppress(nats.errors.Error, OSError):
                await self.raw.flush(timeout_s)

    async def close(self, timeout_s: float = 2.0) -> None:
        """Flush and close within the timeout. Never raises."""
        if self._closing:
            return
        self._closing = True
        if self._watchdog is not None:
            self._watchdog.cancel()
        with contextlib.suppress(Exception):
            if self.is_connected:
                await asyncio.wait_for(self.synced(1.0), timeout_s)
        with contextlib.suppress(Exception):  # close() while down with pending data raises ConnectionResetError
            try:
                await asyncio.wait_for(self.raw.close(), timeout_s)
            except asyncio.CancelledError:  # also where a task of nats-py that waited for the same end was cancelled
                if (task := asyncio.current_task()) is not None and task.cancelling():
                    raise
        self._abandon()

    async def _on_error(self, error: Exception) -> None:
        self.errors_total += 1
        text = f"{type(error).__name__}: {error}"
        if isinstance(error, ssl.SSLError) or "TLS" in text:
            self._tls_fault = f"TLS: {error}"
        if "authorization" in text.lower():
            self._refused.set()
        now = asyncio.get_running_loop().time()
        if self._connected_at == 0.0:
            return  # still opening: `open` raises the error
        if not self._closing and (text != self._said or now - self._said_at > SAY_AGAIN_S):
            self._said, self._said_at = text, now  # an outage repeats the same line several times a second
            log.warning("nats: %s", text[:300])

    async def _on_disconnected(self) -> None:
        self._probe, self._away = None, True
        if not self._closing:
            log.warning("nats: disconnected")
            for hook in self.on_disconnect:
                hook()

    async def _on_reconnected(self) -> None:
        self.reconnects_total += 1
        self._away = False
        self._connected_at = self.heard_at = asyncio.get_running_loop().time()
        log.info("nats: reconnected to %s", self.raw.connected_url.netloc if self.raw.connected_url else "?")
        for hook in self.on_reconnect:
            try:
                await hook()
            except Exception:  # a loop's top: one hook must not stop the others
                log.exception("a reconnect hook failed")

    async def _on_closed(self) -> None:
        if not self._closing:
            log.error("nats: the connection is closed for good")
            if self.on_closed is not None:
                self.on_closed()

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            before = loop.time()
            await asyncio.sleep(WATCH_PERIOD_S)
            self._abort_stuck_transport()
            if loop.time() - before > SILENT_S:
                self.heard_at = loop.time()  # it was this process that did not listen
            with contextlib.suppress(nats.errors.Error, OSError):
                await self._listen_for_life(loop.time())

    def _abort_stuck_transport(self) -> None:
        """A reconnect waits for ever for the old transport to flush to a hung server (nats.py #671), and leaves the
        transport of a failed attempt open."""
        writer = self.raw.writer
        if self._writer is not None and writer is not self._writer:
            self._writer.transport.abort()
        self._writer = writer
        is_stuck = self.raw.is_reconnecting and writer is not None and writer.transport.is_closing()
        if is_stuck and writer is not self._aborted:
            self._aborted = writer
            writer.transport.abort()

    def _abandon(self) -> None:
        """Close the transports that nats-py leaves open when it is closed between two attempts."""
        for writer in (self._writer, self.raw.writer):
            if writer is not None:
                writer.transport.abort()

    async def _listen_for_life(self, now: float) -> None:
        """Any message counts; without one the server is pinged, one ping at a time."""
        heard = self.raw.stats["in_msgs"]
        if heard != self._heard or (self._probe is not None and self._probe.done()):
            self._heard, self.heard_at, self._probe = heard, now, None
        elif self.is_connected and self._probe is None and now - self.heard_at > PROBE_AFTER_S:
            self._probe = asyncio.get_running_loop().create_future()  # must not be cancelled
            await self.raw._send_ping(self._probe)
