"""The bad network of the other tests is as bad as it says, and no worse."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from kvproto.dataplane.addresses import connected, parse
from tests.support.slow_proxy import SlowProxy
from tests.support.waiting import LIMIT_S, wait_until


@pytest.fixture
def mirror() -> Iterator[str]:
    """A server that sends everything back."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer(sock: socket.socket) -> None:
            with sock:
                try:
                    while data := sock.recv(65536):
                        sock.sendall(data)
                except OSError:
                    pass

        def serve() -> None:
            while True:
                try:
                    sock, _ = listener.accept()
                except OSError:
                    return
                threading.Thread(target=answer, args=(sock,)).start()

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"tcp:127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(LIMIT_S)


def there_and_back(sock: socket.socket, data: bytes) -> bytes:
    sock.settimeout(LIMIT_S)
    sending = threading.Thread(target=sock.sendall, args=(data,))
    sending.start()
    back = b""
    while len(back) < len(data):
        piece = sock.recv(65536)
        if not piece:
            break
        back += piece
    sending.join()
    return back


def through(proxy: SlowProxy) -> socket.socket:
    return connected(parse(proxy.address), time.monotonic() + LIMIT_S)


def test_bytes_pass_as_they_are(mirror: str) -> None:
    data = bytes(range(256)) * 4000
    with SlowProxy(mirror) as proxy, through(proxy) as sock:
        assert there_and_back(sock, data) == data
        wait_until(lambda: (proxy.passed, proxy.flipped) == (2 * len(data), 0))


def test_a_rate_is_kept(mirror: str) -> None:
    with SlowProxy(mirror, bytes_per_s=1_000_000) as proxy, through(proxy) as sock:
        began = time.monotonic()
        there_and_back(sock, bytes(300_000))
        assert 0.3 <= time.monotonic() - began < 5


def test_bits_are_flipped_as_often_as_told(mirror: str) -> None:
    data = bytes(1_000_000)
    with SlowProxy(mirror, flip_every=100_000) as proxy, through(proxy) as sock:
        back = there_and_back(sock, data)
        assert proxy.flipped == 10
    assert [at for at, byte in enumerate(back) if byte] == list(range(99_999, 1_000_000, 100_000))


def test_a_stall_ends_nothing(mirror: str) -> None:
    with SlowProxy(mirror) as proxy, through(proxy) as sock:
        proxy.stall.set()
        sock.sendall(b"x")
        sock.settimeout(0.1)
        with pytest.raises(TimeoutError):
            sock.recv(1)
        proxy.stall.clear()
        sock.settimeout(LIMIT_S)
        assert sock.recv(1) == b"x"


def test_a_cut_ends_all_connections_and_others_may_come(mirror: str) -> None:
    with SlowProxy(mirror) as proxy, through(proxy) as first, through(proxy) as second:
        assert there_and_back(first, b"a") + there_and_back(second, b"b") == b"ab"
        proxy.cut()
        assert there_and_back_or_end(first) == there_and_back_or_end(second) == b""
        with through(proxy) as third:
            assert there_and_back(third, b"c") == b"c"


def there_and_back_or_end(sock: socket.socket) -> bytes:
    sock.settimeout(LIMIT_S)
    try:
        return sock.recv(1)
    except ConnectionResetError:
        return b""


def test_a_target_that_is_gone_ends_the_connection(mirror: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with SlowProxy(f"tcp:127.0.0.1:{port}") as proxy, through(proxy) as sock:
        assert there_and_back_or_end(sock) == b""


def test_nothing_is_left(mirror: str) -> None:
    before = set(threading.enumerate())
    proxy = SlowProxy(mirror, bytes_per_s=1000)
    sock = through(proxy)
    sock.sendall(bytes(100_000))
    wait_until(lambda: proxy.passed > 0)
    proxy.close()
    sock.close()
    wait_until(lambda: not [thread for thread in set(threading.enumerate()) - before if thread.name == "slow-proxy"])
