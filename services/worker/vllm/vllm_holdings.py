"""KV of a vLLM worker in all tiers, found, listed and erased by content. Owned by the worker's event loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvfleet.worker.vllm.foreign_blocks import ForeignBlocks, ForeignHash
from kvfleet.worker.vllm.no_tiers import StoreTiers
from kvproto.block_hash import Root, chain, own_root
from kvproto.messages import Inspection, Tier


@dataclass(eq=False, slots=True)
class VllmHoldings:
    blocks: ForeignBlocks
    tiers: StoreTiers

    def holdings(self) -> tuple[dict[Tier, list[bytes]], int]:
        """Hashes of all full blocks, and their digest, as `EventLog.digest` has it."""
        return {Tier.DEVICE: self.blocks.hashes()} | self.tiers.holdings(), self.blocks.digest ^ self.tiers.digest

    def inspect(self, root: Root, ids: Sequence[int]) -> Inspection:
        """How many leading tokens are cached; by tier: there or in a faster one."""
        size = self.blocks.block_size
        hashes = chain(own_root(root), ids, size)
        cached = self.blocks.depth(hashes) * size
        below = {tier.value: max(cached, depth * size) for tier, depth in self.tiers.depths(hashes).items()}
        found = {Tier.DEVICE.value: cached} | below
        return Inspection(cached, (), found)

    def erasable(self, root: Root, ids: Sequence[int], keep: int) -> tuple[list[ForeignHash], int]:
        """vLLM's names of the blocks to erase on its device; those of other tiers are erased. Also how many go."""
        size = self.blocks.block_size
        hashes = chain(own_root(root), ids, size)
        names, gone = self.blocks.erasable(hashes, keep // size)
        return names, gone + self.tiers.erase(own_root(root), hashes, ids, keep)
