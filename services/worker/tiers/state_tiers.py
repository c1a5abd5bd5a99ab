"""Snapshots of recurrent states between the device, this host, vaults and peers. The engine's thread owns it.

    device ◀──copy── host pool ◀──fetch── vault, peer        a sequence waits for a state first, then for the blocks
              ──copy──▶  │ ──write-behind──▶ vault           before it, then for the copy to the device
                         └── a chain goes down

A prefix can be gone on from only where a state stands. So the deepest state of a prompt that is to be had decides what
is restored: the blocks up to it, all or none. One that did not come, or came wrong, is a miss, and the next one counts.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from kvfleet.worker.blocks.block_pool import Lendable, Match
from kvfleet.worker.blocks.chain_location import BlockName, ChainLocation, Finding, state_points
from kvfleet.worker.blocks.content_index import Content
from kvfleet.worker.schedule.sequence import Sequence as EngineSequence
from kvfleet.worker.tiers import break_even
from kvfleet.worker.tiers.break_even import HANDLING_S, LATE, SLACK, SURE, ComputeSeconds
from kvfleet.worker.tiers.host import Copier, Landing
from kvfleet.worker.tiers.host_states import HostStates
from kvfleet.worker.tiers.link_speed import seconds_of
from kvfleet.worker.tiers.offloader import Offloader
from kvfleet.worker.tiers.restorer import GRACE_S, MOST_RESTORES, Restorer
from kvproto.block_hash import state_after
from kvproto.messages import Tier, TierLoad

if TYPE_CHECKING:
    from kvfleet.worker.tiers.remote import RemoteTiers  # which the engine has without its sockets


@dataclass(eq=False, slots=True)
class _StateFetch:
    name: BlockName
    tier: Tier
    place: int  # on the host, claimed
    exact: bool
    landing: Landing
    deadline: float
    waiting: list[EngineSequence] = field(default_factory=list)
    forgotten: bool = False


@dataclass(eq=False)
class StateTiers:
    """`wake` is called, from any thread, when there is something to maintain."""

    host: HostStates
    restorer: Restorer
    offloader: Offloader
    remote: RemoteTiers | None
    wake: Callable[[], None]
    clock: Callable[[], float]
    failures_total: Counter[str] = field(default_factory=Counter)
    fetched_total: int = 0
    _bringing: list[tuple[EngineSequence, bytes]] = field(default_factory=list)  # who waits for which state of the host
    _fetches: list[_StateFetch] = field(default_factory=list)
    _unwritten: OrderedDict[bytes, None] = field(default_factory=OrderedDict)  # to be given to vaults, oldest first
    _written: deque[int] = field(default_factory=deque)  # places that vaults' writers are done with

    def __post_init__(self) -> None:
        self._pool = self.restorer.pool
        self.offloader.on_chain = self.host.offer
        if self.remote is not None:
            self.host.on_listed = self._to_vault

    def claims(self, sequence: EngineSequence, match: Match, *, spare: int, compute_s: ComputeSeconds) -> bool:
        """Whether the sequence has to wait, out of the queue, until `maintain` returns it. `compute_s` is of blocks."""
        size, exact = self._pool.block_size, sequence.spec.exact
        hashes = sequence.hashes[: (len(sequence.ids) - 1) // size]
        here, on_host = match.tokens // size, self.host.deepest(hashes, exact=exact)
        location = break_even.location_of(sequence)
        if location is not None:
            priced = break_even.price_of_computing(location, compute_s)
            least = max(here, on_host)
            if self.restorer.looks(sequence, least, len(hashes), priced):
                return True
            for point, tier in location.finding.states(least, len(hashes)):
                if self._fetch(sequence, location, hashes[:point], tier, here, spare, priced):
                    return True
        if on_host * size <= match.tokens:
            return False
        chain = self._pool.chain_to(hashes[:on_host], exact=exact)
        if len(chain) < on_host:  # first the blocks, then the state behind them
            before = Match(chain, None, 0, len(chain) * size)
            return self.restorer.claims(sequence, before, spare=spare, compute_s=compute_s, end=on_host)
        if sequence.restores > MOST_RESTORES:
            return False
        sequence.restores += 1
        self._bringing.append((sequence, hashes[on_host - 1]))  # later: this step may copy from the slot that it gets
        self.wake()
        return True

    def _fetch(
        self,
        sequence: EngineSequence,
        location: ChainLocation,
        hashes: Sequence[bytes],
        tier: Tier,
        here: int,
        spare: int,
        compute_s: ComputeSeconds,
    ) -> bool:
        """Bring the state behind these blocks to the host, if with them it comes sooner than it is computed."""
        point, exact, pool = len(hashes), sequence.spec.exact, self._pool
        if sequence.restores >= MOST_RESTORES or self.remote is None:
            return False
        for fetch in self._fetches:
            if fetch.name.parent == hashes[-1] and fetch.exact >= exact and not fetch.forgotten:
                fetch.waiting.append(sequence)
                return True
        offers = break_even.remote_offers(self.remote, location, point, point)
        speed = next((offer.speed for offer in offers if offer.tier is tier), None)
        chain = pool.chain_to(hashes, exact=exact)
        if speed is None:
            return False
        state_s = blocks_s = seconds_of(speed, self.host.memory.block_bytes)
        if len(chain) < point:
            before = Match(chain, None, 0, len(chain) * pool.block_size)
            parts = self.restorer.parts(sequence, before, point, spare=spare, compute_s=compute_s)
            if not parts or parts[-1].end < point:
                return False
            blocks_s += sum(part.seconds for part in parts)
        saved_s = compute_s(here, point)
        if SURE * blocks_s + HANDLING_S >= saved_s or (place := self.host.claim()) is None:
            return False
        name, landing = location.names[point - 1].state(), Landing([None], traceparent=location.traceparent)
        deadline = self.clock() + LATE * state_s + max(GRACE_S, SLACK * saved_s)
        self._fetches.append(_StateFetch(name, tier, place, exact, landing, deadline, [sequence]))
        target = [self.host.view(place)]
        self.remote.fetch(tier, [name], target, landing, exact=exact, peer=location.peer, on_progress=self.wake)
        return True

    def maintain(self, copier: Copier) -> list[EngineSequence]:
        """Called between steps. Returns sequences that go back to the queue."""
        self.host.maintain(copier, self.wake)
        self._write()
        bringing, self._bringing = self._bringing, []
        for _, block_hash in bringing:
            if self._pool.index.lists(block_hash):
                self.host.bring(block_hash)
        back = [sequence for sequence, _ in bringing]
        for fetch in [one for one in self._fetches if one.landing.ended or self.clock() >= one.deadline]:
            self._fetches.remove(fetch)
            self._finish(fetch)
            back += fetch.waiting
        return back

    def _finish(self, fetch: _StateFetch) -> None:
        landing, name = fetch.landing, fetch.name
        header = landing.headers[0] if landing.close() else None
        if header is not None and not fetch.forgotten:
            self.fetched_total += 1
            if fetch.tier is Tier.VAULT:
                self.offloader.note_vaulted(name.hash)
            self.host.fill(fetch.place, name, lossy=header.lossy)
            for sequence in fetch.waiting:
                sequence.restores += 1
            return
        self.host.give_back(fetch.place)
        self.failures_total[landing.failure or ("erased" if fetch.forgotten else "late")] += 1
        self.offloader.missed([name.hash])
        for sequence in fetch.waiting:
            if (location := sequence.spec.location) is not None:
                _lose(location.finding, fetch.tier, 1 + sequence.hashes.index(name.parent))

    def _to_vault(self, block_hash: bytes) -> None:
        if not self.offloader.vaulted([state_after(block_hash)]):
            self._unwritten[block_hash] = None

    def _write(self) -> None:
        while self._written:
            self.host.let_go(self._written.popleft())
        while self._unwritten:
            block_hash, _ = self._unwritten.popitem(last=False)
            if self.remote is None or (state := self.host.hold(block_hash)) is None:
                continue
            done = partial(self._wrote, state.place)
            if self.remote.offload(state.name, self.host.view(state.place), lossy=state.lossy, on_done=done):
                self.offloader.note_vaulted(state.name.hash)
            else:
                self.host.let_go(state.place)  # it is given when its chain goes down again

    def _wrote(self, place: int) -> None:
        """On any thread."""
        self._written.append(place)
        self.wake()

    def missed(self, location: ChainLocation) -> None:
        """What vaults were given and do not have is given again."""
        every = self.host.slots.every // self._pool.block_size
        points = {*state_points(location.names, every)}.difference(location.finding.vault_states)
        self.offloader.missed([state_after(location.names[point - 1].hash) for point in points])

    def drop(self, sequence: EngineSequence) -> None:
        self._bringing = [one for one in self._bringing if one[0] is not sequence]
        for fetch in self._fetches:
            fetch.waiting = [one for one in fetch.waiting if one is not sequence]

    def forget(self, hashes: Iterable[bytes]) -> None:
        gone = set(hashes)
        self.host.forget(gone)
        self._unwritten = OrderedDict((one, None) for one in self._unwritten if one not in gone)
        self.offloader.missed([state_after(one) for one in gone])
        for fetch in self._fetches:
            fetch.forgotten = fetch.forgotten or fetch.name.parent in gone

    def lendable(self, asked: Iterable[bytes]) -> dict[bytes, Lendable]:
        """Of the states of these names, those that are here."""
        found: dict[bytes, Lendable] = {}
        wanted, slots, index = {*asked}, self.host.slots, self._pool.index
        if not wanted:
            return found
        kv_format = self.host.memory.kv_format
        for block_hash, state in self.host.items():
            if (name := state.name.hash) in wanted:
                content = Content.of_state(state.name.root, block_hash, lossy=state.lossy)
                found[name] = Lendable(content, kv_format, partial(self.host.view, state.place))
        for point in (slots[slot] for slot in slots):
            block = None if point.ids else index.find(point.parent)
            if block is not None and (name := state_after(point.parent)) in wanted:
                slot = slots.at(point.parent)
                assert slot is not None
                content = Content.of_state(index[block].root, point.parent, lossy=point.lossy)
                found[name] = Lendable(content, kv_format, partial(self._read, slot))
        return found

    def _read(self, slot: int) -> memoryview:
        view = memoryview(bytearray(self.host.memory.block_bytes))
        self.host.memory.read(slot, view)
        return view

    @property
    def is_settled(self) -> bool:
        return self.host.is_settled and not self._unwritten and not self.host.is_read

    @property
    def waiting(self) -> int:
        return len(self._bringing) + sum(len(fetch.waiting) for fetch in self._fetches)

    def due_in(self) -> float | None:
        """Seconds until `maintain` has to be called even if nothing wakes the engine."""
        return max(0.0, min(one.deadline for one in self._fetches) - self.clock()) if self._fetches else None

    def load(self) -> TierLoad:
        return self.host.load(dict(self.failures_total))

    def check_integrity(self) -> None:
        self.host.check_integrity({fetch.place for fetch in self._fetches})


def _lose(finding: Finding, tier: Tier, point: int) -> None:
    if tier is Tier.VAULT:
        finding.vault_states = tuple(one for one in finding.vault_states if one != point)
    else:
        finding.peer_states = tuple(one for one in finding.peer_states if one != point)
