"""A request's prompt in placement: tokens, hashes of blocks, and prefixes in demand. Pure."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

import numpy as np

from kvfleet.placement.index.hash_kernel import chain as chain_kernel
from kvfleet.placement.index.prefix_index import Hashes, pack
from kvproto import block_hash
from kvproto.block_hash import ForkedRoot, Root, TenantRoots
from kvproto.messages import PlaceRequest, PublicPrefix, WorkerRecord

CHARACTERS_PER_TOKEN = 4  # of text that is not tokenised yet
NO_HASHES: Hashes = np.empty((0, 2), dtype=np.uint64)
KEPT = 65_536
KEPT_PREFIXES = 4096
KEPT_BLOCKS = 524_288
COOLS_S = 1800.0  # about as long as an unused copy stays in a cache
IN_DEMAND = 1.5  # two requests, a quarter of an hour apart at most
MAX_SPACES = 64  # with kept roots
LARGEST_BLOCK = 28  # tokens; with a parent of 16 bytes they fill the 128 bytes of one compression


def chain(root: Root, ids: Sequence[int], block_size: int) -> Hashes:
    """`[blocks, 2]`: `kvproto.block_hash.chain` of the full blocks of `ids`, as one compiled loop for blocks of one
    compression, as it is most of a decision's time. Larger and odd ones go through hashlib."""
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
    """What decides a block's address besides its tokens and tenant: workers that agree on it share hashes."""

    model_revision: str
    block_size: int
    public_prefixes: tuple[PublicPrefix, ...]
    lora: str = ""


def address_spaces(record: WorkerRecord) -> dict[str, AddressSpace]:
    """By the names that the worker serves, its model's first."""
    size, public = max(1, record.block_size), record.public_prefixes
    return {name: AddressSpace(record.model_revision, size, public, lora) for name, lora in record.models.items()}


class PromptHasher(Protocol):
    """Counts and hashes prompts; the simulator has traces instead of tokens. `hashes` are `[blocks, 2]` of the full
    blocks, none for text that only a worker can tokenise; their chain begins with `root`."""

    def tokens(self, ask: PlaceRequest) -> int: ...

    def hashes(self, space: AddressSpace, tenant: str, ask: PlaceRequest) -> Hashes: ...

    def root(self, space: AddressSpace, tenant: str, ask: PlaceRequest) -> Root: ...


class HashedPrompts:
    """Hashes token ids as workers do; without the fleet key it cannot, and load alone decides."""

    def __init__(self, fleet_key: bytes | None) -> None:
        self._fleet_key = fleet_key
        self._roots = lru_cache(MAX_SPACES)(self._roots_of)

    def tokens(self, ask: PlaceRequest) -> int:
        return len(ask.prompt_ids) or len(ask.prompt or "") // CHARACTERS_PER_TOKEN

    def hashes(self, space: AddressSpace, tenant: str, ask: PlaceRequest) -> Hashes:
        if self._fleet_key is None or len(ask.prompt_ids) < space.block_size:
            return NO_HASHES
        return chain(self.root(space, tenant, ask), ask.prompt_ids, space.block_size)

    def root(self, space: AddressSpace, tenant: str, ask: PlaceRequest) -> Root:
        return self._roots(space).of(tenant, ask.prompt_ids)

    def _roots_of(self, space: AddressSpace) -> TenantRoots:
        key = self._fleet_key or b""
        return TenantRoots(space.model_revision, space.block_size, space.public_prefixes, key, space.lora)


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """The blocks up to where prompts part ways, `[n, 2]`."""

    model: str
    space: AddressSpace
    root: Root
    hashes: Hashes


@dataclass(eq=False, slots=True)
class Heat:
    """How many prompts part ways after a block: the demand for the prefix that it ends. Owned by the decider.

    Many requests' longest match ends with a system prompt, one with the last block of a conversation. A prefix in
    demand is worth copies on further workers; unused, it cools down. The whole chain of prefixes after which at least
    two parted is kept, at most `kept_prefixes` of `kept_blocks` together; beyond, the coolest quarter goes.
    """

    kept: int = KEPT
    kept_prefixes: int = KEPT_PREFIXES
    kept_blocks: int = KEPT_BLOCKS
    counts: OrderedDict[bytes, tuple[float, float]] = field(default_factory=OrderedDict)  # longest unused first
    prefixes: dict[bytes, SharedPrefix] = field(default_factory=dict)  # by their last block
    blocks: int = 0  # of all prefixes

    def __len__(self) -> int:
        return len(self.counts)

    def of(self, block: bytes, now: float) -> float:
        """Requests of about the last half hour whose longest match ended with this block."""
        count, at = self.counts.get(block, (0.0, now))
        return count * math.exp((at - now) / COOLS_S)

    def add(self, block: bytes, now: float) -> bool:
        """Returns whether `keep` should have the prefix that it ends: it is in demand and not kept."""
        count = self.of(block, now) + 1
        self.counts[block] = count, now
        self.counts.move_to_end(block)
        if len(self.counts) > self.kept:
            self._drop(self.counts.popitem(last=False)[0])
        return count >= IN_DEMAND and block not in self.prefixes

    def keep(self, block: bytes, prefix: SharedPrefix, now: float) -> None:
        self._drop(block)
        self.prefixes[block] = prefix
        self.blocks += len(prefix.hashes)
        if len(self.prefixes) > self.kept_prefixes or self.blocks > self.kept_blocks:
            by_heat = sorted(self.prefixes, key=lambda one: self.of(one, now))
            for coolest in by_heat[: max(1, len(by_heat) // 4)]:
                self._drop(coolest)
            while self.blocks > self.kept_blocks:
                self._drop(next(iter(self.prefixes)))

    def hottest(self, now: float) -> list[tuple[SharedPrefix, float]]:
        """Prefixes and their heat, hottest first; of equals the longer."""
        hot = [(prefix, self.of(block, now)) for block, prefix in self.prefixes.items()]
        return sorted(hot, key=lambda one: (-one[1], -len(one[0].hashes)))

    def _drop(self, block: bytes) -> None:
        if (gone := self.prefixes.pop(block, None)) is not None:
            self.blocks -= len(gone.hashes)

    def check_integrity(self) -> None:
        assert self.blocks == sum(len(prefix.hashes) for prefix in self.prefixes.values()) <= self.kept_blocks
        assert len(self.prefixes) <= self.kept_prefixes
        assert self.prefixes.keys() <= self.counts.keys()
