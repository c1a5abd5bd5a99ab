"""The header of a stored or transferred block. Pure.

It has all that decides whether bytes may be used: the tenant (root), the tokens (hash, parent, ids) and the layout
(format, codec). The checksum covers the header and the bytes, so a damaged or wrong block is detected.

A snapshot of a hybrid model's recurrent state is kept and sent as a block that follows the one at whose end it stands,
with an id that no token has. So a vault or peer of an earlier version stores, serves and erases it unknowingly.
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

from kvproto.block_hash import HASH_BYTES, LAYOUT_VERSION, STATE_ID, child, pack_ids, unpack_ids
from kvproto.errors import CodecError

MAX_BLOCK_BYTES = 256 * 1024 * 1024
# One vault keeps all blocks of an aligned run. A run's key on the ring of vaults is its first hash, as the last one
# changes while the run grows.
RUN_BLOCKS = 64


STATE_IDS = pack_ids((STATE_ID,))  # of a snapshot; its parent is the block at whose end it stands


class BlockCodec(StrEnum):
    RAW = "raw"  # as in the pool
    INT8 = "int8"  # symmetric, one fp32 scale per (token, head)


def kv_format(
    layers: int, kv_heads: int, head_dim: int, block_size: int, dtype: str, ranks: int = 1, latent: int = 0
) -> bytes:
    """16 bytes, equal for blocks of one layout; `dtype` is the pool's: float32, bfloat16, int8... With several `ranks`
    a block is as many parts, one after the other, each of `kv_heads / ranks` heads. `latent`: a block has keys alone,
    and so many of their numbers are the values."""
    more = [ranks, latent] if latent else [ranks] if ranks > 1 else []
    packed: bytes = msgpack.packb([LAYOUT_VERSION, layers, kv_heads, head_dim, block_size, dtype, *more])
    return hashlib.blake2b(packed, digest_size=HASH_BYTES).digest()


def state_format(blocks: bytes, parts: Sequence[tuple[int, str, int, Sequence[int], str]]) -> bytes:
    """As `kv_format`, of recurrent states beside blocks of the format `blocks`: each part's layer, name, number, shape
    and dtype, in the order of their bytes."""
    packed: bytes = msgpack.packb(
        [LAYOUT_VERSION, "state", blocks, [[*one[:3], list(one[3]), one[4]] for one in parts]]
    )
    return hashlib.blake2b(packed, digest_size=HASH_BYTES).digest()


@dataclass(frozen=True, slots=True)
class BlockHeader:
    """`root`, `hash`, `parent` and `format` have 16 bytes."""

    root: bytes
    hash: bytes
    parent: bytes
    ids: bytes  # u32 little-endian
    format: bytes
    codec: BlockCodec
    raw_bytes: int  # size in the pool
    length: int  # of the payload
    lossy: bool = False  # quantised, or computed on quantised blocks
    snr_db: float = 0.0  # of quantising; 0: not quantised
    checksum: int = 0  # xxh3 of the bytes, seeded with that of all other fields

    def sealed(self, payload: Any) -> BlockHeader:
        """With the checksum of `payload`, any contiguous buffer of `length` bytes."""
        return replace(self, checksum=self.checksum_of(payload))

    def checksum_of(self, payload: Any) -> int:
        return xxhash.xxh3_64_intdigest(payload, self._seed())

    def checking(self) -> Any:
        """A hash for payloads in pieces: `update` with each, then compare `intdigest()` with the checksum."""
        return xxhash.xxh3_64(seed=self._seed())

    def matches(self, payload: Any) -> bool:
        """Whether these are the sealed bytes. Reads all of them, so not on an event loop."""
        return self.checksum == self.checksum_of(payload)

    @property
    def is_state(self) -> bool:
        """Whether these are a recurrent state's bytes."""
        return self.ids == STATE_IDS

    def is_genuine(self) -> bool:
        """Whether the hash is that of these tokens after this parent."""
        return child(self.parent, unpack_ids(self.ids)) == self.hash

    def packed(self) -> list[Any]:
        """For msgpack."""
        return [*_CHECKED(self), self.checksum]

    def _seed(self) -> int:
        return xxhash.xxh3_64_intdigest(msgpack.packb(_CHECKED(self)))


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
