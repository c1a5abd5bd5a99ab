"""Chains of block hashes, compiled: `kvproto.block_hash.chain` as one loop. Pure.

A decision hashes a prompt's every block, one after the other, so this is most of what it costs. A block's hash is
BLAKE2b of its parent's 16 bytes and its token ids (RFC 7693); for blocks of up to 28 tokens that is one compression.
Larger ones, and odd ones, take hashlib's way.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvfleet.placement.index.hash_kernel import chain as chain_kernel
from kvfleet.placement.index.prefix_index import Hashes, pack
from kvproto import block_hash
from kvproto.block_hash import ForkedRoot, Root

LARGEST_BLOCK = 28  # tokens; with a parent of 16 bytes that fills the 128 bytes of one compression


def chain(root: Root, ids: Sequence[int], block_size: int) -> Hashes:
    """`[blocks, 2]`: hashes of the full blocks of `ids`, in order."""
    if block_size % 2 or block_size > LARGEST_BLOCK:
        return pack(block_hash.chain(root, ids, block_size))
    count = len(ids) // block_size
    words = block_size // 2
    blocks = np.frombuffer(block_hash.pack_ids(ids), dtype="<u8", count=count * words).reshape(count, words)
    hashes = np.empty((count, 2), dtype=np.uint64)
    forks_at = root.blocks if isinstance(root, ForkedRoot) else 0
    for start, end in ((0, min(forks_at, count)), (forks_at, count)):
        if start < end:
            before = [hashes[start - 1].tobytes()] * start if start else []
            parent = np.frombuffer(block_hash.parent_of(root, before, start), dtype="<u8")
            chain_kernel(parent, blocks[start:end], hashes[start:end])
    return hashes
