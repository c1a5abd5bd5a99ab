"""Recurrent states of a vLLM worker in its host memory: slots of the pool that its blocks lie in, listed by the hash of
the block at whose end a state stands. Owned by the worker's event loop.

    saved by all ranks ──▶ listed ──held while vLLM reads──▶ least recently used goes first, and each with its block
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvfleet.worker.blocks.block_pool import BlockPool
from kvfleet.worker.blocks.content_index import Content
from kvproto.block_hash import digest_term, state_after
from kvproto.messages import BlockRun, Tier, TierEvents, TierLoad

SHARE = 4  # states take this part of the slots at most


@dataclass(eq=False)
class StateRecords:
    pool: BlockPool
    saved_total: int = 0
    restored_total: int = 0
    evictions: int = 0
    digest: int = 0  # of the hashes
    _states: OrderedDict[bytes, tuple[int, ...]] = field(default_factory=OrderedDict)  # least recently used first
    _by_name: dict[bytes, bytes] = field(default_factory=dict)
    _slots: int = 0
    _told: list[TierEvents] = field(default_factory=lambda: [TierEvents(Tier.STATE, False, (BlockRun(b"", ()),))])

    def __post_init__(self) -> None:
        self.pool.on_unlisted = self._unlisted

    def hashes(self) -> list[bytes]:
        return list(self._states)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._states

    def find(self, name: bytes) -> bytes | None:
        """The block that the state of this name, as vaults and peers have it, stands behind, if it is here."""
        return self._by_name.get(name)

    def slots(self, block_hash: bytes) -> list[int]:
        return list(self._states[block_hash])

    def deepest(self, hashes: Sequence[bytes]) -> int:
        """How many leading blocks of a chain that is here the last of its states stands behind; 0 for none."""
        return next((end for end in range(len(hashes), 0, -1) if hashes[end - 1] in self._states), 0)

    def add(self, block_hash: bytes, slots: tuple[int, ...]) -> bool:
        """What the caller holds, who lets go of it. Returns whether it is new; its block has to be here."""
        if block_hash in self._states or not self.pool.index.lists(block_hash):
            self.pool.release(slots)
            return False
        self._states[block_hash] = slots
        self._by_name[state_after(block_hash)] = block_hash
        self._slots += len(slots)
        self.saved_total += 1
        self._tell(block_hash, removed=False)
        while self._slots > self.pool.num_blocks // SHARE:
            self.evictions += 1
            self.drop(next(iter(self._states)))
        return True

    def hold(self, block_hash: bytes) -> list[int]:
        """Its slots, for the caller to release."""
        self._states.move_to_end(block_hash)
        slots = self.slots(block_hash)
        self.pool.acquire(slots)
        self.restored_total += 1
        return slots

    def drop(self, block_hash: bytes) -> None:
        if (slots := self._states.pop(block_hash, None)) is not None:
            del self._by_name[state_after(block_hash)]
            self._slots -= len(slots)
            self.pool.release(slots)
            self._tell(block_hash, removed=True)

    def take_changes(self) -> list[TierEvents]:
        told, self._told = self._told, []
        return told

    def load(self, slot_bytes: int) -> TierLoad:
        return TierLoad(
            blocks=len(self._states),
            bytes_used=self._slots * slot_bytes,
            bytes_total=self.pool.num_blocks // SHARE * slot_bytes,
            offloaded_blocks_total=self.saved_total,
            evictions_total=self.evictions,
            restores_total=self.restored_total,
        )

    def _unlisted(self, content: Content) -> None:
        if content.hash is not None:
            self.drop(content.hash)

    def _tell(self, block_hash: bytes, *, removed: bool) -> None:
        self.digest ^= digest_term(block_hash)
        self._told.append(TierEvents(Tier.STATE, removed, (BlockRun(b"", (block_hash,)),)))

    def check_integrity(self) -> None:
        """Raises AssertionError for a state whose block is not here."""
        assert all(self.pool.index.find(one) is not None for one in self._states)
        assert self._slots == sum(map(len, self._states.values()))
