"""What a caller asks a client for, what one request has tried, and what the client counts. Pure: the time is passed in.

Attempts that a worker took on are counted; refusals cost patience only, and a hand-over costs nothing. When all is used
up there is one error: the last one, which says what was tried before it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from kvproto.errors import DeadlineExceeded, KvfleetError
from kvproto.ids import DEFAULT_TENANT
from kvproto.messages import Sampling


@dataclass(frozen=True, slots=True)
class Generation:
    """What a caller asks for. Either `prompt_ids` or `prompt` (the worker then tokenises it)."""

    model: str
    sampling: Sampling
    prompt_ids: tuple[int, ...] = ()
    prompt: str | None = None
    tenant: str = DEFAULT_TENANT
    session: str | None = None
    priority: int = 0
    deadline_s: float = 600.0
    patience_s: float = 10.0  # how long to look for a worker when there is none; what has begun looks 30 s at least
    attempts: int = 8
    policy: str | None = None
    worker: str | None = None
    request: str | None = None  # its id; one that runs, or ran a moment ago, is read along or again
    traceparent: str | None = None
    exact: bool = False  # nothing that was ever quantised is used, and nothing computed on such
    max_wait_s: float | None = None  # refuse it, with a time to retry, rather than have it wait longer for a start


@dataclass(slots=True)
class ClientCounters:
    """What this client has seen, since its start."""

    requests_total: int = 0
    placed_total: int = 0
    fallback_total: int = 0  # placed by the ring because placement did not answer in time
    unasked_total: int = 0  # of them, those that did not even wait, as it had not answered for a while
    lost_total: int = 0  # attempts that ended because their worker was lost
    resends_total: int = 0
    spilled_total: int = 0  # placed in another region
    region_refusals_total: int = 0  # regions that could not, or did not answer


def seed_of(request: str) -> int:
    """The seed of a request that names none: a repeat, from wherever, draws the same tokens."""
    return int.from_bytes(hashlib.blake2b(request.encode(), digest_size=8).digest(), "little") >> 1


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
