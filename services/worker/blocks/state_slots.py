"""Which slot of the state pool holds what: states of running sequences, and snapshots of them by content. Pure; the
engine thread owns it, through the scheduler's block tables.

    free ──take──▶ a sequence's ──keep──▶ snapshot ──evict, least recently used──▶ free
                        │                    │ copied to a sequence's slot that begins there
                        └──give_back──▶ free ◀

A recurrent layer's state stands for all tokens before it and cannot be cut back. So a prefix can be reused up to a
snapshot alone, and a snapshot leaves with the block that it stands behind. It is named by the hash of the full blocks
before it and the tokens that follow them: none where it stands at a block's end, fewer than a block where a sequence
ended or a prompt forks. Snapshots share the slots with running sequences, which take them when they need them.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvfleet.worker.blocks.content_index import Content, ContentIndex
from kvproto.block_hash import Root, digest_term, parent_of
from kvproto.messages import BlockRun, Tier, TierEvents


class StatePoint(NamedTuple):
    parent: bytes  # the hash of the last full block before it; of one inside a block what that block is hashed onto
    ids: tuple[int, ...]  # inside the block; () at the end of one
    lossy: bool = False  # computed on blocks that were quantised


class StateSlots:
    """Slots are named by 0 ... num_slots - 1. `every`: blocks between two snapshots of a prompt. `at_prompt_ends`: one
    more behind the last block of each prompt, as another worker goes on from there."""

    def __init__(self, num_slots: int, block_size: int, every: int, *, at_prompt_ends: bool = False) -> None:
        if num_slots < 1 or every < 1:
            raise ValueError(f"{num_slots} states, one every {every} blocks: both must be positive")
        self.num_slots = num_slots
        self.at_prompt_ends = at_prompt_ends
        self.every = every * block_size
        self.most_sequences = max(1, num_slots - 1)  # at once; snapshots that are being copied leave them their slots
        self.evictions = 0
        self.taken_total = 0  # snapshots
        self.block_size = block_size
        self._free = list(range(num_slots - 1, -1, -1))
        self._snapshots: OrderedDict[int, StatePoint] = OrderedDict()  # least recently used first
        self._places: dict[bytes, dict[tuple[int, ...], int]] = {}  # parent -> tokens behind it -> slot
        self._pins: Counter[int] = Counter()  # of snapshots that are being copied elsewhere
        self._copies: list[tuple[int, int]] = []
        self.digest = 0  # of the blocks behind which one stands
        self._changed: set[bytes] = set()
        self._told: set[bytes] = set()
        self._is_told = False

    @property
    def snapshots(self) -> int:
        return len(self._snapshots)

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def available(self) -> int:
        return len(self._free) + len(self._snapshots) - sum(1 for slot in self._pins if slot in self._snapshots)

    def take(self, source: int = -1) -> int:
        """A slot for a sequence, with a copy of `source`, or zero. Raises LookupError if there is none."""
        slot = self._claim()
        self._copies.append((source, slot))
        return slot

    def take_empty(self) -> int | None:
        """A slot to write a snapshot to in the next step, if there is one."""
        return self._claim() if self.available else None

    def take_now(self) -> int | None:
        """A slot to write a snapshot to at once, between two steps, if there is one. What was to be copied to it, for
        a sequence that is gone, is not."""
        slot = self.take_empty()
        self._copies = [one for one in self._copies if one[1] != slot]
        return slot

    def give_back(self, slot: int) -> None:
        self._free.append(slot)

    def keep(self, slot: int, snapshot: StatePoint) -> None:
        """The slot, a sequence's until now, holds this. Of two that are equal the first stays, an exact one before a
        lossy one."""
        known = self._places.get(snapshot.parent, {}).get(snapshot.ids)
        if known is not None and self._snapshots[known].lossy > snapshot.lossy:
            self._drop(known)
            known = None
        if known is not None:
            self._snapshots.move_to_end(known)
            self._free.append(slot)
            return
        self._list(slot, snapshot)

    def _list(self, slot: int, snapshot: StatePoint) -> None:
        self.taken_total += 1
        self._snapshots[slot] = snapshot
        if snapshot.parent not in self._places:
            self._change(snapshot.parent)
        self._places.setdefault(snapshot.parent, {})[snapshot.ids] = slot

    def find(
        self, root: Root, hashes: Sequence[bytes], ids: Sequence[int], limit: int, *, exact: bool = False
    ) -> tuple[int, int]:
        """The longest prefix of `ids[:limit]` that a snapshot stands behind, and its slot; (0, -1) if none does."""
        for full in range(min(limit // self.block_size, len(hashes)), -1, -1):
            start = full * self.block_size
            if places := self._places.get(parent_of(root, hashes, full)):
                behind = tuple(ids[start : min(start + self.block_size, limit)])
                for count in range(len(behind), 0, -1):
                    slot = places.get(behind[:count])
                    if slot is not None and not (exact and self._snapshots[slot].lossy):
                        return start + count, slot
            slot = self.at(hashes[full - 1]) if full else None
            if slot is not None and not (exact and self._snapshots[slot].lossy):
                return start, slot
        return 0, -1

    def touch(self, slot: int) -> None:
        self._snapshots.move_to_end(slot)

    def at(self, block_hash: bytes) -> int | None:
        """The slot of the snapshot at the end of this block."""
        return self._places.get(block_hash, {}).get(())

    def __getitem__(self, slot: int) -> StatePoint:
        return self._snapshots[slot]

    def points(self, start: int, end: int) -> range:
        """How many tokens come before each snapshot that a step from `start` to `end` passes."""
        return range((start // self.every + 1) * self.every, end + 1, self.every)

    @property
    def may_pin(self) -> bool:
        return len(self._pins) < self.num_slots - self.most_sequences

    def pin(self, slot: int) -> None:
        self._pins[slot] += 1

    def unpin(self, slot: int) -> None:
        self._pins[slot] -= 1
        if not self._pins[slot]:
            del self._pins[slot]
            if slot not in self._snapshots:  # it left meanwhile
                self._free.append(slot)

    def unlisted(self, content: Content) -> None:
        """A block left the pool's index: snapshots behind it, and inside it, go with it."""
        if content.hash is not None:
            for slot in list(self._places.get(content.hash, {}).values()):
                self._drop(slot)
        for ids, slot in list(self._places.get(content.parent, {}).items()):
            if ids and content.ids[: len(ids)] == ids:
                self._drop(slot)

    def _drop(self, slot: int) -> None:
        self._unlist(slot)
        if not self._pins[slot]:
            del self._pins[slot]
            self._free.append(slot)

    def erase(self, root: Root, hashes: Sequence[bytes], ids: Sequence[int], keep: int, index: ContentIndex) -> None:
        """Forget what this token sequence has inside blocks, behind its first `keep` tokens, that are not in the index:
        of a sequence that failed, the last block is not kept."""
        for full in range(keep // self.block_size, len(hashes) + 1):
            parent, start = parent_of(root, hashes, full), full * self.block_size
            for behind, slot in list(self._places.get(parent, {}).items()):
                end = start + len(behind)
                is_ours = end > keep and tuple(ids[start:end]) == behind
                if behind and is_ours and index.longest_child(parent, behind)[1] < len(behind):
                    self._drop(slot)

    def take_copies(self) -> list[tuple[int, int]]:
        """(source, target) since the last call, to be made in this order before a step; source -1: zero it."""
        copies, self._copies = self._copies, []
        return copies

    def ends(self) -> list[bytes]:
        """Hashes of the blocks at whose end, or behind it within the next one, a snapshot stands."""
        return [*self._places]

    def take_changes(self) -> list[TierEvents]:
        """As `BlockPool.take_changes`, of `ends`. The first ones tell that there is none, if so: what the worker has of
        a prompt counts up to a state."""
        gone = tuple(one for one in self._changed if one not in self._places and one in self._told)
        new = tuple(one for one in self._changed if one in self._places and one not in self._told)
        self._told.difference_update(gone)
        self._told.update(new)
        self._changed = set()
        told = [(True, gone)] if gone else []
        if new or not self._is_told:
            told.append((False, new))
            self._is_told = True
        return [TierEvents(Tier.STATE, removed, (BlockRun(b"", some),)) for removed, some in told]

    def _claim(self) -> int:
        if self._free:
            return self._free.pop()
        slot = next((slot for slot in self._snapshots if slot not in self._pins), None)
        if slot is None:
            raise LookupError("every state is in use")
        self._unlist(slot)
        self.evictions += 1
        return slot

    def _unlist(self, slot: int) -> None:
        snapshot = self._snapshots.pop(slot)
        places = self._places[snapshot.parent]
        del places[snapshot.ids]
        if not places:
            del self._places[snapshot.parent]
            self._change(snapshot.parent)

    def _change(self, block_hash: bytes) -> None:
        self._changed.add(block_hash)
        self.digest ^= digest_term(block_hash)

    def __iter__(self) -> Iterator[int]:
        return iter(self._snapshots)

    def check_integrity(self, held: Sequence[int]) -> None:
        """`held`: slots of sequences. Raises AssertionError if a slot is lost, or has two holders."""
        pinned = [slot for slot in self._pins if slot not in self._snapshots]
        assert sorted([*self._free, *self._snapshots, *pinned, *held]) == list(range(self.num_slots))
        places = {slot: StatePoint(parent, ids) for parent, of in self._places.items() for ids, slot in of.items()}
        assert places == {slot: one._replace(lossy=False) for slot, one in self._snapshots.items()}
        assert all(self._places.values())
        assert all(count > 0 for count in self._pins.values())
