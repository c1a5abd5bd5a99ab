"""How long something took, counted in buckets as Prometheus counts them. Pure; one thread observes, any may read."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class Durations:
    def __init__(self, bounds_s: Sequence[float] = BOUNDS_S) -> None:
        self.bounds_s = tuple(bounds_s)
        self.sum_s = 0.0
        self.max_s = 0.0
        self._counts = [0] * (len(self.bounds_s) + 1)

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(self.bounds_s, seconds)] += 1
        self.sum_s += seconds
        self.max_s = max(self.max_s, seconds)

    @property
    def count(self) -> int:
        return sum(self._counts)

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, how many took at most that), the last one of all."""
        total, found = 0, []
        for bound, count in zip((*map(str, self.bounds_s), "+Inf"), tuple(self._counts), strict=True):
            total += count
            found.append((bound, float(total)))
        return found
