"""What one block's bytes are, bound into their checksum. Pure.

A header says everything that decides whether bytes may be used: whose they are (root), which tokens after which others
(hash, parent, ids), how they lie in memory (format, codec). The checksum covers all of it and the bytes, so a block
that was damaged, or is another one than was asked for, is found out where it is stored and where it is fetched.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from operator import attrgetter
from typing import Any

import msgpack
import xxhash

from kvproto.block_hash import HASH_BYTES, LAYOUT_VERSION, child, unpack_ids
from kvproto.errors import CodecError

MAX_BLOCK_BYTES = 256 * 1024 * 1024


class BlockCodec(StrEnum):
    """How a block's numbers are written."""

    RAW = "raw"  # as they lie in the pool
    INT8 = "int8"  # symmetric, one fp32 scale per (token, head)


def kv_format(layers: int, kv_heads: int, head_dim: int, block_size: int, dtype: str) -> bytes:
    """16 bytes that are equal where blocks' bytes mean the same; `dtype` is the pool's: float32, bfloat16, int8..."""
    packed: bytes = msgpack.packb([LAYOUT_VERSION, layers, kv_heads, head_dim, block_size, dtype])
    return hashlib.blake2b(packed, digest_size=HASH_BYTES).digest()


@dataclass(frozen=True, slots=True)
class BlockHeader:
    """`root`, `hash`, `parent` and `format` have 16 bytes; `ids` are the block's tokens as u32 little-endian.

    `raw_bytes` is the block's size in the pool, `length` that of the bytes that follow. `lossy`: it was quantised, or
    computed on blocks that were. `snr_db` is what quantising cost it, 0 if nothing.
    """

    root: bytes
    hash: bytes
    parent: bytes
    ids: bytes
    format: bytes
    codec: BlockCodec
    raw_bytes: int
    length: int
    lossy: bool = False
    snr_db: float = 0.0
    checksum: int = 0  # xxh3 of the bytes, seeded with that of all other fields

    def sealed(self, payload: Any) -> BlockHeader:
        """With the checksum of `payload`, any contiguous buffer of `length` bytes."""
        return replace(self, checksum=self.checksum_of(payload))

    def checksum_of(self, payload: Any) -> int:
        return xxhash.xxh3_64_intdigest(payload, self._seed())

    def checking(self) -> Any:
        """For bytes that come in pieces: `update` with each, then compare `intdigest()` with the checksum."""
        return xxhash.xxh3_64(seed=self._seed())

    def matches(self, payload: Any) -> bool:
        """Whether these are the bytes that were sealed. Whole bytes are read: outside of event loops only."""
        return self.checksum == self.checksum_of(payload)

    def is_genuine(self) -> bool:
        """Whether the hash is that of these tokens after this parent."""
        return child(self.parent, unpack_ids(self.ids)) == self.hash

    def packed(self) -> list[Any]:
        """For msgpack."""
        return [*_CHECKED(self), self.checksum]

    def _seed(self) -> int:
        return xxhash.xxh3_64_intdigest(msgpack.packb(_CHECKED(self)))


# Of a header all fields but the checksum, in their order.
_CHECKED = attrgetter(*(each.name for each in fields(BlockHeader) if each.name != "checksum"))


def unpack_header(packed: Any) -> BlockHeader:
    """Inverse of `packed`. Raises CodecError."""
    try:
        root, block_hash, parent, ids, kv_format, codec, raw_bytes, length, lossy, snr_db, checksum = packed
        header = BlockHeader(
            root, block_hash, parent, ids, kv_format, BlockCodec(codec), raw_bytes, length, lossy, snr_db, checksum
        )
    except (TypeError, ValueError):
        raise CodecError("not a block's header") from None
    if any(not isinstance(field, bytes) or len(field) != HASH_BYTES for field in (root, block_hash, parent, kv_format)):
        raise CodecError(f"hashes have {HASH_BYTES} bytes")
    if not isinstance(ids, bytes) or not ids or len(ids) % 4:
        raise CodecError("token ids are u32", field="ids")
    for field, size in (("raw_bytes", raw_bytes), ("length", length)):
        if type(size) is not int or not 0 < size <= MAX_BLOCK_BYTES:
            raise CodecError(f"1 to {MAX_BLOCK_BYTES} bytes", field=field)
    if type(lossy) is not bool or type(snr_db) is not float or type(checksum) is not int:
        raise CodecError("not a block's header")
    return header


RUN_BLOCKS = 64


def runs_of(hashes: Sequence[bytes]) -> list[tuple[bytes, int, int]]:
    """A chain cut into aligned runs of 64 blocks: (key for the ring of vaults, first block, end).

    All blocks of a run lie in one vault, so that a promote stays one round trip per vault. The key is the run's first
    hash: its last one is not known while the run still grows.
    """
    return [(hashes[start], start, min(start + RUN_BLOCKS, len(hashes))) for start in range(0, len(hashes), RUN_BLOCKS)]
