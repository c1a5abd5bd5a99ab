"""Loop: KV of vLLM's blocks in memory that its workers map too, the host tier of a vLLM worker: who may write where.
Owned by the worker's event loop.

    free slots ──grant──▶ vLLM's ──saving──▶ being written ──saved, by all ranks──▶ listed under our hashes

vLLM's block has as many tokens as ours: a part of its bytes would hold something of all of them, so that no hash of
ours could name it.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvfleet.worker.blocks.content_index import Content
from kvfleet.worker.tiers.host import HostTier
from kvfleet.worker.vllm.state_records import StateRecords
from kvfleet_vllm.wire import BlocksSaved, BlocksSaving, StateSaving
from kvproto.block_hash import child, parent_of
from kvproto.errors import OutOfMemory
from kvproto.messages import TierEvents

log = logging.getLogger(__name__)

SHARED = Path("/dev/shm")  # both containers of a pod mount it
GRANTED = 256  # slots beyond what the prompts need that vLLM has, or this share of all:
GRANTED_SHARE = 8
TOKENS_LATE_S = 0.05  # a token that the saved bytes are of may still be on its way here
TOKENS_TRIES = 40
KEPT_S = 30.0  # what vLLM was asked for, after its end


@dataclass(eq=False, slots=True)
class AskedChain:
    """What a request of vLLM's consists of: `before` when it was asked, then `outputs` from `first` on. `hashes` are of
    its full blocks, as far as they were asked for."""

    root: bytes
    before: Sequence[int]
    outputs: Sequence[int]  # grows
    first: int
    hashes: list[bytes]
    state: bytes = b""  # the last one behind `before`
    whole: deque[BlocksSaving | StateSaving] = field(default_factory=deque)  # by all ranks, and not listed yet

    def __len__(self) -> int:
        return len(self.before) + len(self.outputs) - self.first

    def ids(self, start: int, end: int) -> list[int]:
        behind = self.first - len(self.before)
        return [*self.before[start:end], *self.outputs[max(start, len(self.before)) + behind : max(end + behind, 0)]]

    def hash_to(self, end: int, size: int) -> list[bytes]:
        """The hashes of at least `end` blocks."""
        for at in range(len(self.hashes), end):
            ids = self.ids(at * size, (at + 1) * size)
            self.hashes.append(child(parent_of(self.root, self.hashes, at), ids))
        return self.hashes


class SharedMemory:
    """A file of zeros in memory. Raises OutOfMemory."""

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            os.posix_fallocate(file, 0, size)  # memory that is missing later would end vLLM
            self._map = mmap.mmap(file, size)
        except (OSError, ValueError) as error:
            path.unlink()
            raise OutOfMemory(f"{path}: {size} bytes cannot be had: {error}", field="host_bytes") from None
        finally:
            os.close(file)
        self.view = memoryview(self._map)

    @classmethod
    def of_life(cls, life: str, size: int) -> SharedMemory:
        """Of this process, in this `life`. What killed processes left goes. Raises OutOfMemory."""
        me = str(os.getpid())
        for left in SHARED.glob("kvfleet-*-*.kv"):
            pid = left.name.split("-")[1]
            if pid == me or not Path(f"/proc/{pid}").exists():
                left.unlink(missing_ok=True)
        return cls(SHARED / f"kvfleet-{me}-{life}.kv", size)

    async def closed(self) -> None:
        self.path.unlink(missing_ok=True)


@dataclass(eq=False)
class SharedSlots:
    """`grant` tells vLLM of free slots, if it is there. `ranks` workers write each their part of a block.
    `computed_again` is told of a block that is here in one slot and was saved to another. `states`: of a model that
    has some."""

    memory: SharedMemory
    host: HostTier
    ranks: int
    grant: Callable[[Sequence[int]], bool]
    on_changes: Callable[[list[TierEvents]], None]
    computed_again: Callable[[bytes, int, int], None] = lambda block, here, saved: None
    states: StateRecords | None = None
    saved_total: int = 0  # blocks
    _granted: set[int] = field(default_factory=set)
    _saving: dict[tuple[int, ...], BlocksSaving | StateSaving] = field(default_factory=dict)
    _confirmed: Counter[tuple[int, ...]] = field(default_factory=Counter)
    _asked: dict[str, AskedChain] = field(default_factory=dict)
    _needs: dict[str, int] = field(default_factory=dict)  # slots, by the request's name
    _doubtful: list[int] = field(default_factory=list)

    def asked(self, name: str, chain: AskedChain, blocks: int) -> None:
        """A request that may save so many `blocks` of its prompt."""
        self._asked[name], self._needs[name] = chain, blocks
        self.refill()

    def over(self, name: str) -> None:
        """The request has ended; what it saves may come a little later."""
        self._needs.pop(name, None)
        asyncio.get_running_loop().call_later(KEPT_S, self._asked.pop, name, None)

    def refill(self) -> None:
        """Grant as many slots as vLLM should have, if a good part of them is used up. One step may compute all of
        several prompts, and a chain that finds no slot ends there."""
        spare = min(GRANTED, self.host.blocks // GRANTED_SHARE)
        needed = min(sum(self._needs.values()), self.host.blocks // 2)
        if len(self._granted) > needed + spare // 2:
            return
        slots = self.host.allocate(needed + spare - len(self._granted))
        self.told()
        if slots and self.grant(slots):
            self._granted.update(slots)
        else:
            self.host.pool.release(slots)

    def away(self) -> None:
        """vLLM is gone, or only silent: what it may write to is not used until it, or the next one, is `back`."""
        self._doubtful += [*self._granted, *(slot for slots in self._saving for slot in slots)]
        self._granted.clear()
        self._saving.clear()
        self._confirmed.clear()
        self._asked.clear()
        self._needs.clear()

    def back(self) -> None:
        """vLLM has served a request since: no step of before is under way."""
        self.host.pool.release(self._doubtful)
        self._doubtful.clear()

    def on_saving(self, told: BlocksSaving | StateSaving) -> None:
        if not self._granted.issuperset(told.slots):
            log.warning("vLLM saves to slots that it was not granted: %s", told.slots)
            return
        self._granted.difference_update(told.slots)
        if isinstance(told, BlocksSaving) and (needed := self._needs.get(told.request)) is not None:
            self._needs[told.request] = max(0, needed - len(told.slots))
        self._saving[told.slots] = told
        self._list_if_whole(told.slots)
        self.refill()

    def on_saved(self, told: BlocksSaved) -> None:
        self._confirmed[told.slots] += 1
        self._list_if_whole(told.slots)

    def _list_if_whole(self, slots: tuple[int, ...]) -> None:
        if self._confirmed[slots] >= self.ranks and (saving := self._saving.pop(slots, None)) is not None:
            del self._confirmed[slots]
            if (asked := self._asked.get(saving.request)) is None:
                self.host.pool.release(saving.slots)
                return
            asked.whole.append(saving)
            if len(asked.whole) == 1:
                self._list_in_order(asked, TOKENS_TRIES)

    def _list_in_order(self, asked: AskedChain, tries: int) -> None:
        """A block needs the one before it to be listed, and a state its block."""
        while asked.whole:
            saved = asked.whole[0]
            blocks = len(saved.slots) if isinstance(saved, BlocksSaving) else 0
            is_known = len(asked) >= (saved.at + blocks) * self.host.pool.block_size
            if not is_known and tries:
                asyncio.get_running_loop().call_later(TOKENS_LATE_S, self._list_in_order, asked, tries - 1)
                return
            asked.whole.popleft()
            if not is_known:
                self.host.pool.release(saved.slots)
            elif isinstance(saved, BlocksSaving):
                self._list_blocks(asked, saved.at, saved.slots)
            else:
                self._list_state(asked, saved.at, saved.slots)
            self.told()

    def _list_blocks(self, asked: AskedChain, start: int, saved: tuple[int, ...]) -> None:
        pool, size, slots = self.host.pool, self.host.pool.block_size, list(saved)
        end = start + len(slots)
        hashes = asked.hash_to(end, size)
        for block, slot in zip(hashes[start:end], slots, strict=True):
            if (here := pool.index.find(block)) is not None:
                self.computed_again(block, here, slot)
        if not start or pool.index.lists(hashes[start - 1]):
            contents = [
                Content.of(asked.root, hashes, at, asked.ids(at * size, (at + 1) * size), full=True, lossy=False)
                for at in range(start, end)
            ]
            slots = self.host.fill(slots, asked.root, hashes, start, contents)
            self.saved_total += len(slots)
        pool.release(slots)

    def _list_state(self, asked: AskedChain, end: int, slots: tuple[int, ...]) -> None:
        """Of those behind the prompt only the last one stays: a next turn goes on from there."""
        size = self.host.pool.block_size
        block = asked.hash_to(end, size)[end - 1]
        if self.states is None:
            self.host.pool.release(slots)
        elif self.states.add(block, slots) and end * size > len(asked.before):
            self.states.drop(asked.state)
            asked.state = block

    def told(self) -> None:
        changes = self.host.take_changes()
        if self.states is not None:
            changes += self.states.take_changes()
        if changes:
            self.on_changes(changes)
