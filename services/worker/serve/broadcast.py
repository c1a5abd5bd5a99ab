"""Loop: what a worker tells every placement replica, batched: block events and milestones of attempts.

One timer serves both. Milestones wait while NATS is away; events do not: a listener sees the gap and pulls a snapshot.
The last milestones before an outage are sent again at reconnect, and once more when all listeners should be back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from kvfleet.worker.port.engine_port import EnginePort
from kvfleet.worker.port.outputs import KvPublisher, StepResult
from kvfleet.worker.streams.milestones import MilestoneLog
from kvfleet.worker.streams.outbox import Outbox
from kvproto import codec
from kvproto.connection import Connection
from kvproto.messages import KvEvents, Snapshot, Tier
from kvproto.subjects import Subjects

MILESTONE_PERIOD_S = 0.02  # between two messages
UNSURE_S = 10.0  # longer than it takes to notice that a server is gone: messages since then may be lost
ALL_BACK_S = 5.0  # after this connection, all others should be back


@dataclass(eq=False)
class Broadcast:
    """Owned by the worker's event loop. Never waits: it sends through the outbox."""

    connection: Connection
    outbox: Outbox
    subjects: Subjects
    worker: str
    publisher: KvPublisher
    milestones: MilestoneLog
    _milestones_at: float = 0.0  # when the next message of them may leave
    _unsure_since: float | None = None  # from an outage until all should be back
    _settling: asyncio.TimerHandle | None = None
    _timer: asyncio.Handle | None = None
    _timer_at: float = 0.0  # uvloop's handles do not tell
    _snapshots: int = 0  # being taken

    def changes(self, results: Sequence[StepResult]) -> None:
        now = asyncio.get_running_loop().time()
        self._send_events(self.publisher.batch(results, now, hold=not self._snapshots))
        self.wake()

    async def snapshot(self, engine: EnginePort, asked: Tier | None) -> list[Snapshot]:
        """All parts of what the engine holds now. Meanwhile no change is held back, so the digest is always that of an
        event. Raises EngineFailure."""
        self._snapshots += 1
        try:
            self._send_events(self.publisher.flush(asyncio.get_running_loop().time()))
            held, digest = await engine.holdings()
        finally:
            self._snapshots -= 1
        return self.publisher.snapshot(held, digest, asked)

    def wake(self) -> None:
        """Set the timer to the next due time, if any, unless it is set to an earlier one."""
        due = self.publisher.due
        if self.milestones and self.connection.is_connected:
            due = self._milestones_at if due is None else min(due, self._milestones_at)
        if due is None or (self._timer is not None and self._timer_at <= due):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = due
        self._timer = asyncio.get_running_loop().call_at(due, self._ring)

    def away(self) -> None:
        """The connection is lost, and perhaps what was sent lately."""
        if self._settling is not None:
            self._settling.cancel()
        if self._unsure_since is None:
            self._unsure_since = asyncio.get_running_loop().time() - UNSURE_S

    async def back(self) -> None:
        self._say_again()
        self._settling = asyncio.get_running_loop().call_later(ALL_BACK_S, partial(self._say_again, is_over=True))

    def _say_again(self, *, is_over: bool = False) -> None:
        if self._unsure_since is not None:
            self.milestones.take_back(self._unsure_since)
            self.wake()
        if is_over:
            self._unsure_since = None

    def flush(self) -> None:
        if self._settling is not None:
            self._settling.cancel()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._send_events(self.publisher.flush(asyncio.get_running_loop().time()))
        while self.milestones:
            self._send_milestones()

    def _ring(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time()
        if (due := self.publisher.due) is not None and due <= now:
            self._send_events(self.publisher.flush(now))
        if now >= self._milestones_at and self.connection.is_connected:
            self._milestones_at = now + MILESTONE_PERIOD_S
            self._send_milestones()
        self.wake()

    def _send_events(self, events: KvEvents | None) -> None:
        if events is not None:
            self.outbox.send(self.subjects.events(self.worker), codec.encode_events(events))

    def _send_milestones(self) -> None:
        now = asyncio.get_running_loop().time()
        sure_until = now - UNSURE_S if self._unsure_since is None else self._unsure_since
        message = self.milestones.take(now, sure_until)
        if message is not None:
            self.outbox.send(self.subjects.milestones(self.worker), codec.encode(message))
