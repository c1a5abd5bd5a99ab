"""A worker serves its blocks to its peers: lent, sent, given back."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvfleet.worker.blocks.block_pool import BlockPool, Lendable
from kvfleet.worker.blocks.chain_location import BlockName
from kvfleet.worker.network import lending
from kvfleet.worker.network.lending import LEASES, PeerStore
from kvfleet.worker.tiers.source import SourceAddress
from kvproto.block_hash import pack_ids, unpack_ids
from kvproto.dataplane.client import DataPlaneClient, GetStatus, PutStatus
from kvproto.dataplane.server import DataPlaneServer
from kvproto.messages import Tier
from tests.integration.worker_tiers.conftest import MakeRemote
from tests.integration.worker_tiers.rig import (
    BLOCK_SIZE,
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


class MemoryTiers:
    """A pool whose blocks' bytes follow from their names; counts how many leases are out."""

    def __init__(self) -> None:
        self.pool = BlockPool(1024, BLOCK_SIZE)
        self.memory = SimpleNamespace(kv_format=FORMAT)
        self.lent: dict[int, object] = {}
        self.most_out = 0
        self.reads = 0
        self.pause_s = 0.0
        self.fails = False
        self._engine = threading.Lock()

    def post(self, work: Callable[[object], None]) -> None:
        if self.fails:
            raise RuntimeError("the engine is gone")
        with self._engine:
            work(None)
            self.most_out = max(self.most_out, len(self.lent))

    def readable(self) -> list[tuple[BlockPool, Callable[[int], memoryview]]]:
        return [(self.pool, self._read)]

    def lendable(self, asked: Iterable[bytes]) -> dict[bytes, Lendable]:
        return {}

    def _read(self, block: int) -> memoryview:
        self.reads += 1
        time.sleep(self.pause_s)
        content = self.pool.index[block]
        assert content.hash is not None
        return payload_of(BlockName(content.root, content.hash, content.parent, pack_ids(content.ids)))

    @property
    def out(self) -> int:
        return len(self.lent)

    def add(self, names: Sequence[BlockName], start: int = 0, *, lossy: bool = False) -> None:
        """Those from `start` on; the ones before are there."""
        hashes = [name.hash for name in names]
        blocks = self.pool.chain_to(hashes[:start])
        self.pool.acquire(blocks)
        for at in range(start, len(names)):
            (block,) = self.pool.allocate(1)
            blocks.append(self.pool.fill(block, ROOT, hashes, at, unpack_ids(names[at].ids), lossy=lossy))
        self.pool.release(blocks)


@pytest.fixture
def tiers() -> MemoryTiers:
    return MemoryTiers()


@pytest.fixture
def peer(tiers: MemoryTiers, _no_thread_left: None) -> Iterator[SourceAddress]:
    with tempfile.TemporaryDirectory(prefix="kvp-") as folder:
        server = DataPlaneServer(PeerStore(tiers, tiers.post), KEYS, "w2", unix_path=Path(folder) / "w2.sock")
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
    peer: SourceAddress, tiers: MemoryTiers, make_remote: MakeRemote
) -> None:
    remote, names = make_remote(), names_of(200)
    remote.set_peers([peer])
    ready(remote, Tier.PEER)
    tiers.add(names[:150])
    tiers.add(names[:180], 150, lossy=True)
    assert look(remote, names, peer="w2").peer == 180
    assert look(remote, names, peer="w2", exact=True).peer == 150
    fetched = Fetched(remote, names[:180], Tier.PEER, peer="w2").wait()
    assert fetched.check() == 180
    assert [header.lossy for header in fetched.landing.headers if header] == [False] * 150 + [True] * 30
    assert Fetched(remote, names, Tier.PEER, peer="w2", exact=True).wait().check() == 150
    wait_until(lambda: tiers.out == 0)
    assert tiers.reads > 0


def test_only_so_many_leases_are_out_at_a_time(
    peer: SourceAddress, tiers: MemoryTiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lending, "LEASE_TIMEOUT_S", 5.0)
    names = names_of(2)
    tiers.add(names)
    tiers.pause_s = 0.05
    got: list[list[GetStatus]] = []

    def ask() -> None:
        client = connected(peer)
        memory = memoryview(bytearray(len(payload_of(names[0]))))
        got.append(
            client.get(ROOT, [name.hash for name in names], False, lambda i, h: memory, lambda i, h, m: True, soon())
        )
        client.close()

    threads = [threading.Thread(target=ask) for _ in range(3 * LEASES)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert got == [[GetStatus.OK, GetStatus.OK]] * (3 * LEASES)
    assert tiers.most_out <= LEASES
    wait_until(lambda: tiers.out == 0)


def test_who_cannot_lend_in_time_has_nothing(tiers: MemoryTiers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lending, "LEASE_TIMEOUT_S", 0.05)
    store, names = PeerStore(tiers, tiers.post), names_of(1)
    tiers.add(names)
    out = [store.get(ROOT, [names[0].hash], False) for _ in range(LEASES)]
    assert all(served.blocks[0] is not None for served in out)
    late = store.get(ROOT, [names[0].hash], False)
    assert late.blocks == [None]
    late.release()
    for served in out:
        served.release()
    assert tiers.out == 0
    again = [store.get(ROOT, [names[0].hash], False) for _ in range(LEASES)]
    assert all(served.blocks[0] is not None for served in again), "what was never lent is not given back"


def test_an_engine_that_fails_keeps_no_place(tiers: MemoryTiers) -> None:
    store, names = PeerStore(tiers, tiers.post), names_of(1)
    tiers.fails = True
    for _ in range(3 * LEASES):
        with pytest.raises(RuntimeError):
            store.get(ROOT, [names[0].hash], False)
    tiers.fails = False
    tiers.add(names)
    assert store.get(ROOT, [names[0].hash], False).blocks[0] is not None


def test_headers_are_sealed_over_what_is_sent(tiers: MemoryTiers) -> None:
    names = names_of(2)
    tiers.add(names)
    served = PeerStore(tiers, tiers.post).get(ROOT, [name.hash for name in names] + [b"n" * 16], False)
    assert served.blocks[2] is None
    for name, block in zip(names, served.blocks, strict=False):
        assert block is not None
        header, payload = block
        assert header == block_of(name)[0]
        assert header.matches(payload)
        assert header.is_genuine()
    served.release()


def test_nothing_is_taken_from_peers(client: DataPlaneClient, tiers: MemoryTiers) -> None:
    names = names_of(2)
    tiers.add(names[:1])
    blocks = [block_of(name) for name in names]
    assert client.put(ROOT, blocks, soon()) == [PutStatus.PRESENT, PutStatus.REFUSED]
    assert client.erase(ROOT, [names[0].hash], soon()) == 0
    assert client.has(ROOT, [name.hash for name in names], False, soon()) == [True, False]


def test_a_peer_that_leaves_in_the_middle_gives_everything_back(peer: SourceAddress, tiers: MemoryTiers) -> None:
    names = names_of(500)
    tiers.add(names)
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
    wait_until(lambda: tiers.out == 0)
