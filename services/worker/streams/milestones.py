"""What this worker's attempts came to, for every placement replica to hear. Pure; one owner: the frame book.

    accepted ──▶ started ──▶ first token ──▶ ended
        └────────────┴─────────────┴───────────▲      refused, failed, cancelled, moved, concluded: in whatever way

Frames go to the requester alone; what a placement expected of an attempt it can only compare and release through
these. A log is kept until it is taken, up to a limit: of an outage the newest part is worth most. What was taken lately
is kept too: what a server took shortly before it hung or died has reached nobody, and is said again.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from kvfleet.worker.streams.records import AttemptRecord
from kvproto.messages import Milestone, Milestones, Passed

KEPT = 16_384  # of an outage: some megabytes
PER_MESSAGE = 512  # with ids of the longest kind 0.7 MB: below what one NATS message takes, and the wire's 65,536


@dataclass(eq=False)
class MilestoneLog:
    """What the attempts of one epoch came to since it was last taken, oldest first."""

    worker: str
    epoch: str
    kept: int = KEPT
    dropped_total: int = 0
    _items: deque[Milestone] = field(default_factory=deque)
    _first: int = 0  # number of the first of these
    _taken: deque[tuple[float, Milestone]] = field(default_factory=deque)  # right before them, and when they were taken

    def __len__(self) -> int:
        return len(self._items)

    def note(self, record: AttemptRecord, passed: Passed, now: float, *details: Any) -> None:
        """What an attempt came to. `details`: what a Milestone says besides."""
        seconds = max(0.0, now - record.accepted_at)
        self.add(Milestone(record.tenant, *record.key, passed, seconds, *details))

    def add(self, item: Milestone) -> None:
        """The oldest one gives way if there are too many."""
        if len(self._items) >= self.kept:
            self._items.popleft()
            self._first += 1
            self._taken.clear()
            self.dropped_total += 1
        self._items.append(item)

    def take(self, now: float, sure_until: float) -> Milestones | None:
        """The oldest ones, as many as one message carries; None if there are none. What was taken before `sure_until`
        will not be wanted again."""
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
        """What was taken since then waits again."""
        while self._taken and self._taken[-1][0] >= since:
            self._items.appendleft(self._taken.pop()[1])
            self._first -= 1
