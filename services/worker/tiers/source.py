"""One vault or peer, in one life of it: its connections, and how fast it is. Thread-safe; waits for nothing. And which
of them are in quarantine, not to be asked for a while (pure).

A source has two connections: a look must be answered within milliseconds, a fetch may last. A vault's begin at once, a
peer's when they are needed.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kvfleet.worker.tiers.link_speed import LinkSpeed, LinkSpeedMeter
from kvfleet.worker.tiers.transfers import Connect, ConnectionJob, ConnectionThread
from kvfleet.worker.tiers.write_behind import WriteBehind
from kvproto.dataplane.client import DataPlaneClient
from kvproto.dataplane.errors import DataPlaneError
from kvproto.messages import MemberRecord, Role, State, Tier, WorkerRecord

LATE_LOOKS = 3  # in a row, before a pause: a single one only says that cores were busy
FIRST_PAUSE_S = 0.5  # without looks; doubles with each late one
LONGEST_PAUSE_S = 15.0
KEEP_ALIVE_S = 30.0
PROBE_BYTES = 1024 * 1024
PROBE_LIMIT_S = 2.0
PROBES = 3  # the quickest counts: others may have waited for a core
FAULTS = 3
WINDOW_S = 60.0
FIRST_TERM_S = 60.0
LONGEST_TERM_S = 3600.0
FORGIVEN_S = 3600.0  # after the end of a term
MAX_SOURCES = 4096
WRONG = "wrong"  # numbers were wrong under a right checksum: no accident of wires or memory


@dataclass(frozen=True, slots=True)
class SourceAddress:
    """Of a vault or worker, in one life of it. `host` decides whether its Unix socket can be reached."""

    id: str
    epoch: str
    host: str
    data_plane: tuple[str, ...]


def vaults_of(members: Iterable[MemberRecord]) -> list[SourceAddress]:
    """Vaults that take and give blocks; one that drains keeps its part of the ring until it is gone."""
    return [
        SourceAddress(member.id, member.epoch, member.host, member.data_plane)
        for member in members
        if member.role is Role.VAULT and member.data_plane and member.state in (State.READY, State.DRAINING)
    ]


def peers_of(workers: Iterable[WorkerRecord], me: WorkerRecord) -> list[SourceAddress]:
    return [
        SourceAddress(worker.id, worker.epoch, worker.host, worker.data_plane)
        for worker in workers
        if worker.id != me.id
        and worker.data_plane
        and worker.kv_format == me.kv_format
        and worker.model_revision == me.model_revision
        and worker.state in (State.READY, State.DRAINING)
    ]


@dataclass(eq=False)
class Source:
    tier: Tier
    address: SourceAddress
    connect: Connect
    look_limit_s: float
    writes: WriteBehind | None = None  # of a vault
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _meter: LinkSpeedMeter = field(default_factory=LinkSpeedMeter)
    _looks: ConnectionThread | None = None
    _fetches: ConnectionThread | None = None
    _closed: bool = False
    _waiting_bytes: int = 0  # of fetches that wait or run
    _unasked_until: float = float("-inf")
    _late: int = 0
    _kept_alive: float = field(default_factory=time.monotonic)
    _staging: bytearray = field(default_factory=bytearray)

    @property
    def id(self) -> str:
        return self.address.id

    def start(self) -> None:
        with self._lock:
            if self._closed or self._looks is not None:
                return
            name = f"{self.tier.value}-{self.id}"
            self._looks = ConnectionThread(f"{name}-look", self.connect, self._keep_alive)
            self._fetches = ConnectionThread(f"{name}-fetch", self.connect, self._probe)
            self._looks.start()
            self._fetches.start()

    def close(self) -> list[threading.Thread]:
        """Ends connections for good, without waiting. Returns the threads that will end."""
        with self._lock:
            self._closed = True
        return self.rest() + ([self.writes.close()] if self.writes is not None else [])

    def rest(self) -> list[threading.Thread]:
        """Ends connections until they are needed again."""
        with self._lock:
            ending = [one for one in (self._looks, self._fetches) if one is not None]
            self._looks = self._fetches = None
        for one in ending:
            one.close()
        return [one.thread for one in ending]

    def is_idle(self, since: float) -> bool:
        with self._lock:
            threads = [one for one in (self._looks, self._fetches) if one is not None]
        return bool(threads) and all(one.used_at < since and one.busy_since is None for one in threads)

    def look(self, job: ConnectionJob, limit_s: float | None = None) -> bool:
        """False: it would not be answered in time. A caller with more time than usual, `limit_s`, ignores a pause."""
        self.start()
        looks = self._looks
        now = time.monotonic()
        patient = limit_s is not None and limit_s > self.look_limit_s
        if looks is None or (now < self._unasked_until and not patient):
            return False
        busy_since = looks.busy_since
        if busy_since is not None and now - busy_since > (self.look_limit_s if limit_s is None else limit_s):
            return False
        return looks.submit(job)

    def answered(self, seconds: float) -> None:
        """A look took `seconds`. A source that is late again and again is not asked for a while."""
        with self._lock:
            self._late = 0 if seconds <= self.look_limit_s else self._late + 1
            if self._late >= LATE_LOOKS:
                pause = FIRST_PAUSE_S * 2 ** min(self._late - LATE_LOOKS, 10)
                self._unasked_until = time.monotonic() + min(pause, LONGEST_PAUSE_S)

    def _keep_alive(self, client: DataPlaneClient) -> None:
        now = time.monotonic()
        if now - self._kept_alive >= KEEP_ALIVE_S:
            self._kept_alive = now
            client.echo(0, now + PROBE_LIMIT_S)

    def fetch(self, job: ConnectionJob, nbytes: int) -> bool:
        """False: it will not run. The caller calls `ended` in any case."""
        self.start()
        fetches = self._fetches
        with self._lock:
            self._waiting_bytes += nbytes
        return fetches is not None and fetches.submit(job)

    def ended(self, nbytes: int) -> None:
        with self._lock:
            self._waiting_bytes -= nbytes

    def cancel(self, job: ConnectionJob) -> None:
        if (fetches := self._fetches) is not None:
            fetches.cancel(job)

    def staging(self, nbytes: int) -> memoryview:
        """Room for a block that is being received; for the fetch connection's thread alone."""
        if len(self._staging) < nbytes:
            self._staging = bytearray(nbytes)
        return memoryview(self._staging)[:nbytes]

    def measured(self, note: Callable[[LinkSpeedMeter], None]) -> None:
        with self._lock:
            note(self._meter)

    def speed(self) -> LinkSpeed | None:
        """Of a fetch that begins now: what waits before it counts as latency. None: unmeasured, or a vault away."""
        fetches = self._fetches
        if self.tier is Tier.VAULT and (fetches is None or not fetches.is_connected):
            return None
        with self._lock:
            speed = self._meter.speed
            waiting = self._waiting_bytes
        return speed and LinkSpeed(speed.latency_s + waiting / speed.bytes_per_s, speed.bytes_per_s)

    def own_speed(self) -> LinkSpeed | None:
        """Of a fetch that waits for no other; None until measured."""
        with self._lock:
            return self._meter.speed

    def _probe(self, client: DataPlaneClient) -> None:
        with self._lock:
            if not self._meter.due(time.monotonic()):
                return
        began = time.monotonic()
        try:
            small_s = min(client.echo(0, began + PROBE_LIMIT_S) for _ in range(PROBES))
            seconds = min(client.echo(PROBE_BYTES, began + PROBE_LIMIT_S) for _ in range(PROBES))
        except DataPlaneError:
            self.measured(lambda meter: meter.given_up(0, time.monotonic() - began, time.monotonic()))
            raise
        self.measured(lambda meter: meter.probed(small_s, PROBE_BYTES, seconds, time.monotonic()))


@dataclass(slots=True)
class _Conduct:
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=FAULTS))
    until: float = float("-inf")
    term_s: float = 0.0


@dataclass(eq=False, slots=True)
class Quarantine:
    """Of all vaults and peers of one worker, by their id: a restart does not clear a source.

        3 faults in 60 s, or one block that was wrong under a right checksum ──▶ shut out for 60 s ──▶ asked again
            shut out again within the hour after that: twice as long, an hour at most

    A fault is a block that failed its checks: damaged, another block, another format. A block that never came is none.
    """

    _conducts: dict[str, _Conduct] = field(default_factory=dict)

    def allows(self, source: str, now: float) -> bool:
        conduct = self._conducts.get(source)
        return conduct is None or now >= conduct.until

    def fault(self, source: str, reason: str, now: float) -> bool:
        """One block failed its checks. True if that shuts the source out now."""
        if source not in self._conducts and len(self._conducts) >= MAX_SOURCES:
            seen = {one: max(conduct.until, *conduct.recent, float("-inf")) for one, conduct in self._conducts.items()}
            del self._conducts[min(seen, key=seen.__getitem__)]
        conduct = self._conducts.setdefault(source, _Conduct())
        if now < conduct.until:
            return False
        conduct.recent.append(now)
        often = len(conduct.recent) == FAULTS and now - conduct.recent[0] <= WINDOW_S
        if reason != WRONG and not often:
            return False
        again = conduct.term_s and now - conduct.until <= FORGIVEN_S
        conduct.term_s = min(conduct.term_s * 2, LONGEST_TERM_S) if again else FIRST_TERM_S
        conduct.until = now + conduct.term_s
        conduct.recent.clear()
        return True
