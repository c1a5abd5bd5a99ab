"""vLLM's cached blocks as blocks of ours. Pure; the sidecar's event loop owns it.

vLLM names a block by a hash of its own and tells the block's token ids, its parent and, of a prompt's first block, the
cache salt. The salt is the root of our chain in hex, so our hashes follow from the event alone. One of its blocks is
one or more of ours. It tells each copy of a block, when it is stored and when it is removed, so copies are counted.

What cannot be told is left out: a holding that is missing costs a slower answer, as a wrong one does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvproto.block_hash import HASH_BYTES, chain
from kvproto.messages import BlockRun, Tier, TierEvents

DENSE = (None, "full_attention")  # kinds of cache groups whose blocks hold whole prefixes; None: not said
DEVICE = (None, "GPU")  # media; vLLM's CPU build says GPU too

ForeignHash = bytes | int


@dataclass(slots=True)
class _Block:
    hashes: tuple[bytes, ...]  # of ours, in order
    copies: int = 0


@dataclass(eq=False, slots=True)
class ForeignBlocks:
    """`block_size` is ours, in tokens. `left_out_total` counts stored blocks that have no name of ours: of unknown
    parents, without a salt that is a root, or of a size that ours do not fill."""

    block_size: int
    left_out_total: int = 0
    _blocks: dict[ForeignHash, _Block] = field(default_factory=dict)
    _copies: dict[bytes, int] = field(default_factory=dict)  # of each of ours
    _group: int | None = None  # of hybrid models one dense group is followed

    def hashes(self) -> list[bytes]:
        return list(self._copies)

    def apply(self, events: Iterable[Mapping[str, Any]]) -> list[TierEvents]:
        """What one batch changed, in order. Raises KeyError, TypeError or ValueError for an event of another form."""
        changes: list[TierEvents] = []
        for event in events:
            kind = event["type"]
            if kind == "AllBlocksCleared":
                changes += self.clear()
            elif event.get("medium") in DEVICE and self._follows(event):
                if kind == "BlockStored":
                    changes += self._stored(event)
                elif kind == "BlockRemoved":
                    changes += self._removed(event["block_hashes"])
        return changes

    def clear(self) -> list[TierEvents]:
        """Nothing is cached any more: vLLM said so, or is another process now."""
        gone = tuple(self._copies)
        self._blocks.clear()
        self._copies.clear()
        return _removal(gone)

    def _follows(self, event: Mapping[str, Any]) -> bool:
        group = event.get("group_idx")
        if self._group is None and event["type"] == "BlockStored" and event.get("kv_cache_spec_kind") in DENSE:
            self._group = group or 0
        return group in (None, self._group)

    def _stored(self, event: Mapping[str, Any]) -> list[TierEvents]:
        names: Sequence[ForeignHash] = event["block_hashes"]
        ids, parent, size = event["token_ids"], event.get("parent_block_hash"), event["block_size"]
        before = self._start(event, parent)
        if before is None or size % self.block_size or len(ids) != size * len(names):
            self.left_out_total += len(names)
            return []
        hashes = chain(before, ids, self.block_size)
        each = size // self.block_size
        for at, name in enumerate(names):
            mine = tuple(hashes[at * each : (at + 1) * each])
            self._blocks.setdefault(name, _Block(mine)).copies += 1
        new = {one for one in hashes if one not in self._copies}
        for one in hashes:
            self._copies[one] = self._copies.get(one, 0) + 1
        return _addition(before, hashes, new)

    def _start(self, event: Mapping[str, Any], parent: ForeignHash | None) -> bytes | None:
        """What the first block is chained onto: the last of our blocks in its parent, or the root; None if unknown."""
        if parent is not None:
            known = self._blocks.get(parent)
            return known.hashes[-1] if known is not None else None
        keys = (event.get("extra_keys") or [None])[0] or ()
        return next((root for key in keys if (root := root_of_salt(key)) is not None), None)

    def _removed(self, names: Iterable[ForeignHash]) -> list[TierEvents]:
        gone: list[bytes] = []
        for name in names:
            block = self._blocks.get(name)
            if block is None:
                continue
            block.copies -= 1
            if block.copies == 0:
                del self._blocks[name]
            for one in reversed(block.hashes):
                self._copies[one] -= 1
                if self._copies[one] == 0:
                    del self._copies[one]
                    gone.append(one)
        return _removal(gone)


def salt_of_root(root: bytes) -> str:
    """What vLLM mixes into the hash of a sequence's first block. Only a holder of the fleet's key can know it."""
    return root.hex()


def root_of_salt(salt: object) -> bytes | None:
    """Inverse of `salt_of_root`; None for anything else."""
    if not isinstance(salt, str) or len(salt) != 2 * HASH_BYTES:
        return None
    try:
        return bytes.fromhex(salt)
    except ValueError:
        return None


def _addition(before: bytes, hashes: Sequence[bytes], new: set[bytes]) -> list[TierEvents]:
    """Runs of the new ones among a chain's `hashes`."""
    runs: list[BlockRun] = []
    run: list[bytes] = []
    for parent, one in zip((before, *hashes), hashes, strict=False):
        if one not in new:
            run = []
        elif run:
            run.append(one)
            runs[-1] = BlockRun(runs[-1].parent, tuple(run))
        else:
            run = [one]
            runs.append(BlockRun(parent, (one,)))
    return [TierEvents(Tier.DEVICE, False, tuple(runs))] if runs else []


def _removal(gone: Sequence[bytes]) -> list[TierEvents]:
    return [TierEvents(Tier.DEVICE, True, (BlockRun(b"", tuple(gone)),))] if gone else []
