"""How many prompts part ways after a block: the demand for the prefix that it ends. Pure.

A system prompt is where many requests' longest match ends; the last block of a conversation is where one does. What is
in demand is worth a copy on further workers, as the copy is computed once and used by all who come after. A prefix that
nobody asks for any more cools down, and its copies are evicted like everything else.
"""

from __future__ import annotations

import math
from collections import OrderedDict

KEPT = 65_536
COOLS_S = 1800.0  # about as long as a copy that nobody uses stays in a cache


class Heat:
    """Owned by the decider. `now` never goes back."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._counts: OrderedDict[bytes, tuple[float, float]] = OrderedDict()  # least recently asked for first

    def __len__(self) -> int:
        return len(self._counts)

    def of(self, block: bytes, now: float) -> float:
        """Requests of about the last half hour whose longest match ended with this block."""
        count, at = self._counts.get(block, (0.0, now))
        return count * math.exp((at - now) / COOLS_S)

    def add(self, block: bytes, now: float) -> None:
        self._counts[block] = self.of(block, now) + 1, now
        self._counts.move_to_end(block)
        if len(self._counts) > self._kept:
            self._counts.popitem(last=False)
