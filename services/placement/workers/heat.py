"""How many prompts part ways after a block: the demand for the prefix that it ends. Pure.

A system prompt is where many requests' longest match ends; the last block of a conversation is where one does. What is
in demand is worth a copy on further workers, as the copy is computed once and used by all who come after. A prefix that
nobody asks for any more cools down, and its copies are evicted like everything else.

Of prefixes after which at least two parted the whole chain is kept, for workers that want to have it: at most
`KEPT_PREFIXES` of `KEPT_BLOCKS` together; when there are more, the coolest quarter goes.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

from kvfleet.placement.index.prefix_index import Hashes
from kvfleet.placement.workers.prompts import AddressSpace
from kvproto.block_hash import Root

KEPT = 65_536
KEPT_PREFIXES = 4096
KEPT_BLOCKS = 524_288
COOLS_S = 1800.0  # about as long as a copy that nobody uses stays in a cache
IN_DEMAND = 1.5  # two requests, a quarter of an hour apart at most


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """The blocks up to where prompts part ways, `[n, 2]`."""

    model: str
    space: AddressSpace
    root: Root
    hashes: Hashes


@dataclass(frozen=True, slots=True)
class HotPrefix:
    prefix: SharedPrefix
    heat: float


class Heat:
    """Owned by the decider. `now` never goes back."""

    def __init__(self, kept: int = KEPT, *, kept_prefixes: int = KEPT_PREFIXES, kept_blocks: int = KEPT_BLOCKS) -> None:
        self._kept = kept
        self._kept_prefixes, self._kept_blocks = kept_prefixes, kept_blocks
        self._counts: OrderedDict[bytes, tuple[float, float]] = OrderedDict()  # least recently asked for first
        self._prefixes: dict[bytes, SharedPrefix] = {}  # by their last block
        self._blocks = 0  # of all of them

    def __len__(self) -> int:
        return len(self._counts)

    def of(self, block: bytes, now: float) -> float:
        """Requests of about the last half hour whose longest match ended with this block."""
        count, at = self._counts.get(block, (0.0, now))
        return count * math.exp((at - now) / COOLS_S)

    def add(self, block: bytes, now: float) -> bool:
        """Whether the prefix that it ends is in demand and its chain not known: then `keep` wants it."""
        count = self.of(block, now) + 1
        self._counts[block] = count, now
        self._counts.move_to_end(block)
        if len(self._counts) > self._kept:
            self._drop(self._counts.popitem(last=False)[0])
        return count >= IN_DEMAND and block not in self._prefixes

    def keep(self, block: bytes, prefix: SharedPrefix, now: float) -> None:
        self._drop(block)
        self._prefixes[block] = prefix
        self._blocks += len(prefix.hashes)
        if len(self._prefixes) > self._kept_prefixes or self._blocks > self._kept_blocks:
            by_heat = sorted(self._prefixes, key=lambda one: self.of(one, now))
            for coolest in by_heat[: max(1, len(by_heat) // 4)]:
                self._drop(coolest)
            while self._blocks > self._kept_blocks:
                self._drop(next(iter(self._prefixes)))

    def hottest(self, now: float) -> list[HotPrefix]:
        """Hottest first; of equals the longer."""
        hot = [HotPrefix(prefix, self.of(block, now)) for block, prefix in self._prefixes.items()]
        return sorted(hot, key=lambda one: (-one.heat, -len(one.prefix.hashes)))

    def _drop(self, block: bytes) -> None:
        gone = self._prefixes.pop(block, None)
        if gone is not None:
            self._blocks -= len(gone.hashes)

    def check_integrity(self) -> None:
        """Raises AssertionError."""
        assert self._blocks == sum(len(prefix.hashes) for prefix in self._prefixes.values()) <= self._kept_blocks
        assert len(self._prefixes) <= self._kept_prefixes
        assert self._prefixes.keys() <= self._counts.keys()
