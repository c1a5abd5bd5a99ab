"""The client of the data plane: one connection, one request at a time.

Any DataPlaneError ends the connection. The outcome for each block is data in the answer, not an error.
"""

from __future__ import annotations

import contextlib
import ssl
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvproto.block_hash import HASH_BYTES
from kvproto.dataplane import handshake, wire
from kvproto.dataplane.addresses import Address, TcpAddress, candidates, connected
from kvproto.dataplane.block import BlockHeader
from kvproto.dataplane.errors import DataPlaneError, HandshakeRefused, PeerGone, PeerTimeout, ProtocolError
from kvproto.dataplane.handshake_bytes import READS_TRACES, VERSION
from kvproto.dataplane.keys import Key, KeyRing
from kvproto.dataplane.link import Link
from kvproto.dataplane.wire import MAX_BLOCKS, MAX_ECHO_BYTES, MAX_TIMEOUT_MS, GetStatus, Message, PutStatus, frame
from kvproto.errors import InvalidRequest

__all__ = ["DataPlaneClient", "GetStatus", "PutStatus"]

Sink = Callable[[int, BlockHeader], memoryview | None]
OnBlock = Callable[[int, BlockHeader, memoryview], bool]
M = TypeVar("M", bound=Message)

_DRAIN_S = 0.25  # how long a stopped Get may still bring blocks before the connection ends


@dataclass(eq=False)
class DataPlaneClient:
    """An authenticated connection. Used by one thread at a time; `abort` by any.

    Deadlines are of `time.monotonic()`, for the whole operation. All operations raise PeerTimeout, PeerGone or
    ProtocolError, and close the connection then; a stopped `get` may close it, too.
    """

    link: Link
    address: str
    version: int = VERSION  # the newest that the server reads
    closed: bool = False

    @classmethod
    def connect(
        cls,
        addresses: Iterable[str],
        keyring: KeyRing,
        *,
        identity: str,
        expect: str,
        same_host: bool,
        tls: ssl.SSLContext | None = None,
        timeout_s: float = 2.0,
    ) -> DataPlaneClient:
        """Try each address, Unix sockets first if the peer is on this host, and the older keys where a server does not
        know the newest yet. Raises HandshakeRefused, PeerTimeout, PeerGone; Unavailable without keys; InvalidRequest
        for a malformed address."""
        deadline = time.monotonic() + timeout_s
        keyring.current()  # without keys there is nothing to try
        failure: DataPlaneError = PeerGone(f"{expect} has no address that can be reached from here")
        for address in candidates(addresses, same_host=same_host):
            for key in keyring.newest_first():
                try:
                    return cls._opened(address, key, identity, expect, tls, deadline)
                except DataPlaneError as error:
                    failure = error
                    if not (isinstance(error, HandshakeRefused) and error.reason == "unknown_key"):
                        break
        raise failure

    @classmethod
    def _opened(
        cls, address: Address, key: Key, identity: str, expect: str, tls: ssl.SSLContext | None, deadline: float
    ) -> DataPlaneClient:
        link = Link(connected(address, deadline))
        try:
            if tls is not None and isinstance(address, TcpAddress):
                link.start_tls(tls, deadline, server_name=address.host)
            version = handshake.ask(link, key, identity=identity, expect=expect, deadline=deadline)
        except BaseException:
            link.close()
            raise
        return cls(link, str(address), version)

    def get(
        self,
        root: bytes,
        hashes: Sequence[bytes],
        exact: bool,
        sink: Sink,
        on_block: OnBlock,
        deadline: float,
        traceparent: str = "",
    ) -> list[GetStatus]:
        """Fetch blocks of one root, in order, in one round trip (a BatchPromote). `exact`: no lossy ones.

        `sink(i, header)` returns the buffer for block i, writable and of `header.length` bytes, or None to skip it.
        `on_block(i, header, bytes)` is called when the block has arrived whole with the right checksum. If it returns
        False, this and all later blocks are REFUSED, and the connection may be `closed` afterwards.
        """
        _check(root, hashes)
        traceparent = traceparent if self.version >= READS_TRACES else ""
        statuses = [GetStatus.MISSING] * len(hashes)
        with self._operation(deadline):
            self._send(wire.Get(_ms(deadline), root, tuple(hashes), exact, traceparent), deadline)
            at = 0
            while (part := self._part(hashes[at:], deadline)) is not None:
                headers, length = part
                for index, header in enumerate(headers, at):
                    if header is None:
                        continue
                    length -= header.length
                    if header.root != root or header.hash != hashes[index]:
                        self.link.skip(header.length, deadline)
                        statuses[index] = GetStatus.CORRUPT
                        continue
                    statuses[index], go_on = self._take(index, header, sink, on_block, deadline)
                    if not go_on:
                        statuses[index:] = [GetStatus.REFUSED] * (len(hashes) - index)
                        self._stop(length, deadline)
                        return statuses
                at += len(headers)
        return statuses

    def _part(self, left: Sequence[bytes], deadline: float) -> tuple[Sequence[BlockHeader | None], int] | None:
        """Headers of the next blocks and the length of their bytes; None at the end."""
        message, length = self._receive(deadline)
        if isinstance(message, wire.End):
            return None
        part = _expected(message, wire.Part)
        if not 0 < len(part.headers) <= len(left) or length != sum(h.length for h in part.headers if h is not None):
            raise ProtocolError("a Part is not what was asked for")
        return part.headers, length

    def _take(
        self, index: int, header: BlockHeader, sink: Sink, on_block: OnBlock, deadline: float
    ) -> tuple[GetStatus, bool]:
        """Receive one block's bytes; False to stop."""
        room = sink(index, header)
        if room is None:
            self.link.skip(header.length, deadline)
            return GetStatus.REFUSED, True
        view = room.cast("B")
        if len(view) != header.length:
            raise InvalidRequest(f"a sink of {len(view)} bytes for a block of {header.length}")
        if not self.link.receive_block(header, view, deadline):
            return GetStatus.CORRUPT, True
        return (GetStatus.OK, True) if on_block(index, header, view) else (GetStatus.REFUSED, False)

    def _stop(self, length: int, deadline: float) -> None:
        """Stop the Get and receive what is on its way, or close the connection if that takes long. Never raises."""
        until = min(deadline, time.monotonic() + _DRAIN_S)
        try:
            self._send(wire.Stop(), until)
            self.link.skip(length, until)
            while True:
                message, length = self._receive(until)
                if isinstance(message, wire.End):
                    return
                _expected(message, wire.Part)
                self.link.skip(length, until)
        except DataPlaneError:
            self.close()

    def put(self, root: bytes, blocks: Sequence[tuple[BlockHeader, memoryview]], deadline: float) -> list[PutStatus]:
        """Offer blocks of one root, with sealed headers; sends only those that the server wants."""
        headers = tuple(header for header, _ in blocks)
        _check(root, [header.hash for header in headers])
        payloads = [memoryview(payload).cast("B") for _, payload in blocks]
        for header, payload in zip(headers, payloads, strict=True):
            if header.root != root or header.length != len(payload):
                raise InvalidRequest("a block of another root or length than its header says")
        statuses: list[PutStatus] = []
        with self._operation(deadline):
            self._send(wire.Put(_ms(deadline), root, headers), deadline)
            while len(statuses) < len(blocks):
                wanted = _expected(self._receive(deadline)[0], wire.Wanted)
                batch = range(len(statuses), len(statuses) + len(wanted.statuses))
                if not batch or batch.stop > len(blocks):
                    raise ProtocolError("more or fewer blocks are wanted than were offered")
                sent = [payloads[at] for at, why in zip(batch, wanted.statuses, strict=True) if why is None]
                if sent:
                    self.link.send([frame(wire.Body(), sum(map(len, sent))), *sent], deadline)
                taken = _expected(self._receive(deadline)[0], wire.Taken)
                if len(taken.statuses) != len(batch):
                    raise ProtocolError("not the status of each block")
                statuses += taken.statuses
        return statuses

    def has(
        self, root: bytes, hashes: Sequence[bytes], exact: bool, deadline: float, traceparent: str = ""
    ) -> list[bool]:
        """Which blocks are present; `exact`: lossy ones do not count."""
        _check(root, hashes)
        traceparent = traceparent if self.version >= READS_TRACES else ""
        with self._operation(deadline):
            self._send(wire.Has(_ms(deadline), root, tuple(hashes), exact, traceparent), deadline)
            held = _expected(self._receive(deadline)[0], wire.Held)
            if len(held.flags) != len(hashes):
                raise ProtocolError("not an answer for each block")
            return list(held.flags)

    def erase(self, root: bytes, hashes: Sequence[bytes], deadline: float) -> int:
        """How many blocks were present and are now removed."""
        _check(root, hashes)
        with self._operation(deadline):
            self._send(wire.Erase(_ms(deadline), root, tuple(hashes)), deadline)
            return _expected(self._receive(deadline)[0], wire.Erased).count

    def echo(self, nbytes: int, deadline: float) -> float:
        """Seconds until the server has sent `nbytes` bytes, at most 4 MiB: measures the link."""
        if not 0 <= nbytes <= MAX_ECHO_BYTES:
            raise InvalidRequest(f"0 to {MAX_ECHO_BYTES} bytes, got {nbytes}")
        with self._operation(deadline):
            began = time.monotonic()
            self._send(wire.Echo(_ms(deadline), nbytes), deadline)
            message, length = self._receive(deadline)
            _expected(message, wire.Echoed)
            if length != nbytes:
                raise ProtocolError("an echo of another length")
            self.link.skip(length, deadline)
            return time.monotonic() - began

    def abort(self) -> None:
        """Any thread: a running operation raises PeerGone at once."""
        self.link.abort()

    def has_ended(self) -> bool:
        """Whether the connection is closed or its end has arrived. Called between operations; costs microseconds."""
        return self.closed or self.link.has_arrived()

    def close(self) -> None:
        self.closed = True
        self.link.close()

    @contextlib.contextmanager
    def _operation(self, deadline: float) -> Iterator[None]:
        """Any exception closes the connection, as its bytes are out of step then."""
        if self.closed:
            raise PeerGone("this connection is closed")
        if deadline <= time.monotonic():
            raise PeerTimeout("the deadline has passed already")  # nothing was sent: the connection stays
        try:
            yield
        except BaseException:
            self.close()
            raise

    def _send(self, message: Message, deadline: float) -> None:
        self.link.send([frame(message)], deadline)

    def _receive(self, deadline: float) -> tuple[Message, int]:
        """A message and the length of its body. Raises ProtocolError for a Failure."""
        message, length = self.link.receive_message(deadline)
        if isinstance(message, wire.Failure):
            raise ProtocolError(f"the server ends the connection: {message.text}", reason=message.reason)
        return message, length


def _expected(message: Message, kind: type[M]) -> M:
    if not isinstance(message, kind):
        raise ProtocolError(f"{type(message).__name__} in place of {kind.__name__}")
    return message


def _check(root: bytes, hashes: Sequence[bytes]) -> None:
    if len(hashes) > MAX_BLOCKS:
        raise InvalidRequest(f"at most {MAX_BLOCKS} blocks a request, got {len(hashes)}")
    if any(len(each) != HASH_BYTES for each in (root, *hashes)):
        raise InvalidRequest(f"roots and hashes have {HASH_BYTES} bytes")


def _ms(deadline: float) -> int:
    return max(1, min(MAX_TIMEOUT_MS, int((deadline - time.monotonic()) * 1000)))
