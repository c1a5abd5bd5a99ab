"""Loop: the one wildcard inbox of a client process; request id -> the stream that wants its frames.

A subscription for all requests costs a seventh of one each, has no race between subscribe and request, and is one line
to replay on a reconnect. Frames arrive on `<prefix>.r.<request>.<attempt>`, or many sequences at once on `<prefix>.b`.
"""

from __future__ import annotations

import logging
from typing import Protocol

from kvproto import codec
from kvproto.connection import Connection
from kvproto.errors import CodecError
from kvproto.messages import Frame
from kvproto.nats_message import Message, Subscription, is_no_responders
from kvproto.subjects import batch_inbox, request_inbox, request_inboxes

log = logging.getLogger(__name__)


class Receiver(Protocol):
    """What a request registers: called on the loop, must not block."""

    def on_frame(self, frame: Frame) -> None: ...
    def on_no_responders(self, attempt: int) -> None: ...


class Inbox:
    """Owns the subscription and the table of receivers. Frames for nobody are counted and dropped."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._receivers: dict[str, Receiver] = {}
        self._subscriptions: list[Subscription] = []
        self.prefix = connection.inbox_prefix
        self.batch = batch_inbox(self.prefix)
        self.orphan_frames_total = 0
        self.malformed_total = 0

    async def start(self) -> None:
        for subject in (request_inboxes(self.prefix), self.batch):
            self._subscriptions.append(await self._connection.subscribe(subject, self._receive))

    async def stop(self) -> None:
        for subscription in self._subscriptions:
            await subscription.unsubscribe()

    def of(self, request: str, attempt: int) -> str:
        """Reply subject of one attempt: a no-responders notice carries nothing else to tell it by."""
        return request_inbox(self.prefix, request, attempt)

    def register(self, request: str, receiver: Receiver) -> None:
        self._receivers[request] = receiver

    def forget(self, request: str) -> None:
        self._receivers.pop(request, None)

    def __len__(self) -> int:
        return len(self._receivers)

    async def _receive(self, message: Message) -> None:
        if is_no_responders(message):
            *_, request, attempt = message.subject.split(".")
            receiver = self._receivers.get(request)
            if receiver is not None and attempt.isdigit():
                receiver.on_no_responders(int(attempt))
            return
        try:
            frames = codec.decode_frames(message.data)
        except CodecError as error:
            self.malformed_total += 1
            log.warning("inbox: a frame on %s is unreadable: %s", message.subject, error)
            return
        receivers = self._receivers
        for frame in frames:
            receiver = receivers.get(frame.request)
            if receiver is None:
                self.orphan_frames_total += 1
            else:
                receiver.on_frame(frame)
