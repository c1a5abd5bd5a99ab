"""Loop: what the parts of one placement replica share: its connection, its subjects, and tasks that end with it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kvproto import codec
from kvproto.connection import Connection, Message, Subscription
from kvproto.errors import CodecError, Unavailable
from kvproto.subjects import Subjects, request_inboxes

log = logging.getLogger(__name__)

QUEUE = "placement"  # in which replicas share requests
LET_GO_S = 1.0

Heard = TypeVar("Heard")
Callback = Callable[[Message], Awaitable[None]]


@dataclass(eq=False)
class Replica:
    """The base of the placement loop: what the loop's parts see of it."""

    connection: Connection
    subjects: Subjects
    internal_errors_total: int = 0
    malformed_total: int = 0  # messages refused, or dropped, because the bytes or a field were wrong
    ignored_total: int = 0  # without an inbox to answer to
    unsent_total: int = 0  # what NATS did not take from us
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.answers = request_inboxes(self.connection.inbox_prefix).rstrip(">")  # begins inboxes of workers' answers
        self.snapshots = f"{self.connection.inbox_prefix}.s."  # and of their snapshots

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.finished)
        return task

    def finished(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.internal_errors_total += 1
            log.error("placement: a task failed", exc_info=error)

    async def listen(self, subject: str, callback: Callback, queue: str = "") -> Subscription:
        return await self.connection.subscribe(subject, self.guarded(callback), queue=queue)

    def guarded(self, callback: Callback) -> Callback:
        """A fault of ours costs one message, never the subscription."""

        async def run(message: Message) -> None:
            try:
                await callback(message)
            except Unavailable as error:
                self.unsent_total += 1
                log.warning("placement: an answer to %s was not sent: %s", message.subject, error)
            except Exception:  # a callback's top
                self.internal_errors_total += 1
                log.exception("placement: a message on %s was not handled", message.subject)

        return run

    def read(self, kind: type[Heard], message: Message) -> Heard | None:
        """None, and counted, if the bytes are wrong."""
        try:
            return codec.decode(kind, message.data)
        except CodecError as error:
            self.malformed_total += 1
            log.debug("placement: a message on %s is unreadable: %s", message.subject, error)
            return None


async def let_go(work: Coroutine[Any, Any, None]) -> None:
    """Takes a second at most, and never raises."""
    try:
        await asyncio.wait_for(work, LET_GO_S)
    except Exception as error:  # the connection may be gone
        log.debug("placement: while letting go: %r", error, exc_info=True)
