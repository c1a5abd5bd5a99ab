"""Where a server listens and how a client chooses: socket files, stale ones, Unix before TCP on the same host."""

from __future__ import annotations

import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from kvproto.dataplane.addresses import UnixAddress, listening_unix, parse
from kvproto.dataplane.client import DataPlaneClient
from kvproto.dataplane.errors import PeerGone
from kvproto.dataplane.keys import KeyRing
from kvproto.dataplane.server import DataPlaneServer
from kvproto.errors import InvalidRequest, Unavailable
from tests.integration.dataplane.conftest import Plane, soon
from tests.integration.dataplane.stores import IDENTITY, SECRET, MemoryStore

Start = Callable[..., Plane]
RING = KeyRing({"k": SECRET})


def server_at(path: Path | None = None, tcp: tuple[str, int] | None = None) -> DataPlaneServer:
    return DataPlaneServer(MemoryStore(), RING, IDENTITY, unix_path=path, tcp=tcp)


def connect(addresses: list[str], *, same_host: bool) -> str:
    client = DataPlaneClient.connect(addresses, RING, identity="w1", expect=IDENTITY, same_host=same_host)
    assert client.echo(1, soon()) > 0
    client.close()
    return client.address


def test_a_unix_socket_is_preferred_on_the_same_host(socket_path: Path) -> None:
    server = server_at(socket_path, ("127.0.0.1", 0))
    server.start()
    try:
        unix, tcp = server.addresses
        assert (unix, tcp.rpartition(":")[0]) == (f"unix:{socket_path}", "tcp:127.0.0.1")
        assert connect([tcp, unix], same_host=True) == unix
        assert connect([tcp, unix], same_host=False) == tcp
        assert connect(["unix:/nowhere/s.sock", tcp], same_host=True) == tcp
        with pytest.raises(PeerGone):
            connect([unix], same_host=False)
    finally:
        server.close()
    assert not socket_path.exists()
    with pytest.raises(PeerGone):
        connect([unix, tcp], same_host=True)


def test_a_socket_that_nobody_serves_is_passed_over(socket_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(socket_path))
    server = server_at(tcp=("127.0.0.1", 0))
    server.start()
    try:
        assert connect([f"unix:{socket_path}", *server.addresses], same_host=True) == server.addresses[0]
    finally:
        server.close()


def test_the_socket_is_its_owners_alone(socket_path: Path) -> None:
    path = socket_path.parent / "made" / "s.sock"
    listener, _ = listening_unix(path)
    listener.close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_folder_that_others_may_enter_is_refused(socket_path: Path) -> None:
    socket_path.parent.chmod(0o755)
    with pytest.raises(Unavailable, match="0755"):
        server_at(socket_path).start()


def test_a_stale_socket_is_replaced(socket_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(socket_path))
    server = server_at(socket_path)
    server.start()
    try:
        assert connect(list(server.addresses), same_host=True) == f"unix:{socket_path}"
    finally:
        server.close()


def test_a_socket_in_use_is_not_taken(start: Start, socket_path: Path) -> None:
    plane = start("unix")
    with pytest.raises(Unavailable, match="another process serves"):
        server_at(socket_path).start()
    assert plane.connect().echo(1, soon()) > 0


def test_what_is_no_socket_is_not_removed(socket_path: Path) -> None:
    socket_path.write_text("precious")
    with pytest.raises(Unavailable, match="no socket"):
        server_at(socket_path).start()
    assert socket_path.read_text() == "precious"


def test_a_path_that_is_too_long_is_named(socket_path: Path) -> None:
    with pytest.raises(Unavailable, match="at most 107"):
        server_at(socket_path.parent / ("x" * 100)).start()


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(Unavailable, match=f"127.0.0.1:{port}"):
            server_at(tcp=("127.0.0.1", port)).start()


def test_a_failed_start_leaves_nothing(socket_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = server_at(socket_path, ("127.0.0.1", taken.getsockname()[1]))
        with pytest.raises(Unavailable):
            server.start()
    assert not socket_path.exists()
    server.close()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "unix:",
        "unix:relative",
        "tcp:",
        "tcp:host",
        "tcp:host:",
        "tcp:host:0",
        "tcp:h:70000",
        "tcp:h:x",
        "udp:h:1",
    ],
)
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(InvalidRequest):
        parse(text)


def test_addresses_are_read_as_they_are_written() -> None:
    for text in ("unix:/run/k/s.sock", "tcp:127.0.0.1:80", "tcp:::1:80", "tcp:host.name:65535"):
        assert str(parse(text)) == text
    assert parse("unix:/a:b") == UnixAddress("/a:b")
