"""A real vault's store behind a real server, and sessions of a peer that has the key but says what is not quite right.

Whatever comes of a session: the server serves the next one, nothing stays reserved, and what the store has is bit by
bit what was once sent under that name.
"""

from __future__ import annotations

import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfleet.vault.store.store import VaultStore
from kvproto.block_hash import child, pack_ids
from kvproto.dataplane import handshake
from kvproto.dataplane.block import BlockCodec, BlockHeader
from kvproto.dataplane.client import DataPlaneClient, GetStatus
from kvproto.dataplane.errors import DataPlaneError
from kvproto.dataplane.keys import Key, KeyRing
from kvproto.dataplane.link import Link
from kvproto.dataplane.server import DataPlaneServer, ServingLimits
from kvproto.dataplane.wire import Body, Echo, Erase, Get, Has, Put, Stop, frame
from tests.fuzz.damage import damaged, some

SECRET = bytes(range(32))
RING = KeyRing({"k": SECRET})
SIZE = 512
ROOTS = (b"r" * 16, b"o" * 16)
Block = tuple[BlockHeader, bytes]


def made(root: bytes, seed: int, count: int) -> list[Block]:
    """A chain."""
    blocks, parent = [], root
    for at in range(count):
        ids = [seed * 1000 + at] * 16
        name = child(parent, ids)
        payload = bytes((seed + at) % 256 for _ in range(SIZE))
        header = BlockHeader(root, name, parent, pack_ids(ids), b"f" * 16, BlockCodec.RAW, SIZE, SIZE, False)
        blocks.append((header.sealed(memoryview(payload)), payload))
        parent = name
    return blocks


BLOCKS = [block for root in ROOTS for seed in range(3) for block in made(root, seed, 4)]
RIGHT = {(header.root, header.hash): (header, payload) for header, payload in BLOCKS}


class Plane:
    def __init__(self, folder: Path) -> None:
        self.store = VaultStore(64 * SIZE)
        self.server = DataPlaneServer(
            self.store, RING, "v1", unix_path=folder / "v.sock", limits=ServingLimits(handshake_s=5.0, request_s=0.2)
        )
        self.server.start()

    def client(self) -> DataPlaneClient:
        return DataPlaneClient.connect(self.server.addresses, RING, identity="w1", expect="v1", same_host=True)

    def link(self) -> Link:
        """Past the handshake, to say on it what no client would."""
        return self.client().link


@pytest.fixture(scope="module")
def plane() -> Iterator[Plane]:
    with tempfile.TemporaryDirectory(prefix="fz-") as folder:
        plane = Plane(Path(folder))
        yield plane
        plane.server.close()


def session(plane: Plane, data: bytes) -> None:
    """Say all of it, read whatever comes for a moment, go."""
    link = plane.link()
    try:
        link.send([data], time.monotonic() + 5)
        link.receive(1, time.monotonic() + 0.002)
    except DataPlaneError:
        pass
    finally:
        link.close()


def check(plane: Plane) -> None:
    """Somebody else is served, and is served nothing wrong."""
    client = plane.client()
    found: dict[tuple[bytes, bytes], Block] = {}
    try:
        for root in ROOTS:
            hashes = [header.hash for header, _ in BLOCKS]

            def take(at: int, header: BlockHeader, payload: memoryview) -> bool:
                found[header.root, header.hash] = header, bytes(payload)
                return True

            statuses = client.get(
                root, hashes, False, lambda at, header: memoryview(bytearray(header.length)), take,
                time.monotonic() + 10,
            )  # fmt: skip
            assert set(statuses) <= {GetStatus.OK, GetStatus.MISSING}, "the store has what its own checksum denies"
    finally:
        client.close()
    for key, (header, payload) in found.items():
        assert (header, payload) == RIGHT[key]
    plane.store.check_integrity()


def put(blocks: list[Block]) -> list[bytes]:
    """A put as a client says it, which does not wait for the answer between."""
    headers, payload = tuple(header for header, _ in blocks), b"".join(payload for _, payload in blocks)
    return [frame(Put(5000, headers[0].root, headers)), frame(Body(), len(payload)), payload]


chains = st.sampled_from([(root, seed) for root in ROOTS for seed in range(3)]).map(
    lambda key: [block for block in BLOCKS if block[0] in [one for one, _ in made(*key, 4)]]
)
timeouts = st.sampled_from([1, 50, 5000])


@st.composite
def requests(draw: st.DrawFn) -> list[bytes]:
    blocks = draw(chains)
    hashes = tuple(header.hash for header, _ in blocks[: draw(st.integers(0, 4))])
    root = draw(st.sampled_from(ROOTS))
    match draw(st.sampled_from(["put", "put", "put", "get", "has", "erase", "echo", "stop"])):
        case "put":
            return put(blocks[: draw(st.integers(1, 4))])
        case "get":
            return [frame(Get(draw(timeouts), root, hashes, draw(st.booleans())))]
        case "has":
            return [frame(Has(draw(timeouts), root, hashes, draw(st.booleans())))]
        case "erase":
            return [frame(Erase(draw(timeouts), root, hashes))]
        case "echo":
            return [frame(Echo(draw(timeouts), draw(st.integers(0, 2000))))]
        case _:
            return [frame(Stop())]


@some
@given(st.lists(requests(), min_size=1, max_size=3), st.data())
def test_sessions_that_are_damaged(plane: Plane, asked: list[list[bytes]], data: st.DataObject) -> None:
    pieces = [piece for request in asked for piece in request]
    if data.draw(st.booleans()):
        pieces = data.draw(st.permutations(pieces))
    said = b"".join(pieces)
    session(plane, said if data.draw(st.integers(0, 4)) == 0 else data.draw(damaged(said)))
    check(plane)


@some
@given(chains, st.integers(0, 4 * SIZE - 1), st.integers(1, 255))
def test_a_block_with_a_wrong_byte_is_not_stored(plane: Plane, blocks: list[Block], at: int, change: int) -> None:
    """Well framed, of the right length: only the checksum knows."""
    start, body, payload = put(blocks)
    wrong = bytearray(payload)
    wrong[at] ^= change
    session(plane, start + body + bytes(wrong))
    check(plane)


@some
@given(st.data())
def test_strangers(plane: Plane, data: st.DataObject) -> None:
    """Before the proof: damaged greetings, and requests without one."""
    right = handshake_bytes()
    said = data.draw(st.one_of(damaged(right), st.binary(max_size=200), damaged(right + frame(Stop()))))
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(0.01)
    with sock:
        sock.connect(plane.server.addresses[0].removeprefix("unix:"))
        try:
            sock.sendall(said)
            sock.shutdown(socket.SHUT_WR)
            sock.recv(1000)
        except OSError:
            pass
    check(plane)


def handshake_bytes() -> bytes:
    """What a client says first, as it would say it to nobody."""
    ours, theirs = socket.socketpair()
    link = Link(ours)
    with theirs:
        theirs.settimeout(2)
        try:
            handshake.ask(link, Key("k", SECRET), identity="w1", expect="v1", deadline=time.monotonic() + 0.02)
        except DataPlaneError:
            pass
        link.close()
        return theirs.recv(10_000)
