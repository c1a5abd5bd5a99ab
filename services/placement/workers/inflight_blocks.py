"""Blocks that requests on their way will have computed: two with one new prefix should meet on one worker. Pure.

A promise ends a moment after the first token, when the blocks' events are here, with its request, or after a minute.
"""

from __future__ import annotations

import numpy as np

from kvfleet.placement.index.prefix_index import Hashes, PrefixIndex
from kvfleet.placement.workers import count_kernel
from kvfleet.placement.workers.workloads import Floats

MAX_WORKERS = 128
BLOCKS_PER_WORKER = 1_024  # 64 prompts of 16 new blocks, or 8 of 128
MADE_PER_WORKER = 128  # promises, of requests running and waiting; of more in all, the oldest go
LIMIT_S = 60.0
EVENTS_S = 0.5  # by when events about blocks of a finished prefill have come

FEWEST_PLACES = 256  # of counted blocks; a power of two

Key = tuple[str, str]


class BlockCounts:
    """How many of some chains have each block. At most half of the places are used."""

    def __init__(self, places: int = FEWEST_PLACES) -> None:
        self.used = 0
        self._blocks: Hashes = np.zeros((places, 2), dtype=np.uint64)
        self._counts = np.zeros(places, dtype=np.int64)  # 0: nothing is in this place

    def add(self, hashes: Hashes) -> None:
        while 2 * (self.used + len(hashes)) > len(self._counts):
            self.grow()
        self.used += count_kernel.add(self._blocks, self._counts, hashes)

    def grow(self) -> None:
        larger = BlockCounts(2 * len(self._counts))
        count_kernel.add(larger._blocks, larger._counts, np.repeat(self._blocks, self._counts, axis=0))
        self._blocks, self._counts = larger._blocks, larger._counts

    def take(self, hashes: Hashes) -> Hashes:
        """Take a chain out; returns its blocks that no other one has."""
        last: Hashes = hashes[count_kernel.take(self._blocks, self._counts, hashes)]
        self.used -= len(last)
        return last


class InflightBlocks:
    """Memory grows with `max_workers`. Owned by the core. `now` never goes back."""

    def __init__(self, max_blocks: int | None = None, max_workers: int = MAX_WORKERS) -> None:
        self.max_made = MADE_PER_WORKER * max_workers
        self._index = PrefixIndex(max_blocks or BLOCKS_PER_WORKER * max_workers, max_workers, tiers=1)
        self._holders: dict[str, int] = {}
        self._counts: dict[str, BlockCounts] = {}  # by worker: how many promises have each block
        self._made: dict[Key, tuple[float, str, Hashes]] = {}  # oldest first
        self._kept: dict[Key, tuple[float, str, Hashes]] = {}  # fulfilled, until their events are here; oldest first

    def __len__(self) -> int:
        return len(self._made) + len(self._kept)

    def make(self, key: Key, worker: str, hashes: Hashes, now: float) -> None:
        """`worker` will compute those of `hashes` that it has not."""
        self.break_off(key)
        if not len(hashes):
            return
        if worker not in self._holders:
            try:
                self._holders[worker] = self._index.add_holder()
            except OverflowError:
                return  # no room for more workers: they go without
            self._counts[worker] = BlockCounts()
        self._index.store(self._holders[worker], 0, hashes)
        self._counts[worker].add(hashes)
        self._made[key] = now, worker, hashes
        if len(self._made) > self.max_made:
            self.break_off(next(iter(self._made)))

    def fulfil(self, key: Key, worker: str, now: float) -> None:
        """`worker` has computed it, or never will."""
        if (made := self._made.get(key)) is not None and made[1] == worker:
            del self._made[key]
            self._kept[key] = (now, *made[1:])

    def break_off(self, key: Key) -> None:
        """It will not be computed there; blocks of other promises stay."""
        if (made := self._made.pop(key, None) or self._kept.pop(key, None)) is not None:
            self._take_back(made)

    def drop_worker(self, worker: str) -> None:
        if (holder := self._holders.pop(worker, None)) is not None:
            self._index.retire(holder)
            del self._counts[worker]
            for table in (self._made, self._kept):
                for key in [key for key, (_, name, _) in table.items() if name == worker]:
                    del table[key]

    def tick(self, now: float) -> None:
        self._index.clean(self._index.max_blocks)
        for table, limit in ((self._made, LIMIT_S), (self._kept, EVENTS_S)):
            while table:
                key, made = next(iter(table.items()))
                if now - made[0] <= limit:
                    break
                del table[key]
                self._take_back(made)

    def depths(self, hashes: Hashes, workers: tuple[str, ...]) -> Floats | None:
        """How many blocks from the start of the chain each worker is computing; None if all are 0."""
        if not len(self):
            return None
        depths = self._index.depths(hashes, workers, self._holders.get)[0]
        return depths.astype(float) if depths.any() else None

    def _take_back(self, made: tuple[float, str, Hashes]) -> None:
        """Remove its blocks, but those of the worker's other promises."""
        _, worker, hashes = made
        self._index.remove(self._holders[worker], 0, self._counts[worker].take(hashes))

    def check_integrity(self) -> None:
        self._index.check_integrity()
        promised: dict[str, set[bytes]] = {worker: set() for worker in self._holders}
        for table in (self._made, self._kept):
            times = [at for at, _, _ in table.values()]
            assert times == sorted(times)
            assert all(name in self._holders for _, name, _ in table.values())
            for _, name, hashes in table.values():
                promised[name].update(block.tobytes() for block in hashes)
        counted = {name: counts.used for name, counts in self._counts.items()}
        assert {name: len(blocks) for name, blocks in promised.items()} == counted
        assert not self._made.keys() & self._kept.keys()
        assert len(self._made) <= self.max_made
