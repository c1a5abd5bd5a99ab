"""Blocks with real headers for tests of what keeps and moves them: chains of hashes, bytes that say whose they are."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvproto.block_hash import child, pack_ids, state_after
from kvproto.dataplane.block import STATE_IDS, BlockCodec, BlockHeader, kv_format

ROOT = hashlib.blake2b(b"root", digest_size=16).digest()
OTHER_ROOT = hashlib.blake2b(b"another root", digest_size=16).digest()
FORMAT = kv_format(2, 1, 8, 4, "float32")


@dataclass(frozen=True)
class Block:
    header: BlockHeader
    payload: bytes

    @property
    def hash(self) -> bytes:
        return self.header.hash


def block(
    parent: bytes, first_id: int, *, root: bytes = ROOT, size: int = 1024, lossy: bool = False, salt: int = 0
) -> Block:
    """Of four tokens after `parent`. `salt` makes other bytes of the same tokens."""
    ids = tuple(range(first_id, first_id + 4))
    block_hash = child(parent, ids)
    payload = hashlib.shake_256(block_hash + bytes([lossy, salt])).digest(size)
    codec = BlockCodec.INT8 if lossy else BlockCodec.RAW
    raw_bytes = 4 * size if lossy else size
    header = BlockHeader(root, block_hash, parent, pack_ids(ids), FORMAT, codec, raw_bytes, size, lossy)
    return Block(header.sealed(payload), payload)


def chain(length: int, *, root: bytes = ROOT, first_id: int = 0, size: int = 1024, lossy: bool = False) -> list[Block]:
    """Blocks that follow one another from the root."""
    blocks: list[Block] = []
    for at in range(length):
        parent = blocks[-1].hash if blocks else root
        blocks.append(block(parent, first_id + 4 * at, root=root, size=size, lossy=lossy))
    return blocks


def state_of(block: Block) -> Block:
    """The recurrent state at its end, as large."""
    header = replace(block.header, hash=state_after(block.header.hash), parent=block.header.hash, ids=STATE_IDS)
    return Block(header.sealed(block.payload), block.payload)


def hashes(blocks: Sequence[Block]) -> list[bytes]:
    return [one.hash for one in blocks]
