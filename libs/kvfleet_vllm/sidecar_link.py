"""The connection from vLLM's scheduler, or one of its workers, to the worker beside vLLM. Owned by that one's main
thread, and never holds it up.

It needs no thread of its own: a Unix socket takes what fits into its buffer at once, and connects at once. A worker
that has not read for so long that the buffer is full (hundreds of steps) is treated as one that is gone.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Sequence

from kvfleet_vllm.wire import Decoder, Message, encode

log = logging.getLogger(__name__)

BUFFER = 1 << 20  # bytes asked for; the kernel may give less
PART = 1 << 16


class SidecarLink:
    """Closed until `open`, and again when the other side is gone, does not read, or cannot be understood."""

    def __init__(self, hello: Callable[[], Message]) -> None:
        self.path = ""  # of the last worker that was reached
        self._hello = hello
        self._opened = 0  # times
        self._refused = ""  # the last path that nobody listened at, which is logged once
        self._socket: socket.socket | None = None
        self._decoder = Decoder()

    @property
    def number(self) -> int:
        """Of the connection, no two have the same; 0 while closed."""
        return 0 if self._socket is None else self._opened

    def open(self, path: str) -> None:
        """To the worker that listens at `path`, in place of another one, unless it is open already."""
        if self._socket is not None and path == self.path:
            return
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        link.setblocking(False)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
        try:
            link.connect(path)
        except (OSError, ValueError) as error:  # ValueError: a path with a null byte
            link.close()
            if path != self._refused:
                log.warning("no connection to the worker at %.200s: %s", path, error)
            self._refused = path
            return
        self.close("another worker asks")
        self.path, self._refused, self._socket, self._decoder = path, "", link, Decoder()
        self._opened += 1
        log.info("connected to the worker at %s", path)
        self.send([self._hello()])

    def send(self, messages: Sequence[Message]) -> None:
        """All of them, or the link is closed. They are dropped where it is closed already."""
        if self._socket is None or not messages:
            return
        try:
            data = encode(messages)
            if self._socket.send(data) < len(data):
                self.close("the worker does not read")
        except BlockingIOError:
            self.close("the worker does not read")
        except (OSError, ValueError, TypeError) as error:  # of encoding: ValueError, TypeError
            self.close(str(error))

    def receive(self) -> list[Message]:
        """What has come since, without waiting. An end that has come is noticed."""
        found: list[Message] = []
        while self._socket is not None:
            try:
                data = self._socket.recv(PART)
                found += self._decoder.feed(data)
            except BlockingIOError:
                break
            except (OSError, ValueError) as error:
                self.close(str(error))
                break
            if not data:
                self.close("the worker hung up")
        return found

    def close(self, why: str) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
            log.warning("the connection to the worker at %s is closed: %s", self.path, why)
