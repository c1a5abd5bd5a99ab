"""Who holds which block of the KV pool, and what the unheld ones still contain. Pure; the engine thread owns it.

    free ──allocate──▶ held (refs > 0) ──release, nothing kept──▶ free
                        │  ▲                                       ▲
                release │  │ acquire (prefix hit)                  │ evict (leaf first)
                        ▼  │                                       │
                       idle: cached, refs == 0 ────────────────────┘

Three rules keep it simple:

* A sequence holds a chain: whoever holds a block holds all blocks before it. `fill` swaps a block whose content is
  cached already for the cached one, so the rule holds for duplicates too. Hence everything that continues an idle
  block is idle, and *every* idle block can be had by evicting leaves: available = free + idle.
* Full blocks are shared by reference, found by hash. Anything less than a full block is shared by copy: `match` names a
  donor and how many of its leading tokens agree, the caller copies it into a block of its own.
* Evictions happen in `allocate` only and blocks are stored in `fill` only, so within one engine step all removals come
  before all stores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvproto.block_hash import Root, digest_term, parent_of
from services.worker.content_index import Content, ContentIndex
from services.worker.eviction.base import EvictionPolicy
from services.worker.eviction.lru import LruEviction


@dataclass(frozen=True, slots=True)
class Match:
    """A cached prefix: `tokens` of it, in full `blocks` and then the first `donor_tokens` of block `donor`."""

    blocks: list[int]
    donor: int | None
    donor_tokens: int
    tokens: int


@dataclass(frozen=True, slots=True)
class PoolChanges:
    """Full blocks that left and entered the content index since the last look; removals came first.

    `stored` groups blocks that follow one another: (hash before the run, hashes of the run).
    """

    removed: list[bytes]
    stored: list[tuple[bytes, list[bytes]]]


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens each. Blocks are named by 0 ... num_blocks - 1."""

    def __init__(self, num_blocks: int, block_size: int, policy: EvictionPolicy | None = None) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool needs at least one block of one token, not {num_blocks} of {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.evictions = 0
        self.digest = 0
        self._policy = policy or LruEviction()
        self._index = ContentIndex()
        self._refs = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._idle = 0
        self._tick = 0
        self._removed: list[bytes] = []
        self._stored: list[tuple[bytes, list[bytes]]] = []

    # ------------------------------------------------------------------ counts

    @property
    def available(self) -> int:
        """Blocks that `allocate` can hand out now."""
        return len(self._free) + self._idle

    @property
    def used(self) -> int:
        """Blocks that a sequence holds."""
        return self.num_blocks - self.available

    @property
    def cached(self) -> int:
        """Blocks nobody holds that still have content."""
        return self._idle

    @property
    def addressed(self) -> int:
        """Full blocks with a content address, held or not: what a snapshot lists."""
        return self._index.addressed

    def idle_among(self, blocks: Sequence[int]) -> int:
        """How many of `blocks` count as available now and would not once acquired."""
        return sum(1 for block in blocks if not self._refs[block])

    def hashes(self) -> list[bytes]:
        """Content addresses of all full blocks, held or not, parents before children."""
        return self._index.hashes()

    def blocks_for(self, tokens: int) -> int:
        """Blocks that `tokens` tokens take."""
        return -(-tokens // self.block_size)

    # ------------------------------------------------------------------ finding

    def match(self, root: Root, hashes: Sequence[bytes], ids: Sequence[int], limit: int) -> Match:
        """Longest cached prefix of `ids[:limit]`, exact to the token; changes nothing.

        `hashes` is the chain over the full blocks of `ids` under `root`.
        """
        size = self.block_size
        blocks: list[int] = []
        for block_hash in hashes[: limit // size]:
            block = self._index.find(block_hash)
            if block is None:
                break
            blocks.append(block)
        full = len(blocks)
        start = full * size
        parent = parent_of(root, hashes, full)
        donor, donor_tokens = self._index.longest_child(parent, ids[start : min(start + size, limit)])
        return Match(blocks, donor, donor_tokens, start + donor_tokens)

    # ------------------------------------------------------------------ holding

    def acquire(self, blocks: Sequence[int]) -> None:
        """Hold cached or held blocks once more, in chain order from the root."""
        for block in blocks:
            if not self._refs[block]:
                self._idle -= 1
                self._policy.withdraw(block)
            self._refs[block] += 1

    def allocate(self, count: int) -> list[int]:
        """`count` blocks for one holder, evicting cached ones as needed; their bytes are whatever was there before.

        Raises ValueError, and changes nothing, if fewer are available.
        """
        if count > self.available:
            raise ValueError(f"{count} blocks asked for, {self.available} available")
        blocks = []
        for _ in range(count):
            block = self._free.pop() if self._free else self._evict()
            self._refs[block] = 1
            blocks.append(block)
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Let go of a holder's blocks, given in chain order. Those with content stay cached until evicted."""
        self._tick += 1
        for block in reversed(blocks):
            self._refs[block] -= 1
            if self._refs[block]:
                continue
            if block not in self._index:
                self._free.append(block)
                continue
            self._idle += 1
            self._policy.touch(block, self._tick)
            self._offer_if_leaf(block)

    # ------------------------------------------------------------------ content

    def fill(self, block: int, parent: bytes, ids: Sequence[int], block_hash: bytes) -> int:
        """`block`, held by the caller alone, now has KV for all its tokens: make it findable.

        Returns the block to use from now on: where the same content is cached already the caller holds that one
        instead, and `block` is free again.
        """
        twin = self._index.find(block_hash)
        if twin is not None:
            self.acquire((twin,))
            self._refs[block] = 0
            self._free.append(block)
            return twin
        self._index.add(block, Content(parent, tuple(ids), block_hash))
        self.digest ^= digest_term(block_hash)
        if self._stored and self._stored[-1][1][-1] == parent:
            self._stored[-1][1].append(block_hash)
        else:
            self._stored.append((parent, [block_hash]))
        return block

    def keep_tail(self, block: int, parent: bytes, ids: Sequence[int]) -> None:
        """Mark the partially filled last block of a holder, before it is released, as worth keeping.

        `ids` are the tokens it has KV for, fewer than a block. Of tails of which one begins with the other only the
        longer is kept.
        """
        tail = tuple(ids)
        if not tail or self._index.longest_child(parent, tail)[1] == len(tail):
            return
        for shorter in self._index.shorter_tails(parent, tail):
            self._index.remove(shorter)
            self._policy.withdraw(shorter)
            self._idle -= 1
            self._free.append(shorter)
        self._index.add(block, Content(parent, tail, None))

    def take_changes(self) -> PoolChanges:
        """What was removed and stored since the last call."""
        changes = PoolChanges(self._removed, self._stored)
        self._removed, self._stored = [], []
        return changes

    # ------------------------------------------------------------------ inside

    def _is_leaf(self, block: int) -> bool:
        block_hash = self._index[block].hash
        return block_hash is None or not self._index.has_children(block_hash)

    def _offer_if_leaf(self, block: int) -> None:
        if self._is_leaf(block):
            self._policy.offer(block)

    def _evict(self) -> int:
        block = self._policy.victim()
        content = self._index.remove(block)
        self._idle -= 1
        if content.hash is not None:
            self.evictions += 1
            self.digest ^= digest_term(content.hash)
            self._removed.append(content.hash)
        parent = self._index.find(content.parent)
        if parent is not None and not self._refs[parent]:
            self._offer_if_leaf(parent)
        return block

    def check_integrity(self, holders: Sequence[Sequence[int]] | None = None) -> None:
        """Raises AssertionError if the books do not balance.

        `holders`: the blocks of every holder, where the caller knows them all; reference counts must then match.
        """
        self._index.check_integrity()
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        assert all(not self._refs[block] and block not in self._index for block in free)
        idle = {block for block in self._index.blocks() if not self._refs[block]}
        assert len(idle) == self._idle
        held = {block for block in range(self.num_blocks) if self._refs[block]}
        assert len(free) + len(idle) + len(held) == self.num_blocks, "a block is lost"
        assert min(self._refs) >= 0
        assert self._policy.offered() == {block for block in idle if self._is_leaf(block)}
        for block in self._index.blocks():
            parent = self._index.find(self._index[block].parent)
            if parent is not None:
                assert self._refs[parent] >= self._refs[block], "a block is held without the one before it"
        if holders is not None:
            counted = [0] * self.num_blocks
            for blocks in holders:
                assert len(set(blocks)) == len(blocks), "a holder lists a block twice"
                for block in blocks:
                    counted[block] += 1
            assert counted == self._refs
