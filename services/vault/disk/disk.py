"""The vault's disk tier: blocks in append-only segment files. Adapter to the file system; owns a folder.

One thread uses a store, and one process a folder, by a lock. Files are for their owner alone (0600).

It is a cache. Writes are not synced: a crash of the process leaves at most a torn last record, which the next `open`
cuts off; checksums find what a power cut leaves. Erasures are synced, because deleted blocks must stay deleted. When
space runs out the oldest segment is dropped whole, however often its blocks are read.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from kvfleet.vault.disk import segments
from kvfleet.vault.disk.segments import MAGIC, PREFIX_BYTES, Kind, RecordPrefix
from kvproto.dataplane.block import BlockHeader

SEGMENT_BYTES = 256 * 1024 * 1024
LEAST_SEGMENTS = 8  # of a full store: dropping one loses no more than an eighth
LOCK = "lock"
_AT_ONCE = 1024  # bytes that a scan reads of a record; a header seldom has more
_PASSING = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN})  # errors that are not a block's


@dataclass(slots=True)
class DiskCounts:
    torn: int = 0  # segments cut off behind their last whole record
    torn_bytes: int = 0
    dropped: int = 0  # segments of which nothing could be read
    damaged: int = 0  # found by a scan or a read, and given up
    failed: int = 0  # not read this time
    evicted: int = 0
    erased: int = 0


@dataclass(eq=False, slots=True)
class _Segment:
    path: Path
    size: int = 0
    hashes: set[bytes] = field(default_factory=set)
    unerased: list[tuple[int, RecordPrefix]] = field(default_factory=list)  # given up, and the disk failed to erase


class _Place(NamedTuple):
    segment: _Segment
    offset: int
    prefix: RecordPrefix


@dataclass(eq=False)
class DiskStore:
    """Blocks by hash. `open` before anything else, `close` at the end. `max_bytes` bounds the files' sizes, with erased
    blocks: their space comes back with their segment."""

    folder: Path
    max_bytes: int
    segment_bytes: int = SEGMENT_BYTES
    counts: DiskCounts = field(default_factory=DiskCounts)
    bytes_used: int = 0  # by all files; never more than `max_bytes`
    _lock: int | None = None
    _places: dict[bytes, _Place] = field(default_factory=dict)
    _segments: list[_Segment] = field(default_factory=list)  # oldest first
    _next: int = 0
    _active: tuple[_Segment, int] | None = None  # the segment that is appended to, and its file
    _lost: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.max_bytes < 1 or self.segment_bytes < 1:
            raise ValueError("a disk tier needs room")
        self.segment_bytes = min(self.segment_bytes, max(self.max_bytes // LEAST_SEGMENTS, 1))

    def __len__(self) -> int:
        return len(self._places)

    def open(self) -> list[BlockHeader]:
        """Make the folder if there is none, lock it, and read the headers there. Returns the blocks, each behind the
        one that it continues. Raises OSError, BlockingIOError if another store has the folder."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            if error.errno == errno.EWOULDBLOCK:
                raise BlockingIOError(error.errno, "used by another vault", str(self.folder)) from error
            raise
        self._lock = lock
        try:
            return self._scan_all()
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Release the folder. A second call does nothing."""
        if self._lock is not None:
            with suppress(OSError):
                self._erase([])
        self._leave_active()
        self._places, self._segments, self._lost, self.bytes_used = {}, [], [], 0
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _scan_all(self) -> list[BlockHeader]:
        headers: dict[bytes, BlockHeader] = {}
        numbers = map(segments.number_of, os.listdir(self.folder))
        for number in sorted(number for number in numbers if number is not None):
            self._next = number + 1
            segment = _Segment(self.folder / segments.name_of(number))
            self._segments.append(segment)
            try:
                with segments.opened(segment.path, os.O_RDWR) as file:
                    headers.update(self._scan(segment, file))
            except OSError as error:
                if error.errno != errno.EIO:
                    raise
                self.counts.dropped += 1
                self._drop(segment)
        self._drop_empty()
        self._make_room(0)
        self._lost.clear()  # they were never announced
        return segments.parents_first(headers[block] for block in self._places)

    def _scan(self, segment: _Segment, file: int) -> dict[bytes, BlockHeader]:
        found: dict[bytes, BlockHeader] = {}
        end = os.fstat(file).st_size
        if end < len(MAGIC):
            self.counts.torn += 1
            self.counts.torn_bytes += end
            return found
        if os.pread(file, len(MAGIC), 0) != MAGIC:
            self.counts.dropped += 1
            return found
        self._grow(segment, len(MAGIC))
        while segment.size < end:
            at = segment.size
            start = os.pread(file, _AT_ONCE, at)
            prefix = segments.read_prefix(start)
            if prefix is None or at + prefix.record_bytes > end:
                self.counts.torn += 1
                self.counts.torn_bytes += end - at
                os.ftruncate(file, at)
                break
            self._grow(segment, prefix.record_bytes)
            place = _Place(segment, at, prefix)
            if prefix.kind is Kind.ERASING:
                segments.erase(file, [(at, prefix)])
            if prefix.kind is not Kind.BLOCK:
                continue
            if len(start) < PREFIX_BYTES + prefix.header_bytes:
                start = os.pread(file, PREFIX_BYTES + prefix.header_bytes, at)
            header = segments.read_header(prefix, start[PREFIX_BYTES : PREFIX_BYTES + prefix.header_bytes])
            if header is None:
                self.counts.damaged += 1
                segments.erase(file, [(at, prefix)])  # no erase could name it
                continue
            if header.hash in self._places:  # after a power cut an erased one may be back: the later counts
                self._erase([header.hash])
            found[header.hash] = header
            self._note(header.hash, place)
        return found

    def has(self, block: bytes) -> bool:
        return block in self._places

    def append(self, header: BlockHeader, payload: memoryview | bytes | bytearray) -> None:
        """Store a block; one that is there stays as it is. `take_lost` has the blocks that went for it. Raises OSError
        where it cannot be stored, with nothing of it left: the disk is full, or the block larger than the store."""
        data = memoryview(payload).cast("B")
        if data.nbytes != header.length:
            raise ValueError(f"{header.length} bytes are announced, {data.nbytes} are there")
        if header.hash in self._places:
            return
        if self._lock is None:
            raise OSError(errno.EBADF, "the disk tier is not open", str(self.folder))
        start = segments.record_start(header)
        prefix = segments.read_prefix(start)
        if prefix is None or len(MAGIC) + prefix.record_bytes > self.max_bytes:
            raise OSError(errno.EFBIG, "a block too large for the disk tier", str(self.folder))
        segment, file = self._segment_for(prefix.record_bytes)
        try:
            segments.write(file, segment.size, start, data)
        except OSError:
            try:
                os.ftruncate(file, segment.size)
            except OSError:  # opening the folder will cut it off
                self._leave_active()
            raise
        self._note(header.hash, _Place(segment, segment.size, prefix))
        self._grow(segment, prefix.record_bytes)

    def read(self, block: bytes, into: memoryview) -> BlockHeader | None:
        """The block's bytes to the first `header.length` of `into`. None if it is not there, or was damaged: then it is
        given up. Raises ValueError if `into` is too small."""
        place = self._places.get(block)
        if place is None:
            return None
        target = into.cast("B")
        if target.nbytes < place.prefix.payload_bytes:
            raise ValueError(f"{place.prefix.payload_bytes} bytes do not fit into {target.nbytes}")
        target = target[: place.prefix.payload_bytes]
        try:
            header = self._read_record(place, target)
        except OSError as error:
            self.counts.failed += 1
            if error.errno in _PASSING:
                return None
            header = None
        if header is None or header.hash != block or not header.matches(target):
            self.counts.damaged += 1
            self._lost.append(block)
            with suppress(OSError):
                self._erase([block])
            return None
        return header

    def forget(self, blocks: Iterable[bytes]) -> None:
        """Erase blocks for good: their bytes are overwritten and synced. Raises OSError if the disk fails; then the
        next call erases them, and a restart before it may bring them back."""
        known = [block for block in dict.fromkeys(blocks) if block in self._places]
        self._erase(known)
        self.counts.erased += len(known)
        self._drop_empty()

    @property
    def owes(self) -> bool:
        """Whether it failed to erase blocks that it has forgotten. From any thread."""
        return any(segment.unerased for segment in tuple(self._segments))

    def take_lost(self) -> list[bytes]:
        """Blocks that were evicted or damaged since the last call."""
        lost, self._lost = self._lost, []
        return lost

    def check_integrity(self) -> None:
        assert {block for segment in self._segments for block in segment.hashes} == set(self._places)
        assert all(block in place.segment.hashes for block, place in self._places.items())
        assert self.bytes_used == sum(segment.size for segment in self._segments) <= self.max_bytes
        assert all(segment.path.stat().st_size == segment.size for segment in self._segments)
        assert set(self.folder.iterdir()) == {self.folder / LOCK} | {segment.path for segment in self._segments}

    def _note(self, block: bytes, place: _Place) -> None:
        self._places[block] = place
        place.segment.hashes.add(block)

    def _read_record(self, place: _Place, target: memoryview) -> BlockHeader | None:
        start = bytearray(PREFIX_BYTES + place.prefix.header_bytes)
        with segments.opened(place.segment.path, os.O_RDONLY) as file:
            if segments.read(file, place.offset, memoryview(start), target) < place.prefix.record_bytes:
                return None
        prefix = segments.read_prefix(bytes(start[:PREFIX_BYTES]))
        return segments.read_header(prefix, bytes(start[PREFIX_BYTES:])) if prefix == place.prefix else None

    def _erase(self, blocks: list[bytes]) -> None:
        """They are gone from now on, also if this raises OSError; then the next call erases them."""
        for block in blocks:
            place = self._places.pop(block)
            place.segment.hashes.discard(block)
            place.segment.unerased.append((place.offset, place.prefix))
        failure: OSError | None = None
        for segment in self._segments:
            if not segment.unerased:
                continue
            try:
                with segments.opened(segment.path, os.O_RDWR) as file:
                    segments.erase(file, segment.unerased)
                segment.unerased.clear()
            except OSError as error:
                failure = error
        if failure is not None:
            raise failure

    def _segment_for(self, more: int) -> tuple[_Segment, int]:
        last = self._segments[-1] if self._segments else None
        if self._active is None and last is not None and last.size < self.segment_bytes:  # an earlier life stopped here
            self._active = last, os.open(last.path, os.O_RDWR | os.O_CLOEXEC)
        if self._active is not None and self._active[0].size + more > self.segment_bytes:
            self._leave_active()
        self._make_room(more if self._active is not None else more + len(MAGIC))
        if self._active is None:
            self._active = self._new_segment()
        return self._active

    def _new_segment(self) -> tuple[_Segment, int]:
        number, self._next = self._next, self._next + 1
        segment = _Segment(self.folder / segments.name_of(number))
        file = os.open(segment.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            segments.write(file, 0, MAGIC)
        except OSError:
            os.close(file)
            with suppress(OSError):
                segment.path.unlink()
            raise
        self._segments.append(segment)
        self._grow(segment, len(MAGIC))
        return segment, file

    def _grow(self, segment: _Segment, more: int) -> None:
        segment.size += more
        self.bytes_used += more

    def _make_room(self, more: int) -> None:
        while self.bytes_used + more > self.max_bytes and self._segments:
            evicted = self._segments[0].hashes
            self.counts.evicted += len(evicted)
            self._lost += evicted
            self._drop(self._segments[0])

    def _drop(self, segment: _Segment) -> None:
        if self._active is not None and self._active[0] is segment:
            self._leave_active()
        self._segments.remove(segment)
        self.bytes_used -= segment.size
        for block in segment.hashes:
            del self._places[block]
        segment.path.unlink(missing_ok=True)
        segments.sync_folder(self.folder)  # else a power cut brings back blocks that no list has: no erase reaches them

    def _drop_empty(self) -> None:
        active = self._active[0] if self._active is not None else None
        for segment in [one for one in self._segments if not one.hashes and one is not active]:
            self._drop(segment)

    def _leave_active(self) -> None:
        if self._active is not None:
            os.close(self._active[1])
            self._active = None
