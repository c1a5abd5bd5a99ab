"""Memory of a vault's blocks: buffers that are used again, and a bound that all of them keep. Pure; the store owns it.

    allocated ──take──▶ in use ──give──▶ free ──take──▶ in use
                                          └── another size needs the room ──▶ returned to the system

The kernel zeroes a fresh buffer's pages as they are first written, which takes as long as filling them; so buffers are
used again, for any block of their size class. Free ones count as used memory until they are returned.
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

MAPPED_BYTES = 256 * 1024  # from here on a buffer is a mapping, whose memory goes back to the system at once
CLASSES_PER_DOUBLING = 16  # so that at most a sixteenth of a buffer is unused
SMALLEST_STEP = 64
ENTRY_BYTES = 1100  # of a block beside its bytes: header, hashes, ids of 16 tokens, places in tables

Raw = Any  # a buffer: bytearray or mmap.mmap


def class_of(length: int) -> int:
    step = max(SMALLEST_STEP, (1 << (length - 1).bit_length()) // (2 * CLASSES_PER_DOUBLING))
    return -(-length // step) * step


def allocate(size: int) -> Raw:
    """Zeroed memory, in huge pages where the system has them: one fault for 2 MB instead of 512."""
    if size < MAPPED_BYTES:
        return bytearray(size)
    try:
        mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:  # a process has only so many mappings
        return bytearray(size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            mapped.madvise(mmap.MADV_HUGEPAGE)
    return mapped


@dataclass(eq=False, slots=True)
class VaultMemory:
    max_bytes: int
    used_bytes: int = 0  # of all buffers, free ones too, and ENTRY_BYTES for each in use
    free_bytes: int = 0  # of buffers that are free
    _free: dict[int, list[Raw]] = field(default_factory=dict)  # by size

    def take(self, length: int) -> Raw | None:
        """A buffer of at least `length` bytes; None if there is no room."""
        size = class_of(length)
        free = self._free.get(size)
        need = ENTRY_BYTES if free else size + ENTRY_BYTES
        spare = self.free_bytes - (size if free else 0)
        if self.used_bytes + need - spare > self.max_bytes:
            return None
        own = free.pop() if free else None
        if own is not None:
            self.free_bytes -= size
        while self.used_bytes + need > self.max_bytes:
            self._return_one()
        self.used_bytes += need
        return own if own is not None else allocate(size)

    def give(self, raw: Raw) -> None:
        """The buffer is free again: no view of it may be used any more."""
        self.used_bytes -= ENTRY_BYTES
        self.free_bytes += len(raw)
        self._free.setdefault(len(raw), []).append(raw)

    def _return_one(self) -> None:
        size = max(size for size, free in self._free.items() if free)
        self._free[size].pop()
        if not self._free[size]:
            del self._free[size]
        self.free_bytes -= size
        self.used_bytes -= size

    def check_integrity(self, in_use: list[Raw]) -> None:
        free = [raw for buffers in self._free.values() for raw in buffers]
        assert all(len(raw) == size for size, buffers in self._free.items() for raw in buffers)
        assert self.free_bytes == sum(len(raw) for raw in free)
        assert self.used_bytes == self.free_bytes + sum(len(raw) + ENTRY_BYTES for raw in in_use)
        assert self.used_bytes <= self.max_bytes
        assert len({id(raw) for raw in (*free, *in_use)}) == len(free) + len(in_use), "a buffer has two users"
