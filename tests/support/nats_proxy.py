"""A bad network between one process and its NATS server, by message: lost, repeated, late and stale frames, partitions.

Loop: owned by the event loop it was started on. It reads what the server sends far enough to know where a message ends
and what its subject is; what the process sends passes as it comes.

    process ──▶ NatsProxy ──▶ nats-server        partition: nothing passes, nothing ends
            ◀── mangled ◀──                      cut: all connections end, new ones are taken
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

from kvproto.testing.nats_process import free_port

FRAMES = ("_ing.*.b", "_ing.*.r.>", "_prd.*.*.b", "_prd.*.*.r.>")  # what workers send to readers that can ask again
EVENTS = ("kvf.events.*",)

_CHUNK_BYTES = 256 * 1024
_KEPT = 64  # of the last messages, to be replayed as stale ones
_HELD_S = 0.05  # how long a message waits for one to come before it
_STALE_S = (0.2, 3.0)
_LONGEST_LINE = 64 * 1024


class ProtocolBroken(ValueError):
    """The server sent what is not NATS."""


@dataclass(frozen=True, slots=True)
class Mangling:
    """What happens to messages on these subjects: probabilities, each for itself. Nothing by default."""

    subjects: tuple[str, ...] = FRAMES
    lost: float = 0.0
    duplicated: float = 0.0
    reordered: float = 0.0
    stale: float = 0.0
    seed: int = 0

    @property
    def pattern(self) -> re.Pattern[bytes]:
        return re.compile(b"|".join(_subject_pattern(subject) for subject in self.subjects))


def _subject_pattern(subject: str) -> bytes:
    """`*` is one token, `>` at the end any number of them."""
    tokens = [
        "[^. ]+" if token == "*" else "[^ ]+" if token == ">" else re.escape(token) for token in subject.split(".")
    ]
    return rf"(?:{'[.]'.join(tokens)})\Z".encode()


class ServerParser:
    """What the server sends, cut into protocol operations: `(subject, bytes)`, subject empty for what is no message.

    Pure: bytes in, operations out. Raises ProtocolBroken.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[tuple[bytes, bytes]]:
        self._buffer += data
        buffer, at = self._buffer, 0
        out: list[tuple[bytes, bytes]] = []
        while (line_end := buffer.find(b"\r\n", at)) >= 0:
            end = line_end + 2
            subject = b""
            if buffer[at : at + 4] == b"MSG " or buffer[at : at + 5] == b"HMSG ":
                fields = bytes(buffer[at:line_end]).split()
                if not 4 <= len(fields) <= 6 or not fields[-1].isdigit():
                    raise ProtocolBroken(f"no message: {bytes(buffer[at:line_end])[:80]!r}")
                end += int(fields[-1]) + 2
                if len(buffer) < end:
                    break
                subject = fields[1]
            out.append((subject, bytes(buffer[at:end])))
            at = end
        del buffer[:at]
        if len(buffer) > _LONGEST_LINE and b"\r\n" not in buffer:
            raise ProtocolBroken(f"no line: {bytes(buffer[:80])!r}")
        return out


class _Link:
    """One connection through the proxy: its two ends, and the messages that are held or kept of it."""

    def __init__(self, client: asyncio.StreamWriter, server: asyncio.StreamWriter) -> None:
        self.client, self.server = client, server
        self.kept: deque[bytes] = deque(maxlen=_KEPT)
        self.held: list[bytes] = []
        self.timer: asyncio.TimerHandle | None = None

    def abort(self) -> None:
        for end in (self.client, self.server):
            end.transport.abort()


class NatsProxy:
    """Listens on a port of its own, passes on to the server at `url`. `start`, then `close`; an async context manager.

    `mangling` may be set and unset at any time. `latency_s` is added to each chunk, both ways. `counts` says what was
    done to messages: `passed` (of the chosen subjects), `lost`, `duplicated`, `reordered`, `stale`.
    """

    def __init__(self, url: str) -> None:
        where = urlsplit(url)
        self._target = (where.hostname or "127.0.0.1", where.port or 4222)
        self.counts: Counter[str] = Counter()
        self.latency_s = 0.0
        self._mangling: Mangling | None = None
        self._pattern: re.Pattern[bytes] | None = None
        self._chance = random.Random(0)
        self._links: set[_Link] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._passing = asyncio.Event()
        self._passing.set()
        self._server: asyncio.Server | None = None
        self._port = free_port()  # kept, however often it is down

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self._port}"

    @property
    def links(self) -> int:
        return len(self._links)

    @property
    def mangling(self) -> Mangling | None:
        return self._mangling

    @mangling.setter
    def mangling(self, value: Mangling | None) -> None:
        self._mangling = value
        self._pattern = value.pattern if value else None
        if value:
            self._chance = random.Random(value.seed)

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", self._port)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self.heal()
        self.cut()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def __aenter__(self) -> NatsProxy:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def partition(self) -> None:
        """Nothing passes from now on, either way; connections stay open, new ones are taken and say nothing."""
        self._passing.clear()

    def heal(self) -> None:
        """What waited passes now, as TCP would send it again."""
        self._passing.set()

    def cut(self) -> None:
        """End all connections, in the middle of whatever they do."""
        for link in tuple(self._links):
            link.abort()

    # ------------------------------------------------------------------ one connection

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._carry(reader, writer), name="nats-proxy")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry(self, from_client: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        try:
            await self._passing.wait()
            from_server, server = await asyncio.open_connection(*self._target)
        except OSError:  # the server is down: so it looks from the other side
            client.transport.abort()
            return
        except asyncio.CancelledError:
            client.transport.abort()
            raise
        link = _Link(client, server)
        self._links.add(link)
        up = asyncio.create_task(self._pass_up(from_client, link), name="nats-proxy-up")
        down = asyncio.create_task(self._pass_down(from_server, link), name="nats-proxy-down")
        try:
            await asyncio.wait((up, down), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._links.discard(link)
            if link.timer is not None:
                link.timer.cancel()
            for task in (up, down):
                task.cancel()
            await asyncio.gather(up, down, return_exceptions=True)
            for end in (client, server):
                end.close()
                with contextlib.suppress(OSError):
                    await end.wait_closed()

    async def _pass_up(self, reader: asyncio.StreamReader, link: _Link) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(_CHUNK_BYTES):
                await self._time_passes()
                link.server.write(data)
                await link.server.drain()

    async def _pass_down(self, reader: asyncio.StreamReader, link: _Link) -> None:
        parser = ServerParser()
        with contextlib.suppress(OSError):
            while data := await reader.read(_CHUNK_BYTES):
                operations = parser.feed(data)
                await self._time_passes()
                self._send(link, b"".join(self._mangled(operations, link)))
                await link.client.drain()

    async def _time_passes(self) -> None:
        if self.latency_s:
            await asyncio.sleep(self.latency_s)
        await self._passing.wait()

    # ------------------------------------------------------------------ messages

    def _mangled(self, operations: Iterable[tuple[bytes, bytes]], link: _Link) -> list[bytes]:
        """What goes to the client now of what came."""
        pattern, mangling, chance = self._pattern, self._mangling, self._chance
        if pattern is None or mangling is None:
            return [*self._released(link), *(data for _, data in operations)]
        out: list[bytes] = []
        for subject, data in operations:
            if not subject or pattern.match(subject) is None:
                out.append(data)
                continue
            self.counts["passed"] += 1
            link.kept.append(data)
            if chance.random() < mangling.stale:
                self._later(link, chance.choice(link.kept), chance.uniform(*_STALE_S))
            if chance.random() < mangling.lost:
                self.counts["lost"] += 1
                continue
            if chance.random() < mangling.duplicated:
                self.counts["duplicated"] += 1
                out.append(data)
            if chance.random() < mangling.reordered:
                self.counts["reordered"] += 1
                link.held.append(data)  # goes after the next one, or when its time is over
                if link.timer is None:
                    link.timer = asyncio.get_running_loop().call_later(_HELD_S, self._release, link)
                continue
            out.append(data)
            out += self._released(link)
        return out

    def _released(self, link: _Link) -> list[bytes]:
        held, link.held = link.held, []
        if link.timer is not None:
            link.timer.cancel()
            link.timer = None
        return held

    def _release(self, link: _Link) -> None:
        link.timer = None
        self._send(link, b"".join(self._released(link)))

    def _later(self, link: _Link, data: bytes, delay_s: float) -> None:
        def replay() -> None:
            if link in self._links and self._passing.is_set():
                self.counts["stale"] += 1
                self._send(link, data)

        asyncio.get_running_loop().call_later(delay_s, replay)

    @staticmethod
    def _send(link: _Link, data: bytes) -> None:
        if data and not link.client.is_closing():
            link.client.write(data)
