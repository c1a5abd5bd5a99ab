"""Real listeners over a store in a dict, chains of blocks, and what an engine does with a `Remote`."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from kvfleet.worker.blocks.block_codec import BlockShape
from kvfleet.worker.blocks.chain_location import BlockName, Finding
from kvfleet.worker.tiers.host import Landing
from kvfleet.worker.tiers.remote import RemoteTiers
from kvfleet.worker.tiers.source import SourceAddress
from kvfleet.worker.tiers.transfers import RemoteSettings
from kvproto.block_hash import Root, chain, pack_ids, parent_of
from kvproto.dataplane.block import RUN_BLOCKS, BlockCodec, BlockHeader, kv_format
from kvproto.dataplane.keys import KeyRing
from kvproto.dataplane.server import DataPlaneServer
from kvproto.dataplane.serving import ServedBlocks
from kvproto.messages import Tier
from tests.support.waiting import LIMIT_S, wait_until

KEYS = KeyRing({"first": b"k" * 32})
BLOCK_SIZE = 16
SHAPE = BlockShape(2 * 2 * 2 * BLOCK_SIZE, 32, "float32")  # 2 layers, 2 heads: 16 KiB
FORMAT = kv_format(2, 2, 32, BLOCK_SIZE, "float32")
ROOT = b"r" * 16
HOST = "here"

Block = tuple[BlockHeader, memoryview]


# ---------------------------------------------------------------------------------------------- blocks


def names_of(blocks: int, *, seed: int = 0, root: Root = ROOT) -> list[BlockName]:
    ids = [random.Random(seed).randrange(50_000) for _ in range(BLOCK_SIZE * blocks)]
    hashes = chain(root, ids, BLOCK_SIZE)
    keys = [hashes[at - at % RUN_BLOCKS] for at in range(len(hashes))]
    names = []
    for at in range(blocks):
        kept_under = root if isinstance(root, bytes) else (root.public if at < root.blocks else root.own)
        packed = pack_ids(ids[BLOCK_SIZE * at : BLOCK_SIZE * (at + 1)])
        names.append(BlockName(kept_under, hashes[at], parent_of(root, hashes, at), packed, keys[at]))
    return names


@lru_cache(maxsize=4096)
def payload_of(name: BlockName) -> memoryview:
    """Numbers that are this block's alone."""
    seed = int.from_bytes(name.hash[:8], "little")
    return memoryview(np.random.default_rng(seed).standard_normal(SHAPE.numbers, dtype=np.float32)).cast("B")


def block_of(name: BlockName, *, lossy: bool = False) -> Block:
    payload = payload_of(name)
    size = len(payload)
    return BlockHeader(*name[:4], FORMAT, BlockCodec.RAW, size, size, lossy).sealed(payload), payload


# ---------------------------------------------------------------------------------------------- stores


class DictStore:
    """A vault's store in a dict. `change` has the last word on what it serves; `pause_s` is what each call takes."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.blocks: dict[tuple[bytes, bytes], tuple[BlockHeader, memoryview]] = {}
        self.change: Callable[[Block], Block | None] = lambda block: block
        self.pause_s = 0.0
        self.room = 1_000_000  # blocks
        self.order: list[bytes] = []  # as they were stored
        self.asked: list[tuple[str, int]] = []

    def add(self, names: Sequence[BlockName], *, lossy: bool = False) -> None:
        for name in names:
            self.blocks[name.root, name.hash] = block_of(name, lossy=lossy)

    def get(self, root: bytes, hashes: Sequence[bytes], exact: bool) -> ServedBlocks:
        self.asked.append(("get", len(hashes)))
        time.sleep(self.pause_s)
        found = [self.blocks.get((root, one)) for one in hashes]
        found = [None if block is None or (exact and block[0].lossy) else self.change(block) for block in found]
        return ServedBlocks(found, lambda: None)

    def has(self, root: bytes, hashes: Sequence[bytes], exact: bool) -> list[bool]:
        self.asked.append(("has", len(hashes)))
        time.sleep(self.pause_s)
        found = [self.blocks.get((root, one)) for one in hashes]
        return [block is not None and not (exact and block[0].lossy) for block in found]

    def reserve(self, header: BlockHeader) -> memoryview | None:
        self.room -= 1
        return memoryview(bytearray(header.length)) if self.room >= 0 else None

    def commit(self, header: BlockHeader, buffer: memoryview) -> bool:
        with self.lock:
            self.blocks[header.root, header.hash] = (header, buffer)
            self.order.append(header.hash)
        return True

    def abandon(self, header: BlockHeader, buffer: memoryview) -> None:
        pass

    def erase(self, root: bytes, hashes: Sequence[bytes]) -> int:
        self.asked.append(("erase", len(hashes)))
        with self.lock:
            return sum(self.blocks.pop((root, one), None) is not None for one in hashes)


@dataclass
class Vault:
    """A listener, on a Unix socket and TCP."""

    id: str
    folder: Path
    store: DictStore = field(default_factory=DictStore)
    server: DataPlaneServer = field(init=False)
    address: SourceAddress = field(init=False)

    def __post_init__(self) -> None:
        self.start()

    def start(self, epoch: str = "e1") -> None:
        path = self.folder / f"{self.id}.sock"
        self.server = DataPlaneServer(self.store, KEYS, self.id, tcp=("127.0.0.1", 0), unix_path=path)
        self.server.start()
        self.address = SourceAddress(self.id, epoch, HOST, self.server.addresses)

    def behind(self, address: str) -> SourceAddress:
        """As it is reached through a proxy."""
        return replace(self.address, data_plane=(address,))

    @property
    def tcp(self) -> str:
        return next(one for one in self.server.addresses if one.startswith("tcp:"))


# ---------------------------------------------------------------------------------------------- the engine's side


def remote_tiers(
    *, codec: BlockCodec = BlockCodec.RAW, max_queued_bytes: int = 64 * 2**20, look_limit_s: float = LIMIT_S
) -> RemoteTiers:
    """Patient, as the tests' machine may be busy."""
    settings = RemoteSettings("me", HOST, FORMAT, SHAPE, codec, max_queued_bytes, look_limit_s)
    return RemoteTiers(settings, KEYS)


def ready(remote: RemoteTiers, tier: Tier = Tier.VAULT) -> None:
    wait_until(lambda: remote.speed(tier) is not None)


def look(
    remote: RemoteTiers,
    names: Sequence[BlockName],
    *,
    exact: bool = False,
    peer: str = "",
    limit_s: float | None = None,
) -> Finding:
    done = threading.Event()
    finding = remote.look(names, exact=exact, peer=peer, on_ready=done.set, limit_s=limit_s)
    assert done.wait(LIMIT_S)
    assert finding.ready
    return finding


class Fetched:
    """A fetch that was begun."""

    def __init__(
        self,
        remote: RemoteTiers,
        names: Sequence[BlockName],
        tier: Tier = Tier.VAULT,
        *,
        exact: bool = False,
        peer: str = "",
    ) -> None:
        self.names = names
        self.memory = [bytearray(SHAPE.raw_bytes) for _ in names]
        self.landing = Landing([None] * len(names))
        self.done = threading.Event()
        self.calls = 0
        targets = [memoryview(one) for one in self.memory]
        remote.fetch(tier, names, targets, self.landing, exact=exact, peer=peer, on_progress=self._progress)

    def _progress(self) -> None:
        self.calls += 1
        if self.landing.ended:
            self.done.set()

    def wait(self, seconds: float = LIMIT_S) -> Fetched:
        assert self.done.wait(seconds), "it never ended"
        return self

    @property
    def landed(self) -> int:
        headers = self.landing.headers
        return next((at for at, header in enumerate(headers) if header is None), len(headers))

    def check(self) -> int:
        """What has landed is right, to the bit; how many from the first."""
        for name, memory, header in zip(self.names, self.memory, self.landing.headers, strict=True):
            if header is not None:
                assert header.hash == name.hash
                assert memory == payload_of(name)
        return self.landed
