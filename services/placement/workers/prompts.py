"""What a request's prompt is to placement: so many tokens, and the hashes of its blocks. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvfleet.placement.index.hash_kernel import chain as chain_kernel
from kvfleet.placement.index.prefix_index import Hashes, pack
from kvproto import block_hash
from kvproto.block_hash import ForkedRoot, Root, TenantRoots
from kvproto.messages import PlaceRequest, PublicPrefix, WorkerRecord

CHARACTERS_PER_TOKEN = 4  # of text that nobody has tokenised yet
NO_HASHES: Hashes = np.empty((0, 2), dtype=np.uint64)
LARGEST_BLOCK = 28  # tokens; with a parent of 16 bytes that fills the 128 bytes of one compression


def chain(root: Root, ids: Sequence[int], block_size: int) -> Hashes:
    """`[blocks, 2]`: hashes of the full blocks of `ids`, in order: `kvproto.block_hash.chain` as one compiled loop.

    A decision hashes a prompt's every block, one after the other, so this is most of what it costs. A block's hash is
    BLAKE2b of its parent's 16 bytes and its token ids (RFC 7693); of up to 28 tokens that is one compression. Larger
    blocks, and odd ones, take hashlib's way.
    """
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


@dataclass(frozen=True, slots=True)
class AddressSpace:
    """What decides a block's address besides its tokens and the tenant: workers that agree on it share hashes."""

    model_revision: str
    block_size: int
    public_prefixes: tuple[PublicPrefix, ...]


def address_space(record: WorkerRecord) -> AddressSpace:
    return AddressSpace(record.model_revision, max(1, record.block_size), record.public_prefixes)


class PromptHasher(Protocol):
    """How prompts are counted and hashed; the simulator has traces instead of tokens."""

    def tokens(self, ask: PlaceRequest) -> int: ...

    def hashes(self, space: AddressSpace, tenant: str, ask: PlaceRequest) -> Hashes:
        """`[blocks, 2]` of the full blocks; none for text that only a worker can tokenise."""
        ...

    def root(self, space: AddressSpace, tenant: str, ask: PlaceRequest) -> Root:
        """What the chain of a prompt that has hashes begins with."""
        ...


class HashedPrompts:
    """Hashes token ids as workers do. Without the fleet key nothing can be hashed: then load alone decides."""

    def __init__(self, fleet_key: bytes | None) -> None:
        self._fleet_key = fleet_key
        self._roots: dict[AddressSpace, TenantRoots] = {}

    def tokens(self, ask: PlaceRequest) -> int:
        return len(ask.prompt_ids) or len(ask.prompt or "") // CHARACTERS_PER_TOKEN

    def hashes(self, space: AddressSpace, tenant: str, ask: PlaceRequest) -> Hashes:
        if self._fleet_key is None or len(ask.prompt_ids) < space.block_size:
            return NO_HASHES
        return chain(self.root(space, tenant, ask), ask.prompt_ids, space.block_size)

    def root(self, space: AddressSpace, tenant: str, ask: PlaceRequest) -> Root:
        roots = self._roots.get(space)
        if roots is None:
            if len(self._roots) >= MAX_SPACES:
                self._roots.clear()
            key = self._fleet_key or b""
            roots = TenantRoots(space.model_revision, space.block_size, space.public_prefixes, key)
            self._roots[space] = roots
        return roots.of(tenant, ask.prompt_ids)


MAX_SPACES = 64
