"""Work by priority, and what gives way to a new request of higher priority on a full worker. Pure.

Only waiting requests of which no reader has seen anything give way, never one that has begun here or elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, Self, TypeVar

from kvfleet.worker.port.sequence_spec import SequenceSpec
from kvproto.messages import PriorityLoad


class Displaceable(Protocol):
    """A sequence of an engine, as far as it matters here. `is_fresh`: it waits, and nothing of it was ever sent."""

    spec: SequenceSpec

    @property
    def arrival(self) -> int: ...

    @property
    def siblings(self) -> Sequence[Self]:
        """All live choices of its attempt, itself too."""
        ...

    @property
    def is_fresh(self) -> bool: ...


W = TypeVar("W", bound=Displaceable)


def by_priority(queued: Iterable[tuple[Displaceable, int]]) -> tuple[PriorityLoad, ...]:
    """Of sequences and their uncomputed prompt tokens. Highest first; empty where all is of priority 0."""
    found: dict[int, list[int]] = {}
    for sequence, tokens in queued:
        level = found.setdefault(sequence.spec.priority, [0, 0, 0])
        level[0] += 1
        level[1] += sequence.is_fresh
        level[2] += tokens
    if found.keys() <= {0}:
        return ()
    return tuple(PriorityLoad(priority, *found[priority]) for priority in sorted(found, reverse=True))


def giving_way(waiting: Iterable[W], priority: int, count: int) -> list[W]:
    """At least `count` sequences of whole attempts, lowest priority first, then the latest; empty if too few."""
    below = [sequence for sequence in waiting if sequence.spec.priority < priority]
    below.sort(key=lambda sequence: (sequence.spec.priority, -sequence.arrival))
    found: dict[int, W] = {}
    for sequence in below:
        if len(found) >= count:
            break
        if id(sequence) not in found and all(sibling.is_fresh for sibling in sequence.siblings):
            found |= {id(sibling): sibling for sibling in sequence.siblings}
    return list(found.values()) if len(found) >= count else []
