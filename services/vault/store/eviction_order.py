"""Which block goes next: the least recently used one that nothing in memory continues. Pure; the store owns it.

A chain goes from its end, so what is left of it can be used: a block whose parent is missing is no use to anybody. The
order is a heap of what was said; what is no longer true of a block is found out as it comes up.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

SLACK = 64


class EvictionOrder:
    """`tick_of(hash)` is when a block was last used, if it may go now, else None.

    A block is offered whenever it may go and could not before, or was used; ticks are never used twice.
    """

    def __init__(self, tick_of: Callable[[bytes], int | None]) -> None:
        self._tick_of = tick_of
        self._heap: list[tuple[int, bytes]] = []
        self._tidy_at = SLACK

    def offer(self, block_hash: bytes, tick: int) -> None:
        heapq.heappush(self._heap, (tick, block_hash))
        if len(self._heap) > self._tidy_at:
            self._heap = [entry for entry in set(self._heap) if self._tick_of(entry[1]) == entry[0]]
            heapq.heapify(self._heap)
            self._tidy_at = 2 * len(self._heap) + SLACK

    def pop(self) -> bytes | None:
        """The next to go, which is no longer in the order; None if none may."""
        while self._heap:
            tick, block_hash = heapq.heappop(self._heap)
            if self._tick_of(block_hash) == tick:
                return block_hash
        return None

    def offered(self) -> set[bytes]:
        """All that may go, for `check_integrity`."""
        return {block_hash for tick, block_hash in self._heap if self._tick_of(block_hash) == tick}
