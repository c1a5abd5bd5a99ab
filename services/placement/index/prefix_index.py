"""Block hash -> holders, per tier; bounded. Pure. Holders are small numbers, given out here for `kv_indexer` to name.
Holders of the pool (vaults) share the last tier, and what they have together counts for all. Memory is 53 to 69 bytes
a block, taken at the start, and with more than 8 holders 20 more and 8 for each tier and 64 holders, taken when needed.
When it is full the holder with the most gives up its newest blocks, which are never a prefix of any that stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvfleet.placement.index import entry_kernels as kernels
from kvfleet.placement.index import query_kernels
from kvproto.block_hash import HASH_BYTES

Hashes: TypeAlias = npt.NDArray[np.uint64]
Depths: TypeAlias = npt.NDArray[np.int32]
Counts: TypeAlias = npt.NDArray[np.int64]

SPARE = 1024  # outdated notes of a log before it is compacted
GIVEN_UP = 1024  # blocks at once when the index is full
CACHE_LINE = 64


def pack(hashes: Sequence[bytes]) -> Hashes:
    """`[n, 2]`. Raises ValueError if one does not have 16 bytes."""
    joined = b"".join(hashes)
    if [*map(len, hashes)].count(HASH_BYTES) != len(hashes):
        raise ValueError(f"block hashes have {HASH_BYTES} bytes")
    return unpack(joined)


def unpack(raw: bytes) -> Hashes:
    """`[n, 2]` of hashes back to back. Raises ValueError for other lengths."""
    return np.frombuffer(raw, dtype="<u8").reshape(-1, 2)


@dataclass(slots=True)
class _Holdings:
    """What one holder got, in order and with the tier; partly out of date."""

    log: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty(64, dtype=np.int32))
    logged: int = 0
    held: int = 0  # (block, tier)


class PrefixIndex:
    """At most `max_blocks` blocks of at most `max_holders` holders, which are at most 16,384, in at most 3 tiers."""

    def __init__(self, max_blocks: int, max_holders: int = 64, tiers: int = 3) -> None:
        slots = 1 << max(4, (2 * max_blocks - 1).bit_length())
        words = self._words = -(-max_holders // 64)
        if words * 64 > kernels.MOST_HOLDERS or tiers > kernels.MOST_TIERS:
            raise ValueError(f"{max_holders} holders in {tiers} tiers do not fit a note of 16 bits")
        self.max_blocks = max_blocks
        self.tiers = tiers
        self.given_up_total = 0
        self._table = np.full(slots, kernels.NONE, dtype=np.uint64)
        self._wide_places = kernels.wide_places(tiers, words)  # type: ignore[no-untyped-call]
        self._most = max_blocks + max_blocks % 2  # so that wide rows begin with a cache line
        self._rows = _aligned_zeros(self._most + max_blocks * self._wide_places << kernels.PLACE)
        self._rows[: max_blocks << kernels.PLACE] = 0  # takes their memory before requests come
        self._named = np.zeros(max_blocks, dtype=np.int32)
        self._free = np.arange(max_blocks - 1, -1, -1, dtype=np.int32)
        self._counters = np.zeros(kernels.COUNTERS, dtype=np.int64)
        self._counters[kernels.FREE] = max_blocks
        self._arrays = self._table, self._rows, self._named, self._most, tiers, words
        self._state = *self._arrays, self._free, self._counters
        self._marks = np.zeros(-(-max_blocks * tiers // 64), dtype=np.uint64)
        self._depths = np.zeros((tiers, words * 64), dtype=np.int32)
        self._holdings: dict[int, _Holdings] = {}
        self._unused = list(range(max_holders - 1, -1, -1))
        self._retired: list[int] = []
        self._anyone = np.zeros(words, dtype=np.uint64)  # but for the pool's
        self._pool = np.zeros(words, dtype=np.uint64)
        self.pooled = 0  # blocks that the pool has from the start of the chain last looked for
        self._deepest_tier = 0
        self.generation = 0  # changes whenever a holder comes or goes
        self._asked: tuple[str, ...] = ()  # names last given to `depths`; the generation then, and their holders:
        self._asked_at = -1
        self._asked_holders = np.empty(0, dtype=np.intp)
        self._strangers = False  # whether one of them is no holder

    def __len__(self) -> int:
        return int(self._counters[kernels.LIVE])

    def held_by(self, holder: int) -> int:
        """A block counts once per tier."""
        return self._holdings[holder].held

    @property
    def nbytes(self) -> int:
        """Wide rows count as far as they were ever used."""
        entries = (self.max_blocks << kernels.PLACE) * self._rows.itemsize
        hot = int(self._counters[kernels.WIDE_USED]) * self.bytes_if_hot
        return entries + hot + sum(int(array.nbytes) for array in (self._table, self._free, self._marks))

    @property
    def bytes_if_hot(self) -> int:
        """Added by each block that many hold."""
        return int(self._wide_places << kernels.PLACE) * self._rows.itemsize + self._named.itemsize

    def add_holder(self, *, pooled: bool = False) -> int:
        """A number for a new holder, without blocks. Raises OverflowError if there are too many."""
        if not self._unused:
            self.clean(self.max_blocks)
        if not self._unused:
            raise OverflowError(f"more than {len(self._depths[0])} holders")
        holder = self._unused.pop()
        self.generation += 1
        self._holdings[holder] = _Holdings()
        (self._pool if pooled else self._anyone)[holder >> 6] |= np.uint64(1 << (holder & 63))
        return holder

    def retire(self, holder: int) -> None:
        """No look-up finds this holder any more; `clean` takes out its blocks bit by bit."""
        for mask in (self._anyone, self._pool):
            mask[holder >> 6] &= ~np.uint64(1 << (holder & 63))
        self.generation += 1
        self._retired.append(holder)

    def clean(self, blocks: int) -> bool:
        """Take out at most so many blocks of retired holders; returns whether there is more to do."""
        while self._retired and blocks > 0:
            holder = self._retired[-1]
            blocks -= self._forget(holder, blocks)
            if not self._holdings[holder].logged:
                self._retired.pop()
                del self._holdings[holder]
                self._unused.append(holder)
        return bool(self._retired)

    def store(self, holder: int, tier: int, hashes: Hashes) -> None:
        done, holdings = 0, self._holdings[holder]
        while True:
            self._make_room_in_log(holder, holdings, len(hashes) - done)
            noted, logged, _ = kernels.store(*self._state, hashes[done:], tier, holder, holdings.log, holdings.logged)
            holdings.held += logged - holdings.logged
            holdings.logged = logged
            done += noted
            if tier > self._deepest_tier and int(self._anyone[holder >> 6]) >> (holder & 63) & 1:
                self._deepest_tier = tier
            if done == len(hashes):
                return
            if not self._give_way(holder):
                self.given_up_total += len(hashes) - done
                return

    def remove(self, holder: int, tier: int, hashes: Hashes) -> None:
        removed, _ = kernels.remove(*self._state, hashes, tier, holder)
        self._holdings[holder].held -= removed

    def find(self, hashes: Hashes) -> Depths:
        """`[tiers, holders]`: how many blocks from the start of the chain each holder has in that tier or a faster
        one, in the last tier with the pool's from there on. A holder of nothing has `pooled`. The array is the index's
        own, to be read before the next call."""
        pooled, _ = query_kernels.find(
            self._table, self._rows, self._most, hashes, self._deepest_tier + 1, self._anyone, self._pool, self._depths
        )
        self.pooled = int(pooled)
        return self._depths

    def depths(self, hashes: Hashes, names: tuple[str, ...], holder_of: Callable[[str], int | None]) -> Depths:
        """As `find`, `[tiers, names]`; names without a holder have what the pool has."""
        found = self.find(hashes)
        if names is not self._asked or self._asked_at != self.generation:  # mostly a decision has the last one's names
            self._asked, self._asked_at = names, self.generation
            holders = (holder_of(name) for name in names)
            self._asked_holders = np.array([-1 if one is None else one for one in holders], dtype=np.intp)
            self._strangers = bool((self._asked_holders < 0).any())
        depths = found.take(self._asked_holders, axis=1)
        if self._strangers:
            depths[:, self._asked_holders < 0] = 0
            depths[-1, self._asked_holders < 0] = self.pooled
        return depths

    def compact(self) -> None:
        """Compact all logs; otherwise a log is compacted when it has grown."""
        for holder, holdings in self._holdings.items():
            self._compact(holder, holdings)

    def mask_of(self, holders: Iterable[int]) -> Hashes:
        mask: Hashes = np.zeros(len(self._anyone), dtype=np.uint64)
        for holder in holders:
            mask[holder >> 6] |= np.uint64(1 << (holder & 63))
        return mask

    def count_sole(self, counted: Hashes, first: int, end: int, counts: Counts) -> None:
        """Add to `counts` `[holders]` the entries `first` to `end` that only one of `counted` has, and not the pool."""
        query_kernels.count_sole(self._rows, first, min(end, self.max_blocks), self.tiers, counted, self._pool, counts)

    def sole_holders(self, hashes: Hashes, counted: Hashes) -> Counts:
        """`[n, 2]`: each block's entry, and its holder if only one of `counted` has it, and not the pool; else -1."""
        found: Counts = np.empty((len(hashes), 2), dtype=np.int64)
        query_kernels.sole_holders(*self._arrays, hashes, counted, self._pool, found)
        return found

    def _give_way(self, holder: int) -> bool:
        """Make room in a full index; returns whether it could: no holder gives way to one that has more."""
        if self._retired:
            self.clean(GIVEN_UP)
            return True
        largest, most = max(self._holdings.items(), key=lambda item: item[1].held)
        before = most.held
        if before <= self._holdings[holder].held:
            return False
        self._forget(largest, GIVEN_UP)
        self.given_up_total += before - most.held
        return True

    def _forget(self, holder: int, count: int) -> int:
        """Drop the last `count` notes of its log, or all; returns how many."""
        holdings = self._holdings[holder]
        count = min(count, holdings.logged)
        holdings.held -= kernels.forget(*self._state, holder, holdings.log, holdings.logged, count)
        holdings.logged -= count
        return count

    def _make_room_in_log(self, holder: int, holdings: _Holdings, count: int) -> None:
        if holdings.logged > 2 * holdings.held + SPARE:
            self._compact(holder, holdings)
        needed = holdings.logged + count
        if needed > len(holdings.log):
            log = np.empty(max(needed, 2 * len(holdings.log)), dtype=np.int32)
            log[: holdings.logged] = holdings.log[: holdings.logged]
            holdings.log = log

    def _compact(self, holder: int, holdings: _Holdings) -> None:
        holdings.logged = kernels.compact(
            self._rows, self.tiers, self._words, holder, holdings.log, holdings.logged, self._marks
        )

    def check_integrity(self) -> None:
        places = (self._table[self._table != kernels.NONE].astype(np.int64) & 0xFFFF_FFFF).tolist()
        wide = [(at - self._most) // self._wide_places for at in places if at >= self._most]
        live = [at for at in places if at < self._most] + self._named[wide].tolist()
        assert len(set(live)) == len(live) == len(self)
        assert len(self) + self._counters[kernels.FREE] == self.max_blocks
        free = np.zeros(self.max_blocks, dtype=bool)
        free[self._free[: self._counters[kernels.FREE]]] = True
        assert not free[live].any()
        logs = {number: set(one.log[: one.logged].tolist()) for number, one in self._holdings.items()}
        held = dict.fromkeys(self._holdings, 0)
        for entry in live:
            bits = self._bits_of(entry)
            assert bits.any()
            for holder, log in logs.items():
                has = bits[:, holder >> 6] >> np.uint64(holder & 63) & np.uint64(1)
                held[holder] += int(has.sum())
                assert all(entry * self.tiers + tier in log for tier in np.flatnonzero(has).tolist())
        assert held == {holder: holdings.held for holder, holdings in self._holdings.items()}
        assert not self._marks.any()
        unused, one = [], int(self._counters[kernels.WIDE_FREE])
        while one:
            unused.append(one - 1)
            one = int(self._rows[self._most + (one - 1) * self._wide_places << kernels.PLACE])
        assert sorted(wide + unused) == list(range(int(self._counters[kernels.WIDE_USED])))

    def _bits_of(self, entry: int) -> Hashes:
        """`[tiers, words]`: its holders. Checks its row."""
        row = self._rows[entry << kernels.PLACE :][: 1 << kernels.PLACE]
        found: Hashes = np.zeros((self.tiers, self._words), dtype=np.uint64)
        wide = kernels.wide_of(self._rows, entry)
        if wide != kernels.NOBODY:
            bits = self._rows[wide << kernels.PLACE :][: kernels.BITS + found.size]
            assert bits[: kernels.BITS].tolist() == row[: kernels.BITS].tolist()
            found = bits[kernels.BITS :].reshape(found.shape)
            assert kernels.NARROW < int(np.bitwise_count(found).sum()) == row[kernels.REST]
            return found
        notes = row[kernels.NOTES :].view(np.uint16).tolist()
        used = [note for note in notes if note]
        assert len(set(used)) == len(used)
        assert notes[: len(used)] == used
        for note in used:
            holder = note >> kernels.TIER_BITS
            found[(note & kernels.MOST_TIERS) - 1, holder >> 6] |= np.uint64(1 << (holder & 63))
        return found


def _aligned_zeros(words: int) -> npt.NDArray[np.uint64]:
    """Aligned to cache lines. Memory is taken when it is written to."""
    raw = np.zeros(words * 8 + CACHE_LINE, dtype=np.uint8)
    start = -raw.ctypes.data % CACHE_LINE
    return raw[start : start + words * 8].view(np.uint64)
