"""Who may start now: concurrent requests of the process, and what the caller's and its tenant's limits leave. Pure.

Time is passed in: `now` in seconds of any clock that does not go back, `unix_s` reads the wall clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvproto.errors import Draining, LimitExceeded, PayloadTooLarge, Unavailable
from services.ingress.callers import Caller
from services.ingress.limits import Limiter, Tab

FREE_RETURNS = 8  # of one run: a client whose connection breaks is not charged again, one that plays with it is


@dataclass(slots=True)
class Admission:
    """State of one process's admission. Owned by the event loop; every `admit` is paired with one `release`."""

    max_concurrent: int
    unix_s: Callable[[], float]
    running: int = 0
    repeats: int = 0  # of those that run
    draining: bool = False
    refused_total: int = 0
    limiter: Limiter = field(default_factory=Limiter)

    def admit(self, caller: Caller, now: float, *, repeat: bool = False, returns: int = 0) -> None:
        """Count the request in. Raises LimitExceeded (429), Unavailable or Draining (503), with a time to retry.

        A `repeat` of a request that runs already, or has finished, is not one more of the caller's: its client may be
        back before the loss of its connection was noticed. One that goes on after it was parked runs once more, and so
        counts in `max_concurrent`, but in no rate; `returns` says how often.
        """
        try:
            self._admit(caller, now, repeat, returns)
        except (LimitExceeded, Unavailable):
            self.refused_total += 1
            raise

    def _admit(self, caller: Caller, now: float, repeat: bool, returns: int) -> None:
        if self.draining:
            raise Draining("this ingress is shutting down", retry_after_s=1.0)
        if self.running >= self.max_concurrent:
            raise Unavailable(f"{self.max_concurrent} requests are running, the most served at once", retry_after_s=1.0)
        if repeat:
            self.repeats += 1
        else:
            self.limiter.admit(caller, now, self.unix_s(), charged=not 1 <= returns <= FREE_RETURNS)
        self.running += 1

    def release(self, caller: Caller, *, repeat: bool = False) -> None:
        """The request has ended, whatever way."""
        self.running -= 1
        if repeat:
            self.repeats -= 1
        else:
            self.limiter.release(caller)

    def charge(self, tab: Tab, prompt_tokens: int, now: float) -> None:
        """Take the prompt of a run that is about to start, the first time. Raises LimitExceeded (429), PayloadTooLarge
        (413) for one that is more than a limit as a whole."""
        try:
            self.limiter.charge(tab, prompt_tokens, now, self.unix_s())
        except (LimitExceeded, PayloadTooLarge):
            self.refused_total += 1
            raise

    def check_integrity(self) -> None:
        """Raises AssertionError when the counts do not add up."""
        self.limiter.check_integrity()
        assert self.running == self.repeats + self.limiter.running
