"""Adapter: the JetStream work queue of requests that may wait, by JetStream's own API. `kvfleet init` creates it.

    kvf.batch.<tenant>.<model> ─▶ kept until it is done ─▶ one taker at a time, who says every few seconds that it is
                                                           at it; else another one gets it

A consumer per subject: a model without workers, or a tenant with much to do, holds up no other.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from kvproto.connection import Connection, Message, Subscription, is_no_responders
from kvproto.errors import KvfleetError, LimitExceeded, Unavailable
from kvproto.ids import base32
from kvproto.subjects import Subjects

STREAM_BYTES = 64 * 1024**2
MAX_WAITING = 10_000  # messages of one tenant and model; more are refused when they are sent
MAX_AGE_S = 7 * 86_400.0
SAME_S = 120.0  # a message with the id of one that came so long ago is the same
ACK_WAIT_S = 15.0
IDLE_S = 3600.0  # a consumer that nobody has asked for so long is forgotten; its messages stay
TIMEOUT_S = 3.0
NS = 1_000_000_000
EXISTS = 10058
FULL = (10077, 10047, 10048)  # stream full: by bytes, by messages, by messages of a subject


@dataclass(eq=False, slots=True)
class QueuedMessage:
    """One message that this process has taken. All methods raise Unavailable when the connection is closed; what they
    say may be lost, and then the message comes again."""

    connection: Connection
    subject: str
    data: bytes
    headers: dict[str, str] | None
    reply: str

    @property
    def deliveries(self) -> int:
        """How often it was taken, this time included."""
        tokens = self.reply.split(".")  # $JS.ACK[.<domain>.<account>].<stream>.<consumer>.<deliveries>...
        return int(tokens[4] if len(tokens) == 9 else tokens[6])

    async def done(self) -> None:
        await self.connection.publish(self.reply, b"+ACK")

    async def at_it(self) -> None:
        await self.connection.publish(self.reply, b"+WPI")

    async def give_back(self, after_s: float = 0.0) -> None:
        said = b"-NAK" if not after_s else b'-NAK {"delay": %d}' % int(after_s * NS)
        await self.connection.publish(self.reply, said)


@dataclass(eq=False, slots=True)
class OpenQueue:
    """One subject's messages, for one taker at a time."""

    connection: Connection
    next_subject: str
    inbox: str
    _came: asyncio.Queue[Message] = field(default_factory=asyncio.Queue)
    _subscription: Subscription | None = None

    async def take(self) -> QueuedMessage | None:
        """The next one that nobody is at; None if there is none just now. Raises Unavailable without an answer: the
        queue may be gone, and is to be opened again."""
        if self._came.empty():
            await self.connection.publish(self.next_subject, b'{"batch": 1, "no_wait": true}', reply=self.inbox)
        try:
            told = await asyncio.wait_for(self._came.get(), TIMEOUT_S)
        except TimeoutError:
            raise Unavailable("the queue does not answer") from None
        if is_no_responders(told):
            raise Unavailable("the queue is gone")
        if (told.headers or {}).get("Status") is not None:
            return None
        return QueuedMessage(self.connection, told.subject, told.data, told.headers, told.reply)

    async def close(self) -> None:
        """What came and was not taken goes to others after a while."""
        if self._subscription is not None:
            with contextlib.suppress(KvfleetError):  # its connection may be gone, and it with that
                await self._subscription.unsubscribe()

    async def _on_message(self, message: Message) -> None:
        self._came.put_nowait(message)


@dataclass(frozen=True, slots=True)
class WorkQueue:
    """All methods raise Unavailable when JetStream does not answer in time, or there is no queue."""

    connection: Connection
    subjects: Subjects
    ack_wait_s: float = ACK_WAIT_S

    async def put(self, subject: str, data: bytes, message_id: str) -> None:
        """Kept when this returns. Raises LimitExceeded when the queue has no room."""
        told = await self._ask(subject, data, {"Nats-Msg-Id": message_id})
        if (error := told.get("error")) is not None:
            why = f"the queue does not take it: {error.get('description', '')}"
            raise (LimitExceeded if error.get("err_code") in FULL else Unavailable)(why, retry_after_s=1.0)

    async def waiting(self) -> dict[str, int]:
        """Messages by subject, those that are taken included."""
        told = await self._api("STREAM.INFO", {"subjects_filter": ">"})
        return dict(told["state"].get("subjects") or {})

    async def open(self, subject: str) -> OpenQueue:
        """To be closed by its taker."""
        name = _consumer_of(subject)
        config = {
            "durable_name": name,
            "name": name,
            "filter_subject": subject,
            "ack_policy": "explicit",
            "ack_wait": int(self.ack_wait_s * NS),
            "max_ack_pending": -1,
            "inactive_threshold": int(IDLE_S * NS),
            "deliver_policy": "all",
        }
        said = {"stream_name": self.subjects.batch_stream, "config": config}
        await self._api("CONSUMER.CREATE", said, f".{name}.{subject}")
        next_ = f"$JS.API.CONSUMER.MSG.NEXT.{self.subjects.batch_stream}.{name}"
        opened = OpenQueue(self.connection, next_, self.connection.raw.new_inbox())
        opened._subscription = await self.connection.subscribe(opened.inbox, opened._on_message)
        return opened

    async def _api(self, verb: str, said: dict[str, Any], rest: str = "") -> dict[str, Any]:
        told = await self._ask(f"$JS.API.{verb}.{self.subjects.batch_stream}{rest}", json.dumps(said).encode())
        if (error := told.get("error")) is not None:
            raise Unavailable(f"the queue cannot {verb}: {error.get('description', '')}")
        return told

    async def _ask(self, subject: str, data: bytes, headers: dict[str, str] | None = None) -> dict[str, Any]:
        try:
            told: dict[str, Any] = json.loads((await self.connection.request(subject, data, TIMEOUT_S, headers)).data)
        except (KvfleetError, TimeoutError, ValueError) as error:
            raise Unavailable(f"the queue does not answer: {error}", retry_after_s=1.0) from None
        return told


async def ensure_work_queue(connection: Connection, subjects: Subjects, *, replicas: int = 1) -> list[str]:
    """Create it, if it is missing; a line for each difference in what is there. Raises Unavailable."""
    name = subjects.batch_stream
    wanted = {
        "name": name,
        "subjects": [subjects.batch_all(), subjects.batch_lines_all()],
        "retention": "workqueue",
        "storage": "file",
        "discard": "new",
        "discard_new_per_subject": True,
        "max_msgs_per_subject": MAX_WAITING,
        "max_msgs": -1,
        "max_bytes": STREAM_BYTES,
        "max_age": int(MAX_AGE_S * NS),
        "duplicate_window": int(SAME_S * NS),
        "max_consumers": -1,
        "num_replicas": replicas,
    }
    queue = WorkQueue(connection, subjects)
    told = await queue._ask(f"$JS.API.STREAM.CREATE.{name}", json.dumps(wanted).encode())
    error = told.get("error")
    if error is None:
        return []
    if error.get("err_code") != EXISTS:
        raise Unavailable(f"the queue {name} cannot be made: {error.get('description', '')}")
    have = (await queue._api("STREAM.INFO", {}))["config"]
    watched = ("subjects", "retention", "discard", "max_bytes", "num_replicas")
    return [
        f"queue {name}: {what} is {have.get(what)}, the configuration says {wanted[what]}"
        for what in watched
        if have.get(what) != wanted[what]
    ]


def _consumer_of(subject: str) -> str:
    return "q" + base32(hashlib.blake2b(subject.encode(), digest_size=10).digest())
