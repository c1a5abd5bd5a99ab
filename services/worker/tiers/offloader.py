"""Takes blocks down, device to host and host to vault, beside the engine's steps. The engine's thread owns it.

    offer ──worth it──▶ queue ──maintain──▶ batch: copied to host slots ──maintain──▶ listed there ──▶ vault's writer

A chain goes down from its start, so that a tier that lists a block has all blocks before it. The device's chain is held
while a batch is copied, the host's while the vault's writer has it. A block evicted before its turn is lost.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kvfleet.worker.blocks.block_pool import BlockPool
from kvfleet.worker.blocks.chain_location import BlockName
from kvfleet.worker.blocks.content_index import depth_of
from kvfleet.worker.model.base import BlockMemory
from kvfleet.worker.schedule.sequence import Sequence as EngineSequence
from kvfleet.worker.tiers.host import Copier, CopyJob, HostTier
from kvproto.block_hash import Root, own_root, pack_ids, parent_of, root_at
from kvproto.dataplane.block import RUN_BLOCKS

if TYPE_CHECKING:
    from kvfleet.worker.tiers.remote import RemoteTiers  # which the engine has without its sockets

BATCH_BYTES = 32 * 1024 * 1024
MOST_QUEUED = 1024  # chains
KEPT_VAULTED = 131_072
MOST_LATER = 256
VAULT_SHARE = 4  # a quarter of the host's blocks at most wait for vaults
SAVE_LIMIT_S = 0.03  # the longest that `save` holds up a step
KEPT_NAMES = 131_072  # of blocks: two million tokens of prompts
KEPT_ROOTS = 1024
MEMORY_BLOCKS = 4096.0  # asked blocks after which old experience counts half
FEWEST_BLOCKS = 32.0  # less than that is no experience
RARE = 0.01


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
    """How much is asked for again, by root, that is by model and tenant. A workload without reuse must not pay for
    tiers. The names of chains asked for lately are enough, also of those that were evicted."""

    kept_names: int = KEPT_NAMES
    _names: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    _shares: OrderedDict[bytes, _Share] = field(default_factory=OrderedDict)

    def ask(self, root: bytes, hashes: Sequence[bytes]) -> int:
        """Note a request's chain. Returns how many of its blocks were asked for before."""
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

    def is_rare(self, root: bytes) -> bool:
        """Whether much was asked for, and next to nothing again."""
        share = self._shares.get(root)
        return share is not None and share.asked >= MEMORY_BLOCKS and share.again < RARE * share.asked

    def is_worth(self, root: bytes, offload_s: float, recompute_s: float) -> bool:
        """Whether keeping a block, which takes `offload_s`, is expected to save more."""
        return self.share(root) * recompute_s > offload_s


@dataclass(frozen=True, slots=True)
class Chain:
    root: Root
    hashes: Sequence[bytes]
    end: int
    done: int = 0  # blocks that had their turn

    @property
    def last(self) -> bytes:
        return self.hashes[self.end - 1]


@dataclass(slots=True)
class _Batch:
    """Blocks `start` to `end` of a chain; those before `copied_from` are on the host already."""

    chain: Chain
    start: int
    end: int
    device: list[int]  # held on the device: the whole chain up to `end`, or nothing if all is on the host
    host: list[int]  # held on the host: the same
    copied_from: int
    copy: CopyJob | None
    forgotten: bool = False  # erased meanwhile: it goes nowhere


@dataclass(eq=False, slots=True)
class _VaultHold:
    """Slots held until the vault's writer is done with all blocks of a batch of the chain that ends with `last`."""

    last: bytes
    slots: list[int]
    left: int  # blocks
    wake: Callable[[], None]
    lock: threading.Lock = field(default_factory=threading.Lock)

    def one_done(self) -> None:
        with self.lock:
            self.left -= 1
        if not self.left:
            self.wake()


@dataclass(eq=False, slots=True)
class Offloader:
    """`wake` is called, from any thread, when there is something to maintain. Without a host tier nothing goes down."""

    pool: BlockPool
    memory: BlockMemory
    host: HostTier
    copier: Copier
    remote: RemoteTiers | None
    reuse: ReuseWatch
    wake: Callable[[], None]
    offloaded_total: int = 0
    on_chain: Callable[[Root, Sequence[bytes]], None] = lambda root, hashes: None  # it goes down: so may its states
    _queue: OrderedDict[bytes, Chain] = field(default_factory=OrderedDict)
    _batch: _Batch | None = None
    _vaulted: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    _holds: set[_VaultHold] = field(default_factory=set)
    _save_s: float = SAVE_LIMIT_S  # left in this step
    _holding: int = 0  # host blocks that wait for vaults
    _later: deque[Chain] = field(default_factory=lambda: deque(maxlen=MOST_LATER))  # offered again without holds

    def offer(self, sequence: EngineSequence, prefill_tokens_per_s: float, *, reused: bool = False) -> None:
        """Take the sequence's computed blocks down, if they are likely to be asked for again, or were (`reused`)."""
        end = 0 if sequence.private else min(sequence.filled, len(sequence.hashes))
        if not end:
            return
        recompute_s = self.pool.block_size / prefill_tokens_per_s if prefill_tokens_per_s else 1.0
        offload_s = self.copier.speed_out.seconds(self.memory.block_bytes)
        if reused or self.reuse.is_worth(own_root(sequence.root), offload_s, recompute_s):
            self.offer_chain(Chain(sequence.root, sequence.hashes, end))

    def offer_chain(self, chain: Chain) -> None:
        if not self.host.blocks:
            return
        self.on_chain(chain.root, chain.hashes[: chain.end])
        if (known := self._queue.get(chain.last)) is not None:
            chain = replace(chain, done=min(chain.done, known.done))
        self._queue[chain.last] = chain
        self._queue.move_to_end(chain.last)
        if len(self._queue) > MOST_QUEUED:
            self._queue.popitem(last=False)

    def save(self, sequence: EngineSequence) -> None:
        """Copy now, for a bounded time, what is not on the host: this very step may overwrite the blocks."""
        end = 0 if sequence.private else sequence.filled
        device = self.pool.chain_to(sequence.hashes[:end])
        host = self.host.pool.chain_to(sequence.hashes[: len(device)])
        self.host.pool.acquire(host)
        began, limit = time.perf_counter(), self._save_s
        slots = self.host.allocate(len(device) - len(host))
        saved = 0
        blocks = device[len(host) :][: len(slots)]
        with closing(self.host.copies(self.memory.read_blocks, blocks, slots)) as copies:
            while time.perf_counter() - began <= limit and (count := next(copies, None)) is not None:
                saved += count
        self._save_s -= time.perf_counter() - began
        self.host.pool.release(slots[saved:])
        del slots[saved:]
        filled = self._list(sequence.root, sequence.hashes, len(host), blocks[:saved], slots)
        self.host.pool.release([*host, *filled])

    @property
    def has_work(self) -> bool:
        return bool(self._queue or self._batch) or not all(hold.left for hold in self._holds)

    @property
    def is_settled(self) -> bool:
        """Whether the host has all that was offered, and vaults have answered for it."""
        return not (self.has_work or self._holds or self._later)

    def maintain(self) -> None:
        """Called before each step: take what is done and begin what is next; at most one batch is being copied."""
        self._save_s = SAVE_LIMIT_S
        for hold in [hold for hold in self._holds if not hold.left]:
            self._holds.remove(hold)
            self._holding -= len(hold.slots)
            self.host.pool.release(hold.slots)
        if not self._holds:
            while self._later:
                self.offer_chain(self._later.popleft())
        if self._batch is not None and (self._batch.copy is None or self._batch.copy.ended):
            self._finish(self._batch)
            self._batch = None
        while self._batch is None and self._queue:
            _, chain = self._queue.popitem(last=False)
            self._batch = self._begin(chain)

    def _begin(self, chain: Chain) -> _Batch | None:
        """The next piece of a chain; None if nothing of it can go down now."""
        hashes = chain.hashes[: chain.end]
        device, host = self.pool.chain_to(hashes), self.host.pool.chain_to(hashes)
        start = copied_from = len(host)
        if self.remote is not None:
            start = next((at for at in range(chain.done, start) if hashes[at] not in self._vaulted), start)
        most = max(1, BATCH_BYTES // self.memory.block_bytes)
        end = min(max(len(device), len(host)), start + most)
        if end <= max(start, chain.done):  # a host too small for a chain must not copy it round and round
            return None
        self.host.pool.acquire(host)
        slots = self.host.allocate(max(0, end - copied_from))
        end = min(end, copied_from + len(slots))
        if end <= max(start, chain.done):
            self.host.pool.release([*host, *slots])
            return None
        device = device[:end] if slots else []
        self.pool.acquire(device)
        copy = None
        if slots:
            copy = self.host.copy_job(self.memory.read_blocks, device[copied_from:], slots, self.wake)
            self.copier.offload(copy)
        else:
            self.wake()
        return _Batch(chain, start, end, device, [*host, *slots], copied_from, copy)

    def _finish(self, batch: _Batch) -> None:
        chain, at = batch.chain, batch.copied_from
        is_whole = not batch.forgotten
        if batch.copy is not None and is_whole:
            end = at + batch.copy.close()
            batch.host[at:end] = self._list(chain.root, chain.hashes, at, batch.device[at:end], batch.host[at:end])
            is_whole = end == len(batch.host)  # else the device could not be read
        self.pool.release(batch.device)
        if not is_whole:
            self.host.pool.release(batch.host)
            return
        self._to_vault(batch)
        if batch.end < chain.end:
            self.offer_chain(replace(chain, done=batch.end))

    def _list(
        self, root: Root, hashes: Sequence[bytes], start: int, blocks: Sequence[int], slots: Sequence[int]
    ) -> list[int]:
        """List what was copied from `blocks` to `slots`. Returns the slots to hold."""
        listed = next((at for at, block in enumerate(blocks) if block not in self.pool.index), len(blocks))
        if start and not self.host.pool.index.lists(hashes[start - 1]):
            listed = 0  # thrown away meanwhile
        contents = [self.pool.index[block] for block in blocks[:listed]]
        self.offloaded_total += listed
        return [*self.host.fill(slots[:listed], root, hashes, start, contents), *slots[listed:]]

    def _to_vault(self, batch: _Batch) -> None:
        """Hand what vaults were not given yet to their writer; the host's chain is held until it is through."""
        chain = batch.chain
        if self.remote is None or any(slot not in self.host.pool.index for slot in batch.host[: batch.end]):
            self.host.pool.release(batch.host)
            return
        if self._holds and self._holding + batch.end > self.host.pool.num_blocks // VAULT_SHARE:
            self.host.pool.release(batch.host)
            self._later.append(replace(chain, end=batch.end, done=batch.start))
            return
        hold = _VaultHold(chain.last, batch.host[: batch.end], batch.end - batch.start, self.wake)
        self._holds.add(hold)
        self._holding += len(hold.slots)
        self.host.pool.release(batch.host[batch.end :])
        taking = True
        for at in range(batch.start, batch.end):
            content = self.host.pool.index[batch.host[at]]
            parent = parent_of(chain.root, chain.hashes, at)
            run = chain.hashes[at - at % RUN_BLOCKS]
            name = BlockName(root_at(chain.root, at), chain.hashes[at], parent, pack_ids(content.ids), run)
            view = self.host.view(batch.host[at])
            taking = taking and self.remote.offload(name, view, lossy=content.lossy, on_done=hold.one_done)
            if not taking:  # no later block goes without its parents
                hold.one_done()
                continue
            self.note_vaulted(name.hash)

    def note_vaulted(self, name: bytes) -> None:
        """A vault was given this."""
        self._vaulted[name] = None
        if len(self._vaulted) > KEPT_VAULTED:
            self._vaulted.popitem(last=False)

    def missed(self, hashes: Sequence[bytes]) -> None:
        """Vaults do not have these: they are offered again when their chain is."""
        for block_hash in hashes:
            self._vaulted.pop(block_hash, None)

    def doubt(self) -> None:
        """Vaults may have lost what they were given: all of it is offered again when its chain is."""
        self._vaulted.clear()

    def forget(self, hashes: Sequence[bytes]) -> None:
        """These were erased: chains go down only up to the first of them."""
        gone = set(hashes)

        def left(chain: Chain) -> Chain:
            end = next((at for at, one in enumerate(chain.hashes[: chain.end]) if one in gone), chain.end)
            return replace(chain, end=end)

        queued = [chain for chain in map(left, self._queue.values()) if chain.end]
        self._queue = OrderedDict((chain.last, chain) for chain in queued)
        self._later = deque((chain for chain in map(left, self._later) if chain.end), self._later.maxlen)
        if self._batch is not None and left(self._batch.chain).end < self._batch.chain.end:
            self._batch.forgotten = True
        self.missed(hashes)

    def vaulted(self, hashes: Sequence[bytes]) -> int:
        return depth_of(hashes, self._vaulted.__contains__)

    def carries(self, last: bytes) -> bool:
        """Whether some of the chain that ends with this block is on its way down, or waits."""
        return (
            last in self._queue
            or (self._batch is not None and self._batch.chain.last == last)
            or any(hold.last == last for hold in self._holds)
            or any(chain.last == last for chain in self._later)
        )

    def carried(self) -> list[bytes]:
        """Last blocks of chains that are held on their way down."""
        ends = (hold.slots[-1] for hold in self._holds if hold.slots[-1] in self.host.pool.index)
        on_host = (self.host.pool.index[end].hash for end in ends)
        batch = [self._batch.chain.last] if self._batch is not None else []
        return batch + [end for end in on_host if end]

    def held(self) -> list[list[int]]:
        return [self._batch.device] if self._batch is not None and self._batch.device else []

    def held_on_host(self) -> list[list[int]]:
        return [*([self._batch.host] if self._batch else []), *(hold.slots for hold in self._holds)]
