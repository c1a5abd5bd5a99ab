"""A histogram as Prometheus counts one, for hot paths: integers in a list. Pure; one thread observes, any may read."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

SHORT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class Distribution:
    """`counts[i]`: values of at most `bounds[i]` and above the bound before; the last one: all above."""

    __slots__ = ("bounds", "counts", "max", "sum")

    def __init__(self, bounds: Sequence[float] = SHORT_S) -> None:
        self.bounds = tuple(bounds)
        self.sum = 0.0
        self.max = 0.0
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times
        if value > self.max:
            self.max = value

    @property
    def count(self) -> int:
        return sum(self.counts)

    def read(self) -> tuple[list[tuple[str, float]], float]:
        """(upper bound, count of values up to it) for each, the last "+Inf"; and the sum of the values."""
        total, found = 0, []
        for bound, count in zip((*map(str, self.bounds), "+Inf"), tuple(self.counts), strict=True):
            total += count
            found.append((bound, float(total)))
        return found, self.sum
