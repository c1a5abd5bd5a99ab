"""The block that is expected to save the fewest seconds while it is kept goes first: learned from what came back. Pure.

    score of a leaf = gain(its kind, its age) x seconds to compute it again

A kind says how often a block was read, and whether it continued what was cached. For each kind the policy counts at
which age blocks came back, of evicted ones by their names, and how many never did. `gain` is the most reuses per time
that keeping such a block for any further time gives (Gittins index; "hit density" in LHD, Beckmann et al., NSDI 2018).

What was learned can mislead. So a list of names shows what LRU would hold now: while the policy is behind by more than
BEHIND of what LRU computes again, all scores are equal, and then the least recently used block goes.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import ClassVar

from kvfleet.worker.eviction.base import EvictionBalance
from kvfleet.worker.eviction.gains import AGES, LEVELS, gains

COMPACT_FROM = 64  # heap entries; below that stale ones cost nothing
FRESH, CONTINUED, READ_AGAIN, READ_OFTEN = range(4)  # kinds
REMEMBERED = 8  # evicted blocks whose names are kept, for each block of the pool
MOST_REMEMBERED = 262_144
LEARNS = 8  # times per turnover of the pool that scores are made anew
KEPT = 0.5 ** (1 / (4 * LEARNS))  # of the counts, each time: half of them after four turnovers
KEPT_BALANCE = 0.5 ** (1 / (16 * LEARNS))
BEHIND = 0.01
BEGINS = 2  # turnovers: less is no experience


class ReuseEviction:
    """Ages are counted in stored blocks. `seconds(position, tokens)` says how long computing takes."""

    kinds: ClassVar[int] = 4

    def __init__(self, num_blocks: int, block_size: int, seconds: Callable[[int, int], float]) -> None:
        self.seconds = seconds
        self.follows_lru = True  # until the pool has turned over twice
        self.behind_s = 0.0  # LRU's list
        self.lru_again_s = 0.0  # what LRU would have computed that was cached once
        self._saved_s = self._lost_s = 0.0
        self._size, self._num_blocks = block_size, num_blocks
        self._clock = 0
        self._last = [0] * num_blocks  # the clock at the last use
        self._tick = [0] * num_blocks
        self._reads = [0] * num_blocks
        self._kind = [FRESH] * num_blocks
        self._hash: list[bytes | None] = [None] * num_blocks
        self._at = [0] * num_blocks
        self._first = [0] * num_blocks  # where the run of blocks that were computed with it begins
        self._offered: dict[int, tuple[float, int]] = {}  # block -> score and tick of its live heap entry
        self._heap: list[tuple[float, int, int]] = []
        self._lru: OrderedDict[bytes, None] = OrderedDict()
        self._tails = [False] * num_blocks  # partial blocks, which take room from the list as well
        self._count_of_tails = 0
        self._gone: OrderedDict[bytes, tuple[int, int, int]] = OrderedDict()  # evicted: kind, last use, reads
        self._most_gone = min(REMEMBERED * num_blocks, MOST_REMEMBERED)
        self._back = [[0.0] * LEVELS for _ in range(self.kinds)]
        self._never = [0.0] * self.kinds
        self._gains = [gains(back, 0.0, num_blocks) for back in self._back]
        self._learn_at = BEGINS * num_blocks

    # ------------------------------------------------------------------ what happens to blocks

    @property
    def balance(self) -> EvictionBalance:
        return EvictionBalance(self._saved_s, self._lost_s, self.follows_lru)

    def asked(self, hashes: Sequence[bytes], limit: int, cached: int) -> None:
        known = 0
        while known < limit and hashes[known] in self._lru:
            known += 1
        seen = max(known, cached)
        while seen < limit and (hashes[seen] in self._gone or hashes[seen] in self._lru):
            seen += 1
        saved, lost = self._between(known, cached), self._between(cached, known)
        self._saved_s += saved
        self._lost_s += lost
        self.lru_again_s += self._between(known, seen)
        self.behind_s += lost - saved
        if not self.follows_lru and self.behind_s > BEHIND * self.lru_again_s:
            self.follows_lru = True
            self._order()

    def stored(self, block: int, block_hash: bytes | None, at: int, before: int | None) -> None:
        self._clock += 1
        self._set_tail(block, block_hash is None)
        self._reads[block], self._hash[block], self._at[block], self._first[block] = 0, block_hash, at, at
        if before is not None and not self._reads[before]:  # computed by the same sequence
            self._first[block] = self._first[before]
        if block_hash is not None:
            if (gone := self._gone.pop(block_hash, None)) is not None:
                kind, last, self._reads[block] = gone
                self._back[kind][self._level(self._clock - last)] += 1
            self._use(block_hash)
        if self._clock >= self._learn_at:
            self._learn()

    def reused(self, block: int) -> None:
        self._back[self._kind[block]][self._level(self._clock - self._last[block])] += 1

    def touch(self, block: int, tick: int) -> None:
        self._reads[block] += 1
        self._last[block], self._tick[block] = self._clock, tick
        self._kind[block] = self.kind_of(block)
        if (block_hash := self._hash[block]) is not None:
            self._use(block_hash)

    def demote(self, block: int) -> None:
        self._tick[block] = 0

    def kind_of(self, block: int) -> int:
        reads = self._reads[block]
        if reads > 1:
            return READ_AGAIN if reads == 2 else READ_OFTEN
        return CONTINUED if 2 * self._first[block] > self._at[block] else FRESH

    # ------------------------------------------------------------------ which goes first

    def offer(self, block: int) -> None:
        entry = self.score(block), self._tick[block]
        if self._offered.get(block) == entry:
            return
        self._offered[block] = entry
        heapq.heappush(self._heap, (*entry, block))
        if len(self._heap) > COMPACT_FROM and len(self._heap) > 2 * len(self._offered):
            self._heap = [(*entry, block) for block, entry in self._offered.items()]
            heapq.heapify(self._heap)

    def withdraw(self, block: int) -> None:
        self._offered.pop(block, None)

    def victim(self) -> int:
        while self._heap:
            score, tick, block = heapq.heappop(self._heap)
            if self._offered.get(block) == (score, tick):
                del self._offered[block]
                self._remember(block)
                return block
        raise LookupError("no block is evictable")

    def is_offered(self, block: int) -> bool:
        return block in self._offered

    def score(self, block: int) -> float:
        """What it saves; the lowest goes first, among equals the least recently used."""
        if not self._tick[block]:
            return -1.0
        if self.follows_lru:
            return 0.0
        age, of_kind = self._clock - self._last[block], self._gains[self._kind[block]]
        level = self._level(age)
        gain = of_kind[level]
        if level < LEVELS - 1:
            low, high = AGES[level] * self._num_blocks, AGES[level + 1] * self._num_blocks
            gain += (of_kind[level + 1] - gain) * (age - low) / (high - low)
        return gain * self.seconds(self._at[block] * self._size, self._size)

    # ------------------------------------------------------------------ what is learned

    def _learn(self) -> None:
        self._learn_at = self._clock + max(1, self._num_blocks // LEARNS)
        for kind in range(self.kinds):
            self._gains[kind] = gains(self._back[kind], self._never[kind], self._num_blocks)
            self._back[kind] = [KEPT * count for count in self._back[kind]]
            self._never[kind] *= KEPT
        self.follows_lru = self.behind_s > BEHIND * self.lru_again_s
        self.behind_s *= KEPT_BALANCE
        self.lru_again_s *= KEPT_BALANCE
        self._order()

    def _order(self) -> None:
        offered = list(self._offered)
        self._offered = {block: (self.score(block), self._tick[block]) for block in offered}
        self._heap = [(*entry, block) for block, entry in self._offered.items()]
        heapq.heapify(self._heap)

    def _remember(self, block: int) -> None:
        self._set_tail(block, False)
        if (block_hash := self._hash[block]) is None:
            return
        self._gone[block_hash] = self._kind[block], self._last[block], self._reads[block]
        self._gone.move_to_end(block_hash)
        if len(self._gone) > self._most_gone:
            kind, *_ = self._gone.popitem(last=False)[1]
            self._never[kind] += 1

    def _use(self, block_hash: bytes) -> None:
        self._lru[block_hash] = None
        self._lru.move_to_end(block_hash)
        if len(self._lru) > self._num_blocks - self._count_of_tails:
            self._lru.popitem(last=False)

    def _set_tail(self, block: int, is_tail: bool) -> None:
        self._count_of_tails += is_tail - self._tails[block]
        self._tails[block] = is_tail

    def _level(self, age: int) -> int:
        return bisect_right(AGES, age / self._num_blocks) - 1

    def _between(self, first: int, end: int) -> float:
        return self.seconds(first * self._size, (end - first) * self._size) if end > first else 0.0
