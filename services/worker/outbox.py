"""Loop: sends a worker's frames, in order, from one task, so that no producer of frames ever waits for NATS.

While NATS is away frames are dropped once the connection's buffer is full: the frame book still has them, and readers
ask again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterable

from kvproto import codec
from kvproto.connection import Connection
from kvproto.errors import Unavailable
from kvproto.messages import TERMINAL, Encoding, Frame
from services.worker.frames import Record

log = logging.getLogger(__name__)

MAX_BACKLOG = 65_536
LARGEST_BATCH = 512 * 1024  # bytes; a NATS server takes 1 MiB unless told otherwise


class Outbox:
    """Owned by the worker's event loop. `send` never blocks; `run` is the one task that publishes."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._backlog: deque[tuple[str, bytes]] = deque()
        self._wake = asyncio.Event()
        self.dropped_total = 0

    def send(self, subject: str, data: bytes) -> None:
        if len(self._backlog) >= MAX_BACKLOG:
            self.dropped_total += 1
            return
        self._backlog.append((subject, data))
        self._wake.set()

    def send_frames(self, framed: Iterable[tuple[Record, Frame]]) -> None:
        """One message per batch inbox with everything for it; one message per frame for producers' inboxes."""
        batches: dict[str, list[Frame]] = {}
        for record, frame in framed:
            if record.encoding is Encoding.FRAMES:
                batches.setdefault(record.inbox, []).append(frame)
            else:
                as_json = record.encoding is Encoding.JSON
                self.send(record.inbox, codec.encode_plain_frame(frame, as_json=as_json))
            if record.watcher_reply is not None and isinstance(frame, TERMINAL):
                self.send(record.watcher_reply, codec.encode_frames([frame]))
        for inbox, frames in batches.items():
            self._send_batch(inbox, frames)

    def _send_batch(self, inbox: str, frames: list[Frame]) -> None:
        """In one message, or in as many as NATS takes: many streams with log probabilities are large."""
        data = codec.encode_frames(frames)
        if len(data) <= LARGEST_BATCH or len(frames) == 1:
            self.send(inbox, data)
            return
        half = len(frames) // 2
        self._send_batch(inbox, frames[:half])
        self._send_batch(inbox, frames[half:])

    async def run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            await self._flush()

    async def _flush(self) -> None:
        while self._backlog:
            subject, data = self._backlog.popleft()
            try:
                await self._connection.publish(subject, data)
            except Unavailable as error:
                self.dropped_total += 1
                log.debug("frame for %s dropped: %s", subject, error)

    async def drain(self) -> None:
        """Send what is left, before the process ends."""
        await self._flush()
        await self._connection.synced(1.0)
