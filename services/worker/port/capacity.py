"""Whether an engine has room, told from its load: the wait, and what may give way to a new request. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kvproto.errors import Overloaded
from kvproto.messages import Load, PriorityLoad, Rates

LEAST_RETRY_S, MOST_RETRY_S = 1.0, 60.0

Attempt = tuple[str, int]


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
