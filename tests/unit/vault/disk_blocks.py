"""Blocks for the tests of the disk tier: everything about one follows from its number. Also a process that writes some.

    python disk_blocks.py FOLDER FIRST MAX_BYTES SEGMENT_BYTES

stores blocks from FIRST on, erases every fifth again once three more are there, and says so, line by line, until it is
killed.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from kvfleet.vault.disk.disk import DiskStore
from kvproto.block_hash import child, pack_ids
from kvproto.dataplane.block import BlockCodec, BlockHeader

ROOT = b"root of a tenant"
FORMAT = b"format of blocks"


def payload_of(number: int) -> bytes:
    chance = random.Random(number)
    return chance.randbytes(chance.randrange(1, 5_000))


def block(number: int, parent: bytes = ROOT, payload: bytes | None = None) -> tuple[BlockHeader, bytes]:
    """Header and payload."""
    data = payload_of(number) if payload is None else payload
    ids = [number, *range(15)]
    header = BlockHeader(
        ROOT, child(parent, ids), parent, pack_ids(ids), FORMAT, BlockCodec.RAW, max(len(data), 9_000), len(data)
    )
    return header.sealed(data), data


def write_for_ever(folder: Path, first: int, max_bytes: int, segment_bytes: int) -> None:
    store = DiskStore(folder, max_bytes, segment_bytes)
    store.open()
    number = first
    while True:
        store.append(*block(number))
        print(f"stored {number}", flush=True)
        if number % 5 == 3 and number - 3 >= first:
            print(f"erasing {number - 3}", flush=True)
            store.forget([block(number - 3)[0].hash])
            print(f"erased {number - 3}", flush=True)
        number += 1


if __name__ == "__main__":
    write_for_ever(Path(sys.argv[1]), *map(int, sys.argv[2:]))
