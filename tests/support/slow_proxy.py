"""A bad network between two ends of the data plane, or of anything that speaks TCP or Unix sockets. For tests.

`SlowProxy` owns a listener and two threads per connection. What it does can be changed while bytes flow.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import tempfile
import threading
import time
from pathlib import Path

from kvproto.dataplane import addresses

_CHUNK_BYTES = 256 * 1024
_CHUNKS_PER_S = 100  # of a slow one: its bytes come steadily, not by the quarter megabyte


_Pair = tuple[socket.socket, socket.socket]


class SlowProxy:
    """Listens on `address`, of the same kind as `target` (`tcp:host:port`, `unix:/path`), and passes bytes on.

    `bytes_per_s`: of each direction, all connections together; None: as fast as it can. `latency_s`: added to every
    chunk. `stall`: while it is set nothing passes and nothing ends. `flip_every`: one bit of so many bytes towards the
    client is flipped, `flip_every_sent` of those towards the target; 0: none. A context manager.
    """

    def __init__(
        self,
        target: str,
        *,
        bytes_per_s: float | None = None,
        latency_s: float = 0.0,
        stall: threading.Event | None = None,
        flip_every: int = 0,
        flip_every_sent: int = 0,
    ) -> None:
        self.bytes_per_s = bytes_per_s
        self.latency_s = latency_s
        self.stall = stall or threading.Event()
        self.flip_every = flip_every
        self.flip_every_sent = flip_every_sent
        self.flipped = 0
        self.passed = 0  # bytes, both directions
        self._target = addresses.parse(target)
        self._folder = Path(tempfile.mkdtemp(prefix="slow-"))
        if isinstance(self._target, addresses.TcpAddress):
            self._listener, made = addresses.listening_tcp("127.0.0.1", 0)
            self.address = str(made)
        else:
            self._listener, own = addresses.listening_unix(self._folder / "proxy.sock")
            self.address = str(own)
        self._lock = threading.Lock()
        self._pairs: dict[_Pair, int] = {}  # threads that still use it
        self._threads: list[threading.Thread] = []
        self._free_at = [0.0, 0.0]  # by direction: when the link has sent what it was given
        self._since_flip = [0, 0]
        self._closing = threading.Event()
        self._listener.settimeout(0.05)
        self._start(self._accept)

    def __enter__(self) -> SlowProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def cut(self) -> None:
        """End all connections now, in the middle of whatever they do."""
        with self._lock:
            pairs = list(self._pairs)
        for sock in (sock for pair in pairs for sock in pair):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._closing.set()
        self._threads[0].join(5)
        self._listener.close()
        self.cut()  # now that no other connection can come
        for thread in self._threads[1:]:
            thread.join(5)
        shutil.rmtree(self._folder, ignore_errors=True)

    # ------------------------------------------------------------------ threads

    def _start(self, target: object, *args: object) -> None:
        thread = threading.Thread(target=target, args=args, name="slow-proxy", daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                client, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            try:
                server = addresses.connected(self._target, time.monotonic() + 5)
            except Exception:  # noqa: BLE001 (a target that is gone: the client sees its connection end)
                client.close()
                continue
            client.settimeout(None)
            server.settimeout(None)
            pair = (client, server)
            with self._lock:
                self._pairs[pair] = 2
            self._start(self._pump, client, server, 0, pair)
            self._start(self._pump, server, client, 1, pair)

    def _pump(self, source: socket.socket, sink: socket.socket, way: int, pair: _Pair) -> None:
        buffer = memoryview(bytearray(_CHUNK_BYTES))
        with contextlib.suppress(OSError):
            while count := source.recv_into(buffer[: self._chunk()]):
                self._pass_time(way, count)
                self._flip(way, buffer[:count])
                sink.sendall(buffer[:count])
                with self._lock:
                    self.passed += count
        for sock in pair:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._pairs[pair] -= 1
            is_last = not self._pairs[pair]
            if is_last:
                del self._pairs[pair]
        if is_last:
            for sock in pair:
                sock.close()

    def _chunk(self) -> int:
        rate = self.bytes_per_s
        return _CHUNK_BYTES if rate is None else max(1, min(_CHUNK_BYTES, int(rate / _CHUNKS_PER_S)))

    def _pass_time(self, way: int, count: int) -> None:
        rate = self.bytes_per_s
        if rate is not None:
            with self._lock:
                self._free_at[way] = max(self._free_at[way], time.monotonic()) + count / rate
                until = self._free_at[way]
            self._closing.wait(max(0.0, until - time.monotonic()))
        if self.latency_s:
            self._closing.wait(self.latency_s)
        while self.stall.is_set() and not self._closing.is_set():
            self._closing.wait(0.01)

    def _flip(self, way: int, chunk: memoryview) -> None:
        every = self.flip_every if way else self.flip_every_sent
        if not every:
            return
        with self._lock:
            at = every - self._since_flip[way] - 1
            while at < len(chunk):
                chunk[max(at, 0)] ^= 0x10
                self.flipped += 1
                at += every
            self._since_flip[way] = len(chunk) - (at - every) - 1
