"""A generation's parameters, the trials of one request, and a client's counters. Pure: time is passed in.

Accepted attempts are counted against the limit; refusals only cost patience, and a hand-over costs nothing. The last
error is raised, and says what was tried before it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from kvproto.errors import DeadlineExceeded, KvfleetError
from kvproto.ids import DEFAULT_TENANT
from kvproto.messages import Chat, ResponseFormat, Sampling


@dataclass(frozen=True, slots=True)
class Generation:
    """A caller's request. One of `prompt_ids`, `prompt` (the worker then tokenises it) and `chat` (it renders that, and
    reads the message that comes)."""

    model: str
    sampling: Sampling
    prompt_ids: tuple[int, ...] = ()
    prompt: str | None = None
    tenant: str = DEFAULT_TENANT
    session: str | None = None
    priority: int = 0
    deadline_s: float = 600.0
    patience_s: float = 10.0  # how long to look for a worker; a request that has begun looks at least 30 s
    attempts: int = 8
    policy: str | None = None
    worker: str | None = None
    request: str | None = None  # its id; one that runs, or ran a moment ago, is read from its first token on
    traceparent: str | None = None
    exact: bool = False  # use no block that was ever quantised, and none computed on one
    max_wait_s: float | None = None  # refuse the request, with a time to retry, if it would wait longer for a start
    scored: int = 0  # leading tokens of the prompt whose scores the caller has
    chat: Chat | None = None  # made by `kvproto.chats.chat_of`
    response_format: ResponseFormat | None = None  # instead of a grammar in `sampling`
    spare: bool = False  # taken only where a worker has nothing better to do, and refused (Overloaded) elsewhere

    @property
    def text(self) -> str | None:
        """What its worker tokenises."""
        return self.prompt if self.chat is None else self.chat.text


@dataclass(slots=True)
class ClientCounters:
    """Counts since the client's start."""

    requests_total: int = 0
    placed_total: int = 0
    fallback_total: int = 0  # placed by the ring because placement did not answer in time
    unasked_total: int = 0  # of them, those that did not wait, as placement had not answered for a while
    lost_total: int = 0  # attempts that ended because their worker was lost
    resends_total: int = 0
    spilled_total: int = 0  # placed in another region
    region_refusals_total: int = 0  # regions that refused, or did not answer


def seed_of(request: str) -> int:
    """The seed of a request without one: every repeat draws the same tokens."""
    return int.from_bytes(hashlib.blake2b(request.encode(), digest_size=8).digest(), "little") >> 1


BEGUN_PATIENCE_S = 30.0  # an accepted request may wait for a worker to come back


class Trials:
    """Of one request; owned by its driver. `excluded`: workers that it has lost since it last ran out of others."""

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
        """The request has begun and looks for a worker from now on."""
        self._patience_s = max(self._patience_s, BEGUN_PATIENCE_S)
        self._until = now + self._patience_s

    def moved(self, worker: str, now: float) -> bool:
        """An attempt was handed over. Whether to wait before the next, as that worker has just moved it already."""
        again = self.excluded == [worker]
        self.excluded[:] = [worker]
        self.be_patient(now)
        return again

    def failed(self, worker: str, error: KvfleetError, now: float, *, accepted: bool) -> bool:
        """An attempt ended early. Raises its error if that is not retryable or no trial is left. Whether to wait before
        the next attempt, as all workers were tried."""
        self._ended += 1
        self._last = worker, error
        if accepted:
            self._accepted += 1
            self.be_patient(now)
        if not error.retryable or self._accepted >= self._limit or not self.may_wait(now):
            raise error
        if worker in self.excluded:
            self.excluded[:] = [worker]
            return True
        self.excluded.append(worker)
        return False

    def may_wait(self, now: float, wait_s: float = 0.0) -> bool:
        """Whether there is time to look for a worker in `wait_s` seconds."""
        return now + wait_s <= min(self._until, self.deadline)

    def told(self, error: KvfleetError, now: float) -> KvfleetError:
        """The error for the reader: one that ends several attempts says what was tried."""
        if self._last is None or not (error.retryable or isinstance(error, DeadlineExceeded)):
            return error
        worker, last = self._last
        if self._ended < 2 and error is last:
            return error
        attempts = f"{self._ended} attempt{'s' if self._ended > 1 else ''}"
        tried = f"gave up after {attempts} in {now - self._began_at:.1f} s, the last at worker {worker}: {last.message}"
        text = tried if error is last else f"{error.message}; {tried}"
        return type(error)(text, field=error.field, retry_after_s=error.retry_after_s)
