"""Snapshots of recurrent states in host memory: a pool beside the host tier's blocks, with records, a size and an
eviction of its own. The engine's thread owns it; copies to it are the copier's, copies back take that thread.

    device ──a chain goes down──▶ copied by the copier ──▶ listed by the hash of the block at whose end it stands
       ▲                                                        │ least recently used goes first
       └── its blocks are on the device, and no snapshot as late ◀──┘
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvfleet.worker.blocks.chain_location import BlockName, StateForm
from kvfleet.worker.blocks.state_slots import StatePoint, StateSlots
from kvfleet.worker.model.base import StatePieces
from kvfleet.worker.tiers.host import Copier, CopyJob
from kvproto.block_hash import Root, root_at
from kvproto.dataplane.block import MAX_BLOCK_BYTES, RUN_BLOCKS
from kvproto.messages import TierLoad


class HostState(NamedTuple):
    place: int
    lossy: bool
    name: BlockName  # in vaults


@dataclass(slots=True)
class _Copying:
    block_hash: bytes
    slot: int  # of the device, pinned
    state: HostState
    job: CopyJob
    forgotten: bool = False


@dataclass(eq=False)
class HostStates:
    """As many states as `host` has room for. `slots` and `memory` are the device's. `on_listed` gets the blocks behind
    which one is here now."""

    slots: StateSlots
    memory: StatePieces
    host: memoryview
    on_listed: Callable[[bytes], None] = lambda block_hash: None
    offloaded_total: int = 0
    restored_total: int = 0
    evictions: int = 0
    _states: OrderedDict[bytes, HostState] = field(default_factory=OrderedDict)  # least recently used first
    _copying: list[_Copying] = field(default_factory=list)
    _wanted: OrderedDict[bytes, BlockName] = field(default_factory=OrderedDict)  # to be copied next, oldest first
    _claimed: set[int] = field(default_factory=set)  # places that are being written to
    _held: dict[int, bool] = field(default_factory=dict)  # places that are being read: whether their state has left

    def __post_init__(self) -> None:
        self.places = len(self.host) // self.memory.block_bytes
        self._free = list(range(self.places))

    def offer(self, root: Root, hashes: Sequence[bytes]) -> None:
        """These blocks go down: so do the snapshots at their ends, as many at once as running sequences can spare."""
        for at, block_hash in enumerate(hashes):
            if block_hash in self._states:
                self._states.move_to_end(block_hash)
                self.on_listed(block_hash)
            elif self.slots.at(block_hash) is not None:
                run = hashes[at - at % RUN_BLOCKS]
                self._wanted[block_hash] = BlockName(root_at(root, at), block_hash, b"", b"", run).state()
        while len(self._wanted) > self.slots.num_slots:  # there are no more of them
            self._wanted.popitem(last=False)

    def maintain(self, copier: Copier, wake: Callable[[], None]) -> None:
        """List what has been copied, and copy on."""
        for one in [one for one in self._copying if one.job.ended]:
            self._copying.remove(one)
            self.slots.unpin(one.slot)
            if one.job.close() and not one.forgotten:
                self.offloaded_total += 1
                self.fill(one.state.place, one.state.name, lossy=one.state.lossy)
            else:
                self.give_back(one.state.place)
        while self._wanted and self.slots.may_pin:
            block_hash, name = self._wanted.popitem(last=False)
            slot = self.slots.at(block_hash)
            known = block_hash in self._states or any(one.block_hash == block_hash for one in self._copying)
            if slot is not None and not known and (place := self.claim()) is not None:
                self.slots.pin(slot)
                job = CopyJob(self.memory.read_blocks([slot], self.host, [place]), self.memory.block_bytes, wake)
                self._copying.append(_Copying(block_hash, slot, HostState(place, self.slots[slot].lossy, name), job))
                copier.offload(job)

    @property
    def form(self) -> StateForm | None:
        """Of states that vaults and peers give and get; None: there is no place for one, or it is too large."""
        nbytes, every = self.memory.block_bytes, self.slots.every // self.slots.block_size
        return StateForm(self.memory.kv_format, nbytes, every) if self.places and nbytes <= MAX_BLOCK_BYTES else None

    @property
    def is_settled(self) -> bool:
        return not (self._copying or self._wanted)

    def claim(self) -> int | None:
        """A place to write a state to, for which the least recently used one goes; `fill` or `give_back` follows."""
        if not self._free:
            oldest = next((one for one, state in self._states.items() if state.place not in self._held), None)
            if oldest is None:
                return None
            self._free.append(self._states.pop(oldest).place)
            self.evictions += 1
        self._claimed.add(place := self._free.pop())
        return place

    def give_back(self, place: int) -> None:
        self._claimed.remove(place)
        self._free.append(place)

    def fill(self, place: int, name: BlockName, *, lossy: bool) -> None:
        """The state of this name lies in a claimed place now."""
        known = self._states.get(name.parent)
        if known is not None and (known.lossy <= lossy or known.place in self._held):
            self.give_back(place)
            return
        if known is not None:  # an exact one comes before a lossy one
            self._free.append(known.place)
        self._claimed.remove(place)
        self._states[name.parent] = HostState(place, lossy, name)
        self.on_listed(name.parent)

    def view(self, place: int) -> memoryview:
        size = self.memory.block_bytes
        return self.host[place * size : (place + 1) * size]

    def hold(self, block_hash: bytes) -> HostState | None:
        """The state there, which stays as it is until `let_go` of its place. None: not here, or held already."""
        state = self._states.get(block_hash)
        if state is None or state.place in self._held:
            return None
        self._held[state.place] = False
        return state

    def let_go(self, place: int) -> None:
        if self._held.pop(place):
            self._free.append(place)

    def items(self) -> Iterator[tuple[bytes, HostState]]:
        return iter(self._states.items())

    def deepest(self, hashes: Sequence[bytes], *, exact: bool = False) -> int:
        """How many leading blocks the last of the snapshots here stands behind; 0 for none."""
        for full in range(len(hashes), 0, -1):
            state = self._states.get(hashes[full - 1])
            if state is not None and not (exact and state.lossy):
                return full
        return 0

    def bring(self, block_hash: bytes) -> bool:
        """To the device, at once, between steps; its block is listed there. Returns whether it was brought."""
        state = self._states.get(block_hash)
        if state is None or (slot := self.slots.take_now()) is None:
            return False
        self._states.move_to_end(block_hash)
        self.memory.write(slot, self.view(state.place))
        self.slots.keep(slot, StatePoint(block_hash, (), state.lossy))
        self.restored_total += 1
        return True

    def forget(self, hashes: Iterable[bytes]) -> None:
        gone = set(hashes)
        self._wanted = OrderedDict((one, name) for one, name in self._wanted.items() if one not in gone)
        for block_hash in gone & self._states.keys():
            place = self._states.pop(block_hash).place
            if place in self._held:
                self._held[place] = True
            else:
                self._free.append(place)
        for one in self._copying:
            one.forgotten = one.forgotten or one.block_hash in gone

    @property
    def stored(self) -> int:
        return len(self._states)

    @property
    def is_read(self) -> bool:
        return bool(self._held)

    def load(self, failures: dict[str, int]) -> TierLoad:
        """Of states everywhere: those of running sequences, and snapshots of device and host."""
        size, on_device = self.memory.block_bytes, self.slots.num_slots
        held = on_device - self.slots.free + self.places - len(self._free)
        return TierLoad(
            blocks=self.slots.snapshots + self.stored,
            bytes_used=held * size,
            bytes_total=(on_device + self.places) * size,
            offloaded_blocks_total=self.offloaded_total,
            evictions_total=self.slots.evictions + self.evictions,
            restores_total=self.restored_total,
            restored_bytes_total=self.restored_total * size,
            failures_total=failures,
        )

    def check_integrity(self, fetched: set[int]) -> None:
        """`fetched`: places that are being fetched to. Raises AssertionError if a place is lost, or has two states."""
        listed = [state.place for state in self._states.values()]
        left = [place for place, has_left in self._held.items() if has_left]
        assert sorted([*self._free, *listed, *left, *self._claimed]) == list(range(self.places))
        assert fetched | {one.state.place for one in self._copying} == self._claimed
        assert {place for place, has_left in self._held.items() if not has_left} <= {*listed}
