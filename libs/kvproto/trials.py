"""What one request has tried and may still try. Pure: the time is passed in.

Attempts that a worker took on are counted; refusals cost patience only, and a hand-over costs nothing. When all is used
up there is one error: the last one, which says what was tried before it.
"""

from __future__ import annotations

from kvproto.errors import DeadlineExceeded, KvfleetError
from kvproto.generation import Generation

BEGUN_PATIENCE_S = 30.0  # what was accepted completes: it may wait for a worker to come back


class Trials:
    """Of one request; owned by its driver. `excluded` are workers that it has lost since there was another."""

    def __init__(self, generation: Generation, now: float) -> None:
        self.deadline = now + generation.deadline_s
        self.excluded: list[str] = []
        self._limit = generation.attempts
        self._patience_s = generation.patience_s
        self._began_at = now
        self._until = now + generation.patience_s
        self._accepted = 0
        self._ended = 0
        self._last: tuple[str, KvfleetError] | None = None

    def be_patient(self, now: float) -> None:
        """It has begun, and a worker is to be looked for from now on."""
        self._patience_s = max(self._patience_s, BEGUN_PATIENCE_S)
        self._until = now + self._patience_s

    def moved(self, worker: str, now: float) -> bool:
        """An attempt was handed over. Whether to wait before the next: that worker had just moved it already."""
        again = self.excluded == [worker]
        self.excluded[:] = [worker]
        self.be_patient(now)
        return again

    def failed(self, worker: str, error: KvfleetError, now: float, *, accepted: bool) -> bool:
        """An attempt ended early; the error is raised if it is not retryable or nothing is left to try.

        Whether to wait before the next: everybody was asked, and somebody may come back.
        """
        self._ended += 1
        self._last = worker, error
        if accepted:
            self._accepted += 1
            self.be_patient(now)
        if not error.retryable or self._accepted >= self._limit or not self.may_wait(now):
            raise error  # its reader gets what `told` makes of it
        if worker in self.excluded:
            self.excluded[:] = [worker]
            return True
        self.excluded.append(worker)
        return False

    def may_wait(self, now: float, wait_s: float = 0.0) -> bool:
        """Whether there is time to look for a worker that much later."""
        return now + wait_s <= min(self._until, self.deadline)

    def told(self, error: KvfleetError, now: float) -> KvfleetError:
        """The error as its reader gets it: one that ends a row of attempts says what was tried."""
        if self._last is None or not (error.retryable or isinstance(error, DeadlineExceeded)):
            return error
        worker, last = self._last
        if self._ended < 2 and error is last:
            return error
        attempts = f"{self._ended} attempt{'s' if self._ended > 1 else ''}"
        tried = f"gave up after {attempts} in {now - self._began_at:.1f} s, the last at worker {worker}: {last.message}"
        text = tried if error is last else f"{error.message}; {tried}"
        return type(error)(text, field=error.field, retry_after_s=error.retry_after_s)
