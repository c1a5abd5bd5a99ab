"""Whatever arrives, before and after authentication: that connection ends, the server and its other clients do not."""

from __future__ import annotations

import socket
import struct
import time
import tracemalloc
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvproto.dataplane import handshake, handshake_bytes, wire
from kvproto.dataplane.block import BlockHeader
from kvproto.dataplane.client import DataPlaneClient, GetStatus, PutStatus
from kvproto.dataplane.errors import PeerTimeout, ProtocolError
from kvproto.dataplane.keys import Key, KeyRing
from kvproto.dataplane.link import Link
from kvproto.dataplane.server import ServingLimits
from kvproto.dataplane.wire import Body, Echo, End, Failure, Get, Has, Held, Part, Put, Stop, Taken, Wanted, frame
from tests.integration.dataplane.conftest import Plane, soon
from tests.integration.dataplane.stores import IDENTITY, OTHER_ROOT, ROOT, SECRET, Block, hashes_of, made, made_many
from tests.integration.dataplane.test_handshake import fake_server, hello, raw, received
from tests.support.waiting import wait_until

Start = Callable[..., Plane]
REUSED = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def authenticated(plane: Plane) -> Link:
    """A link that has passed the handshake, to say on it what no client would."""
    link = Link(raw(plane.address))
    handshake.ask(link, Key("k", SECRET), identity="rogue", expect=IDENTITY, deadline=soon())
    return link


def head(
    kind: int, meta: bytes, *, version: int = handshake_bytes.VERSION, length: int | None = None, body: int = 0
) -> bytes:
    """A frame as its bytes are defined, not as our own code writes them."""
    front = struct.pack("!BBHIQ", version, kind, 0, len(meta) if length is None else length, body)
    return front + struct.pack("!I", zlib.crc32(meta, zlib.crc32(front))) + meta


def told_off(link: Link) -> Failure:
    message, _ = link.receive_message(soon())
    assert isinstance(message, Failure)
    with pytest.raises(Exception, match="ended"):
        link.receive(1, soon())
    return message


def still_serves(plane: Plane) -> None:
    client, block = plane.connect(), made(77)
    assert set(client.put(ROOT, [block], soon())) <= {PutStatus.STORED, PutStatus.PRESENT}
    assert client.has(ROOT, [block[0].hash], True, soon()) == [True]
    client.close()


# ---------------------------------------------------------------------- before authentication


def test_random_bytes_of_strangers(start: Start) -> None:
    plane = start("tcp", ServingLimits(handshake_s=0.3))
    random = Random(5)
    for size in (
        0,
        1,
        4,
        100,
        handshake_bytes.HELLO_BYTES - 1,
        handshake_bytes.HELLO_BYTES,
        handshake_bytes.HELLO_BYTES + 500,
        100_000,
    ):
        for start_of in (b"", handshake_bytes.MAGIC, handshake_bytes.MAGIC + bytes([handshake_bytes.VERSION])):
            with raw(plane.address) as sock:
                try:
                    sock.sendall((start_of + random.randbytes(size))[:size])
                    sock.shutdown(socket.SHUT_WR)
                    assert len(received(sock, 10_000)) <= handshake_bytes.REPLY_BYTES
                except OSError:
                    pass  # it was sent away while it spoke
    wait_until(lambda: sum(plane.server.counters.refused.values()) == 24)
    assert plane.server.counters.connections == 0
    assert plane.server.counters.bytes_in <= 24 * handshake_bytes.HELLO_BYTES
    still_serves(plane)


def test_strangers_make_the_server_allocate_nothing(start: Start) -> None:
    plane = start("tcp")
    tracemalloc.start()
    try:
        with raw(plane.address) as sock:
            try:
                for _ in range(20):
                    sock.sendall(head(4, b"", length=2**32 - 1, body=2**63) * 1000)
            except OSError:
                pass
            wait_until(lambda: sum(plane.server.counters.refused.values()) == 1)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000


def test_requests_before_the_proof_are_not_read(start: Start) -> None:
    plane = start("tcp")
    plane.store.fill([made(1)])
    with raw(plane.address) as sock:
        sock.sendall(hello() + frame(Get(1000, ROOT, (made(1)[0].hash,), False)) + bytes(32))
        answer = received(sock, 100_000)
    assert answer[handshake_bytes.REPLY_BYTES :] == bytes([handshake_bytes.HandshakeVerdict.BAD_PROOF])


# ---------------------------------------------------------------------- after it

BAD_FRAMES: dict[str, bytes] = {
    "nothing like a frame": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "another version": head(2, b"", version=2),
    "an unknown kind": head(99, b""),
    "a kind that only servers send": frame(Held((True,))),
    "a body of its own": frame(Body(), 100),
    "a body where none belongs": head(2, b"", body=5),
    "a meta as long as can be said": head(2, b"", length=2**32 - 1),
    "no msgpack": head(2, b"\xc1\xc1"),
    "msgpack of another shape": head(2, msgpack.packb({"a": 1})),
    "too few fields": head(2, msgpack.packb([1000, ROOT])),
    "a root that is too short": head(2, msgpack.packb([1000, ROOT[:8], bytes(16), True])),
    "hashes that are not whole": head(2, msgpack.packb([1000, ROOT, bytes(17), True])),
    "hashes that are a number": head(2, msgpack.packb([1000, ROOT, 17, True])),
    "a flag that is a number": head(2, msgpack.packb([1000, ROOT, bytes(16), 1])),
    "a timeout of nothing": head(2, msgpack.packb([0, ROOT, bytes(16), True])),
    "a timeout for ever": head(2, msgpack.packb([2**40, ROOT, bytes(16), True])),
    "an echo that is too large": head(5, msgpack.packb([1000, 2**30])),
    "a negative echo": head(5, msgpack.packb([1000, -1])),
    "headers that are none": head(4, msgpack.packb([1000, ROOT, [1, 2, 3]])),
    "a header of another root": frame(Put(1000, OTHER_ROOT, (made(1)[0],))).replace(OTHER_ROOT, ROOT, 1),
    "a block larger than any may be": head(
        4, msgpack.packb([1000, ROOT, [[*made(1)[0].packed()[:7], 2**40, False, 0.0, 0]]])
    ),
    "a list that says it is endless": head(4, b"\x93\xcd\x03\xe8\xc4\x10" + ROOT + b"\xdd\xff\xff\xff\xff"),
    "lists in lists": head(2, b"\x91" * 100_000),
    "a frame with a bit flipped": bytes(b ^ (at == 30) for at, b in enumerate(frame(Has(1000, ROOT, (ROOT,), True)))),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_FRAMES)
def test_bad_frames(start: Start, name: str) -> None:
    plane = start("unix")
    other = plane.connect()
    link = authenticated(plane)
    link.send([BAD_FRAMES[name]], soon())
    assert told_off(link).reason in ("malformed", "too_large")
    link.close()
    assert plane.server.counters.malformed == 1
    assert other.echo(10, soon()) > 0
    still_serves(plane)


@REUSED
@given(st.binary(max_size=400), st.integers(0, 30), st.binary(max_size=40))
def test_random_frames(plane: Plane, meta: bytes, kind: int, tail: bytes) -> None:
    """Well framed or not, of any content: the server says why or waits for more, and serves others."""
    for data in (meta, head(kind, meta) + tail, frame(Stop()) + head(kind, meta)[: len(tail)]):
        link = authenticated_over(plane)
        link.send([data], soon())
        link.close()
    assert plane.connect().echo(1, soon()) > 0


def authenticated_over(plane: Plane) -> Link:
    """As `authenticated`, under TLS where the plane has it."""
    client = plane.connect()
    plane.clients.remove(client)
    return client.link


def test_a_put_that_lies_about_its_body(start: Start) -> None:
    plane = start("unix")
    for body in (1, 4095, 4097, 2**40):
        link = authenticated(plane)
        link.send([frame(Put(1000, ROOT, (made(1)[0],)))], soon())
        assert link.receive_message(soon())[0] == Wanted((None,))
        link.send([frame(Body(), body)], soon())
        assert told_off(link).reason == "malformed"
        link.close()
    wait_until(lambda: plane.store.reserved == 0)
    assert plane.store.abandoned == 4
    still_serves(plane)


@pytest.mark.parametrize("sent", [0, 1, 5000, 9000])
def test_a_put_that_ends_in_the_middle(plane: Plane, sent: int) -> None:
    """What came whole is stored, the rest is given back."""
    blocks = made_many(3)
    payloads = b"".join(bytes(payload) for _, payload in blocks)
    link = authenticated_over(plane)
    link.send([frame(Put(5000, ROOT, tuple(header for header, _ in blocks)))], soon())
    assert link.receive_message(soon())[0] == Wanted((None,) * 3)
    link.send([frame(Body(), len(payloads)), payloads[:sent]], soon())
    link.abort()
    link.close()
    wait_until(lambda: plane.store.reserved == 0)
    assert len(plane.store.blocks) == sent // 4096
    assert plane.store.abandoned == 3 - sent // 4096
    still_serves(plane)


def test_who_claims_much_and_sends_nothing_is_cut_off(start: Start) -> None:
    plane = start("unix", ServingLimits(request_s=0.2, handshake_s=0.2))
    for claim in (head(4, b"", length=wire.MAX_META_BYTES), frame(Put(60_000, ROOT, (made(1)[0],)))):
        link = authenticated(plane)
        link.send([claim], soon())
        with pytest.raises(Exception, match="ended"):
            link.skip(10_000, soon())
        link.close()
    assert plane.server.counters.timeouts == 2
    assert plane.store.reserved == 0


def test_a_request_in_the_middle_of_a_get(start: Start) -> None:
    plane = start("unix", ServingLimits(batch_bytes=100_000))
    blocks = made_many(200, 100_000)
    plane.store.fill(blocks)
    link = authenticated(plane)
    link.send([frame(Get(5000, ROOT, tuple(hashes_of(blocks)), False)), frame(Echo(1000, 5))], soon())
    with pytest.raises(Exception, match="ended"):
        while True:
            _, length = link.receive_message(soon())
            link.skip(length, soon())
    link.close()
    assert plane.server.counters.malformed == 1


def test_stop_without_a_get_is_nothing(start: Start) -> None:
    plane = start("unix")
    link = authenticated(plane)
    link.send([frame(Stop()), frame(Echo(1000, 5)), frame(Stop())], soon())
    _, length = link.receive_message(soon())
    link.skip(length, soon())
    assert length == 5
    link.close()


# ---------------------------------------------------------------------- servers that lie


def lying(answers: Sequence[bytes]) -> Callable[[socket.socket], None]:
    """A server that holds the key, and answers the first request with these bytes."""

    def answer(sock: socket.socket) -> None:
        link = Link(sock)
        handshake.answer(link, KeyRing({"k": SECRET}), identity=IDENTITY, admit=lambda: True, deadline=soon())
        link.receive_message(soon())
        link.send(answers, soon())
        try:
            link.receive(1, soon())
        except Exception:  # noqa: BLE001 (the client left)
            pass

    return answer


def asked_of(answers: Sequence[bytes], hashes: Sequence[bytes]) -> tuple[list[GetStatus], dict[int, Block]]:
    taken: dict[int, Block] = {}

    def on_block(at: int, header: BlockHeader, payload: memoryview) -> bool:
        taken[at] = (header, payload)
        return True

    with fake_server(lying(answers)) as address:
        client = DataPlaneClient.connect(
            [address], KeyRing({"k": SECRET}), identity="w1", expect=IDENTITY, same_host=False
        )
        try:
            sink = lambda at, header: memoryview(bytearray(header.length))  # noqa: E731
            return client.get(ROOT, hashes, False, sink, on_block, soon(5)), taken
        finally:
            client.close()


def test_another_block_than_was_asked_for_is_corrupt() -> None:
    """With right checksums of their own: other tokens, and another tenant's."""
    good, other, foreign = made(1), made(2), made(1, root=OTHER_ROOT)
    for wrong in (other, foreign):
        part = frame(Part((wrong[0], good[0])), 8192)
        statuses, taken = asked_of([part, wrong[1], good[1], frame(End())], [good[0].hash] * 2)
        assert statuses == [GetStatus.CORRUPT, GetStatus.OK]
        assert taken == {1: good}


@pytest.mark.parametrize(
    "answers",
    [
        [frame(Part((made(1)[0],)), 100)],
        [frame(Part((made(1)[0],) * 3), 3 * 4096)],
        [frame(Part(()))],
        [frame(Held((True,)))],
        [frame(Wanted((None,)))],
        [frame(Get(1, ROOT, (), False))],
        [b"\0" * 100],
        [head(16, msgpack.packb([[None]]), length=2**31)],
        [frame(Failure("store", "no"))],
    ],
)
def test_answers_that_are_none(answers: list[bytes]) -> None:
    with pytest.raises(ProtocolError):
        asked_of(answers, [made(1)[0].hash, made(2)[0].hash])


def test_an_end_too_early_leaves_blocks_missing() -> None:
    assert asked_of([frame(End())], [bytes(16)] * 3) == ([GetStatus.MISSING] * 3, {})


@pytest.mark.parametrize(
    "answers",
    [
        [frame(Wanted(()))],
        [frame(Wanted((None,) * 3))],
        [frame(Taken((PutStatus.STORED,)))],
        [frame(Wanted((PutStatus.PRESENT, PutStatus.PRESENT))), frame(Taken((PutStatus.PRESENT,)))],
    ],
)
def test_puts_answered_wrongly(answers: list[bytes]) -> None:
    with fake_server(lying(answers)) as address:
        client = DataPlaneClient.connect(
            [address], KeyRing({"k": SECRET}), identity="w1", expect=IDENTITY, same_host=False
        )
        with pytest.raises(ProtocolError):
            client.put(ROOT, made_many(2), soon(5))
        assert client.closed


def test_a_server_that_falls_silent(start: Start) -> None:
    began = time.monotonic()
    with fake_server(lying([frame(Part((made(1)[0],)), 4096), bytes(100)])) as address:
        client = DataPlaneClient.connect(
            [address], KeyRing({"k": SECRET}), identity="w1", expect=IDENTITY, same_host=False
        )
        with pytest.raises(PeerTimeout):
            client.get(
                *(ROOT, [made(1)[0].hash], False),
                lambda at, header: memoryview(bytearray(header.length)),
                lambda *_: True,
                soon(0.2),
            )
        assert client.closed
    assert time.monotonic() - began < 3


def test_a_header_that_changed_on_its_way_is_corrupt() -> None:
    header, payload = made(1)
    changed = replace(header, ids=bytes(60))
    statuses, taken = asked_of([frame(Part((changed,)), 4096), payload, frame(End())], [header.hash])
    assert (statuses, taken) == ([GetStatus.CORRUPT], {})
