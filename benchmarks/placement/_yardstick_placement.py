"""What a plain Python program does on this machine: placement's benchmarks are measured against it, in the same run.

A figure per second says as much of a processor as of placement: half of it on an older one, and less while others work
there. A floor that is a ratio to stated work, done between the measurements, fails where placement became slower, and
only there. The work is of the same kind as placement's: bytes are unpacked and hashed, and a table is looked up that is
much larger than any cache.

question    unpack the msgpack of a PlaceRequest of 2,048 ids, and the ids; hash them in 128 blocks, each with the
            digest before it (blake2b, 16 bytes), and look all of these up in a dict of a million; and hash and look up
            128 once more, salted otherwise
probe       look 64 random keys of 16 bytes up in that dict
change      store a key in it, remove another, and fold both into a sum: two operations
"""

from __future__ import annotations

import hashlib
import struct
import time
from random import Random

import msgpack

ENTRIES = 1_000_000
IDS, BLOCK = 2_048, 16
PROBES = 64
CHANGES = 5_000  # of a round


class Yardstick:
    """A dict of a million. Each method does its work once, and returns what it took in CPU time of this thread: to be
    called between the measurements that it is compared with, so that what else the machine does slows down both."""

    def __init__(self, seed: int = 1) -> None:
        self._chance = Random(seed)
        raw = self._chance.randbytes(16 * ENTRIES)
        self._keys = [raw[at : at + 16] for at in range(0, len(raw), 16)]
        self._table = {key: number for number, key in enumerate(self._keys)}
        ids = struct.pack(f"<{IDS}I", *(self._chance.randrange(128_256) for _ in range(IDS)))
        self._question = msgpack.packb({"request": "r1", "model": "demo", "prompt_ids": ids, "max_tokens": 50})

    def question_s(self) -> float:
        began = time.thread_time()
        self._ask()
        return time.thread_time() - began

    def probe_s(self) -> float:
        keys = self._chance.choices(self._keys, k=PROBES)
        began = time.thread_time()
        self._probe(keys)
        return time.thread_time() - began

    def change_s(self) -> float:
        """One, of many."""
        at = [self._chance.randrange(ENTRIES) for _ in range(CHANGES)]
        new = [self._chance.randbytes(16) for _ in range(CHANGES)]
        began = time.thread_time()
        self._change(at, new)
        return (time.thread_time() - began) / CHANGES

    # ------------------------------------------------------------------ the work

    def _ask(self) -> None:
        fields = msgpack.unpackb(self._question)
        ids = struct.unpack(f"<{IDS}I", fields["prompt_ids"])
        assert len(ids) == IDS
        packed, table = memoryview(fields["prompt_ids"]), self._table
        for salt in (b"one", b"two"):
            digest = salt
            for at in range(0, 4 * IDS, 4 * BLOCK):
                digest = hashlib.blake2b(digest + packed[at : at + 4 * BLOCK], digest_size=16).digest()
                table.get(digest)

    def _probe(self, keys: list[bytes]) -> None:
        table = self._table
        for key in keys:
            table[key]

    def _change(self, at: list[int], new: list[bytes]) -> None:
        keys, table, total = self._keys, self._table, 0
        for number, key in zip(at, new, strict=True):
            old = keys[number]
            del table[old]
            table[key] = number
            keys[number] = key
            total ^= int.from_bytes(old[:8], "little") ^ int.from_bytes(key[:8], "little")
