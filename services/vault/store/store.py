"""A vault's blocks as connections, disk and loop use them: one lock around the table, and never around bytes.

Owned by nobody: connection threads, the disk's thread and the loop call it. The lock is held for dictionary work only.
What the bytes mean it does not know; state of another kind would get a store, and memory, of its own.

    reserve ──▶ reserved ──commit──▶ held ──evict, erase──▶ gone
                   └──abandon──▶ free        (bytes that are being sent stay until `release`)

* Nobody sees a block before its commit. Of two commits of one hash the first wins; but an exact block takes the place
  of a lossy one.
* Least recently used first, and of a chain its end first: a block stays while another one in memory, or on its way
  there, continues it. Of what is used together the first of the chain is the youngest. What is being sent stays; if
  all ends of chains are, the last block before one of them goes.
* Bytes that have lain for a minute are checked before they are sent: memory errs, too. Damaged, the block is gone.
* With a disk, blocks that are about to be evicted are written to it beforehand, while there is still some room
  (`next_spill`): `put` never waits for it. If writing cannot keep pace, blocks are evicted unwritten (`dropped`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from kvfleet.vault.store.block_table import BlockEntry, BlockTable, StoreCounters, StoredChange, bytes_for
from kvfleet.vault.store.memory import VaultMemory
from kvproto.dataplane.block import BlockCodec, BlockHeader

SPARE_FRACTION = 8  # of the memory, one part in so many is kept free by writing to disk ahead
MOST_SPARE_BYTES = 256 * 1024 * 1024
CHECK_AFTER_S = 60.0


class Disk(Protocol):
    """What the store asks of a disk. `read` and `forget` take as long as disks do: never under the lock."""

    def read(self, header: BlockHeader, target: memoryview) -> bool:
        """Bring the bytes of just this block, verified, to `target`. False if it is damaged or gone."""

    def forget(self, hashes: Sequence[bytes]) -> None:
        """They are not to come back, not even after a restart. Never raises."""

    def wake(self) -> None:
        """There is little room: ask for `next_spill`. Returns at once."""


@dataclass(slots=True)
class ServedBlocks:
    """Blocks that are being sent, in the order asked for, None where there is none. Nobody looks at these bytes any
    more after `release`, which may be called again."""

    blocks: list[tuple[BlockHeader, memoryview] | None]
    release: Callable[[], None]
    from_disk: int  # memory missed so many of them


class VaultStore:
    """At most `max_bytes` of memory, and what a disk has, of which `on_disk` is known at the start. The table's
    `on_change` is called on any thread and under the lock, so it only passes that on."""

    def __init__(
        self,
        max_bytes: int,
        disk: Disk | None = None,
        *,
        on_disk: Iterable[BlockHeader] = (),
        clock: Callable[[], float] = time.monotonic,
        check_after_s: float = CHECK_AFTER_S,
    ) -> None:
        self.counters = StoreCounters()
        self.table = BlockTable(VaultMemory(max_bytes), self.counters, disk is not None)
        self._clock = clock
        self._check_after_s = check_after_s
        self._disk = disk
        self._spare_bytes = min(max_bytes // SPARE_FRACTION, MOST_SPARE_BYTES) if disk is not None else 0
        self._lock = threading.Lock()
        for header in on_disk:
            self.table.add_on_disk(header)

    # ------------------------------------------------------------------ what connection threads call

    def get(self, root: bytes, hashes: Sequence[bytes], exact: bool) -> ServedBlocks:
        """Blocks of a chain in its order. What memory misses is read from disk, on the calling thread."""
        found: list[BlockEntry | None] = []
        with self._lock:
            for block_hash in hashes:
                entry = self.table.resident.get(block_hash)
                if entry is not None and _why_not(entry.header, root, exact):
                    entry = None
                if entry is not None:
                    self.table.pin(entry)
                found.append(entry)
        brought = 0
        try:
            for at, entry in enumerate(found):
                if entry is not None and not self._is_whole(entry):
                    found[at] = entry = None
                if entry is None:
                    found[at] = self._bring(root, hashes[at], exact)
                    brought += found[at] is not None
        except BaseException:
            self._release([entry for entry in found if entry is not None])
            raise
        pinned = [entry for entry in found if entry is not None]
        with self._lock:
            for entry in reversed(pinned):
                self.table.touch(entry)
                self.counters.hits_total += 1
                self.counters.hit_bytes_total += entry.header.length
        blocks = [None if one is None else (one.header, one.view.toreadonly()) for one in found]
        return ServedBlocks(blocks, partial(self._release, pinned), brought)

    def has(self, root: bytes, hashes: Sequence[bytes], exact: bool) -> list[bool]:
        """Whether `get` would find them. That is a use: who asks is about to fetch it, or had it just now to store."""
        with self._lock:
            for block_hash in reversed(hashes):
                entry = self.table.resident.get(block_hash)
                if entry is not None and entry.header.root == root:
                    self.table.touch(entry)
            return [
                any(not _why_not(header, root, exact) for header in self.table.versions(block_hash))
                for block_hash in hashes
            ]

    def reserve(self, header: BlockHeader) -> memoryview | None:
        """Room for a block's bytes, `header.length` of them; None if it is not wanted."""
        why = _why_wrong(header)
        with self._lock:
            if not why and self.table.has_as_good(header):
                why = "held"
            elif not why and bytes_for(header) > self.table.memory.max_bytes:
                why = "too_large"
            entry = None if why else self._expect(header)
            if entry is None:
                self.counters.refused[why or "no_room"] += 1
                return None
            return entry.view

    def commit(self, header: BlockHeader, buffer: memoryview) -> bool:
        now = self._clock()
        with self._lock:
            entry = self.table.arrived(header, buffer)
            why = "erased" if entry.doomed else "held" if self.table.has_as_good(header) else ""
            if why:
                self.counters.refused[why] += 1
                self.table.give_back(entry)
                return False
            entry.checked_at = now
            self.counters.stored_total += 1
            self.counters.stored_bytes_total += header.length
            self.table.insert(entry)
            self._wake_disk()  # when it was reserved there may have been nothing that could be written
            return True

    def abandon(self, header: BlockHeader, buffer: memoryview) -> None:
        with self._lock:
            self.table.give_back(self.table.arrived(header, buffer))
            self.counters.abandoned_total += 1

    def erase(self, root: bytes, hashes: Sequence[bytes]) -> int:
        """Forget those of these blocks that no other block continues, in memory and on disk. How many that were."""
        named = set(hashes)
        on_disk: list[bytes] = []
        erased = 0
        with self._lock:
            table = self.table
            for entry in table.arriving.values():
                if entry.header.root == root and entry.header.hash in named:
                    entry.doomed = True
            asked = {one for one in named if any(header.root == root for header in table.versions(one))}
            last = [one for one in asked if one not in table.continued]
            while last:
                block_hash = last.pop()
                parent = table.versions(block_hash)[0].parent
                if block_hash in table.resident:
                    table.remove(table.resident[block_hash])
                if table.remove_on_disk(block_hash):
                    on_disk.append(block_hash)
                erased += 1
                if parent in asked and parent not in table.continued:
                    last.append(parent)
            self.counters.erased_total += erased
        if on_disk and self._disk is not None:
            self._disk.forget(on_disk)
        return erased

    def _release(self, entries: list[BlockEntry]) -> None:
        with self._lock:
            while entries:
                self.table.unpin(entries.pop())
            self._wake_disk()

    # ------------------------------------------------------------------ what the disk's thread calls

    def next_spill(self) -> BlockEntry | None:
        """The next block to be written to disk, pinned, while there is little room; None if there is nothing to do.
        What is on disk already is evicted on the way: also what was given last, unless it was used meanwhile."""
        with self._lock:
            while self.table.room < self._spare_bytes:
                entry = self.table.pop_oldest()
                if entry is None:
                    return None
                if not self.table.is_on_disk(entry.header):
                    self.table.pin(entry)
                    return entry
                self.table.evict(entry)
            return None

    def spilled(self, entry: BlockEntry, written: bool) -> bool:
        """What `next_spill` or `pin_unwritten` gave has been written, or cannot be. False: the disk is to forget it."""
        with self._lock:
            wanted = entry.resident  # else it was erased, or replaced by a better one, while it was written
            if written and wanted:
                self.counters.spilled_total += 1
                self.table.add_on_disk(entry.header)
            self.table.unpin(entry)
            return wanted

    def lost_on_disk(self, hashes: Sequence[bytes]) -> None:
        """The disk gave these up: for others, or because they were damaged."""
        with self._lock:
            for block_hash in hashes:
                self.counters.disk_evictions_total += self.table.remove_on_disk(block_hash)

    def unwritten(self) -> list[BlockEntry]:
        """What a restart would lose, the most recently used first, and of what was used together the parents first."""
        with self._lock:
            entries = [one for one in self.table.resident.values() if not self.table.is_on_disk(one.header)]
            return sorted(entries, key=lambda entry: -entry.tick)

    def pin_unwritten(self, entry: BlockEntry) -> bool:
        """Whether one of those is still there; then it is pinned, for `spilled`."""
        with self._lock:
            if entry.resident:
                self.table.pin(entry)
            return entry.resident

    # ------------------------------------------------------------------ what the loop calls

    def take_changes(self) -> list[StoredChange]:
        with self._lock:
            changes, self.table.changes = self.table.changes, []
            return changes

    def holdings(self) -> tuple[list[StoredChange], list[bytes]]:
        """What happened since the last `take_changes`, and all that is held after exactly that."""
        with self._lock:
            changes, self.table.changes = self.table.changes, []
            return changes, list(self.table.held())

    def check_integrity(self) -> None:
        with self._lock:
            self.table.check_integrity()

    # ------------------------------------------------------------------ inside

    def _expect(self, header: BlockHeader, *, asked_for: bool = False) -> BlockEntry | None:
        entry = self.table.expect(header, asked_for=asked_for)
        self._wake_disk()
        return entry

    def _wake_disk(self) -> None:
        """Under the lock: a word to the disk if there is little room left."""
        if self._disk is not None and self.table.room < self._spare_bytes:
            self._disk.wake()

    def _is_whole(self, entry: BlockEntry) -> bool:
        """Of a pinned block. If it is not, it is let go of, and gone from memory."""
        now = self._clock()
        if now - entry.checked_at < self._check_after_s:
            return True
        if entry.header.matches(entry.view):
            entry.checked_at = now
            return True
        with self._lock:
            self.counters.damaged_total += 1
            if entry.resident:
                self.table.remove(entry)
            self.table.unpin(entry)
        return False

    def _bring(self, root: bytes, block_hash: bytes, exact: bool) -> BlockEntry | None:
        """A block that memory could not serve, from disk into memory, pinned. Else None, and why is counted."""
        with self._lock:
            versions = self.table.versions(block_hash)
            header = next((one for one in versions if not _why_not(one, root, exact)), None)
            if header is None:
                self.counters.misses[_why_not(versions[0], root, exact) if versions else "absent"] += 1
                return None
            entry = self.table.resident.get(block_hash)
            if entry is not None and entry.header is header:  # it came meanwhile
                self.table.pin(entry)
                return entry
            coming = self._expect(header, asked_for=True)
            if coming is None:
                self.counters.misses["no_room"] += 1
                return None
        assert self._disk is not None
        try:
            readable = self._disk.read(header, coming.view)
        except BaseException:
            self.abandon(header, coming.view)
            raise
        coming.checked_at = self._clock()
        with self._lock:
            return self._take_in(coming, readable)

    def _take_in(self, coming: BlockEntry, readable: bool) -> BlockEntry | None:
        """Under the lock: what was read from disk, pinned; or what came another way meanwhile, if it is as good."""
        table, header = self.table, coming.header
        table.arrived(header, coming.view)
        is_current = table.on_disk.get(header.hash) is header
        if not readable and is_current:
            table.remove_on_disk(header.hash)
        entry = table.resident.get(header.hash)
        if entry is not None and entry.header.root == header.root and (header.lossy or not entry.header.lossy):
            table.give_back(coming)
        elif readable and is_current and not coming.doomed:
            table.insert(coming)
            entry = coming
            self.counters.disk_hits_total += 1
        else:
            table.give_back(coming)
            self.counters.misses["unreadable"] += 1
            return None
        table.pin(entry)
        return entry


def _why_not(header: BlockHeader, root: bytes, exact: bool) -> str:
    if header.root != root:
        return "wrong_root"
    return "lossy" if exact and header.lossy else ""


def _why_wrong(header: BlockHeader) -> str:
    if not header.is_genuine():
        return "not_genuine"
    whole = header.codec is BlockCodec.RAW
    return "malformed" if header.length > header.raw_bytes or (whole and header.length != header.raw_bytes) else ""
