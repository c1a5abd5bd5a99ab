"""The loop's sense of time: one timer that knows when it woke late. Owned by the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

TICK_S = 0.1
STALL_S = 0.02


class StallTimer:
    """Calls `ring()` ten times a second, and earlier when told so by `set`.

    A timer that fires late means that the whole loop stalled, and that messages wait unread in front of it. They get
    20 ms to be read first: else every answer that came during the stall would count as missing.
    """

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._rang_at: float | None = None
        self._is_catching_up = False
        self._stopped = False

    def set(self, wake_at: float | None) -> None:
        """Ring at `wake_at` (loop time) if that is sooner than planned. The first call starts the ticking."""
        if self._stopped:
            return
        loop = asyncio.get_running_loop()
        if self._rang_at is None:
            self._rang_at = loop.time()
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
        self._ring()
        self.set(None)
