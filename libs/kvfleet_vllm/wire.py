"""The messages between a worker and the vLLM server beside it, and their frames. Pure; both sides import it.

    frame = 4 bytes, big endian, the length of the rest │ msgpack of [name, field, ...]

They run over a Unix stream socket on which the worker listens. It names the path in each request, in the HTTP body:
`kv_transfer_params: {"kvfleet": {"version": VERSION, "socket": PATH}}` (all of it: `request_params`). vLLM's scheduler
sends an EngineHello first. Either side closes the connection when it cannot read the other, or when the other does not
read; vLLM comes back with the next request.

Blocks lie in slots of a shared memory that the worker owns. Each of vLLM's own workers, one a rank, opens a connection
to the same path, with a WorkerHello first:

    save       GrantSlots ──▶ scheduler, BlocksSaving or StateSaving ──▶ worker; each rank, BlocksSaved ──▶ worker
    restore    in a request ──▶ scheduler, Scheduled ──▶ worker; each rank, BlocksRead ──▶ worker
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import msgpack

KEY = "kvfleet"  # in a request's kv_transfer_params
VERSION = 4
MAX_FRAME = 1 << 20  # bytes after the length
ERASE_HASHES = 4096  # at most in one EraseBlocks: it must fit into a socket's buffer while an idle vLLM reads nothing


@dataclass(frozen=True, slots=True)
class EngineHello:
    """vLLM's first message. `instance` is drawn anew by each of its EngineCore processes. What a version of vLLM does
    not tell is None in `facts`, see `engine_facts`."""

    version: int
    instance: str
    pid: int
    vllm: str
    facts: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Scheduled:
    """vLLM gave a request its blocks, for the first time or again after a preemption. Of its tokens `cached` were in
    the device's cache and `restored` are brought from outside. Precedes the request's first token."""

    request: str
    cached: int
    restored: int


@dataclass(frozen=True, slots=True)
class EngineStep:
    """vLLM scheduled `tokens` tokens of `sequences` sequences at once, of all requests. The step before took
    `seconds`; 0.0 if that is not known, as of one after which vLLM waited. `prefill_tokens` of the tokens stood in a
    prompt, or are outputs computed again after a preemption. Only the worker's own requests are in `preempted`."""

    seconds: float
    sequences: int
    tokens: int
    prefill_tokens: int
    preempted: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class EraseBlocks:
    """From the worker: forget the cached blocks of these hashes, which are as vLLM's KV events have them. A request
    that reaches vLLM after this message hits none of them. An idle vLLM reads it with the next request only."""

    number: int
    hashes: tuple[int | bytes, ...]


@dataclass(frozen=True, slots=True)
class BlocksErased:
    """The answer to an EraseBlocks: so many blocks lost their hashes, those in use included."""

    number: int
    blocks: int


@dataclass(frozen=True, slots=True)
class GrantSlots:
    """From the worker, to vLLM's scheduler: free slots to save blocks in. They are vLLM's until it has told a
    BlocksSaving of them, or the connection ends. An idle vLLM reads it with the next request only."""

    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BlocksSaving:
    """The blocks of a request from number `at` on, outputs included, will lie in these slots, which were
    granted. Each of vLLM's workers tells when its part is there; it does not where a connection ends, or vLLM."""

    request: str
    at: int
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StateSaving:
    """The same of a request's recurrent state behind its first `at` blocks, which takes all of these slots."""

    request: str
    at: int
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WorkerHello:
    """The first message of each of vLLM's workers. Slots of equal `format` mean the same; it is empty where blocks can
    neither be saved nor restored. A rank's part of a block, in all cache groups, has `block_bytes`; a slot has the
    parts of all ranks."""

    version: int
    rank: int
    ranks: int
    format: bytes
    block_bytes: int


@dataclass(frozen=True, slots=True)
class BlocksSaved:
    """From one of vLLM's workers: its rank's part of these slots, named by one of those, is there."""

    request: str
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BlocksRead:
    """From one of vLLM's workers: it has read what it was to restore for the request, so many blocks in so many
    seconds, or has given it up: 0 blocks."""

    request: str
    blocks: int
    seconds: float


Message = (
    EngineHello
    | Scheduled
    | EngineStep
    | EraseBlocks
    | BlocksErased
    | GrantSlots
    | BlocksSaving
    | StateSaving
    | WorkerHello
    | BlocksSaved
    | BlocksRead
)

_FORMS: dict[type[Message], tuple[type, ...]] = {
    EngineHello: (int, str, int, str, dict),
    Scheduled: (str, int, int),
    EngineStep: (float, int, int, int, list),
    EraseBlocks: (int, list),
    BlocksErased: (int, int),
    GrantSlots: (list,),
    BlocksSaving: (str, int, list),
    StateSaving: (str, int, list),
    WorkerHello: (int, int, int, bytes, int),
    BlocksSaved: (str, list),
    BlocksRead: (str, int, float),
}
_ITEMS: dict[type[Message], type | tuple[type, ...]] = {  # of the last field
    EngineStep: str,
    EraseBlocks: (int, bytes),
    GrantSlots: int,
    BlocksSaving: int,
    StateSaving: int,
    BlocksSaved: int,
}
_NAMES = {kind.__name__: kind for kind in _FORMS}
_FIELDS = {kind: tuple(field.name for field in fields(kind)) for kind in _FORMS}


def encode(messages: Iterable[Message]) -> bytes:
    """Their frames. Raises ValueError for a message that is too large."""
    return b"".join(_frame(message) for message in messages)


def _frame(message: Message) -> bytes:
    kind = type(message)
    body: bytes = msgpack.packb([kind.__name__, *(getattr(message, name) for name in _FIELDS[kind])])
    if len(body) > MAX_FRAME:
        raise ValueError(f"{kind.__name__} of {len(body)} bytes, more than {MAX_FRAME}")
    return struct.pack(">I", len(body)) + body


class Decoder:
    """Cuts what a connection brings into messages. After a ValueError it is of no more use."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """The messages that are whole now. Raises ValueError for what it cannot read."""
        self._pending += data
        found: list[Message] = []
        start = 0
        while len(self._pending) >= start + 4:
            (size,) = struct.unpack_from(">I", self._pending, start)
            if size > MAX_FRAME:
                raise ValueError(f"a frame of {size} bytes, more than {MAX_FRAME}")
            end = start + 4 + size
            if len(self._pending) < end:
                break
            found.append(_message(bytes(self._pending[start + 4 : end])))
            start = end
        del self._pending[:start]
        return found


def _message(body: bytes) -> Message:
    try:
        name, *values = msgpack.unpackb(body)
    except (ValueError, TypeError) as error:  # msgpack's own errors are ValueErrors
        raise ValueError(f"a frame that is no message: {type(error).__name__}: {error}") from error
    kind = _NAMES.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ValueError(f"a message that is not known: {name!r:.80}")
    form = _FORMS[kind]
    if len(values) != len(form) or not all(map(isinstance, values, form)):
        raise ValueError(f"{name} of another form: {[type(value).__name__ for value in values]}")
    if kind in _ITEMS:
        if not all(isinstance(item, _ITEMS[kind]) for item in values[-1]):
            raise ValueError(f"{name} with items of another form")
        values[-1] = tuple(values[-1])
    return kind(*values)
