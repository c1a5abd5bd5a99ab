"""A vault's two pools: one of blocks, one of hybrid models' recurrent states, which push one another out of neither
memory nor disk. Thread-safe as its parts are; the data plane calls it.

    put, has, get, erase ──by what the header says it is, or by who knows the hash──▶ blocks │ states

A state that stands behind a block goes with it when that is erased, and stays while another chain continues the block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvfleet.vault.store.store import VaultStore
from kvproto.dataplane.block import BlockHeader
from kvproto.dataplane.serving import BlockStore, ServedBlocks


@dataclass(frozen=True, slots=True)
class VaultPools(BlockStore):
    blocks: VaultStore
    states: VaultStore

    def get(self, root: bytes, hashes: Sequence[bytes], exact: bool) -> ServedBlocks:
        """What no pool knows counts as a block that is missed."""
        known = [header is not None for header in self.states.headers_of(hashes)]
        if not any(known):
            return self.blocks.get(root, hashes, exact)
        served: list[ServedBlocks] = []

        def release() -> None:
            for part in served:
                part.release()

        try:
            for pool, of_states in ((self.blocks, False), (self.states, True)):
                asked = [one for one, is_state in zip(hashes, known, strict=True) if is_state is of_states]
                served.append(pool.get(root, asked, exact))
        except BaseException:
            release()
            raise
        parts = [iter(part.blocks) for part in served]
        found = [next(parts[is_state]) for is_state in known]
        return ServedBlocks(found, release, sum(part.from_disk for part in served))

    def has(self, root: bytes, hashes: Sequence[bytes], exact: bool) -> list[bool]:
        held = self.blocks.has(root, hashes, exact), self.states.has(root, hashes, exact)
        return [block or state for block, state in zip(*held, strict=True)]

    def reserve(self, header: BlockHeader) -> memoryview | None:
        return self._pool(header).reserve(header)

    def commit(self, header: BlockHeader, buffer: memoryview) -> bool:
        return self._pool(header).commit(header, buffer)

    def abandon(self, header: BlockHeader, buffer: memoryview) -> None:
        self._pool(header).abandon(header, buffer)

    def erase(self, root: bytes, hashes: Sequence[bytes]) -> int:
        erased = 0
        try:
            erased = self.blocks.erase(root, hashes)
        finally:  # the disk of one may fail, and all is asked for again
            states = [header for header in self.states.headers_of(hashes, coming=True) if header is not None]
            before = self.blocks.headers_of([state.parent for state in states])
            may_go = [state.hash for state, block in zip(states, before, strict=True) if block is None]
            erased += self.states.erase(root, may_go)
        return erased

    def _pool(self, header: BlockHeader) -> VaultStore:
        return self.states if header.is_state else self.blocks

    def check_integrity(self) -> None:
        self.blocks.check_integrity()
        self.states.check_integrity()
        assert all(entry.header.is_state for entry in self.states.table.resident.values())
