"""How blocks lie in a segment file of a vault's disk tier, and records read and written whole. Holds no state.

    segment := MAGIC record*                  record := prefix header payload
    prefix  := tag kind header_length payload_length header_crc prefix_crc          24 bytes, little-endian

The prefix has a checksum of its own: while it is right, the next record can be found, whatever happened to this one.
The header is `BlockHeader.packed` in msgpack; it has the payload's checksum, which is verified when a block is read.

A record is written once; only its kind changes, in place: BLOCK -> ERASING -> ERASED. ERASING says that header and
payload are about to be zeroed, so that the next scan finishes an erasure that was cut short. Functions raise OSError.
"""

from __future__ import annotations

import os
import re
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

import msgpack

from kvproto.dataplane.block import MAX_BLOCK_BYTES, BlockHeader, unpack_header
from kvproto.errors import CodecError

MAGIC = b"kvfseg\x00\x01"  # with the format's version
MAX_HEADER_BYTES = 1024 * 1024

_FIELDS = struct.Struct("<4sB3xIII")
_CRC = struct.Struct("<I")
_TAG = b"kvbl"
PREFIX_BYTES = _FIELDS.size + _CRC.size
_NAME = re.compile(r"segment-(\d{10})\Z")

_ZEROS = memoryview(bytes(1024 * 1024))


class Kind(IntEnum):
    BLOCK = 1
    ERASING = 2
    ERASED = 3


class RecordPrefix(NamedTuple):
    kind: Kind
    header_bytes: int
    payload_bytes: int
    header_crc: int

    @property
    def record_bytes(self) -> int:
        return PREFIX_BYTES + self.header_bytes + self.payload_bytes

    def packed(self) -> bytes:
        fields = _FIELDS.pack(_TAG, self.kind, self.header_bytes, self.payload_bytes, self.header_crc)
        return fields + _CRC.pack(zlib.crc32(fields))


def record_start(header: BlockHeader) -> bytes:
    packed: bytes = msgpack.packb(header.packed())
    return RecordPrefix(Kind.BLOCK, len(packed), header.length, zlib.crc32(packed)).packed() + packed


def read_prefix(data: bytes) -> RecordPrefix | None:
    """From a record's first bytes; None if they are damaged, or too few."""
    if len(data) < PREFIX_BYTES:
        return None
    fields = data[: _FIELDS.size]
    tag, kind, header_bytes, payload_bytes, header_crc = _FIELDS.unpack(fields)
    (crc,) = _CRC.unpack_from(data, _FIELDS.size)
    if tag != _TAG or crc != zlib.crc32(fields) or kind not in tuple(Kind):
        return None
    if header_bytes > MAX_HEADER_BYTES or payload_bytes > MAX_BLOCK_BYTES:
        return None
    return RecordPrefix(Kind(kind), header_bytes, payload_bytes, header_crc)


def read_header(prefix: RecordPrefix, data: bytes) -> BlockHeader | None:
    """From the `header_bytes` behind a prefix; None if they are damaged."""
    if len(data) != prefix.header_bytes or zlib.crc32(data) != prefix.header_crc:
        return None
    try:
        header = unpack_header(msgpack.unpackb(data))
    except (CodecError, ValueError, msgpack.UnpackException):
        return None
    return header if header.length == prefix.payload_bytes else None


def name_of(number: int) -> str:
    return f"segment-{number:010d}"


def number_of(name: str) -> int | None:
    found = _NAME.match(name)
    return int(found.group(1)) if found else None


def parents_first(headers: Iterable[BlockHeader]) -> list[BlockHeader]:
    """Each block behind the one that it continues, where that is among them."""
    waiting = {header.hash: header for header in headers}
    ordered: list[BlockHeader] = []
    while waiting:
        chain = []
        current: BlockHeader | None = next(iter(waiting.values()))
        while current is not None:
            chain.append(waiting.pop(current.hash))
            current = waiting.get(current.parent)
        ordered += reversed(chain)
    return ordered


@contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    file = os.open(path, flags | os.O_CLOEXEC)
    try:
        yield file
    finally:
        os.close(file)


def write(file: int, offset: int, *parts: bytes | memoryview) -> None:
    """Writes all: a full disk first cuts a call short, and raises at the next one."""
    left = [memoryview(part) for part in parts if len(part)]
    while left:
        written = os.pwritev(file, left, offset)
        offset += written
        left = _after(left, written)


def read(file: int, offset: int, *parts: memoryview) -> int:
    left = [part for part in parts if len(part)]
    total = 0
    while left and (count := os.preadv(file, left, offset + total)):
        total += count
        left = _after(left, count)
    return total


def erase(file: int, records: Sequence[tuple[int, RecordPrefix]]) -> None:
    """Zeros these records' headers and payloads, for good. Cut short at any moment, by a power cut too, it is done or
    the next scan finishes it."""
    for offset, prefix in records:
        write(file, offset, prefix._replace(kind=Kind.ERASING).packed())
    os.fdatasync(file)
    for offset, prefix in records:
        at, end = offset + PREFIX_BYTES, offset + prefix.record_bytes
        while at < end:
            count = min(end - at, len(_ZEROS))
            write(file, at, _ZEROS[:count])
            at += count
    os.fdatasync(file)
    for offset, prefix in records:
        write(file, offset, prefix._replace(kind=Kind.ERASED).packed())


def sync_folder(path: Path) -> None:
    """That files in it were made and unlinked holds from now on, over a power cut too."""
    with opened(path, os.O_RDONLY) as folder:
        os.fsync(folder)


def _after(parts: list[memoryview], done: int) -> list[memoryview]:
    while parts and done >= len(parts[0]):
        done -= len(parts[0])
        parts = parts[1:]
    return [parts[0][done:], *parts[1:]] if parts else []
