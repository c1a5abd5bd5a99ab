"""A vault's blocks, thread-safe: connection threads, the disk's thread and the loop call it. The lock is held for
dictionary work only, never while bytes are copied or checked.

    reserve ──▶ reserved ──commit──▶ held ──evict, erase──▶ gone
                   └──abandon──▶ free        (bytes that are being sent stay until `release`)

* A block is visible from its commit on. Of two commits of one hash the first wins; but an exact block replaces a lossy
  one.
* The least recently used block is evicted first, and a chain from its end: a block stays while another one in memory,
  or on its way there, continues it, and while it is being sent. If all ends of chains are being sent, the last block
  before one of them goes.
* Bytes that have lain for a minute are checked before they are sent, as memory errs; a damaged block is dropped.
* Blocks are written to the disk before they are evicted, while there is still some room (`next_spill`), so that `put`
  never waits for it. If writing cannot keep pace, blocks are evicted unwritten (`dropped`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol

from kvfleet.vault.store.block_table import BlockEntry, BlockTable, StoreCounters, StoredChange, bytes_for
from kvfleet.vault.store.memory import VaultMemory
from kvproto.dataplane.block import BlockCodec, BlockHeader
from kvproto.dataplane.serving import ServedBlocks

SPARE_FRACTION = 8  # one part in so many of the memory is kept free by writing to disk ahead
MOST_SPARE_BYTES = 256 * 1024 * 1024
CHECK_AFTER_S = 60.0


class Disk(Protocol):
    """`read` and `forget` take as long as disks do: they are never called under the lock."""

    def read(self, header: BlockHeader, target: memoryview) -> bool:
        """Bring the bytes of just this block, verified, to `target`. False if it is damaged or gone."""

    @property
    def owes(self) -> bool:
        """Whether blocks that were forgotten are still to be erased."""

    def forget(self, hashes: Sequence[bytes]) -> bool:
        """Erase them, for restarts too, and all that it owes. False: not now; it owes them then."""

    def wake(self) -> None:
        """There is little room: call `next_spill`. Returns at once."""


class VaultStore:
    """At most `max_bytes` of memory, and a disk, with the blocks `on_disk` at the start. The table's `on_change` is
    called on any thread and under the lock."""

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

    def get(self, root: bytes, hashes: Sequence[bytes], exact: bool) -> ServedBlocks:
        """Blocks that memory misses are read from disk, on the calling thread."""
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
        """Whether `get` would find them. It counts as a use: the client is about to fetch or to store them."""
        with self._lock:
            for block_hash in reversed(hashes):
                entry = self.table.resident.get(block_hash)
                if entry is not None and entry.header.root == root:
                    self.table.touch(entry)
            return [
                any(not _why_not(header, root, exact) for header in self.table.versions(block_hash))
                for block_hash in hashes
            ]

    def headers_of(self, hashes: Sequence[bytes], *, coming: bool = False) -> list[BlockHeader | None]:
        """Of what is held under these hashes, with `coming` also of what is on its way here."""
        with self._lock:
            entries = self.table.arriving.values() if coming else ()
            arriving = {entry.header.hash: entry.header for entry in entries}
            return [next(iter(self.table.versions(one)), arriving.get(one)) for one in hashes]

    def reserve(self, header: BlockHeader) -> memoryview | None:
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
                self.table.memory.give(entry.raw)
                return False
            entry.checked_at = now
            self.counters.stored_total += 1
            self.counters.stored_bytes_total += header.length
            self.table.insert(entry)
            self._wake_disk()  # `reserve` may have found nothing to be written
            return True

    def abandon(self, header: BlockHeader, buffer: memoryview) -> None:
        with self._lock:
            self.table.memory.give(self.table.arrived(header, buffer).raw)
            self.counters.abandoned_total += 1

    def erase(self, root: bytes, hashes: Sequence[bytes]) -> int:
        """Forget those of these blocks that no other block continues, in memory and on disk. Returns how many. Raises
        OSError while the disk has not erased all: who asks again learns when it has."""
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
        if self._disk is not None and (on_disk or self._disk.owes) and not self._disk.forget(on_disk):
            raise OSError("the disk has not erased all")
        return erased

    def _release(self, entries: list[BlockEntry]) -> None:
        with self._lock:
            while entries:
                self.table.unpin(entries.pop())
            self._wake_disk()

    def next_spill(self) -> BlockEntry | None:
        """While there is little room, the next block to be written to disk, pinned. Blocks that are on disk already are
        evicted on the way."""
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
        """A block of `next_spill` or `pin_unwritten` was written, or cannot be. False: the disk is to forget it."""
        with self._lock:
            wanted = entry.resident  # else it was erased, or replaced by a better one, while it was written
            if written and wanted:
                self.counters.spilled_total += 1
                self.table.add_on_disk(entry.header)
            self.table.unpin(entry)
            return wanted

    def lost_on_disk(self, hashes: Sequence[bytes]) -> None:
        with self._lock:
            for block_hash in hashes:
                self.counters.disk_evictions_total += self.table.remove_on_disk(block_hash)

    def unwritten(self) -> list[BlockEntry]:
        """Blocks that a restart would lose, the most recently used first, parents before their children."""
        with self._lock:
            entries = [one for one in self.table.resident.values() if not self.table.is_on_disk(one.header)]
            return sorted(entries, key=lambda entry: -entry.tick)

    def pin_unwritten(self, entry: BlockEntry) -> bool:
        """Pin one of those, for `spilled`, if it is still there."""
        with self._lock:
            if entry.resident:
                self.table.pin(entry)
            return entry.resident

    def take_changes(self) -> list[StoredChange]:
        with self._lock:
            changes, self.table.changes = self.table.changes, []
            return changes

    def holdings(self) -> tuple[list[StoredChange], list[BlockHeader]]:
        """The changes since the last `take_changes`, and what is held after exactly those."""
        with self._lock:
            changes, self.table.changes = self.table.changes, []
            return changes, list(self.table.held())

    def check_integrity(self) -> None:
        with self._lock:
            self.table.check_integrity()

    def _expect(self, header: BlockHeader, *, asked_for: bool = False) -> BlockEntry | None:
        entry = self.table.expect(header, asked_for=asked_for)
        self._wake_disk()
        return entry

    def _wake_disk(self) -> None:
        """Under the lock."""
        if self._disk is not None and self.table.room < self._spare_bytes:
            self._disk.wake()

    def _is_whole(self, entry: BlockEntry) -> bool:
        """Checks a pinned block. A damaged one is unpinned and dropped from memory."""
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
        """Read a block from disk into memory, pinned. If it cannot be, count why."""
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
        """Under the lock: the block that was read, pinned, or one that came meanwhile and is as good."""
        table, header = self.table, coming.header
        table.arrived(header, coming.view)
        is_current = table.on_disk.get(header.hash) is header
        if not readable and is_current:
            table.remove_on_disk(header.hash)
        entry = table.resident.get(header.hash)
        if entry is not None and entry.header.root == header.root and (header.lossy or not entry.header.lossy):
            table.memory.give(coming.raw)
        elif readable and is_current and not coming.doomed:
            table.insert(coming)
            entry = coming
            self.counters.disk_hits_total += 1
        else:
            table.memory.give(coming.raw)
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
