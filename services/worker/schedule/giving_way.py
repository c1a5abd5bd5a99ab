"""Work by priority, and what gives way to a new request of higher priority on a full worker. Pure.

Only waiting requests of which no reader has seen anything give way, never one that has begun here or elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvfleet.worker.schedule.sequence import Sequence, SequenceState
from kvproto.messages import PriorityLoad

Queued = tuple[Sequence, int]  # and its uncomputed prompt tokens


def by_priority(queued: Iterable[Queued]) -> tuple[PriorityLoad, ...]:
    """Highest first; empty where all is of priority 0."""
    found: dict[int, list[int]] = {}
    for sequence, tokens in queued:
        level = found.setdefault(sequence.spec.priority, [0, 0, 0])
        level[0] += 1
        level[1] += _is_fresh(sequence)
        level[2] += tokens
    if found.keys() <= {0}:
        return ()
    return tuple(PriorityLoad(priority, *found[priority]) for priority in sorted(found, reverse=True))


def giving_way(waiting: Iterable[Sequence], priority: int, count: int) -> list[Sequence]:
    """At least `count` sequences of whole attempts, lowest priority first, then the latest; empty if too few."""
    below = [sequence for sequence in waiting if sequence.spec.priority < priority]
    below.sort(key=lambda sequence: (sequence.spec.priority, -sequence.arrival))
    found: dict[int, Sequence] = {}
    for sequence in below:
        if len(found) >= count:
            break
        if id(sequence) not in found and all(map(_is_fresh, sequence.siblings)):
            found |= {id(sibling): sibling for sibling in sequence.siblings}
    return list(found.values()) if len(found) >= count else []


def _is_fresh(sequence: Sequence) -> bool:
    return sequence.state is SequenceState.WAITING and not sequence.started and not sequence.spec.output_ids
