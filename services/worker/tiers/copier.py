"""Copies between the device and host memory beside the engine. Loop: owns one thread.

Each job is a list of block copies that can be stopped between any two of them, so a caller that gives up has its
blocks back at once. Restores go before offloads: somebody waits for them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from kvfleet.worker.tiers.link_speed import CopySpeed

log = logging.getLogger(__name__)


class CopyJob:
    """`moves` are done in order; `on_end` is called on the copying thread when no more will be."""

    def __init__(self, moves: Sequence[Callable[[], None]], block_bytes: int, on_end: Callable[[], None]) -> None:
        self.block_bytes = block_bytes
        self.ended = False
        self.done = 0
        self.failure = ""
        self._moves = moves
        self._on_end = on_end
        self._lock = threading.Lock()
        self._closed = False

    def close(self) -> int:
        """No further copy begins, and none is under way. Returns how many were made."""
        with self._lock:
            self._closed = True
        return self.done

    @property
    def bytes_done(self) -> int:
        return self.done * self.block_bytes

    def run(self) -> float:
        """Seconds it took."""
        began = time.perf_counter()
        try:
            for move in self._moves:
                with self._lock:
                    if self._closed:
                        break
                    move()
                    self.done += 1
        except Exception as error:  # a device's: this job has failed, the thread goes on
            log.exception("a block could not be copied")
            self.failure = type(error).__name__
        took = time.perf_counter() - began
        self.ended = True
        self._moves = ()
        self._on_end()
        return took


class Copier:
    """Jobs come from one thread; `close` when nobody has any more."""

    def __init__(self) -> None:
        self.speed_in = CopySpeed()  # to the device
        self.speed_out = CopySpeed()
        self.bytes_in_total = 0  # likewise
        self.bytes_out_total = 0
        self._urgent: deque[CopyJob] = deque()
        self._behind: deque[CopyJob] = deque()
        self._wake = threading.Semaphore(0)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="copier", daemon=True)  # starts with the first job

    def bring(self, job: CopyJob) -> None:
        """To the device: somebody waits."""
        self._urgent.append(job)
        self._begin()

    def offload(self, job: CopyJob) -> None:
        """From the device, when there is time."""
        self._behind.append(job)
        self._begin()

    def _begin(self) -> None:
        if self._thread.ident is None:
            self._thread.start()
        self._wake.release()

    def measure(self, out: Sequence[Callable[[], None]], back: Sequence[Callable[[], None]], block_bytes: int) -> None:
        """Copy here and now, to know how fast that is."""
        for moves, speed in ((out, self.speed_out), (back, self.speed_in)):
            job = CopyJob(moves, block_bytes, lambda: None)
            took = job.run()
            speed.start(job.bytes_done, took)

    def close(self) -> None:
        """What waits is not done; what is under way ends with its block."""
        self._closing = True
        for job in (*self._urgent, *self._behind):
            job.close()
        self._wake.release()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            self._wake.acquire()
            if self._closing:
                return
            comes_in = bool(self._urgent)
            job = (self._urgent if comes_in else self._behind).popleft()
            took = job.run()
            (self.speed_in if comes_in else self.speed_out).observe(job.bytes_done, took)
            if comes_in:
                self.bytes_in_total += job.bytes_done
            else:
                self.bytes_out_total += job.bytes_done
