"""Who comes before whom: numbers made of priority and arrival alone. Pure.

`rank` orders what runs, for preemption: it never changes, and a level of priority is worth AGE_S of having come
earlier. `level` orders what wants prompt tokens: the priority, plus one for every AGE_S since arrival. Both let
everything be served in the end, whatever keeps coming.
"""

from __future__ import annotations

AGE_S = 20.0

Rank = tuple[float, int]


def rank_of(priority: int, enqueued: float, arrival: int) -> Rank:
    """Smaller ones may take blocks from larger ones."""
    return enqueued - AGE_S * priority, arrival


def level_of(priority: int, waited: float) -> int:
    """Larger ones are served first."""
    return priority + int(waited / AGE_S)
