"""Loop: sends a worker's frames, in order, from one task, so that no producer of frames ever waits for NATS.

`records` says which messages ask for a receipt. While NATS is away frames are dropped once the connection's buffer is
full: the frame book still has them, and readers ask again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from kvfleet.worker.streams.records import AttemptRecord, Leases, Reader, without_message
from kvproto import codec
from kvproto.connection import Connection
from kvproto.errors import Cancelled, Unavailable
from kvproto.messages import TERMINAL, Encoding, Failed, Frame
from kvproto.subjects import receipt_inbox

log = logging.getLogger(__name__)

MAX_BACKLOG = 65_536
NO_FRAMES = codec.encode_frames([])
LARGEST_BATCH = 512 * 1024  # bytes; a NATS server takes 1 MiB unless told otherwise


@dataclass(eq=False)
class Outbox:
    """Owned by the worker's event loop. Only `run` publishes."""

    connection: Connection
    leases: Leases
    dropped_total: int = 0
    _backlog: deque[tuple[str, bytes]] = field(default_factory=deque)
    _wake: asyncio.Event = field(default_factory=asyncio.Event)

    def send(self, subject: str, data: bytes) -> None:
        if len(self._backlog) >= MAX_BACKLOG:
            self.dropped_total += 1
            return
        self._backlog.append((subject, data))
        self._wake.set()

    def send_frames(self, framed: Iterable[tuple[AttemptRecord, Frame]]) -> None:
        """One message per batch inbox; one per frame to producers' inboxes."""
        batches: dict[str, list[Frame]] = {}
        for record, frame in framed:
            for reader in record.readers:
                # Plain readers hear of no cancel: placement moved the request, or reports the reason itself.
                if reader.reads_batches:
                    batches.setdefault(reader.inbox, []).append(frame)
                elif not (isinstance(frame, Failed) and frame.code == Cancelled.code):
                    self._send_plain(reader, frame)
            if record.watchers and isinstance(frame, TERMINAL):
                for watcher in record.watchers:
                    self.send(watcher, codec.encode_frames([without_message(frame)]))
        for inbox, frames in batches.items():
            self._send_batch(inbox, frames)

    def send_to(self, reader: Reader, frames: list[Frame]) -> None:
        if reader.reads_batches:
            self._send_batch(reader.inbox, frames)
        else:
            for frame in frames:
                self._send_plain(reader, frame)

    def ask_for_receipts(self, now: float) -> None:
        for inbox in self.leases.due(now):
            self.send(inbox, NO_FRAMES)

    def _send_plain(self, reader: Reader, frame: Frame) -> None:
        encode = partial(codec.encode_plain_frame, as_json=reader.encoding is Encoding.JSON)
        self.send(reader.inbox, self._fitting(frame, encode))

    def _send_batch(self, inbox: str, frames: list[Frame]) -> None:
        """Split where it is larger than a message: many streams with log probabilities are."""
        data = codec.encode_frames(frames)
        if len(data) <= LARGEST_BATCH:
            self.send(inbox, data)
            return
        if len(frames) == 1:
            self.send(inbox, self._fitting(frames[0], lambda frame: codec.encode_frames([frame])))
            return
        half = len(frames) // 2
        self._send_batch(inbox, frames[:half])
        self._send_batch(inbox, frames[half:])

    def _fitting(self, frame: Frame, encode: Callable[[Frame], bytes]) -> bytes:
        data = encode(frame)
        return data if len(data) <= self.connection.max_payload else encode(without_message(frame))

    async def run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            await self._flush()

    async def _flush(self) -> None:
        clock = asyncio.get_running_loop().time
        while self._backlog:
            subject, data = self._backlog.popleft()
            number = self.leases.receipt(subject, clock())
            reply = "" if number is None else receipt_inbox(self.connection.inbox_prefix, number)
            try:
                await self.connection.publish(subject, data, reply=reply)
            except Unavailable as error:
                self.dropped_total += 1
                log.debug("frame for %s dropped: %s", subject, error)

    async def drain(self) -> None:
        await self._flush()
        await self.connection.synced(1.0)
