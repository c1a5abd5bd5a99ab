"""Serves one authenticated connection, on its own thread, and counts. Requests come in turn, blocks in batches.

Memory is bounded by the batch: one batch of blocks (Get) or reservations (Put) is held at a time.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvproto.dataplane import wire
from kvproto.dataplane.block import BlockHeader
from kvproto.dataplane.errors import ProtocolError
from kvproto.dataplane.link import Link
from kvproto.dataplane.wire import MAX_BLOCKS, Echo, Erase, Get, Has, Lookup, Put, PutStatus, Stop, frame


@dataclass(frozen=True, slots=True)
class DataPlaneCounters:
    """Since the start, apart from `open_connections`, which is the present number."""

    connections: int = 0  # authenticated
    open_connections: int = 0
    refused: Mapping[str, int] = field(default_factory=dict)  # handshakes, by reason
    bytes_in: int = 0
    bytes_out: int = 0
    blocks_served: int = 0
    blocks_stored: int = 0
    checksum_failures: int = 0
    malformed: int = 0  # authenticated connections ended for malformed bytes
    timeouts: int = 0  # connections ended in the middle of a request
    store_failures: int = 0  # exceptions of the store


class Tally:
    """Thread-safe counts of a listener; `add` takes the names of `DataPlaneCounters`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._refused: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()

    def add(self, **counts: int) -> None:
        with self._lock:
            self._counts.update(counts)

    def refuse(self, reason: str) -> None:
        with self._lock:
            self._refused[reason] += 1

    def read(self) -> DataPlaneCounters:
        with self._lock:
            return DataPlaneCounters(**self._counts, refused=dict(self._refused))


_FIRST_BATCH_BLOCKS = 4  # of a Get, until it is known how large blocks are
_MOST_BATCH_BLOCKS = 512
_GRACE_S = 0.5  # after its deadline the client ends the connection; if not, this end does
_ECHO = memoryview(bytes(256 * 1024))


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One Get or Has that carried a trace context, served or failed. Times are of `time.time_ns()`."""

    kind: str  # "get", "has"
    traceparent: str
    client: str  # its identity
    began_ns: int
    ended_ns: int
    blocks: int  # requested
    hits: int
    nbytes: int  # of blocks sent
    from_disk: int  # hits that were not in memory
    error: str = ""


OnTraced = Callable[[TracedRequest], None]


@dataclass(frozen=True, slots=True)
class ServedBlocks:
    """A store's answer, in the order of the request; None: not there. The bytes stay as they are until `release`, which
    is called once, on any thread, when they are sent or never will be."""

    blocks: Sequence[tuple[BlockHeader, memoryview] | None]
    release: Callable[[], None]
    from_disk: int = 0  # blocks that memory did not have


class BlockStore(Protocol):
    """Called on connection threads, many at once. A subclass that keeps the last four methods stores nothing."""

    def get(self, root: bytes, hashes: Sequence[bytes], exact: bool) -> ServedBlocks:
        """`exact`: lossy blocks are not there. A request comes in several calls, a batch of its hashes each."""

    def has(self, root: bytes, hashes: Sequence[bytes], exact: bool) -> list[bool]: ...

    def reserve(self, header: BlockHeader) -> memoryview | None:
        """A writable buffer for a missing block's payload; None: not wanted. The store limits `header.length`, which
        the client claims. `commit` or `abandon` follows, exactly once."""
        return None

    def commit(self, header: BlockHeader, buffer: memoryview) -> bool:
        """The payload is complete and its checksum right. False: not stored."""
        return False

    def abandon(self, header: BlockHeader, buffer: memoryview) -> None:
        """The connection ended, or the checksum was wrong."""
        return

    def erase(self, root: bytes, hashes: Sequence[bytes]) -> int:
        """The number of blocks that were present."""
        return 0


@dataclass(frozen=True, slots=True)
class ServingLimits:
    connections: int = 4096  # three for each worker
    threads: int = 128  # connections served at one time; more of them wait
    handshakes: int = 32  # unauthenticated connections; a further one ends the oldest
    handshake_s: float = 2.0
    idle_s: float = 600.0  # until an authenticated connection without requests is ended
    request_s: float = 120.0  # the longest deadline of a request
    request_blocks: int = MAX_BLOCKS
    request_bytes: int = 8 * 1024 * 1024 * 1024  # a larger Put is refused, a larger Get is cut
    batch_bytes: int = 32 * 1024 * 1024  # held at once for one connection, or one block if that is larger


@dataclass(eq=False, slots=True)
class ServedConnection:
    """An authenticated connection, owned by the thread that serves it. Ends with a DataPlaneError, also when the client
    leaves."""

    link: Link
    client: str  # its identity
    trusted: Callable[[], bytes | None]  # the key that it has proven, if it is still valid
    store: BlockStore
    tally: Tally
    limits: ServingLimits
    on_traced: OnTraced | None
    idle_until: float = 0.0
    _hits: int = 0  # these three: of the present request
    _nbytes: int = 0
    _from_disk: int = 0

    def serve_one(self) -> None:
        """The next request, which has begun to arrive."""
        head = self.link.receive_head(time.monotonic() + self.limits.request_s)
        request, _ = self.link.receive_meta(head, time.monotonic() + self.limits.request_s)
        if self.trusted() is None:
            raise ProtocolError("the key of this connection was withdrawn", reason="key_withdrawn")
        match request:
            case Stop():
                pass  # the Get was over
            case Get() | Has() | Erase() | Put() | Echo():
                allowed_s = min(request.timeout_ms / 1000, self.limits.request_s)
                deadline = time.monotonic() + allowed_s + _GRACE_S
                if self.on_traced is not None and isinstance(request, Lookup) and request.traceparent:
                    self._answer_traced(request, deadline, self.on_traced)
                else:
                    self._answer(request, deadline)
            case _:
                raise ProtocolError(f"{head.kind.__name__} is no request")

    def _answer_traced(self, request: Lookup, deadline: float, on_traced: OnTraced) -> None:
        self._hits = self._nbytes = self._from_disk = 0
        began, error = time.time_ns(), ""
        try:
            self._answer(request, deadline)
        except Exception as failure:
            error = type(failure).__name__
            raise
        finally:
            kind = "get" if isinstance(request, Get) else "has"
            counts = (len(request.hashes), self._hits, self._nbytes, self._from_disk)
            on_traced(TracedRequest(kind, request.traceparent, self.client, began, time.time_ns(), *counts, error))

    def _answer(self, request: Lookup | Erase | Put | Echo, deadline: float) -> None:
        match request:
            case Get():
                self._limit(len(request.hashes))
                self._get(request, deadline)
            case Has(_, root, hashes, exact):
                self._limit(len(hashes))
                flags = tuple(map(bool, self.store.has(root, hashes, exact)))
                self._hits = sum(flags)
                self.link.send([frame(wire.Held(flags))], deadline)
            case Erase(_, root, hashes):
                self._limit(len(hashes))
                self.link.send([frame(wire.Erased(self.store.erase(root, hashes)))], deadline)
            case Put():
                self._limit(len(request.headers), sum(header.length for header in request.headers))
                self._put(request.headers, deadline)
            case Echo(_, nbytes):
                whole, rest = divmod(nbytes, len(_ECHO))
                self.link.send([frame(wire.Echoed(), nbytes), *([_ECHO] * whole), _ECHO[:rest]], deadline)

    def _limit(self, blocks: int, nbytes: int = 0) -> None:
        most = self.limits
        if blocks > most.request_blocks or nbytes > most.request_bytes:
            text = f"{blocks} blocks and {nbytes} bytes, at most {most.request_blocks} and {most.request_bytes}"
            raise ProtocolError(text, reason="too_large")

    def _get(self, request: Get, deadline: float) -> None:
        at, sent, batch = 0, 0, _FIRST_BATCH_BLOCKS
        while at < len(request.hashes) and sent < self.limits.request_bytes and not self._stopped(deadline):
            hashes = request.hashes[at : at + batch]
            served = self.store.get(request.root, hashes, request.exact)
            try:
                blocks = [
                    block if block is not None and _answers(block, request, asked) else None
                    for block, asked in zip(served.blocks, hashes, strict=True)
                ]
                payloads = [block[1] for block in blocks if block is not None]
                nbytes = sum(payload.nbytes for payload in payloads)
                part = wire.Part(tuple(block and block[0] for block in blocks))
                self.link.send([frame(part, nbytes), *payloads], deadline)
            finally:
                served.release()
            self.tally.add(blocks_served=len(payloads))
            self._hits += len(payloads)
            self._nbytes += nbytes
            self._from_disk += served.from_disk
            at += len(hashes)
            sent += nbytes
            if payloads:
                batch = max(1, min(_MOST_BATCH_BLOCKS, self.limits.batch_bytes * len(payloads) // nbytes))
        self.link.send([frame(wire.End())], deadline)

    def _stopped(self, deadline: float) -> bool:
        if not self.link.has_arrived():
            return False
        message, _ = self.link.receive_message(deadline)
        if not isinstance(message, Stop):
            raise ProtocolError(f"{type(message).__name__} in the middle of a Get")
        return True

    def _put(self, headers: Sequence[BlockHeader], deadline: float) -> None:
        batch: list[BlockHeader] = []
        nbytes = 0
        for header in headers:
            if batch and (nbytes + header.length > self.limits.batch_bytes or len(batch) == _MOST_BATCH_BLOCKS):
                self._receive_batch(batch, deadline)
                batch, nbytes = [], 0
            batch.append(header)
            nbytes += header.length
        if batch:
            self._receive_batch(batch, deadline)

    def _receive_batch(self, headers: Sequence[BlockHeader], deadline: float) -> None:
        reserved: dict[int, memoryview] = {}  # not committed yet, by place in the batch
        try:
            statuses = self._reserve(headers, reserved)
            self.link.send([frame(wire.Wanted(tuple(statuses)))], deadline)
            expected = sum(headers[at].length for at in reserved)
            if expected:
                message, length = self.link.receive_message(deadline)
                if not isinstance(message, wire.Body) or length != expected:
                    raise ProtocolError(f"{type(message).__name__} of {length} bytes, {expected} were wanted")
                for at in sorted(reserved):
                    is_whole = self.link.receive_block(headers[at], reserved[at], deadline)
                    statuses[at] = self._settle(headers[at], reserved.pop(at), is_whole)
            taken = tuple(status for status in statuses if status is not None)
            self.link.send([frame(wire.Taken(taken))], deadline)
        finally:
            for at, buffer in reserved.items():
                self.store.abandon(headers[at], buffer)

    def _reserve(self, headers: Sequence[BlockHeader], reserved: dict[int, memoryview]) -> list[PutStatus | None]:
        """For each block None, with its buffer in `reserved`, or why it is not wanted."""
        statuses: list[PutStatus | None] = []
        for at, header in enumerate(headers):
            if any(self.store.has(header.root, [header.hash], not header.lossy)):
                statuses.append(PutStatus.PRESENT)
                continue
            buffer = self.store.reserve(header)
            if buffer is None:
                statuses.append(PutStatus.REFUSED)
                continue
            view = buffer.cast("B")
            if len(view) != header.length:
                self.store.abandon(header, buffer)
                raise ValueError(f"the store reserved {len(view)} bytes for {header.length}")
            reserved[at] = view
            statuses.append(None)
        return statuses

    def _settle(self, header: BlockHeader, buffer: memoryview, is_whole: bool) -> PutStatus:
        if not is_whole:
            self.store.abandon(header, buffer)
            self.tally.add(checksum_failures=1)
            return PutStatus.CORRUPT
        if not self.store.commit(header, buffer):
            return PutStatus.REFUSED
        self.tally.add(blocks_stored=1)
        return PutStatus.STORED


def _answers(block: tuple[BlockHeader, memoryview], request: Get, asked: bytes) -> bool:
    """Guards against a store's mistake: no client gets another tenant's block."""
    header, payload = block
    return (
        header.root == request.root
        and header.hash == asked
        and header.length == payload.nbytes
        and not (request.exact and header.lossy)
    )
