"""Paused conversations of one worker, and when something is to be done about each. Pure; times are the caller's.

    begin ──▶ down ──`up_at`──▶ up ──`over_at`──▶ gone: it did not come back
                 └──────────────┴──back──▶ gone: it did

The engine of a worker and the simulated one keep the same book.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

MOST_PAUSED = 4096
UP_SHARE = 0.5  # of a worker's device blocks, at most, that were brought up and wait
SURE = 1.5  # times the seconds that copies take, that a pause has to last

K = TypeVar("K", bound=Hashable)
C = TypeVar("C")


@dataclass(eq=False, slots=True)
class Paused(Generic[C]):
    """`brought` blocks of the chain, from number `start` on, were brought up in `seconds`."""

    chain: C
    up_at: float
    over_at: float
    is_up: bool = False
    start: int = 0
    brought: int = 0
    seconds: float = 0.0

    def saved_s(self, on_device: int) -> float:
        """Seconds of restoring that its return does not wait for, with so many leading blocks on the device."""
        used = min(max(on_device - self.start, 0), self.brought)
        return self.seconds * used / self.brought if used else 0.0


@dataclass(eq=False, slots=True)
class PauseBook(Generic[K, C]):
    """Of too many pauses the oldest are forgotten: their blocks are kept as others are."""

    paused: OrderedDict[K, Paused[C]] = field(default_factory=OrderedDict)
    _due: list[tuple[float, int, K, Paused[C]]] = field(default_factory=list)
    _number: int = 0

    def begin(self, key: K, pause: Paused[C]) -> None:
        self.paused.pop(key, None)
        self.paused[key] = pause
        self._plan(key, pause, pause.up_at)
        while len(self.paused) > MOST_PAUSED:
            self.paused.popitem(last=False)
        if len(self._due) > 2 * MOST_PAUSED:  # mostly of pauses that are over
            self._due = [one for one in self._due if self.paused.get(one[2]) is one[3]]
            heapq.heapify(self._due)

    def back(self, key: K) -> Paused[C] | None:
        return self.paused.pop(key, None)

    def due(self, now: float) -> Iterator[tuple[K, Paused[C], bool]]:
        """Pauses to bring up, and, with True, those that are over."""
        while self._due and self._due[0][0] <= now:
            _, _, key, pause = heapq.heappop(self._due)
            if self.paused.get(key) is not pause:
                continue
            is_over, pause.is_up = pause.is_up, True
            if is_over:
                del self.paused[key]
            else:
                self._plan(key, pause, pause.over_at)
            yield key, pause, is_over

    @property
    def next_at(self) -> float:
        while self._due and self.paused.get(self._due[0][2]) is not self._due[0][3]:
            heapq.heappop(self._due)
        return self._due[0][0] if self._due else math.inf

    @property
    def brought(self) -> int:
        """Blocks that were brought up for conversations that are not back yet."""
        return sum(pause.brought for pause in self.paused.values())

    def _plan(self, key: K, pause: Paused[C], at: float) -> None:
        self._number += 1
        heapq.heappush(self._due, (at, self._number, key, pause))


def is_long_enough(soonest_s: float, down_s: float, up_s: float) -> bool:
    """Whether taking blocks down and up again fits into the pause with certainty."""
    return soonest_s > SURE * (down_s + up_s)
