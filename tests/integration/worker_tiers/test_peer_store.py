"""A worker serves its blocks to its peers: lent, sent, given back."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvfleet.worker.tiers import peer_store
from kvfleet.worker.tiers.base import BlockName
from kvfleet.worker.tiers.peer_store import LENDINGS, LentBlock, PeerStore
from kvfleet.worker.tiers.source_address import SourceAddress
from kvproto.dataplane.client import DataPlaneClient, GetStatus, PutStatus
from kvproto.dataplane.server import DataPlaneServer
from kvproto.messages import Tier
from tests.integration.worker_tiers.conftest import MakeRemote
from tests.integration.worker_tiers.rig import (
    FORMAT,
    HOST,
    KEYS,
    ROOT,
    Fetched,
    block_of,
    look,
    names_of,
    payload_of,
    ready,
)
from tests.support.waiting import LIMIT_S, wait_until


class Lending:
    def __init__(self, lender: MemoryLender, blocks: Sequence[LentBlock | None]) -> None:
        self._lender = lender
        self.blocks = blocks

    def release(self) -> None:
        with self._lender.lock:
            self._lender.out -= 1


class MemoryLender:
    """Lends from a dict; counts what is out."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.held: dict[tuple[bytes, bytes], tuple[BlockName, bool]] = {}
        self.out = 0
        self.most_out = 0
        self.lent = 0
        self.pause_s = 0.0
        self.fails = False

    def lend(self, root: bytes, hashes: Sequence[bytes], exact: bool) -> Lending:
        if self.fails:
            raise RuntimeError("the engine is gone")
        with self.lock:
            self.out += 1
            self.lent += 1
            self.most_out = max(self.most_out, self.out)
        time.sleep(self.pause_s)
        return Lending(self, [self._block(root, one, exact) for one in hashes])

    def _block(self, root: bytes, block: bytes, exact: bool) -> LentBlock | None:
        found = self.held.get((root, block))
        if found is None or (exact and found[1]):
            return None
        return LentBlock(found[0], payload_of(found[0]), found[1])

    def holds(self, root: bytes, hashes: Sequence[bytes], exact: bool) -> list[bool]:
        found = [self.held.get((root, one)) for one in hashes]
        return [one is not None and not (exact and one[1]) for one in found]

    def add(self, names: Sequence[BlockName], *, lossy: bool = False) -> None:
        for name in names:
            self.held[name.root, name.hash] = (name, lossy)


@pytest.fixture
def lender() -> MemoryLender:
    return MemoryLender()


@pytest.fixture
def peer(lender: MemoryLender, _no_thread_left: None) -> Iterator[SourceAddress]:
    with tempfile.TemporaryDirectory(prefix="kvp-") as folder:
        server = DataPlaneServer(PeerStore(lender, FORMAT), KEYS, "w2", unix_path=Path(folder) / "w2.sock")
        server.start()
        yield SourceAddress("w2", "e1", HOST, server.addresses)
        server.close()


@pytest.fixture
def client(peer: SourceAddress) -> Iterator[DataPlaneClient]:
    client = connected(peer)
    yield client
    client.close()


def connected(peer: SourceAddress) -> DataPlaneClient:
    return DataPlaneClient.connect(peer.data_plane, KEYS, identity="me", expect="w2", same_host=True)


def soon() -> float:
    return time.monotonic() + LIMIT_S


def test_a_peer_gets_what_is_held_and_all_is_given_back(
    peer: SourceAddress, lender: MemoryLender, make_remote: MakeRemote
) -> None:
    remote, names = make_remote(), names_of(200)
    remote.set_peers([peer])
    ready(remote, Tier.PEER)
    lender.add(names[:150])
    lender.add(names[150:180], lossy=True)
    assert look(remote, names, peer="w2").peer == 180
    assert look(remote, names, peer="w2", exact=True).peer == 150
    fetched = Fetched(remote, names[:180], Tier.PEER, peer="w2").wait()
    assert fetched.check() == 180
    assert [header.lossy for header in fetched.landing.headers if header] == [False] * 150 + [True] * 30
    assert Fetched(remote, names, Tier.PEER, peer="w2", exact=True).wait().check() == 150
    wait_until(lambda: lender.out == 0)
    assert lender.lent > 0


def test_only_so_many_lendings_are_out_at_a_time(
    peer: SourceAddress, lender: MemoryLender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_store, "LENDING_TIMEOUT_S", 5.0)
    names = names_of(2)
    lender.add(names)
    lender.pause_s = 0.05
    got: list[list[GetStatus]] = []

    def ask() -> None:
        client = connected(peer)
        memory = memoryview(bytearray(len(payload_of(names[0]))))
        got.append(
            client.get(ROOT, [name.hash for name in names], False, lambda i, h: memory, lambda i, h, m: True, soon())
        )
        client.close()

    threads = [threading.Thread(target=ask) for _ in range(3 * LENDINGS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert got == [[GetStatus.OK, GetStatus.OK]] * (3 * LENDINGS)
    assert lender.most_out <= LENDINGS
    wait_until(lambda: lender.out == 0)


def test_who_cannot_lend_in_time_has_nothing(lender: MemoryLender, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_store, "LENDING_TIMEOUT_S", 0.05)
    store, names = PeerStore(lender, FORMAT), names_of(1)
    lender.add(names)
    out = [store.get(ROOT, [names[0].hash], False) for _ in range(LENDINGS)]
    assert all(served.blocks[0] is not None for served in out)
    late = store.get(ROOT, [names[0].hash], False)
    assert late.blocks == [None]
    late.release()
    for served in out:
        served.release()
    assert lender.out == 0
    again = [store.get(ROOT, [names[0].hash], False) for _ in range(LENDINGS)]
    assert all(served.blocks[0] is not None for served in again), "what was never lent is not given back"


def test_a_lender_that_fails_keeps_no_place(lender: MemoryLender) -> None:
    store, names = PeerStore(lender, FORMAT), names_of(1)
    lender.fails = True
    for _ in range(3 * LENDINGS):
        with pytest.raises(RuntimeError):
            store.get(ROOT, [names[0].hash], False)
    lender.fails = False
    lender.add(names)
    assert store.get(ROOT, [names[0].hash], False).blocks[0] is not None


def test_headers_are_sealed_over_what_is_sent(lender: MemoryLender) -> None:
    names = names_of(2)
    lender.add(names)
    served = PeerStore(lender, FORMAT).get(ROOT, [name.hash for name in names] + [b"n" * 16], False)
    assert served.blocks[2] is None
    for name, block in zip(names, served.blocks, strict=False):
        assert block is not None
        header, payload = block
        assert header == block_of(name)[0]
        assert header.matches(payload)
        assert header.is_genuine()
    served.release()


def test_nothing_is_taken_from_peers(client: DataPlaneClient, lender: MemoryLender) -> None:
    names = names_of(2)
    lender.add(names[:1])
    blocks = [block_of(name) for name in names]
    assert client.put(ROOT, blocks, soon()) == [PutStatus.PRESENT, PutStatus.REFUSED]
    assert client.erase(ROOT, [names[0].hash], soon()) == 0
    assert client.has(ROOT, [name.hash for name in names], False, soon()) == [True, False]


def test_a_peer_that_leaves_in_the_middle_gives_everything_back(peer: SourceAddress, lender: MemoryLender) -> None:
    names = names_of(500)
    lender.add(names)
    for _ in range(5):
        client = connected(peer)
        memory = memoryview(bytearray(len(payload_of(names[0]))))
        blocks: list[int] = []

        def on_block(index: int, *_: object, blocks: list[int] = blocks, client: DataPlaneClient = client) -> bool:
            blocks.append(index)
            if len(blocks) == 20:
                client.abort()
            return True

        hashes = [name.hash for name in names]
        with pytest.raises(Exception):  # noqa: B017 - how it ends is the client's to say
            client.get(ROOT, hashes, False, lambda i, h, memory=memory: memory, on_block, soon())
    wait_until(lambda: lender.out == 0)
