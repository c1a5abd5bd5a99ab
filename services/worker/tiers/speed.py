"""How fast blocks come from somewhere, as measured. Pure."""

from __future__ import annotations

from typing import NamedTuple

WEIGHT = 0.3  # of the newest measurement
LEAST_BYTES = 64 * 1024  # fewer say more about latency than about speed


class LinkSpeed(NamedTuple):
    """A fetch of n bytes takes about `latency_s + n / bytes_per_s`."""

    latency_s: float
    bytes_per_s: float


class CopySpeed:
    """Copies in memory: no latency to speak of. 0 until measured."""

    def __init__(self) -> None:
        self.bytes_per_s = 0.0

    def start(self, count: int, seconds: float) -> None:
        """The first measurement, whatever its size."""
        if count and seconds > 0:
            self.bytes_per_s = count / seconds

    def observe(self, count: int, seconds: float) -> None:
        if count < LEAST_BYTES or seconds <= 0:
            return
        rate = count / seconds
        self.bytes_per_s = (
            rate
            if not self.bytes_per_s
            else 1
            / (
                (1 - WEIGHT) / self.bytes_per_s + WEIGHT / rate  # means of seconds per byte, so that a slow one counts
            )
        )

    def seconds(self, count: int) -> float:
        return count / self.bytes_per_s if self.bytes_per_s else 0.0
