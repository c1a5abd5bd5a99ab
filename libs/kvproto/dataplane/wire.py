"""The data plane's bytes after the handshake. Pure.

A frame is a head of 20 bytes, `meta_length` bytes of msgpack, then `body_length` bytes of blocks:

    version u8 │ kind u8 │ 0 u16 │ meta_length u32 │ body_length u64 │ crc32 of all before it, and of the meta u32

    Get  ──▶                     Put (headers) ──▶              Has, Erase, Echo ──▶
         ◀── Part + blocks           ◀── Wanted (a batch)           ◀── Held, Erased, Echoed + bytes
         ◀── Part + blocks       Body + blocks ──▶
    Stop ──▶  (if it likes)          ◀── Taken; Wanted ...      Failure ends the connection
         ◀── End

Frames are of VERSION 1. A server that reads version 2 says so in its Reply: then a Get or a Has may end in one field
more, a trace context (W3C `traceparent`).
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Annotated, Any, NamedTuple, get_args, get_type_hints

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
    """The outcome for one requested block."""

    OK = "ok"
    MISSING = "missing"
    CORRUPT = "corrupt"  # its checksum was wrong, or it was another block
    REFUSED = "refused"  # the client had no room for it, or wanted no more


class PutStatus(StrEnum):
    """The outcome for one offered block."""

    STORED = "stored"
    PRESENT = "present"
    REFUSED = "refused"  # by the store, for want of room or otherwise
    CORRUPT = "corrupt"


_SEND = 255  # in `Wanted`: send this one
_STATUS_OF: dict[int, PutStatus | None] = {**dict(enumerate(PutStatus)), _SEND: None}
_CODE_OF = {status: code for code, status in _STATUS_OF.items()}


class _Form(NamedTuple):
    """A field's form in msgpack."""

    read: Callable[[Any], Any]  # raises CodecError
    write: Callable[[Any], Any] | None = None  # None: the value itself


def _checked(name: str, rule: str, is_right: Callable[[Any], bool]) -> _Form:
    """A field that is its own msgpack value; `rule` is the error's text."""

    def read(value: Any) -> Any:
        if not is_right(value):
            raise CodecError(rule, field=name)
        return value

    return _Form(read)


def _number(name: str, least: int, most: int) -> _Form:
    return _checked(name, f"{least} to {most}", lambda value: type(value) is int and least <= value <= most)


def _text(name: str, most: int) -> _Form:
    def read(value: Any) -> str:
        if not isinstance(value, str):
            raise CodecError("a text", field=name)
        return value[:most]

    return _Form(read, lambda text: text[:most])


def _read_hashes(joined: Any) -> tuple[bytes, ...]:
    if not isinstance(joined, bytes) or len(joined) % HASH_BYTES or len(joined) > MAX_BLOCKS * HASH_BYTES:
        raise CodecError(f"at most {MAX_BLOCKS} hashes of {HASH_BYTES} bytes", field="hashes")
    return tuple(joined[at : at + HASH_BYTES] for at in range(0, len(joined), HASH_BYTES))


def _read_headers(packed: Any) -> tuple[BlockHeader | None, ...]:
    if not isinstance(packed, list):
        raise CodecError("a list", field="headers")
    return tuple(None if one is None else unpack_header(one) for one in packed)


def _read_wanted(codes: Any) -> tuple[PutStatus | None, ...]:
    if not isinstance(codes, bytes):
        raise CodecError("one byte per block", field="statuses")
    if not _STATUS_OF.keys() >= set(codes):
        raise CodecError("0 to 3", field="status")
    return tuple(map(_STATUS_OF.get, codes))


def _read_taken(codes: Any) -> tuple[PutStatus, ...]:
    statuses = tuple(status for status in _read_wanted(codes) if status is not None)
    if len(statuses) != len(codes):
        raise CodecError("a status of each block", field="statuses")
    return statuses


def _read_flags(flags: Any) -> tuple[bool, ...]:
    if not isinstance(flags, bytes) or any(flag > 1 for flag in flags):
        raise CodecError("one byte per block, 0 or 1", field="flags")
    return tuple(map(bool, flags))


def _write_headers(headers: tuple[BlockHeader | None, ...]) -> list[Any]:
    return [header and header.packed() for header in headers]


def _write_statuses(statuses: tuple[PutStatus | None, ...]) -> bytes:
    return bytes(map(_CODE_OF.__getitem__, statuses))


# Its content is not checked: a malformed context fails no request.
_TRACEPARENT = _checked(
    "traceparent",
    f"a text of at most {MAX_TRACEPARENT} characters",
    lambda text: type(text) is str and len(text) <= MAX_TRACEPARENT,
)
_Timeout = Annotated[int, _number("timeout_ms", 1, MAX_TIMEOUT_MS)]
_Root = Annotated[
    bytes,
    _checked("root", f"a root has {HASH_BYTES} bytes", lambda root: type(root) is bytes and len(root) == HASH_BYTES),
]
_Hashes = Annotated[tuple[bytes, ...], _Form(_read_hashes, b"".join)]


@dataclass(frozen=True, slots=True)
class Lookup:
    """A Get or a Has. An empty `traceparent` is left out."""

    timeout_ms: _Timeout
    root: _Root
    hashes: _Hashes
    exact: Annotated[bool, _checked("exact", "true or false", lambda value: type(value) is bool)]
    traceparent: Annotated[str, _TRACEPARENT] = ""


class Get(Lookup):
    __slots__ = ()


class Has(Lookup):
    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Erase:
    timeout_ms: _Timeout
    root: _Root
    hashes: _Hashes


@dataclass(frozen=True, slots=True)
class Put:
    timeout_ms: _Timeout
    root: _Root
    headers: Annotated[tuple[BlockHeader, ...], _Form(_read_headers, _write_headers)]


@dataclass(frozen=True, slots=True)
class Echo:
    timeout_ms: _Timeout
    nbytes: Annotated[int, _number("nbytes", 0, MAX_ECHO_BYTES)]


@dataclass(frozen=True, slots=True)
class Stop:
    """Ends a Get early. Ignored when it is already over."""


@dataclass(frozen=True, slots=True)
class Part:
    """The next requested blocks; None: missing. The body has the others' bytes."""

    headers: Annotated[tuple[BlockHeader | None, ...], _Form(_read_headers, _write_headers)]


@dataclass(frozen=True, slots=True)
class End:
    """The end of a Get."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """For each of the next offered blocks: None to send it, else why not."""

    statuses: Annotated[tuple[PutStatus | None, ...], _Form(_read_wanted, _write_statuses)]


@dataclass(frozen=True, slots=True)
class Body:
    """The body has the bytes of the wanted blocks."""


@dataclass(frozen=True, slots=True)
class Taken:
    """The outcome for each of the batch's blocks, unwanted ones included."""

    statuses: Annotated[tuple[PutStatus, ...], _Form(_read_taken, _write_statuses)]


@dataclass(frozen=True, slots=True)
class Held:
    flags: Annotated[tuple[bool, ...], _Form(_read_flags, bytes)]


@dataclass(frozen=True, slots=True)
class Erased:
    count: Annotated[int, _number("count", 0, MAX_BLOCKS)]


@dataclass(frozen=True, slots=True)
class Echoed:
    """The body has `nbytes` bytes."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why the server ends the connection."""

    reason: Annotated[str, _text("reason", 40)]
    text: Annotated[str, _text("text", 500)]


Request = Get | Has | Erase | Put | Echo | Stop
Message = Request | Part | End | Wanted | Body | Taken | Held | Erased | Echoed | Failure

_ANSWERS = (Part, End, Wanted, Body, Taken, Held, Erased, Echoed, Failure)
_KINDS: dict[int, type[Message]] = {**dict(enumerate(get_args(Request), 1)), **dict(enumerate(_ANSWERS, 16))}
_CODES = {kind: code for code, kind in _KINDS.items()}
_WITH_BODY = (Part, Body, Echoed)


def _forms_of(kind: type[Any]) -> tuple[tuple[str, _Form], ...]:
    hints = get_type_hints(kind, include_extras=True)
    return tuple((each.name, get_args(hints[each.name])[1]) for each in fields(kind))


_FORMS = {kind: _forms_of(kind) for kind in _CODES}


_HEAD = struct.Struct("!BBHIQ")
_CRC = struct.Struct("!I")
HEAD_BYTES = _HEAD.size + _CRC.size


class Head(NamedTuple):
    kind: type[Message]
    meta_length: int
    body_length: int
    packed: bytes


def frame(message: Message, body_length: int = 0) -> bytes:
    """Head and meta, to send before the body. Raises InvalidRequest if the message exceeds one frame."""
    forms = _FORMS[type(message)]
    if isinstance(message, Lookup) and not message.traceparent:
        forms = forms[:-1]
    meta: bytes = msgpack.packb(
        [write(getattr(message, name)) if write else getattr(message, name) for name, (_, write) in forms]
    )
    if len(meta) > MAX_META_BYTES:
        raise InvalidRequest(f"{type(message).__name__} has {len(meta)} bytes, at most {MAX_META_BYTES} fit a frame")
    head = _HEAD.pack(VERSION, _CODES[type(message)], 0, len(meta), body_length)
    return head + _CRC.pack(zlib.crc32(meta, zlib.crc32(head))) + meta


def unpack_head(data: bytes) -> Head:
    """Raises ProtocolError before it allocates the claimed length."""
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
        values = msgpack.unpackb(meta, raw=False, max_array_len=MAX_BLOCKS, max_map_len=0, max_ext_len=0)
        forms = _FORMS[head.kind]
        if issubclass(head.kind, Lookup) and len(values) < len(forms):
            forms = forms[:-1]  # the trace context is left out
        message = head.kind(*[form.read(value) for value, (_, form) in zip(values, forms, strict=True)])
        if isinstance(message, Put) and not all(header and header.root == message.root for header in message.headers):
            raise CodecError("a block of another root", field="headers")
        return message
    except (CodecError, ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise ProtocolError(f"{head.kind.__name__}: {str(error)[:120]}") from None
