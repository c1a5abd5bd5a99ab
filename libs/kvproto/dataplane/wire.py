"""The data plane's bytes after the handshake: frames, messages, limits. Pure.

A frame is a head of 20 bytes, `meta_length` bytes of msgpack, then `body_length` bytes of blocks:

    version u8 │ kind u8 │ 0 u16 │ meta_length u32 │ body_length u64 │ crc32 of all before it, and of the meta u32

    Get  ──▶                     Put (headers) ──▶              Has, Erase, Echo ──▶
         ◀── Part + blocks           ◀── Wanted (a batch)           ◀── Held, Erased, Echoed + bytes
         ◀── Part + blocks       Body + blocks ──▶
    Stop ──▶  (if it likes)          ◀── Taken; Wanted ...      Failure ends the connection
         ◀── End

Frames are of VERSION. What an end reads beyond that it announces: a server by the version in its Reply, which the proof
covers and which clients of version 1 do not look at; a client by using it.

    1   all of the above
    2   a Get or a Has may end in one field more, a trace context (W3C `traceparent`); there is none where nothing
        is traced
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

import msgpack

from kvproto.block_hash import HASH_BYTES
from kvproto.dataplane.block import BlockHeader, unpack_header
from kvproto.dataplane.errors import ProtocolError
from kvproto.dataplane.handshake_bytes import VERSION
from kvproto.errors import CodecError, InvalidRequest

MAX_BLOCKS = 8192
MAX_META_BYTES = 4 * 1024 * 1024
MAX_ECHO_BYTES = 4 * 1024 * 1024
MAX_TIMEOUT_MS = 3_600_000
MAX_TRACEPARENT = 128


class GetStatus(StrEnum):
    """What became of one block that was asked for."""

    OK = "ok"
    MISSING = "missing"
    CORRUPT = "corrupt"  # its checksum was wrong, or it was another block
    REFUSED = "refused"  # the asker had no room for it, or wanted no more


class PutStatus(StrEnum):
    """What became of one block that was offered."""

    STORED = "stored"
    PRESENT = "present"
    REFUSED = "refused"  # the store had no room for it, or would not have it
    CORRUPT = "corrupt"


_PUT_STATUSES = tuple(PutStatus)
_SEND = 255  # in `Wanted`: send this one


# ---------------------------------------------------------------------- messages


@dataclass(frozen=True, slots=True)
class Get:
    timeout_ms: int
    root: bytes
    hashes: tuple[bytes, ...]
    exact: bool
    traceparent: str = ""  # for servers that read it


@dataclass(frozen=True, slots=True)
class Has:
    timeout_ms: int
    root: bytes
    hashes: tuple[bytes, ...]
    exact: bool
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class Erase:
    timeout_ms: int
    root: bytes
    hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Put:
    timeout_ms: int
    root: bytes
    headers: tuple[BlockHeader, ...]


@dataclass(frozen=True, slots=True)
class Echo:
    timeout_ms: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Stop:
    """No more of this Get. Ignored when it is already over."""


@dataclass(frozen=True, slots=True)
class Part:
    """The next blocks asked for; None: not there. The body has the others' bytes."""

    headers: tuple[BlockHeader | None, ...]


@dataclass(frozen=True, slots=True)
class End:
    """Nothing more comes of this Get."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Of the next blocks offered: None to send it, else why not."""

    statuses: tuple[PutStatus | None, ...]


@dataclass(frozen=True, slots=True)
class Body:
    """The body has the bytes of the blocks that were wanted."""


@dataclass(frozen=True, slots=True)
class Taken:
    """What became of the batch's blocks, those included that were not wanted."""

    statuses: tuple[PutStatus, ...]


@dataclass(frozen=True, slots=True)
class Held:
    flags: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Erased:
    count: int


@dataclass(frozen=True, slots=True)
class Echoed:
    """The body has as many bytes as were asked for."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why the server ends the connection."""

    reason: str
    text: str


Request = Get | Has | Erase | Put | Echo | Stop
Message = Request | Part | End | Wanted | Body | Taken | Held | Erased | Echoed | Failure

_KINDS: dict[int, type[Message]] = {
    1: Get,
    2: Has,
    3: Erase,
    4: Put,
    5: Echo,
    6: Stop,
    16: Part,
    17: End,
    18: Wanted,
    19: Body,
    20: Taken,
    21: Held,
    22: Erased,
    23: Echoed,
    24: Failure,
}
_CODES = {kind: code for code, kind in _KINDS.items()}
_WITH_BODY = (Part, Body, Echoed)

# ---------------------------------------------------------------------- frames

_HEAD = struct.Struct("!BBHIQ")
_CRC = struct.Struct("!I")
HEAD_BYTES = _HEAD.size + _CRC.size


class Head(NamedTuple):
    kind: type[Message]
    meta_length: int
    body_length: int
    packed: bytes


def frame(message: Message, body_length: int = 0) -> bytes:
    """Head and meta; the body's bytes follow on their own. Raises InvalidRequest if it is too large for one frame."""
    meta = _meta(message)
    if len(meta) > MAX_META_BYTES:
        raise InvalidRequest(f"{type(message).__name__} has {len(meta)} bytes, at most {MAX_META_BYTES} fit a frame")
    head = _HEAD.pack(VERSION, _CODES[type(message)], 0, len(meta), body_length)
    return head + _CRC.pack(zlib.crc32(meta, zlib.crc32(head))) + meta


def unpack_head(data: bytes) -> Head:
    """Raises ProtocolError, before anything of the claimed length is allocated."""
    version, code, zero, meta_length, body_length = _HEAD.unpack(data[: _HEAD.size])
    if version != VERSION:
        raise ProtocolError(f"version {version}, this end speaks {VERSION}")
    kind = _KINDS.get(code)
    if kind is None or zero:
        raise ProtocolError(f"no frame of this protocol (kind {code})")
    if meta_length > MAX_META_BYTES:
        raise ProtocolError(f"a frame's meta of {meta_length} bytes, at most {MAX_META_BYTES}", reason="too_large")
    if body_length and kind not in _WITH_BODY:
        raise ProtocolError(f"{kind.__name__} has no body")
    return Head(kind, meta_length, body_length, data)


def unpack(head: Head, meta: bytes | bytearray) -> Message:
    """Raises ProtocolError."""
    (crc,) = _CRC.unpack(head.packed[_HEAD.size :])
    if crc != zlib.crc32(meta, zlib.crc32(head.packed[: _HEAD.size])):
        raise ProtocolError("a frame was damaged")
    try:
        fields = msgpack.unpackb(meta, raw=False, max_array_len=MAX_BLOCKS, max_map_len=0, max_ext_len=0)
        message: Message = _READERS[head.kind](*fields)
        return message
    except (CodecError, ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise ProtocolError(f"{head.kind.__name__}: {str(error)[:120]}") from None


def _meta(message: Message) -> bytes:
    match message:
        case Get(timeout_ms, root, hashes, exact, traceparent) | Has(timeout_ms, root, hashes, exact, traceparent):
            fields: list[Any] = [timeout_ms, root, b"".join(hashes), exact]
            fields += [traceparent] if traceparent else []
        case Erase(timeout_ms, root, hashes):
            fields = [timeout_ms, root, b"".join(hashes)]
        case Put(timeout_ms, root, headers):
            fields = [timeout_ms, root, [header.packed() for header in headers]]
        case Echo(timeout_ms, nbytes):
            fields = [timeout_ms, nbytes]
        case Part(found):
            fields = [[header and header.packed() for header in found]]
        case Wanted(wanted):
            fields = [bytes(_SEND if status is None else _PUT_STATUSES.index(status) for status in wanted)]
        case Taken(taken):
            fields = [bytes(map(_PUT_STATUSES.index, taken))]
        case Held(flags):
            fields = [bytes(flags)]
        case Erased(count):
            fields = [count]
        case Failure(reason, text):
            fields = [reason, text[:500]]
        case _:
            fields = []
    packed: bytes = msgpack.packb(fields)
    return packed


def _hashes(joined: Any) -> tuple[bytes, ...]:
    if not isinstance(joined, bytes) or len(joined) % HASH_BYTES or len(joined) > MAX_BLOCKS * HASH_BYTES:
        raise CodecError(f"at most {MAX_BLOCKS} hashes of {HASH_BYTES} bytes", field="hashes")
    return tuple(joined[at : at + HASH_BYTES] for at in range(0, len(joined), HASH_BYTES))


def _root(root: Any) -> bytes:
    if not isinstance(root, bytes) or len(root) != HASH_BYTES:
        raise CodecError(f"a root has {HASH_BYTES} bytes", field="root")
    return root


def _number(name: str, value: Any, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise CodecError(f"{least} to {most}", field=name)
    return value


def _flag(value: Any) -> bool:
    if type(value) is not bool:
        raise CodecError("true or false", field="exact")
    return value


def _traceparent(value: Any) -> str:
    """What it means is for who traces to say: garbage in it fails no request."""
    if not isinstance(value, str) or len(value) > MAX_TRACEPARENT:
        raise CodecError(f"a text of at most {MAX_TRACEPARENT} characters", field="traceparent")
    return value


def _timeout(value: Any) -> int:
    return _number("timeout_ms", value, 1, MAX_TIMEOUT_MS)


def _put(timeout_ms: Any, root: Any, headers: Any) -> Put:
    of = _root(root)
    read = tuple(map(unpack_header, _list(headers)))
    if any(header.root != of for header in read):
        raise CodecError("a block of another root", field="headers")
    return Put(_timeout(timeout_ms), of, read)


def _list(value: Any) -> Sequence[Any]:
    if not isinstance(value, list):
        raise CodecError("a list", field="headers")
    return value


def _statuses(codes: Any) -> tuple[PutStatus | None, ...]:
    if not isinstance(codes, bytes):
        raise CodecError("one byte per block", field="statuses")
    return tuple(None if code == _SEND else _PUT_STATUSES[_number("status", code, 0, 3)] for code in codes)


def _taken(codes: Any) -> Taken:
    statuses = tuple(status for status in _statuses(codes) if status is not None)
    if len(statuses) != len(codes):
        raise CodecError("a status of each block", field="statuses")
    return Taken(statuses)


def _held(flags: Any) -> Held:
    if not isinstance(flags, bytes) or any(flag > 1 for flag in flags):
        raise CodecError("one byte per block, 0 or 1", field="flags")
    return Held(tuple(map(bool, flags)))


def _failure(reason: Any, text: Any) -> Failure:
    if not isinstance(reason, str) or not isinstance(text, str):
        raise CodecError("texts")
    return Failure(reason[:40], text[:500])


def _part(headers: Any) -> Part:
    return Part(tuple(None if packed is None else unpack_header(packed) for packed in _list(headers)))


_READERS: dict[type[Message], Any] = {
    Get: lambda ms, root, hashes, exact, trace="": Get(
        _timeout(ms), _root(root), _hashes(hashes), _flag(exact), _traceparent(trace)
    ),
    Has: lambda ms, root, hashes, exact, trace="": Has(
        _timeout(ms), _root(root), _hashes(hashes), _flag(exact), _traceparent(trace)
    ),
    Erase: lambda ms, root, hashes: Erase(_timeout(ms), _root(root), _hashes(hashes)),
    Put: _put,
    Echo: lambda ms, nbytes: Echo(_timeout(ms), _number("nbytes", nbytes, 0, MAX_ECHO_BYTES)),
    Stop: Stop,
    Part: _part,
    End: End,
    Wanted: lambda codes: Wanted(_statuses(codes)),
    Body: Body,
    Taken: _taken,
    Held: _held,
    Erased: lambda count: Erased(_number("count", count, 0, MAX_BLOCKS)),
    Echoed: Echoed,
    Failure: _failure,
}
