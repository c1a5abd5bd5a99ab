"""The loop's sense of time: whether an answer is of use to its asker, and a timer that knows when it woke late."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

SHARE = 0.75  # of what it may take: the rest is for the decision and the way back
LONGEST_S = 1.0  # at most; and of a request that does not say: those that do go first
DRIFT = 2e-4  # of a second per second, between two clocks
JUMP_S = 5.0
MAX_ASKERS = 4096

TICK_S = 0.1
STALL_S = 0.02


@dataclass(slots=True)
class _Asker:
    least_s: float  # from its clock to ours, on the quickest way
    at: float
    late_since: float | None = None  # since then all were
    least_late_s: float = 0.0


@dataclass(eq=False, slots=True)
class Lateness:
    """When an answer is of no more use to its asker: to decide what is late only makes the next ones late.

        sent ──(on its way: network, server, socket)──▶ arrived ──(waits its turn)──▶ now ──▶ decided, answered in time?

    The wait is measured by the clock of this process. The way is reckoned from the time of sending, by another host's
    clock: what counts is how much it exceeds the least one of the same asker, which is what clocks and network make.
    Clocks that drift apart are followed; one that jumps is believed again after some seconds in which all of its
    requests seemed late. Times are the loop's, `expires_unix_ms` is the asker's.
    """

    askers: OrderedDict[str, _Asker] = field(default_factory=OrderedDict)  # last heard last

    def due(self, asker: str, deadline_ms: object, expires_unix_ms: object, arrived: float) -> float:
        """Until when a request should be decided, or not at all; both fields as they came, unchecked."""
        if type(deadline_ms) is not int or type(expires_unix_ms) is not int:
            return arrived + SHARE * LONGEST_S
        sent = (expires_unix_ms - deadline_ms) / 1000
        limit_s = SHARE * min(deadline_ms / 1000, LONGEST_S)
        return arrived + limit_s - self._on_way_s(asker, sent, limit_s, arrived)

    def _on_way_s(self, asker: str, sent: float, limit_s: float, arrived: float) -> float:
        took_s = arrived - sent
        known = self.askers.pop(asker, None) or _Asker(took_s, arrived)
        self.askers[asker] = known
        if len(self.askers) > MAX_ASKERS:
            self.askers.popitem(last=False)
        known.least_s = min(known.least_s + DRIFT * (arrived - known.at), took_s)
        known.at = arrived
        if took_s - known.least_s <= limit_s:
            known.late_since = None
        elif known.late_since is None:
            known.late_since, known.least_late_s = arrived, took_s
        else:
            known.least_late_s = min(known.least_late_s, took_s)
            if arrived - known.late_since > JUMP_S:
                known.least_s, known.late_since = known.least_late_s, None
        return took_s - known.least_s


@dataclass(eq=False, slots=True)
class StallTimer:
    """Calls `ring()` ten times a second, and earlier when told so by `set`.

    A timer that fires late means that the whole loop stalled, and that messages wait unread in front of it. They get
    20 ms to be read first: else every answer that came during the stall would count as missing.
    """

    ring: Callable[[], None]
    _timer: asyncio.TimerHandle | None = None
    _due: float = 0.0
    _rang_at: float | None = None
    _is_catching_up: bool = False
    _stopped: bool = False

    def set(self, wake_at: float | None) -> None:
        """Ring at `wake_at` (loop time) if that is sooner than planned. The first call starts the ticking."""
        if self._stopped:
            return
        if self._rang_at is None:
            self._rang_at = asyncio.get_running_loop().time()
        due = self._rang_at + TICK_S
        if wake_at is not None and wake_at < due:
            due = wake_at
        if self._timer is not None:
            if self._due <= due or self._is_catching_up:
                return
            self._timer.cancel()
        self._start(due)

    def stop(self) -> None:
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()

    def _start(self, due: float) -> None:
        self._due = due
        self._timer = asyncio.get_running_loop().call_at(due, self._fire)

    def _fire(self) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._due > STALL_S and not self._is_catching_up:
            self._is_catching_up = True
            self._start(now + STALL_S)
            return
        self._is_catching_up = False
        self._timer, self._rang_at = None, now
        self.ring()
        self.set(None)
