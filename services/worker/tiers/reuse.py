"""Whose blocks are asked for again: what is worth keeping below the device. Pure; the engine's thread owns it.

A workload without reuse must not pay for tiers, so blocks are offloaded only where experience says that they come back.
Experience needs no copies: the names of the chains asked for lately are enough, also of those that were evicted before
anybody came back for them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvfleet.worker.blocks.content_index import depth_of

KEPT_NAMES = 131_072  # of blocks: two million tokens of prompts
KEPT_ROOTS = 1024
MEMORY_BLOCKS = 4096.0  # asked blocks after which old experience counts half
FEWEST_BLOCKS = 32.0  # less than that is no experience


@dataclass(slots=True)
class _Share:
    asked: float = 0.0
    again: float = 0.0

    def add(self, asked: int, again: int) -> None:
        fade = 0.5 ** (asked / MEMORY_BLOCKS)
        self.asked = self.asked * fade + asked
        self.again = self.again * fade + again


@dataclass(eq=False)
class ReuseWatch:
    """Per root, that is per model and tenant, as tenants differ in what they do."""

    kept_names: int = KEPT_NAMES
    _names: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    _shares: OrderedDict[bytes, _Share] = field(default_factory=OrderedDict)

    def ask(self, root: bytes, hashes: Sequence[bytes]) -> int:
        """A request came with this chain. Returns how many of its blocks were asked for before."""
        seen = self.extend(hashes)
        if hashes:
            share = self._shares.setdefault(root, _Share())
            self._shares.move_to_end(root)
            share.add(len(hashes), seen)
            if len(self._shares) > KEPT_ROOTS:
                self._shares.popitem(last=False)
        return seen

    def extend(self, hashes: Sequence[bytes]) -> int:
        """Note a chain, also that of a sequence that ended: its next turn asks for its generated blocks too."""
        names = self._names
        seen = depth_of(hashes, names.__contains__)
        for block_hash in reversed(hashes):  # so that what follows is forgotten before what it follows
            names[block_hash] = None
            names.move_to_end(block_hash)
        while len(names) > self.kept_names:
            names.popitem(last=False)
        return seen

    def share(self, root: bytes) -> float:
        """Of the blocks asked for lately, the share that had been asked for before; 0 without experience."""
        share = self._shares.get(root)
        return share.again / share.asked if share is not None and share.asked >= FEWEST_BLOCKS else 0.0

    def is_worth(self, root: bytes, offload_s: float, recompute_s: float) -> bool:
        """Whether keeping a block, which takes `offload_s`, is expected to save more."""
        return self.share(root) * recompute_s > offload_s
