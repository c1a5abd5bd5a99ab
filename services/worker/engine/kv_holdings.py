"""What of KV this engine holds, in all tiers of this worker: found, read, listed and erased by content.

It changes nothing but by `erase`. The engine's thread owns it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvfleet.worker.blocks.block_pool import BlockPool
from kvfleet.worker.model.base import ModelRunner
from kvfleet.worker.tiers.tiers import Tiers
from kvproto.block_hash import Root, chain
from kvproto.messages import Tier


class KvHoldings:
    def __init__(self, runner: ModelRunner, pool: BlockPool, tiers: Tiers | None) -> None:
        self._runner = runner
        self._pool = pool
        self._tiers = tiers

    @property
    def digest(self) -> int:
        """Of what is held in each tier, as `EventLog.digest` has it."""
        return self._pool.digest ^ (self._tiers.digest if self._tiers is not None else 0)

    def holdings(self) -> dict[Tier, list[bytes]]:
        """Content addresses of all full blocks, parents before children, of all tiers that `digest` covers."""
        below = self._tiers.holdings() if self._tiers is not None else {}
        return {Tier.DEVICE: self._pool.hashes()} | below

    def depths(self, root: Root, ids: Sequence[int]) -> dict[Tier, int]:
        """How many leading tokens of `ids` are cached, by tier of this worker: there or in a faster one."""
        on_device = self.locate(root, ids)[0]
        if self._tiers is None or not self._tiers.host.blocks:
            return {Tier.DEVICE: on_device}
        hashes = chain(root, ids, self._pool.block_size)
        below = self._tiers.host.depth(hashes, 0, len(hashes)) * self._pool.block_size
        return {Tier.DEVICE: on_device, Tier.HOST: max(on_device, below)}

    def locate(self, root: Root, ids: Sequence[int]) -> tuple[int, list[int]]:
        """How many leading tokens of `ids` are cached, and the blocks that hold them."""
        match = self._pool.match(root, chain(root, ids, self._pool.block_size), ids, limit=len(ids))
        return match.tokens, match.blocks + ([match.donor] if match.donor is not None else [])

    def read_kv(self, root: Root, ids: Sequence[int], layer: int) -> tuple[Any, Any]:
        """K and V `[len, kv_heads, head_dim]` of the cached part of `ids` in one layer, copied.

        Raises IndexError if the model has no such layer.
        """
        if not 0 <= layer < self._runner.num_layers:
            raise IndexError(f"the model has layers 0 to {self._runner.num_layers - 1}, not {layer}")
        tokens, blocks = self.locate(root, ids)
        return self._runner.read_kv(blocks, tokens, layer)

    def erase(self, root: Root, ids: Sequence[int], keep: int = 0) -> int:
        """Forget what only this token sequence has behind its first `keep` tokens, in every tier. Returns how many
        blocks of this worker went."""
        return self.erase_chain(root, chain(root, ids, self._pool.block_size), ids, keep)

    def erase_chain(self, root: Root, hashes: Sequence[bytes], ids: Sequence[int], keep: int) -> int:
        """The same, where the chain is hashed already."""
        if self._tiers is None:
            return self._pool.erase(root, hashes, ids, keep)
        return self._tiers.erase(root, hashes, ids, keep)
