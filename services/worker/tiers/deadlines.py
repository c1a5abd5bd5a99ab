"""Calls made at given times, from a thread of their own. Loop: owns that thread and the calls that wait.

A worker has one: looks without an answer end in time, and no callback runs on the thread that asked. Calls are short.
"""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections.abc import Callable
from itertools import count

logger = logging.getLogger(__name__)


class Deadlines:
    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="tiers-deadlines", daemon=True)
        self._thread.start()

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Call once, `seconds` from now. `close` makes the calls that wait; then only those due at once are made."""
        when = time.monotonic() + seconds
        with self._changed:
            if not self._closed:
                heapq.heappush(self._waiting, (when, next(self._numbers), call))
                if self._waiting[0][0] == when:
                    self._changed.notify()
                return
        if seconds <= 0:
            _make(call)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._closed and (not self._waiting or self._waiting[0][0] > time.monotonic()):
                    self._changed.wait(self._waiting[0][0] - time.monotonic() if self._waiting else None)
                if not self._waiting:
                    return  # closed
                _, _, call = heapq.heappop(self._waiting)
            _make(call)


def _make(call: Callable[[], None]) -> None:
    try:
        call()
    except Exception:  # the top of a loop: one call's fault is not the next one's
        logger.exception("a deadline's call failed")
