"""The host tier: a second block pool whose blocks lie in host memory. The engine's thread owns it.

It is the same pool as the device's, with the same rules: whole chains, leaves evicted first, found by hash. Holding a
block means holding the chain up to it; what is held is being copied from or to.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvfleet.worker.blocks.block_pool import BlockPool
from kvproto.block_hash import Root
from kvproto.messages import Tier, TierEvents


class HostTier:
    """`memory` has room for whole blocks of `block_bytes`; how many that is, is the tier's size."""

    def __init__(self, memory: memoryview, block_bytes: int, block_size: int) -> None:
        self.pool = BlockPool(len(memory) // block_bytes, block_size)
        self.block_bytes = block_bytes
        self._memory = memory
        self._changes: list[TierEvents] = []

    def view(self, slot: int) -> memoryview:
        return self._memory[slot * self.block_bytes : (slot + 1) * self.block_bytes]

    def allocate(self, count: int) -> list[int]:
        """At most so many slots, fewer if there are not as many; held by the caller."""
        self._note_changes()
        return self.pool.allocate(min(count, self.pool.available))

    def drop(self, block_hash: bytes) -> int:
        """See `BlockPool.drop`."""
        self._note_changes()
        return self.pool.drop(block_hash)

    def erase(self, root: Root, hashes: Sequence[bytes], ids: Sequence[int], keep: int = 0) -> int:
        """See `BlockPool.erase`."""
        self._note_changes()
        return self.pool.erase(root, hashes, ids, keep)

    def depth(self, hashes: Sequence[bytes], start: int, end: int, *, exact: bool = False) -> int:
        """How far the chain is here without a gap, from `start` on, to `end` at most; `exact`: nothing lossy."""
        return max(len(self.pool.chain_to(hashes[:end], exact=exact)), start)

    def fill(
        self, slots: Sequence[int], root: Root, hashes: Sequence[bytes], start: int, ids: Sequence[tuple[int, ...]],
        lossy: Sequence[bool],
    ) -> list[int]:  # fmt: skip
        """Blocks `start` and on of a chain have been copied to `slots`, which the caller holds and goes on holding.

        Returns the slots to hold from now on: where a block is here already, that one.
        """
        before = self.pool.find(hashes[start - 1]) if start else None
        after_lossy = before is not None and self.pool.content(before).lossy
        filled = []
        for at, (slot, tokens, is_lossy) in enumerate(zip(slots, ids, lossy, strict=True), start):
            after_lossy = after_lossy or is_lossy  # what follows a lossy block counts as lossy too
            filled.append(self.pool.fill(slot, root, hashes, at, tokens, lossy=after_lossy))
            after_lossy = after_lossy or self.pool.is_lossy(hashes[at])
        return filled

    def take_changes(self) -> list[TierEvents]:
        """What was removed and stored since the last call, in order."""
        self._note_changes()
        changes, self._changes = self._changes, []
        return changes

    def _note_changes(self) -> None:
        """The pool tells removals before stores: before blocks are taken again, what was stored is to be noted."""
        self._changes += self.pool.take_changes(Tier.HOST)
