"""What keeping a block of some age is worth, from the ages at which blocks like it came back. Pure.

Of all further times for which it may be kept, the best one counts: reuses in that time over the time that it takes, on
average. That is the Gittins index of a job that may end at any moment (Gittins, J. R. Stat. Soc. B 41, 1979), with
reuse as the end.
"""

from __future__ import annotations

from collections.abc import Sequence

AGES = (0.0, 1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2, 3 / 4, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0)  # turnovers
LEVELS = len(AGES)
END = 24.0  # of the last level
PRIOR = 0.02  # reuses for each block of the pool that are supposed before any are seen, soon ones more often than late


def gains(back: Sequence[float], never: float, num_blocks: int) -> list[float]:
    """For each level of age, in reuses per turnover of the pool. `back`: how many blocks came back at that level;
    `never`: how many did not."""
    weights = [1 / (age + AGES[1]) for age in AGES]
    supposed = PRIOR * num_blocks / sum(weights)
    counts = [count + supposed * weight for count, weight in zip(back, weights, strict=True)]
    never += PRIOR * num_blocks
    widths = [end - begin for begin, end in zip(AGES, (*AGES[1:], END), strict=True)]
    found = [0.0] * LEVELS
    for first in range(LEVELS):
        left = sum(counts[first:]) + never
        hits = held = best = 0.0
        for count, width in zip(counts[first:], widths[first:], strict=True):
            hits += count
            held += width * (left - count / 2)
            left -= count
            best = max(best, hits / held)
        found[first] = best
    return found
