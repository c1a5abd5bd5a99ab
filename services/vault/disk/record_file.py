"""Records of a segment file, read and written whole. Adapter to the file system; holds no state.

Offsets and lengths are in bytes. All of it raises OSError.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvfleet.vault.disk.segments import PREFIX_BYTES, Kind, RecordPrefix

_ZEROS = memoryview(bytes(1024 * 1024))


@contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    file = os.open(path, flags | os.O_CLOEXEC)
    try:
        yield file
    finally:
        os.close(file)


def write(file: int, offset: int, *parts: bytes | memoryview) -> None:
    """All of it: a full disk first cuts a call short, and says what is wrong at the next one."""
    left = [memoryview(part) for part in parts if len(part)]
    while left:
        written = os.pwritev(file, left, offset)
        offset += written
        left = _after(left, written)


def read(file: int, offset: int, *parts: memoryview) -> int:
    """As much as there is; how much that was."""
    left = [part for part in parts if len(part)]
    total = 0
    while left and (count := os.preadv(file, left, offset + total)):
        total += count
        left = _after(left, count)
    return total


def overwrite(file: int, offset: int, prefix: RecordPrefix) -> None:
    """The record's header and payload with zeros; then its prefix says so."""
    at, end = offset + PREFIX_BYTES, offset + prefix.record_bytes
    while at < end:
        count = min(end - at, len(_ZEROS))
        write(file, at, _ZEROS[:count])
        at += count
    write(file, offset, prefix._replace(kind=Kind.ERASED).packed())


def _after(parts: list[memoryview], done: int) -> list[memoryview]:
    while parts and done >= len(parts[0]):
        done -= len(parts[0])
        parts = parts[1:]
    return [parts[0][done:], *parts[1:]] if parts else []
