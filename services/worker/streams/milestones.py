"""Milestones of this worker's attempts, for every placement replica. Pure; owned by the frame book.

    accepted ──▶ started ──▶ first token ──▶ ended
        └────────────┴─────────────┴───────────▲      refused, failed, cancelled, moved, concluded: in whatever way

A placement releases what it expected of an attempt by these, as frames go to the requester alone. Items wait until
taken; of too many the newest stay. Items taken lately are kept as well: a server that died may not have delivered them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from kvfleet.worker.streams.records import AttemptRecord
from kvproto.messages import Milestone, Milestones, Passed

KEPT = 16_384  # of an outage: some megabytes
PER_MESSAGE = 512  # 0.7 MB with the longest ids: below the limit of a NATS message, and the wire's 65,536


@dataclass(eq=False)
class MilestoneLog:
    worker: str
    epoch: str
    kept: int = KEPT
    dropped_total: int = 0
    _items: deque[Milestone] = field(default_factory=deque)
    _first: int = 0  # number of the first of these
    _taken: deque[tuple[float, Milestone]] = field(default_factory=deque)  # right before `_items`, with the time

    def __len__(self) -> int:
        return len(self._items)

    def note(self, record: AttemptRecord, passed: Passed, now: float, *details: Any) -> None:
        """`details`: further fields of the Milestone."""
        seconds = max(0.0, now - record.accepted_at)
        self.add(Milestone(record.tenant, *record.key, passed, seconds, *details))

    def add(self, item: Milestone) -> None:
        """Drops the oldest one if there are too many."""
        if len(self._items) >= self.kept:
            self._items.popleft()
            self._first += 1
            self._taken.clear()
            self.dropped_total += 1
        self._items.append(item)

    def take(self, now: float, sure_until: float) -> Milestones | None:
        """One message of the oldest ones; None if there are none. Those taken before `sure_until` are forgotten."""
        while self._taken and (self._taken[0][0] < sure_until or len(self._taken) > self.kept):
            self._taken.popleft()
        if not self._items:
            return None
        first, count = self._first, min(len(self._items), PER_MESSAGE)
        said = tuple(self._items.popleft() for _ in range(count))
        self._first += count
        self._taken.extend((now, one) for one in said)
        return Milestones(self.worker, self.epoch, said, first)

    def take_back(self, since: float) -> None:
        """Items taken since then wait again."""
        while self._taken and self._taken[-1][0] >= since:
            self._items.appendleft(self._taken.pop()[1])
            self._first -= 1
