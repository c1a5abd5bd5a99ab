"""Vaults and peers as the engine sees them. Thread-safe; waits for nothing but in `close`.

    members view ──▶ set_vaults, set_peers      (the worker's loop)
    engine ──▶ look, fetch, offload, erase, speed, distrust, loads
    each vault, peer: a Source, which has threads; each vault: a WriteBehind, which has another

It owns the sources, their quarantine, and where blocks were seen that are not at their owner.
"""

from __future__ import annotations

import logging
import ssl
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvfleet.worker.blocks.chain_location import BlockName, Finding, VaultRing, by_root, state_points
from kvfleet.worker.tiers.fetching import Fetch, Intake
from kvfleet.worker.tiers.host import Landing
from kvfleet.worker.tiers.link_speed import LinkSpeed, LinkSpeedMeter, is_laggard, slowest
from kvfleet.worker.tiers.looking import Look, SourceQuestion
from kvfleet.worker.tiers.source import WRONG, Quarantine, Source, SourceAddress
from kvfleet.worker.tiers.transfers import GONE, ConnectionJob, Deadlines, RemoteCounts, RemoteSettings
from kvfleet.worker.tiers.write_behind import Owed, WriteBehind, owe
from kvproto.dataplane.client import DataPlaneClient
from kvproto.dataplane.keys import KeyRing
from kvproto.messages import Tier, TierLoad
from kvproto.regions import split
from kvservice import tracing
from kvservice.tracing import Tracer

logger = logging.getLogger(__name__)

CONNECT_S = 1.5
IDLE_S = 60.0  # then a peer's connections end
MAX_STRAYS = 65_536
CLOSE_S = 3.0
MAX_AWAY = 16  # vaults that are owed erasures and are not here
MAX_FAR = 64  # peers of other regions that are remembered
FAR_LOOK_LIMIT_S = 1.0


@dataclass(eq=False)
class RemoteTiers:
    """The engine's thread calls it; callbacks run on transfer threads. Without `far_keys` it asks no other region."""

    settings: RemoteSettings
    keyring: KeyRing
    tls: ssl.SSLContext | None = None
    far_keys: KeyRing | None = None
    tracer: Tracer = tracing.NULL
    counts: RemoteCounts = field(default_factory=RemoteCounts)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _vaults: dict[str, Source] = field(default_factory=dict)
    _peers: dict[str, Source] = field(default_factory=dict)
    _far: OrderedDict[str, Source] = field(default_factory=OrderedDict)  # peers of other regions, last used last
    _ring: VaultRing = field(default_factory=VaultRing)
    _quarantine: Quarantine = field(default_factory=Quarantine)
    _strays: OrderedDict[bytes, str] = field(default_factory=OrderedDict)  # block hash -> vault, not the owner, with it
    _owed: OrderedDict[str, Owed] = field(default_factory=OrderedDict)  # by vault that is away
    _ending: list[threading.Thread] = field(default_factory=list)
    _closed: bool = False
    _vault_changes: int = 0
    _deadlines: Deadlines = field(default_factory=Deadlines)

    def __post_init__(self) -> None:
        self._intake = Intake(self.settings, self.counts, self._deadlines, self._fault, self._missing, self.tracer)
        self._deadlines.after(IDLE_S, self._rest_idle)

    def set_vaults(self, addresses: Iterable[SourceAddress]) -> None:
        with self._lock:
            if self._closed:
                return
            before = [one.address for one in self._vaults.values()]
            leaving = self._replace(Tier.VAULT, self._vaults, {one.id: one for one in addresses})
            self._vault_changes += before != [one.address for one in self._vaults.values()]
            self._ring = VaultRing(self._ring.ring.with_nodes(self._vaults))
            for vault in self._vaults.values():
                vault.start()
        self._end(leaving)

    def set_peers(self, addresses: Iterable[SourceAddress]) -> None:
        with self._lock:
            if self._closed:
                return
            leaving = self._replace(Tier.PEER, self._peers, {one.id: one for one in addresses})
            for peer in self._peers.values():
                if peer.own_speed() is None:
                    peer.start()  # it is about to be asked, and nothing is fetched before it is measured
        self._end(leaving)

    def _replace(self, tier: Tier, sources: dict[str, Source], wanted: dict[str, SourceAddress]) -> list[Source]:
        """Under the lock. Returns what is to end."""
        leaving = [one for one in sources.values() if wanted.get(one.id) != one.address]
        for source in leaving:
            del sources[source.id]
            if source.writes is not None:
                self._owed[source.id] = source.writes.owed  # shared: it may be told a last time
        for address in wanted.values():
            if address.id not in sources:
                connect = partial(self._connect, tier, address, self.keyring)
                source = sources[address.id] = Source(tier, address, connect, self.settings.look_limit_s)
                if tier is Tier.VAULT:
                    owed = self._owed.pop(address.id, {})
                    source.writes = WriteBehind(address.id, connect, self.settings, self._deadlines, self.counts, owed)
        while len(self._owed) > MAX_AWAY:
            self._owed.popitem(last=False)
        return leaving

    def _end(self, leaving: Iterable[Source]) -> None:
        """Not under the lock: it gives back what waits to the engine, which may be calling just now."""
        ending = [thread for one in leaving for thread in one.close()]
        with self._lock:
            self._ending = [thread for thread in [*self._ending, *ending] if thread.is_alive()]

    def introduce(self, source: str, addresses: Sequence[str]) -> None:
        """`source`, a worker of another region, `<region>.<id>`, may be a `peer` from now on; its link is measured."""
        if self.far_keys is None:
            return
        address = SourceAddress(source, "", "", tuple(addresses))
        leaving: list[Source] = []
        with self._lock:
            if self._closed:
                return
            known = self._far.pop(source, None)
            if known is not None and known.address != address:
                leaving.append(known)
                known = None
            if known is None:
                connect = partial(self._connect, Tier.PEER, address, self.far_keys)
                known = Source(Tier.PEER, address, connect, FAR_LOOK_LIMIT_S)
            self._far[source] = known
            while len(self._far) > MAX_FAR:
                leaving.append(self._far.popitem(last=False)[1])
            known.start()
        self._end(leaving)

    def speed_of(self, source: str) -> LinkSpeed | None:
        with self._lock:
            far = self._far.get(source)
        return far.speed() if far is not None else None

    def _peer(self, peer: str) -> Source | None:
        return self._far.get(peer) if split(peer)[0] else self._peers.get(peer)

    def _connect(self, tier: Tier, address: SourceAddress, keys: KeyRing) -> DataPlaneClient:
        client = DataPlaneClient.connect(
            address.data_plane,
            keys,
            identity=self.settings.worker,
            expect=split(address.id)[1],
            same_host=address.host == self.settings.host,
            tls=self.tls,
            timeout_s=CONNECT_S,
        )
        self.counts.connected(tier, client)
        return client

    def _rest_idle(self) -> None:
        since = time.monotonic() - IDLE_S
        with self._lock:
            if self._closed:
                return
            for peer in (*self._peers.values(), *self._far.values()):
                if peer.is_idle(since):
                    self._ending += peer.rest()
        self._deadlines.after(IDLE_S, self._rest_idle)

    def close(self) -> None:
        """No thread is left afterwards, and every callback has been called. Takes at most CLOSE_S and CONNECT_S."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            leaving = [*self._vaults.values(), *self._peers.values(), *self._far.values()]
        self._end(leaving)
        until = time.monotonic() + CLOSE_S
        for thread in self._ending:
            thread.join(max(0.0, until - time.monotonic()))
        self._deadlines.close()

    def look(
        self,
        names: Sequence[BlockName],
        *,
        exact: bool,
        peer: str,
        on_ready: Callable[[], None],
        limit_s: float | None = None,
        traceparent: str = "",
        vaults: bool = True,
    ) -> Finding:
        """Ask the vaults concerned, and `peer` if it is not "", what they have of a chain. The finding is ready after
        at most `limit_s`, by default LOOK_LIMIT_S. Without `vaults` only the peer is asked."""
        finding, states = Finding(), self.settings.states
        points = state_points(names, states.every) if states is not None else []
        names = [*names, *(names[point - 1].state() for point in points)]
        look = Look(names, finding, on_ready, self._noticed, exact, self.tracer, traceparent, points)
        now = time.monotonic()
        with self._lock:
            laggards = self._laggards(self._vaults)
            questions = [
                SourceQuestion(look, self._vaults[vault], shares)
                for vault, shares in (self._ring.shares(names).items() if vaults else ())
                if vault not in laggards and self._quarantine.allows(vault, now)
            ]
            if (source := self._peer(peer)) is not None and self._quarantine.allows(peer, now):
                questions.append(SourceQuestion(look, source, by_root(names)))
        look.expect([question.source.tier for question in questions])
        for question in questions:
            own_limit = question.source.id in self._far  # a long one; a source that misses it is not asked for a while
            job = ConnectionJob(question.run, question.fail)
            if not question.source.look(job, None if own_limit else limit_s):
                self._deadlines.after(0.0, partial(look.answered, question.source.tier))
        within_s = self.settings.look_limit_s if limit_s is None else limit_s
        self._deadlines.after(within_s if questions else 0.0, look.end)
        return finding

    def fetch(
        self,
        tier: Tier,
        names: Sequence[BlockName],
        targets: Sequence[memoryview],
        landing: Landing,
        *,
        exact: bool,
        peer: str,
        on_progress: Callable[[], None],
    ) -> None:
        """Bring blocks to `targets` (raw pool bytes, writable). `on_progress` is called when the fetch has ended. A
        failure is data in `landing`, never an exception."""
        fetch = Fetch(tier, names, targets, landing, self._intake, exact, on_progress)
        now = time.monotonic()
        parts = []
        with self._lock:
            if tier is Tier.PEER:
                found = self._peer(peer)
                sources, homes = {peer: found} if found is not None else {}, {peer: by_root(names)}
            else:
                sources, homes = self._vaults, self._ring.homes(names, self._strays)
            for holder, shares in homes.items():
                if not shares:
                    continue
                if holder not in sources:
                    fetch.cut(shares[0].at[0], GONE)
                elif not self._quarantine.allows(holder, now):
                    fetch.cut(shares[0].at[0], "quarantined")
                else:
                    parts.append((sources[holder], shares))
            if not homes:
                fetch.cut(0, GONE)
        fetch.start(parts)

    def offload(self, name: BlockName, payload: memoryview, *, lossy: bool, on_done: Callable[[], None]) -> bool:
        """Write to the vault that keeps this block, unless it has it. `payload` must stay as it is until `on_done`,
        which is called in any case. False, and nothing happens, if the queue is full or there is no vault."""
        with self._lock:
            owner = self._ring.owner(name)
            vault = self._vaults.get(owner) if owner is not None else None
            allowed = owner is not None and self._quarantine.allows(owner, time.monotonic())
        if (
            vault is None
            or vault.writes is None
            or not allowed
            or payload.nbytes != self.settings.form(name.ids)[1].raw_bytes
        ):
            return False
        return vault.writes.offer(name, payload, lossy=lossy, on_done=on_done)

    @property
    def losses(self) -> int:
        """Grows whenever a vault came, went or began anew, or blocks did not get through to one."""
        return self._vault_changes + self.counts.not_offloaded

    def erase(self, names: Sequence[BlockName]) -> None:
        """Have vaults forget these blocks, except those that others continue, and the states at their ends, and drop
        what waits to be offloaded. A vault that is away may come back with its disk: it is told then."""
        if self.settings.states is not None:
            names = [*names, *(name.state() for name in names)]
        with self._lock:
            for owed in self._owed.values():
                owe(owed, names)
            writes = [vault.writes for vault in self._vaults.values() if vault.writes is not None]
        for write_behind in writes:
            write_behind.erase(names)

    def speed(self, tier: Tier) -> LinkSpeed | None:
        """Of VAULT or PEER; None until measured, and while there is none to ask."""
        now = time.monotonic()
        with self._lock:
            sources = self._peers if tier is Tier.PEER else self._vaults
            laggards = self._laggards(sources)
            asked = [one for one in sources.values() if one.id not in laggards and self._quarantine.allows(one.id, now)]
        return slowest(speed for speed in (source.speed() for source in asked) if speed is not None)

    def distrust(self, source: str) -> None:
        """A block from this vault or peer was wrong although its checksum was right."""
        with self._lock:
            tier = Tier.PEER if self._peer(source) is not None else Tier.VAULT
            out = self._quarantine.fault(source, WRONG, time.monotonic())
        self.counts.failed(tier, WRONG)
        if out:
            logger.warning("%s gave a block that was wrong under a right checksum: it is not asked for a while", source)

    def loads(self) -> dict[str, TierLoad]:
        return self.counts.loads()

    @staticmethod
    def _laggards(sources: dict[str, Source]) -> set[str]:
        """Sources so much slower than others that their blocks count as absent."""
        if len(sources) < 2:
            return set()
        speeds = {name: speed for name, source in sources.items() if (speed := source.own_speed()) is not None}
        laggards = {name for name, speed in speeds.items() if is_laggard(speed, speeds.values())}
        for name in laggards:
            sources[name].measured(LinkSpeedMeter.doubt)
        return laggards

    def _fault(self, source: Source, reason: str) -> None:
        with self._lock:
            out = self._quarantine.fault(source.id, reason, time.monotonic())
        if out:
            logger.warning("%s %s gave bad blocks (%s): it is not asked for a while", source.tier, source.id, reason)

    def _missing(self, source: str, block: bytes) -> None:
        with self._lock:
            if self._strays.get(block) == source:
                del self._strays[block]

    def _noticed(self, strays: dict[bytes, str]) -> None:
        with self._lock:
            for block, vault in strays.items():
                self._strays[block] = vault
                self._strays.move_to_end(block)
            while len(self._strays) > MAX_STRAYS:
                self._strays.popitem(last=False)
