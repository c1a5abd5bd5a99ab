"""Adapter: one connected socket with deadlines, plain or under TLS. No other file sends or receives.

Each call has one deadline of `time.monotonic()`, however the bytes trickle. Used by one thread at a time; any thread
may call `abort`.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from typing import Any

from kvproto.dataplane.block import BlockHeader
from kvproto.dataplane.errors import HandshakeRefused, PeerGone, PeerTimeout
from kvproto.dataplane.wire import HEAD_BYTES, Head, Message, unpack, unpack_head

_MOST_BUFFERS = 512  # of one sendmsg; IOV_MAX is 1,024
_SCRATCH_BYTES = 256 * 1024


def _ignore(piece: memoryview) -> None:
    pass


class Link:
    """Owns a socket. All methods raise PeerTimeout or PeerGone."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._tls: ssl.SSLSocket | None = None
        self._aborted = False
        self.is_local = sock.family == socket.AF_UNIX
        self.bytes_in = 0  # without what TLS adds
        self.bytes_out = 0

    def start_tls(self, context: ssl.SSLContext, deadline: float, *, server_name: str | None = None) -> None:
        """A client gives `server_name`. Raises HandshakeRefused (tls), too."""
        is_server = server_name is None
        try:
            self._sock.settimeout(_left(deadline))
            self._sock = self._tls = context.wrap_socket(
                self._sock, server_side=is_server, server_hostname=server_name, do_handshake_on_connect=False
            )
            if self._aborted:
                raise PeerGone("the connection was ended")
            self._tls.settimeout(_left(deadline))
            self._tls.do_handshake()
        except TimeoutError:
            raise PeerTimeout("TLS was not agreed in time") from None
        except (ssl.SSLError, ssl.CertificateError) as error:
            raise HandshakeRefused(f"TLS: {error}", reason="tls") from None
        except (OSError, ValueError) as error:
            raise PeerGone(f"the connection ended: {error}") from None

    def receive_into(self, view: memoryview, deadline: float, on_bytes: Callable[[memoryview], None] = _ignore) -> None:
        """Fill `view`, of bytes; `on_bytes` sees each piece while the processor's cache still has it."""
        with _as_peer_errors():
            while view:
                self._sock.settimeout(_left(deadline))
                count = self._sock.recv_into(view)
                if not count:
                    raise PeerGone("the connection ended")
                self.bytes_in += count
                on_bytes(view[:count])
                view = view[count:]

    def receive(self, count: int, deadline: float) -> bytes:
        """The caller has checked that `count` is small enough to allocate."""
        received = bytearray(count)
        self.receive_into(memoryview(received), deadline)
        return bytes(received)

    def receive_block(self, header: BlockHeader, view: memoryview, deadline: float) -> bool:
        """Fill `view`, of `header.length` bytes; whether the checksum is right."""
        checking = header.checking()
        self.receive_into(view, deadline, checking.update)
        return bool(checking.intdigest() == header.checksum)

    def skip(self, count: int, deadline: float) -> None:
        scratch = memoryview(bytearray(min(count, _SCRATCH_BYTES)))
        while count:
            piece = scratch[: min(count, len(scratch))]
            self.receive_into(piece, deadline)
            count -= len(piece)

    def receive_head(self, deadline: float) -> Head:
        """Raises ProtocolError, too."""
        return unpack_head(self.receive(HEAD_BYTES, deadline))

    def receive_message(self, deadline: float) -> tuple[Message, int]:
        """A message and the length of its body. Raises ProtocolError, too."""
        return self.receive_meta(self.receive_head(deadline), deadline)

    def receive_meta(self, head: Head, deadline: float) -> tuple[Message, int]:
        return unpack(head, self.receive(head.meta_length, deadline)), head.body_length

    def send(self, buffers: Sequence[Any], deadline: float) -> None:
        """Contiguous buffers of any type, in order."""
        views = [view for view in (memoryview(buffer).cast("B") for buffer in buffers) if view]
        with _as_peer_errors():
            if self._tls is not None:
                for view in views:
                    self._send_one(view, deadline)
                return
            first = 0
            while first < len(views):
                self._sock.settimeout(_left(deadline))
                count = self._sock.sendmsg(views[first : first + _MOST_BUFFERS])
                self.bytes_out += count
                while count:
                    sent = min(count, len(views[first]))
                    count -= sent
                    if sent == len(views[first]):
                        first += 1
                    else:
                        views[first] = views[first][sent:]

    def _send_one(self, view: memoryview, deadline: float) -> None:
        while view:
            self._sock.settimeout(_left(deadline))
            count = self._sock.send(view)
            self.bytes_out += count
            view = view[count:]

    def fileno(self) -> int:
        return self._sock.fileno()

    def has_arrived(self, within_s: float = 0.0) -> bool:
        """Whether bytes or the end can be read within that time."""
        if self._tls is not None and self._tls.pending():
            return True
        poll = select.poll()
        try:
            poll.register(self._sock, select.POLLIN)
            return bool(poll.poll(within_s * 1000))
        except (OSError, ValueError):
            return True  # reading will tell

    def abort(self) -> None:
        """Any thread: running calls raise PeerGone."""
        self._aborted = True
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.close()


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise PeerTimeout("the deadline passed")
    return left


class _as_peer_errors(contextlib.AbstractContextManager[None]):
    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if isinstance(error, TimeoutError):
            raise PeerTimeout("the deadline passed") from None
        if isinstance(error, OSError | ValueError):
            raise PeerGone(f"the connection ended: {error or type(error).__name__}") from None
