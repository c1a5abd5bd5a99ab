"""The serving process of `data_plane`: a listener of ours, and a bare loop beside it, over the same memory.

Asked in JSON lines: `{"do": "cpu"}`; the first line it writes says where it listens. The bare loop, on each connection:
a byte `g` or `p`, a count u32, then so many blocks, to the client or from it and a byte back; no header, no check.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random

from kvproto.dataplane.block import BlockCodec, BlockHeader
from kvproto.dataplane.keys import KeyRing
from kvproto.dataplane.server import DataPlaneServer
from kvproto.dataplane.serving import ServedBlocks

BLOCK_BYTES = 2 * 1024 * 1024
DISTINCT = 64
ROOT = b"r" * 16
IDENTITY = "data-plane-end"
ASK = struct.Struct("!cI")
_PR_SET_PDEATHSIG = 1


def made_blocks(seed: int) -> list[tuple[BlockHeader, memoryview]]:
    """The same in every process."""
    random, blocks = Random(seed), []
    for at in range(DISTINCT):
        payload = memoryview(bytearray(random.randbytes(BLOCK_BYTES)))
        name = (seed << 32 | at).to_bytes(16, "big")
        header = BlockHeader(ROOT, name, ROOT, bytes(64), ROOT, BlockCodec.RAW, BLOCK_BYTES, BLOCK_BYTES)
        blocks.append((header.sealed(payload), payload))
    return blocks


class MemoryStore:
    """What was made, to be fetched; what is put lands in buffers that are used again and again."""

    def __init__(self, blocks: list[tuple[BlockHeader, memoryview]]) -> None:
        self._blocks = {header.hash: (header, payload) for header, payload in blocks}
        self.landing = [memoryview(bytearray(BLOCK_BYTES)) for _ in range(DISTINCT)]
        self._next = 0

    def get(self, root: bytes, hashes: Sequence[bytes], exact: bool) -> ServedBlocks:
        return ServedBlocks([self._blocks.get(each) for each in hashes], lambda: None)

    def has(self, root: bytes, hashes: Sequence[bytes], exact: bool) -> list[bool]:
        return [False] * len(hashes)

    def reserve(self, header: BlockHeader) -> memoryview | None:
        self._next = (self._next + 1) % DISTINCT
        return self.landing[self._next]

    def commit(self, header: BlockHeader, buffer: memoryview) -> bool:
        return True

    def abandon(self, header: BlockHeader, buffer: memoryview) -> None:
        raise AssertionError("a block was damaged")

    def erase(self, root: bytes, hashes: Sequence[bytes]) -> int:
        return 0


def receive(sock: socket.socket, view: memoryview) -> None:
    while view:
        count = sock.recv_into(view)
        if not count:
            raise ConnectionError
        view = view[count:]


def serve_bare(listener: socket.socket, blocks: Sequence[memoryview], landing: Sequence[memoryview]) -> None:
    while True:
        sock, _ = listener.accept()
        threading.Thread(target=_bare, args=(sock, blocks, landing), daemon=True).start()


def _bare(sock: socket.socket, blocks: Sequence[memoryview], landing: Sequence[memoryview]) -> None:
    asked = memoryview(bytearray(ASK.size))
    try:
        while True:
            receive(sock, asked)
            what, count = ASK.unpack(asked)
            for at in range(count):
                if what == b"g":
                    sock.sendall(blocks[at % DISTINCT])
                else:
                    receive(sock, landing[at % DISTINCT])
            if what == b"p":
                sock.sendall(b"k")
    except ConnectionError:
        sock.close()


def main() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    folder, key = Path(sys.argv[1]), bytes.fromhex(sys.argv[2])
    blocks = made_blocks(1)
    store = MemoryStore(blocks)
    server = DataPlaneServer(store, KeyRing({"k": key}), IDENTITY, tcp=("127.0.0.1", 0), unix_path=folder / "ours.sock")
    server.start()
    tcp = socket.create_server(("127.0.0.1", 0))
    unix = socket.socket(socket.AF_UNIX)
    unix.bind(str(folder / "bare.sock"))
    unix.listen()
    payloads = [payload for _, payload in blocks]
    for listener in (tcp, unix):
        threading.Thread(target=serve_bare, args=(listener, payloads, store.landing), daemon=True).start()
    print(json.dumps({"pid": os.getpid(), "ours": server.addresses, "bare_tcp": tcp.getsockname()[1]}), flush=True)
    for _ in sys.stdin:
        print(json.dumps({"cpu_s": time.process_time()}), flush=True)
    server.close()


if __name__ == "__main__":
    main()
