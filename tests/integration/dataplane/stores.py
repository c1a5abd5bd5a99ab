"""A store that counts what it lent, blocks to put there, and a server of it for a process of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

from kvproto.dataplane.block import BlockCodec, BlockHeader
from kvproto.dataplane.keys import KeyRing
from kvproto.dataplane.server import DataPlaneServer
from kvproto.dataplane.serving import ServedBlocks

ROOT, OTHER_ROOT = b"r" * 16, b"o" * 16
IDENTITY = "vault-1"
SECRET = bytes(range(32))
Block = tuple[BlockHeader, memoryview]


def made(index: int, size: int = 4096, *, root: bytes = ROOT, lossy: bool = False) -> Block:
    payload = memoryview(bytearray(Random(index).randbytes(size)))
    name = index.to_bytes(16, "big")
    header = BlockHeader(root, name, root, bytes(64), b"f" * 16, BlockCodec.RAW, size, size, lossy)
    return header.sealed(payload), payload


def made_many(count: int, size: int = 4096) -> list[Block]:
    return [made(index, size) for index in range(count)]


def hashes_of(blocks: Sequence[Block]) -> list[bytes]:
    return [header.hash for header, _ in blocks]


class MemoryStore:
    """Thread-safe. `lent` and `reserved` are 0 when nobody uses it."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[bytes, bytes], Block] = {}
        self.lock = threading.Lock()
        self.lent = self.most_blocks_lent = self.reserved = self.abandoned = 0
        self.wants: Callable[[BlockHeader], bool] = lambda header: True
        self.takes: Callable[[BlockHeader], bool] = lambda header: True
        self.finds: Callable[[bytes, bytes], Block | None] = lambda root, name: self.blocks.get((root, name))

    def fill(self, blocks: Sequence[Block]) -> None:
        self.blocks |= {(header.root, header.hash): (header, payload) for header, payload in blocks}

    def get(self, root: bytes, hashes: Sequence[bytes], exact: bool) -> ServedBlocks:
        found = [self.finds(root, name) for name in hashes]
        found = [None if block and exact and block[0].lossy else block for block in found]
        with self.lock:
            self.lent += 1
            self.most_blocks_lent = max(self.most_blocks_lent, sum(block is not None for block in found))
        return ServedBlocks(found, self._release)

    def _release(self) -> None:
        with self.lock:
            self.lent -= 1

    def has(self, root: bytes, hashes: Sequence[bytes], exact: bool) -> list[bool]:
        found = [self.blocks.get((root, name)) for name in hashes]
        return [block is not None and not (exact and block[0].lossy) for block in found]

    def reserve(self, header: BlockHeader) -> memoryview | None:
        if not self.wants(header):
            return None
        with self.lock:
            self.reserved += 1
        return memoryview(bytearray(header.length))

    def commit(self, header: BlockHeader, buffer: memoryview) -> bool:
        with self.lock:
            self.reserved -= 1
            if self.takes(header):
                self.blocks[header.root, header.hash] = (header, buffer)
                return True
            return False

    def abandon(self, header: BlockHeader, buffer: memoryview) -> None:
        with self.lock:
            self.reserved -= 1
            self.abandoned += 1

    def erase(self, root: bytes, hashes: Sequence[bytes]) -> int:
        with self.lock:
            return sum(self.blocks.pop((root, name), None) is not None for name in hashes)


def main(unix_path: str, blocks: int, size: int) -> None:
    """Serve until killed; a line says where."""
    store = MemoryStore()
    store.fill(made_many(blocks, size))
    server = DataPlaneServer(store, KeyRing({"k": SECRET}), IDENTITY, tcp=("127.0.0.1", 0), unix_path=Path(unix_path))
    server.start()
    print(*server.addresses, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    import sys

    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
