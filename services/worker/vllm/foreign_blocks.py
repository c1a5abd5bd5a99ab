"""vLLM's cached blocks as blocks of ours. Pure; the sidecar's event loop owns it.

vLLM names a block by a hash of its own and tells the block's token ids, its parent and, of a prompt's first block, the
cache salt. The salt is the root of our chain in hex, the adapter's of those that have one, so our hashes follow from
the event alone. One of its blocks is
one or more of ours. It tells each copy of a block, when it is stored and when it is removed, so copies are counted.

What cannot be told is left out: a holding that is missing costs a slower answer, as a wrong one does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvproto.block_hash import HASH_BYTES, chain, digest_term
from kvproto.messages import BlockRun, Tier, TierEvents

DENSE = (None, "full_attention")  # kinds of cache groups whose blocks hold whole prefixes; None: not said
DEVICE = (None, "GPU")  # media; vLLM's CPU build says GPU too

ForeignHash = bytes | int


@dataclass(slots=True)
class _Block:
    parent: bytes  # of ours: the block before, or the root
    hashes: tuple[bytes, ...]  # of ours, in order
    copies: int = 0


@dataclass(eq=False, slots=True)
class ForeignBlocks:
    """`block_size` is ours, in tokens. `left_out_total` counts stored blocks that have no name of ours: of unknown
    parents, without a salt that is a root, or of a size that ours do not fill."""

    block_size: int
    left_out_total: int = 0
    evictions_total: int = 0
    digest: int = 0  # of one tier, as an event log has it
    _blocks: dict[ForeignHash, _Block] = field(default_factory=dict)
    _names: dict[bytes, ForeignHash] = field(default_factory=dict)  # by the last of ours in it
    _children: dict[bytes, int] = field(default_factory=dict)  # how many of its blocks have this parent
    _copies: dict[bytes, int] = field(default_factory=dict)  # of each of ours
    _group: int | None = None  # of hybrid models one dense group is followed

    def hashes(self) -> list[bytes]:
        return list(self._copies)

    def __len__(self) -> int:
        return len(self._copies)

    def depth(self, hashes: Sequence[bytes]) -> int:
        """How many leading ones of a chain are held."""
        return next((at for at, one in enumerate(hashes) if one not in self._copies), len(hashes))

    def erasable(self, hashes: Sequence[bytes], keep: int) -> tuple[list[ForeignHash], int]:
        """vLLM's names of the blocks that only this chain has: from its end back to one that others continue, or the
        first `keep` of ours. Also how many of ours they are."""
        names: list[ForeignHash] = []
        count = 0
        leaving: set[bytes] = set()  # parents of one that goes
        for at in range(len(hashes), keep, -1):
            name = self._names.get(hashes[at - 1])
            if name is None:
                continue
            if self._children.get(hashes[at - 1], 0) > (hashes[at - 1] in leaving):
                break
            block = self._blocks[name]
            names.append(name)
            count += len(block.hashes)
            leaving.add(block.parent)
        return names, count

    def continuations(self, block: bytes) -> list[ForeignHash]:
        """vLLM's names of the block that ends with this one of ours, or has it inside, and of all that continue it."""
        found: list[ForeignHash] = []
        ends = {block}
        while ends:
            names = [
                name for name, one in self._blocks.items() if one.parent in ends or (not found and block in one.hashes)
            ]
            found += names
            ends = {self._blocks[name].hashes[-1] for name in names} - ends
        return found

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

    def forget(self, names: Iterable[ForeignHash]) -> list[TierEvents]:
        """vLLM was told to drop all copies of these, and has. What it tells of that later is no change."""
        known = [(name, block.copies) for name in names if (block := self._blocks.get(name)) is not None]
        return self._removed(name for name, copies in known for _ in range(copies))

    def clear(self) -> list[TierEvents]:
        """Nothing is cached any more: vLLM said so, or is another process now."""
        gone = tuple(self._copies)
        for known in (self._blocks, self._copies, self._names, self._children):
            known.clear()
        self.digest = 0
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
            if (block := self._blocks.get(name)) is None:
                parent_hash = hashes[at * each - 1] if at else before
                block = self._blocks[name] = _Block(parent_hash, mine)
                self._names[mine[-1]] = name
                self._children[parent_hash] = self._children.get(parent_hash, 0) + 1
            block.copies += 1
        new = {one for one in hashes if one not in self._copies}
        for one in hashes:
            self._copies[one] = self._copies.get(one, 0) + 1
        for one in new:
            self.digest ^= digest_term(one)
        return _addition(before, hashes, new)

    def _start(self, event: Mapping[str, Any], parent: ForeignHash | None) -> bytes | None:
        """What the first block is chained onto: the last of our blocks in its parent, or the root; None if unknown."""
        if parent is not None:
            known = self._blocks.get(parent)
            return known.hashes[-1] if known is not None else None
        keys, lora = (event.get("extra_keys") or [None])[0] or (), event.get("lora_name")
        return next((root for key in keys if key != lora and (root := root_of_salt(key)) is not None), None)

    def _removed(self, names: Iterable[ForeignHash]) -> list[TierEvents]:
        gone: list[bytes] = []
        for name in names:
            block = self._blocks.get(name)
            if block is None:
                continue
            block.copies -= 1
            if block.copies == 0:
                self._drop(name, block)
            for one in reversed(block.hashes):
                self._copies[one] -= 1
                if self._copies[one] == 0:
                    del self._copies[one]
                    self.digest ^= digest_term(one)
                    gone.append(one)
        self.evictions_total += len(gone)
        return _removal(gone)

    def _drop(self, name: ForeignHash, block: _Block) -> None:
        del self._blocks[name]
        if self._names.get(block.hashes[-1]) == name:
            del self._names[block.hashes[-1]]
        self._children[block.parent] -= 1
        if not self._children[block.parent]:
            del self._children[block.parent]


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
