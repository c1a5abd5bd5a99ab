"""KV in all tiers of this worker, found, read, listed and erased by content. The engine's thread owns it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvfleet.worker.blocks.content_index import common_prefix
from kvfleet.worker.blocks.state_slots import StateSlots
from kvfleet.worker.model.base import ModelRunner
from kvfleet.worker.schedule.sequence import Sequence as Running
from kvfleet.worker.tiers.tiers import Tiers
from kvproto.block_hash import Root, chain, in_tier
from kvproto.messages import Inspection, Tier, TierEvents


@dataclass(eq=False, slots=True)
class KvHoldings:
    runner: ModelRunner
    tiers: Tiers
    live: Iterable[Running]  # the present ones, whenever it is iterated
    states: StateSlots | None = None

    @property
    def digest(self) -> int:
        """Of all tiers, as `EventLog.digest` has it."""
        states = 0 if self.states is None else in_tier(self.states.digest, Tier.STATE.number)
        return self.tiers.pool.digest ^ in_tier(self.tiers.host.pool.digest, Tier.HOST.number) ^ states

    def state_changes(self) -> list[TierEvents]:
        return [] if self.states is None else self.states.take_changes()

    def holdings(self) -> dict[Tier, list[bytes]]:
        """Hashes of all full blocks that `digest` covers, parents before children."""
        on_host = {Tier.HOST: self.tiers.host.pool.index.hashes()} if self.tiers.host.blocks else {}
        states = {} if self.states is None else {Tier.STATE: self.states.ends()}
        return {Tier.DEVICE: self.tiers.pool.index.hashes()} | on_host | states

    def inspect(self, root: Root, ids: Sequence[int]) -> Inspection:
        """How many leading tokens are cached; by tier: there or in a faster one."""
        on_device, blocks = self.locate(root, ids)
        tiers = {Tier.DEVICE.value: on_device}
        if self.tiers.host.blocks:
            hashes = chain(root, ids, self.tiers.pool.block_size)
            below = self.tiers.host.depth(hashes, 0, len(hashes)) * self.tiers.pool.block_size
            tiers[Tier.HOST.value] = max(on_device, below)
        return Inspection(on_device, tuple(blocks), tiers)

    def locate(self, root: Root, ids: Sequence[int]) -> tuple[int, list[int]]:
        match = self.tiers.pool.match(root, chain(root, ids, self.tiers.pool.block_size), ids, limit=len(ids))
        return match.tokens, match.blocks + ([match.donor] if match.donor is not None else [])

    def read_kv(self, root: Root, ids: Sequence[int], layer: int) -> tuple[Any, Any]:
        """K and V `[len, kv_heads, head_dim]` of the cached part of `ids` in one layer, copied. Raises IndexError for
        an unknown layer."""
        if not 0 <= layer < self.runner.num_layers:
            raise IndexError(f"the model has layers 0 to {self.runner.num_layers - 1}, not {layer}")
        tokens, blocks = self.locate(root, ids)
        return self.runner.read_kv(blocks, tokens, layer)

    def leave_soon(self) -> bool:
        """Have snapshots taken at each block's end from now on. Whether all that runs has one at the end of its last
        block, from which another worker can go on."""
        assert self.states is not None
        self.states.every = self.states.block_size
        ends = (one.hashes[one.filled - 1] for one in self.live if one.filled and not one.private)
        return all(self.states.at(end) is not None for end in ends)

    def erase(self, root: Root, ids: Sequence[int], keep: int = 0) -> int:
        """As `BlockPool.erase`, in every tier; what running sequences hold of it, when they have ended. Returns how
        many blocks of this worker went at once."""
        hashes = chain(root, ids, self.tiers.pool.block_size)
        users = [one for one in self.live if one.hashes[:1] == hashes[:1] and common_prefix(one.ids, ids) > keep]
        if users:
            self.tiers.erase_once(lambda: all(map(_is_over, users)), root, hashes, ids, keep)
        return self.tiers.erase(root, hashes, ids, keep)


def _is_over(sequence: Running) -> bool:
    return sequence.has_ended
