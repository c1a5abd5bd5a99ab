"""Which blocks a vault has in memory and on disk, their order of eviction, and what changed. Pure; the store owns it.

arriving ──insert──▶ resident ──remove──▶ gone          (a pinned block's buffer is free once it is unpinned)
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

from kvfleet.vault.store.memory import ENTRY_BYTES, Raw, VaultMemory, class_of
from kvproto.dataplane.block import BlockHeader
from kvproto.messages import BlockRun, Tier, TierEvents

REFUSALS = (
    "not_genuine",  # the hash is not that of these tokens
    "malformed",  # sizes that cannot be
    "too_large",  # for the whole memory
    "no_room",  # all blocks are being sent or received
    "held",  # already here, no worse
    "erased",  # while its bytes arrived
)
MISSES = (
    "absent",
    "wrong_root",  # here, but another root's
    "lossy",  # here, but an exact one was asked for
    "no_room",  # on disk, and no memory to read it to
    "unreadable",  # on disk, and damaged there or gone just now
)

SLACK = 64
BLOCKS_PER_EVENT = 16_000  # 650 KB where no two continue one another: below the limit of a NATS message


class StoredChange(NamedTuple):
    removed: bool
    parent: bytes
    hash: bytes


@dataclass(slots=True)
class StoreCounters:
    stored_total: int = 0
    stored_bytes_total: int = 0
    replaced_total: int = 0  # lossy blocks by exact ones
    abandoned_total: int = 0  # reserved, and their bytes did not come or were wrong
    refused: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REFUSALS, 0))
    hits_total: int = 0
    hit_bytes_total: int = 0
    disk_hits_total: int = 0  # of the hits
    misses: dict[str, int] = field(default_factory=lambda: dict.fromkeys(MISSES, 0))
    damaged_total: int = 0  # blocks whose bytes memory did not keep
    erased_total: int = 0
    evictions_total: int = 0  # from memory
    dropped_total: int = 0  # of them, those that should have been on disk and were not
    spilled_total: int = 0  # written to disk
    disk_evictions_total: int = 0


@dataclass(slots=True, eq=False)
class BlockEntry:
    header: BlockHeader
    raw: Raw
    view: memoryview
    checked_at: float = 0.0
    tick: int = 0  # of its last use
    pins: int = 0  # connections that send it, and the disk's thread that writes it
    resident: bool = False  # it can be found
    doomed: bool = False  # erased before it was there

    @property
    def bytes(self) -> int:
        return len(self.raw) + ENTRY_BYTES


def bytes_for(header: BlockHeader) -> int:
    return class_of(header.length) + ENTRY_BYTES


@dataclass(eq=False, slots=True)
class BlockTable:
    """`on_change` is called at the first change after the last were taken. `_order` has (tick, hash) of all blocks that
    may be evicted, and stale pairs, which are skipped as they come up; ticks are never used twice."""

    memory: VaultMemory
    counters: StoreCounters
    has_disk: bool
    resident: dict[bytes, BlockEntry] = field(default_factory=dict)
    arriving: dict[int, BlockEntry] = field(default_factory=dict)  # by id of the buffer
    on_disk: dict[bytes, BlockHeader] = field(default_factory=dict)  # the disk itself may have lost one
    continued: Counter[bytes] = field(default_factory=Counter)  # hash -> blocks held anywhere that continue it
    changes: list[StoredChange] = field(default_factory=list)
    on_change: Callable[[], None] = lambda: None
    held_blocks: int = 0  # in memory or on disk
    locked_bytes: int = 0  # that no eviction can free: pinned or arriving
    _continued_here: Counter[bytes] = field(default_factory=Counter)  # by blocks in memory, or arriving there
    _pinned: set[BlockEntry] = field(default_factory=set)
    _order: list[tuple[int, bytes]] = field(default_factory=list)  # a heap
    _tidy_at: int = SLACK
    _tick: int = 0

    def held(self) -> Iterator[BlockHeader]:
        """Each block once: what memory has of it, if it has."""
        for entry in self.resident.values():
            yield entry.header
        for block_hash, header in self.on_disk.items():
            if block_hash not in self.resident:
                yield header

    def versions(self, block_hash: bytes) -> list[BlockHeader]:
        entry, on_disk = self.resident.get(block_hash), self.on_disk.get(block_hash)
        return [header for header in (entry.header if entry else None, on_disk) if header is not None]

    def has_as_good(self, header: BlockHeader) -> bool:
        return any(header.lossy or not version.lossy for version in self.versions(header.hash))

    def is_on_disk(self, header: BlockHeader) -> bool:
        known = self.on_disk.get(header.hash)
        return known is not None and known.checksum == header.checksum

    @property
    def room(self) -> int:
        """Bytes that can be had without evicting anything."""
        return self.memory.max_bytes - self.memory.used_bytes + self.memory.free_bytes

    def expect(self, header: BlockHeader, *, asked_for: bool = False) -> BlockEntry | None:
        """A place for a block's bytes, for which others may be evicted; None without room. Its parent is evicted for it
        only if a client asked for just this block."""
        if self.locked_bytes + bytes_for(header) > self.memory.max_bytes:
            return None  # evictions cannot help
        if not asked_for:
            self._continued_here[header.parent] += 1
        while (raw := self.memory.take(header.length)) is None:
            victim = self.pop_oldest() or self._continued_by_one_in_use(arriving=asked_for)
            if victim is None:
                if not asked_for:
                    self._no_longer_continue(header.parent)
                return None
            self.evict(victim)
        if asked_for:
            self._continued_here[header.parent] += 1
        entry = self.arriving[id(raw)] = BlockEntry(header, raw, memoryview(raw)[: header.length])
        self.locked_bytes += entry.bytes
        return entry

    def arrived(self, header: BlockHeader, buffer: memoryview) -> BlockEntry:
        """The place of these bytes, to be inserted or given back. Raises ValueError for a buffer of another block."""
        entry = self.arriving.get(id(buffer.obj))
        if entry is None or entry.header != header:
            raise ValueError("this buffer was not reserved for this block")
        del self.arriving[id(entry.raw)]
        self.locked_bytes -= entry.bytes
        self._no_longer_continue(header.parent)
        return entry

    def insert(self, entry: BlockEntry) -> None:
        header = entry.header
        old = self.resident.get(header.hash)
        if old is not None:
            self.counters.replaced_total += 1
            self.remove(old, is_replaced=True)
        elif header.hash not in self.on_disk:
            self._appeared(header)
        entry.resident = True
        self.resident[header.hash] = entry
        self._continued_here[header.parent] += 1
        self.touch(entry)

    def pop_oldest(self) -> BlockEntry | None:
        """The least recently used block that none in memory continues, as a block without its parent is useless. The
        caller evicts or pins it."""
        while self._order:
            tick, block_hash = heapq.heappop(self._order)
            if self._tick_if_evictable(block_hash) == tick:
                return self.resident[block_hash]
        return None

    def _continued_by_one_in_use(self, *, arriving: bool) -> BlockEntry | None:
        """If all ends of chains are being sent: the last block before one of them that is not."""
        in_use = [*self._pinned, *(self.arriving.values() if arriving else ())]
        parents = (self.resident.get(entry.header.parent) for entry in in_use)
        return min((one for one in parents if one is not None and not one.pins), key=lambda one: one.tick, default=None)

    def evict(self, entry: BlockEntry) -> None:
        self.counters.evictions_total += 1
        self.counters.dropped_total += self.has_disk and not self.is_on_disk(entry.header)
        self.remove(entry)

    def remove(self, entry: BlockEntry, *, is_replaced: bool = False) -> None:
        """Remove from memory. `is_replaced`: by another version."""
        header = entry.header
        entry.resident = False
        del self.resident[header.hash]
        self._no_longer_continue(header.parent)
        if not is_replaced and header.hash not in self.on_disk:
            self._disappeared(header)
        if not entry.pins:
            self.memory.give(entry.raw)

    def add_on_disk(self, header: BlockHeader) -> None:
        if header.hash not in self.on_disk and header.hash not in self.resident:
            self._appeared(header)
        self.on_disk[header.hash] = header

    def remove_on_disk(self, block_hash: bytes) -> bool:
        header = self.on_disk.pop(block_hash, None)
        if header is not None and block_hash not in self.resident:
            self._disappeared(header)
        return header is not None

    def _appeared(self, header: BlockHeader) -> None:
        self.held_blocks += 1
        self.continued[header.parent] += 1
        self._note(StoredChange(False, header.parent, header.hash))

    def _disappeared(self, header: BlockHeader) -> None:
        self.held_blocks -= 1
        _count_down(self.continued, header.parent)
        self._note(StoredChange(True, header.parent, header.hash))

    def _note(self, change: StoredChange) -> None:
        self.changes.append(change)
        if len(self.changes) == 1:
            self.on_change()

    def touch(self, entry: BlockEntry) -> None:
        self._tick += 1
        entry.tick = self._tick
        self._offer(entry.header.hash)

    def pin(self, entry: BlockEntry) -> None:
        if not entry.pins:
            self.locked_bytes += entry.bytes
            self._pinned.add(entry)
        entry.pins += 1

    def unpin(self, entry: BlockEntry) -> None:
        entry.pins -= 1
        if not entry.pins:
            self.locked_bytes -= entry.bytes
            self._pinned.remove(entry)
            if entry.resident:
                self._offer(entry.header.hash)
            else:
                self.memory.give(entry.raw)

    def _no_longer_continue(self, parent: bytes) -> None:
        _count_down(self._continued_here, parent)
        self._offer(parent)

    def _offer(self, block_hash: bytes) -> None:
        tick = self._tick_if_evictable(block_hash)
        if tick is None:
            return
        heapq.heappush(self._order, (tick, block_hash))
        if len(self._order) > self._tidy_at:
            self._order = [entry for entry in set(self._order) if self._tick_if_evictable(entry[1]) == entry[0]]
            heapq.heapify(self._order)
            self._tidy_at = 2 * len(self._order) + SLACK

    def _tick_if_evictable(self, block_hash: bytes) -> int | None:
        entry = self.resident.get(block_hash)
        if entry is None or entry.pins or block_hash in self._continued_here:
            return None
        return entry.tick

    def check_integrity(self) -> None:
        entries, arriving = list(self.resident.values()), list(self.arriving.values())
        for block_hash, entry in self.resident.items():
            assert entry.header.hash == block_hash
            assert entry.resident
            assert len(entry.view) == entry.header.length <= len(entry.raw)
        assert not any(entry.resident for entry in arriving)
        assert {entry for entry in entries if entry.pins} == {entry for entry in self._pinned if entry.resident}
        assert self.locked_bytes == sum(entry.bytes for entry in (*arriving, *self._pinned))
        self.memory.check_integrity([entry.raw for entry in {*entries, *arriving, *self._pinned}])
        held = list(self.held())
        assert self.held_blocks == len(held)
        assert self.continued == Counter(header.parent for header in held)
        assert self._continued_here == Counter(entry.header.parent for entry in (*entries, *arriving))
        evictable = {block_hash for block_hash in self.resident if self._tick_if_evictable(block_hash) is not None}
        assert {one for tick, one in self._order if self._tick_if_evictable(one) == tick} == evictable


def _count_down(counts: Counter[bytes], key: bytes) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]


def net(changes: Iterable[StoredChange]) -> list[StoredChange]:
    """The changes without blocks that came and went meanwhile; removals first. A block's own changes alternate."""
    first: dict[bytes, bool] = {}
    last: dict[bytes, StoredChange] = {}
    for change in changes:
        first.setdefault(change.hash, change.removed)
        last.pop(change.hash, None)  # its place is that of its last change
        last[change.hash] = change
    different = [change for change in last.values() if change.removed == first[change.hash]]
    return sorted(different, key=lambda change: not change.removed)  # stable


def state_events(changes: Iterable[StoredChange]) -> list[TierEvents]:
    """In the order of the changes, of recurrent states: each by the block behind which it stands."""
    grouped = groupby(changes, key=attrgetter("removed"))
    runs = [(removed, BlockRun(b"", tuple(change.parent for change in group))) for removed, group in grouped]
    return [TierEvents(Tier.STATE, removed, (run,)) for removed, run in runs]


def tier_events(changes: Iterable[StoredChange]) -> list[TierEvents]:
    """In the order of the changes. Blocks that continue one another make one run; removed ones one without a parent."""
    events = []
    for removed, group in groupby(changes, key=attrgetter("removed")):
        runs: list[tuple[bytes, list[bytes]]] = []
        for change in group:
            if runs and (removed or runs[-1][1][-1] == change.parent):
                runs[-1][1].append(change.hash)
            else:
                runs.append((b"" if removed else change.parent, [change.hash]))
        told = tuple(BlockRun(parent, tuple(hashes)) for parent, hashes in runs)
        events.append(TierEvents(Tier.VAULT, removed, told))
    return events
