"""Who may start now: concurrent requests of the process, and of each key its concurrency and its rate. Pure.

A rate is a token bucket that holds at most 10 seconds' worth (at least one request), so short bursts pass. Time is
passed in, in seconds of any clock that does not go back.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvproto.errors import Draining, LimitExceeded, Unavailable
from services.ingress.tenancy import ApiKey

BURST_S = 10.0


@dataclass(slots=True)
class _Usage:
    """What one key uses: running requests, and requests it may still start at once."""

    running: int = 0
    allowance: float = 0.0
    refilled_at: float = 0.0


@dataclass(slots=True)
class Admission:
    """State of one process's admission. Owned by the event loop; every `admit` is paired with one `release`."""

    max_concurrent: int
    running: int = 0
    repeats: int = 0  # of those that run
    draining: bool = False
    refused_total: int = 0
    _usage: dict[str, _Usage] = field(default_factory=dict)

    def admit(self, key: ApiKey, now: float, *, repeat: bool = False) -> None:
        """Count the request in. Raises LimitExceeded (429), Unavailable or Draining (503), with a time to retry.

        A `repeat` of a request that runs already, or has finished, is not one more of the key's: its client may be back
        before the loss of its connection was noticed.
        """
        try:
            self._admit(key, now, repeat)
        except (LimitExceeded, Unavailable):
            self.refused_total += 1
            raise

    def _admit(self, key: ApiKey, now: float, repeat: bool) -> None:
        if self.draining:
            raise Draining("this ingress is shutting down", retry_after_s=1.0)
        if self.running >= self.max_concurrent:
            raise Unavailable(f"{self.max_concurrent} requests are running, the most served at once", retry_after_s=1.0)
        if repeat:
            self.running += 1
            self.repeats += 1
            return
        usage = self._usage.get(key.name)
        if usage is None:
            usage = self._usage[key.name] = _Usage(allowance=_burst(key), refilled_at=now)
        if key.max_concurrent and usage.running >= key.max_concurrent:
            raise LimitExceeded(f"at most {key.max_concurrent} requests at once with this key", retry_after_s=1.0)
        if key.requests_per_minute:
            per_s = key.requests_per_minute / 60.0
            usage.allowance = min(_burst(key), usage.allowance + (now - usage.refilled_at) * per_s)
            usage.refilled_at = now
            if usage.allowance < 1.0:
                raise LimitExceeded(
                    f"at most {key.requests_per_minute:g} requests per minute with this key",
                    retry_after_s=(1.0 - usage.allowance) / per_s,
                )
            usage.allowance -= 1.0
        usage.running += 1
        self.running += 1

    def release(self, key: ApiKey, *, repeat: bool = False) -> None:
        """The request has ended, whatever way."""
        self.running -= 1
        if repeat:
            self.repeats -= 1
        else:
            self._usage[key.name].running -= 1

    def check_integrity(self) -> None:
        """Raises AssertionError when the counts do not add up."""
        assert self.running == self.repeats + sum(usage.running for usage in self._usage.values())
        assert all(usage.running >= 0 and usage.allowance >= 0 for usage in self._usage.values())


def _burst(key: ApiKey) -> float:
    return max(1.0, key.requests_per_minute / 60.0 * BURST_S)
