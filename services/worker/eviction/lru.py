"""Least recently used first. Pure.

A heap with lazy deletion: withdrawing is O(1); the block of a stale entry is not offered, or at a later tick.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from kvfleet.worker.eviction.base import EvictionBalance

COMPACT_FROM = 64  # heap entries; below that stale ones cost nothing


class LruEviction:
    """Ties go to the lower block id."""

    def __init__(self) -> None:
        self._last_use: dict[int, int] = {}
        self._offered: dict[int, int] = {}  # block -> tick under which its live heap entry stands
        self._heap: list[tuple[int, int]] = []

    @property
    def balance(self) -> EvictionBalance:
        return EvictionBalance()

    def touch(self, block: int, tick: int) -> None:
        self._last_use[block] = tick

    def demote(self, block: int) -> None:
        self._last_use[block] = 0

    def offer(self, block: int) -> None:
        tick = self._last_use.get(block, 0)
        if self._offered.get(block) == tick:
            return
        self._offered[block] = tick
        heapq.heappush(self._heap, (tick, block))
        if len(self._heap) > COMPACT_FROM and len(self._heap) > 2 * len(self._offered):
            self._heap = [(tick, block) for block, tick in self._offered.items()]
            heapq.heapify(self._heap)

    def withdraw(self, block: int) -> None:
        self._offered.pop(block, None)

    def victim(self) -> int:
        while self._heap:
            tick, block = heapq.heappop(self._heap)
            if self._offered.get(block) == tick:
                del self._offered[block]
                return block
        raise LookupError("no block is evictable")

    def is_offered(self, block: int) -> bool:
        return block in self._offered

    def asked(self, hashes: Sequence[bytes], limit: int, cached: int) -> None: ...

    def stored(self, block: int, block_hash: bytes | None, at: int, before: int | None) -> None: ...

    def reused(self, block: int) -> None: ...
