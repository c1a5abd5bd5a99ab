"""Work by priority, and what gives way to a new request of higher priority on a full worker. Pure.

Only waiting requests of which no reader has seen anything give way, never one that has begun here or elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kvfleet.worker.schedule.sequence import Sequence, SequenceState
from kvproto.errors import Overloaded
from kvproto.messages import Load, PriorityLoad, Rates

LEAST_RETRY_S, MOST_RETRY_S = 1.0, 60.0

Attempt = tuple[str, int]
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


def until_served(load: Load, rates: Rates, priority: int) -> float:
    """Seconds of prefill ahead of a newcomer of this priority; 0 while the rate is unmeasured."""
    if not rates.prefill_tokens_per_s:
        return 0.0
    levels = load.priorities or (PriorityLoad(0, 0, 0, load.queued_prefill_tokens),)
    ahead = sum(level.queued_prefill_tokens for level in levels if level.priority >= priority)
    return ahead / rates.prefill_tokens_per_s


def full(wait_s: float) -> Overloaded:
    retry_after_s = min(max(wait_s, LEAST_RETRY_S), MOST_RETRY_S)
    return Overloaded("this worker has all it takes, waiting and running", retry_after_s=round(retry_after_s, 3))


def could_give_way(load: Load, priority: int, leaving: int = 0) -> int:
    """How many sequences of lower priority may be displaced. `leaving`, the lowest of all, are going already."""
    if not load.priorities:
        return max(load.waiting - leaving, 0) if priority > 0 else 0
    return max(sum(level.unstarted for level in load.priorities if level.priority < priority) - leaving, 0)


@dataclass(eq=False, slots=True)
class Departures:
    """Sequences told to give way that are still counted; the request desk's. `asked`: the engine has not chosen yet."""

    asked: int = 0
    going: set[Attempt] = field(default_factory=set)

    def answered(self, count: int, going: Iterable[Attempt]) -> None:
        self.asked -= count
        self.going.update(going)

    def count(self, pending: Callable[[Attempt], int]) -> int:
        """`pending`: an attempt's sequences that have not ended."""
        left = {attempt: pending(attempt) for attempt in self.going}
        self.going = {attempt for attempt, number in left.items() if number}
        return self.asked + sum(left.values())


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
