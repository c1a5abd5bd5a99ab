"""Who may open the data plane: both ends prove that they hold a key; strangers cost little and learn nothing."""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kvproto.dataplane import addresses, handshake_bytes
from kvproto.dataplane.client import DataPlaneClient
from kvproto.dataplane.errors import DataPlaneError, HandshakeRefused, PeerGone, PeerTimeout, ProtocolError
from kvproto.dataplane.handshake_bytes import HandshakeVerdict, Hello, Reply
from kvproto.dataplane.keys import KeyRing
from kvproto.dataplane.server import DataPlaneServer, ServingLimits
from kvproto.errors import InvalidRequest, Unavailable
from tests.integration.dataplane.conftest import Certificates, Plane, soon
from tests.integration.dataplane.stores import IDENTITY, ROOT, SECRET, MemoryStore, made
from tests.support.waiting import LIMIT_S, wait_until

OTHER = bytes(reversed(range(32)))
Start = Callable[..., Plane]


def raw(address: str) -> socket.socket:
    sock = addresses.connected(addresses.parse(address), time.monotonic() + LIMIT_S)
    sock.settimeout(LIMIT_S)
    return sock


def received(sock: socket.socket, count: int) -> bytes:
    """So many bytes, or what came before the end."""
    data = b""
    while len(data) < count:
        try:
            piece = sock.recv(count - len(data))
        except ConnectionResetError:
            break
        if not piece:
            break
        data += piece
    return data


def hello(key_id: str = "k", expect: str = IDENTITY, version: int = handshake_bytes.VERSION) -> bytes:
    return Hello(version, key_id, "w1", expect, secrets.token_bytes(handshake_bytes.NONCE_BYTES)).packed()


@contextmanager
def fake_server(answer: Callable[[socket.socket], Any]) -> Iterator[str]:
    """One that answers its first connection with whatever a test likes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            sock, _ = listener.accept()
            sock.settimeout(LIMIT_S)
            with sock:
                answer(sock)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"tcp:127.0.0.1:{listener.getsockname()[1]}"
        thread.join(LIMIT_S)


def connect(address: str, ring: KeyRing, **changes: Any) -> DataPlaneClient:
    options: dict[str, Any] = {"identity": "w1", "expect": IDENTITY, "same_host": True}
    return DataPlaneClient.connect([address], ring, **options | changes)


# ---------------------------------------------------------------------- keys


def test_without_a_common_key_nobody_gets_in(plane: Plane) -> None:
    with pytest.raises(HandshakeRefused) as refused:
        plane.connect(ring=KeyRing({"other": SECRET}))
    assert refused.value.reason == "unknown_key"
    wait_until(lambda: plane.server.counters.refused == {"unknown_key": 1})
    assert plane.server.counters.connections == 0


def test_a_client_that_is_told_the_wrong_secret_refuses_the_server(plane: Plane) -> None:
    with pytest.raises(HandshakeRefused) as refused:
        plane.connect(ring=KeyRing({"k": OTHER}))
    assert refused.value.reason == "server_proof"
    wait_until(lambda: sum(plane.server.counters.refused.values()) == 1)


def test_a_wrong_proof_is_refused(start: Start) -> None:
    plane = start("tcp")
    asked = hello()
    for proof in (
        bytes(32),
        handshake_bytes.client_proof(OTHER, asked, b""),
        handshake_bytes.server_proof(SECRET, asked, b""),
    ):
        with raw(plane.address) as sock:
            sock.sendall(asked)
            reply = received(sock, handshake_bytes.REPLY_BYTES)
            assert reply[-32:] == handshake_bytes.server_proof(SECRET, asked, reply[:-32])
            sock.sendall(proof)
            assert received(sock, 10) == bytes([HandshakeVerdict.BAD_PROOF])
    wait_until(lambda: plane.server.counters.refused == {"bad_proof": 3})


def test_a_servers_own_proof_sent_back_to_it_is_refused(start: Start) -> None:
    plane = start("tcp")
    with raw(plane.address) as sock:
        sock.sendall(hello())
        sock.sendall(received(sock, handshake_bytes.REPLY_BYTES)[-32:])
        assert received(sock, 10) == bytes([HandshakeVerdict.BAD_PROOF])


def test_without_any_key_there_is_nothing_to_try(start: Start) -> None:
    plane = start("unix")
    with pytest.raises(Unavailable, match="kvfleet init"):
        plane.connect(ring=KeyRing())
    assert plane.server.counters.bytes_in == 0


def test_a_server_without_keys_lets_nobody_in(start: Start) -> None:
    plane = start("tcp")
    plane.ring.update({})
    with pytest.raises(HandshakeRefused) as refused:
        plane.connect(ring=KeyRing({"k": SECRET}))
    assert refused.value.reason == "unknown_key"


def test_a_fake_server_is_refused() -> None:
    """It holds no key: neither silence, nor WELCOME, nor an older proof helps it."""

    def claims(sock: socket.socket) -> None:
        received(sock, handshake_bytes.HELLO_BYTES)
        sock.sendall(
            Reply(handshake_bytes.VERSION, HandshakeVerdict.WELCOME, IDENTITY, bytes(32)).packed()
            + secrets.token_bytes(32)
        )
        assert received(sock, 1) == b""  # the client proved nothing to it

    with fake_server(claims) as address, pytest.raises(HandshakeRefused) as refused:
        connect(address, KeyRing({"k": SECRET}))
    assert refused.value.reason == "server_proof"

    with fake_server(lambda sock: received(sock, 1000)) as address, pytest.raises(PeerTimeout):
        connect(address, KeyRing({"k": SECRET}), timeout_s=0.3)
    talks = b"HTTP/1.1 400 Bad Request\r\n" * 10
    with fake_server(lambda sock: sock.sendall(talks)) as address, pytest.raises(DataPlaneError):
        connect(address, KeyRing({"k": SECRET}))


def test_a_server_that_answers_by_another_name_is_refused() -> None:
    def answer(sock: socket.socket) -> None:
        asked = received(sock, handshake_bytes.HELLO_BYTES)
        reply = Reply(handshake_bytes.VERSION, HandshakeVerdict.WELCOME, "vault-2", bytes(32)).packed()
        sock.sendall(reply + handshake_bytes.server_proof(SECRET, asked, reply))
        received(sock, 1)

    with fake_server(answer) as address, pytest.raises(HandshakeRefused) as refused:
        connect(address, KeyRing({"k": SECRET}))
    assert refused.value.reason == "identity"


def test_who_expects_somebody_else_is_refused(plane: Plane) -> None:
    with pytest.raises(HandshakeRefused) as refused:
        plane.connect(expect="vault-2")
    assert refused.value.reason == "identity"
    wait_until(lambda: plane.server.counters.refused == {"identity": 1})


@pytest.mark.parametrize("name", ["", "x" * 65, "a\0b"])
def test_names_that_fit_no_handshake(start: Start, name: str) -> None:
    plane = start("unix")
    with pytest.raises(InvalidRequest):
        plane.connect(identity=name)
    with pytest.raises(InvalidRequest):
        DataPlaneServer(MemoryStore(), plane.ring, name)


# ---------------------------------------------------------------------- replays and versions


def test_a_recorded_client_is_of_no_use(start: Start) -> None:
    plane = start("tcp")
    asked = hello()
    with raw(plane.address) as sock:
        sock.sendall(asked)
        reply = received(sock, handshake_bytes.REPLY_BYTES)
        proof = handshake_bytes.client_proof(SECRET, asked, reply[:-32])
        sock.sendall(proof)
        assert received(sock, 1) == bytes([HandshakeVerdict.WELCOME])
    with raw(plane.address) as sock:
        sock.sendall(asked + proof)
        again = received(sock, handshake_bytes.REPLY_BYTES)
        assert again != reply
        assert received(sock, 10) == bytes([HandshakeVerdict.BAD_PROOF])


def test_a_recorded_server_is_of_no_use(start: Start) -> None:
    plane = start("tcp")
    with raw(plane.address) as sock:
        sock.sendall(hello())
        recorded = received(sock, handshake_bytes.REPLY_BYTES)
    with fake_server(lambda sock: sock.sendall(recorded)) as address, pytest.raises(HandshakeRefused) as refused:
        connect(address, plane.ring)
    assert refused.value.reason == "server_proof"


def test_another_version_is_named(start: Start) -> None:
    plane = start("tcp")
    with raw(plane.address) as sock:
        sock.sendall(hello(version=9))
        reply, proof = handshake_bytes.unpack_reply(received(sock, handshake_bytes.REPLY_BYTES))
        assert (reply.verdict, reply.version, proof) == (HandshakeVerdict.VERSION, handshake_bytes.VERSION, bytes(32))
    wait_until(lambda: plane.server.counters.refused == {"version": 1})

    def newer(sock: socket.socket) -> None:
        received(sock, handshake_bytes.HELLO_BYTES)
        sock.sendall(Reply(9, HandshakeVerdict.VERSION, IDENTITY, bytes(32)).packed() + bytes(32))

    with fake_server(newer) as address, pytest.raises(HandshakeRefused, match="speaks version 9"):
        connect(address, plane.ring)


# ---------------------------------------------------------------------- rotation


def test_rotation_needs_no_pause(plane: Plane) -> None:
    before = plane.connect()
    plane.ring.update({"k": SECRET, "new": OTHER})
    assert before.has(ROOT, [], False, soon()) == []
    assert plane.connect(ring=KeyRing({"k": SECRET})).echo(1, soon()) > 0  # has not heard of it yet
    assert plane.connect(ring=KeyRing({"new": OTHER})).echo(1, soon()) > 0


def test_a_client_that_heard_of_a_key_first_uses_an_older_one(plane: Plane) -> None:
    client = plane.connect(ring=KeyRing({"k": SECRET, "new": OTHER}))
    assert client.echo(1, soon()) > 0
    wait_until(lambda: plane.server.counters.refused == {"unknown_key": 1})


def test_a_withdrawn_key_ends_its_connections(plane: Plane) -> None:
    old, new = plane.connect(), KeyRing({"new": OTHER})
    plane.ring.update({"new": OTHER})
    with pytest.raises(ProtocolError) as ended:
        old.put(ROOT, [made(1)], soon())
    assert ended.value.reason == "key_withdrawn"
    assert plane.server.counters.malformed == 0
    with pytest.raises(HandshakeRefused):
        plane.connect(ring=KeyRing({"k": SECRET}))
    assert plane.connect(ring=new).has(ROOT, [made(1)[0].hash], False, soon()) == [False]


# ---------------------------------------------------------------------- limits


def test_strangers_are_sent_away_in_time(start: Start) -> None:
    plane = start("tcp", ServingLimits(handshake_s=0.2))
    with raw(plane.address) as silent, raw(plane.address) as slow:
        slow.sendall(hello()[:100])
        assert received(silent, 1) == b""
        assert received(slow, 1) == b""
    wait_until(lambda: plane.server.counters.refused == {"timeout": 2})


def test_strangers_do_not_shut_genuine_clients_out(start: Start) -> None:
    plane = start("tcp", ServingLimits(handshakes=8, handshake_s=30))
    strangers = [raw(plane.address) for _ in range(40)]
    assert plane.connect().echo(1, soon()) > 0
    wait_until(lambda: plane.server.counters.refused.get("gone", 0) >= 32)
    for stranger in strangers:
        stranger.close()


def test_a_full_server_says_so(start: Start) -> None:
    plane = start("unix", ServingLimits(connections=2))
    first, second = plane.connect(), plane.connect()
    with pytest.raises(HandshakeRefused) as refused:
        plane.connect()
    assert refused.value.reason == "busy"
    first.close()
    wait_until(lambda: plane.server.counters.open_connections == 1)
    assert plane.connect().echo(1, soon()) > 0
    assert second.echo(1, soon()) > 0


def test_an_idle_connection_ends(start: Start) -> None:
    plane = start("unix", ServingLimits(idle_s=0.1))
    client = plane.connect()
    assert plane.server.counters.connections == 1
    wait_until(lambda: plane.server.counters.open_connections == 0)
    with pytest.raises(PeerGone):
        client.echo(1, soon())
    assert client.closed
    with pytest.raises(PeerGone):
        client.echo(1, soon())


# ---------------------------------------------------------------------- TLS


def test_tls_is_not_left_out(start: Start, certificates: Certificates) -> None:
    """A client without TLS, one that trusts somebody else, a server without TLS: refused, and nobody is harmed."""
    plane = start("tls", ServingLimits(handshake_s=0.5))
    plain = start("tcp")
    with pytest.raises(DataPlaneError):
        plane.connect(tls=None)
    with pytest.raises(HandshakeRefused) as refused:
        plane.connect(tls=certificates.client(trusts=False))
    assert refused.value.reason == "tls"
    with pytest.raises(DataPlaneError):
        plain.connect(tls=certificates.client(), timeout_s=0.5)
    assert plane.connect().echo(1, soon()) > 0
    assert plain.connect().echo(1, soon()) > 0


def test_certificates_of_clients(certificates: Certificates) -> None:
    ring = KeyRing({"k": SECRET})
    server = DataPlaneServer(
        MemoryStore(), ring, IDENTITY, tcp=("127.0.0.1", 0), tls=certificates.server(asks_client=True)
    )
    server.start()
    try:
        with pytest.raises(DataPlaneError):
            connect(server.addresses[0], ring, tls=certificates.client())
        client = connect(server.addresses[0], ring, tls=certificates.client(shows=True))
        assert client.echo(1000, soon()) > 0
        client.close()
        assert server.counters.refused.get("tls", 0) == 1
    finally:
        server.close()


def test_tls_does_not_replace_the_key(start: Start) -> None:
    plane = start("tls")
    with pytest.raises(HandshakeRefused) as refused:
        plane.connect(ring=KeyRing({"k": OTHER}))
    assert refused.value.reason == "server_proof"
