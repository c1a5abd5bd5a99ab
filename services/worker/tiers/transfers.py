"""What all transfers of a worker share: their settings, thread-safe counts, and threads, one for each connection to a
vault or peer, and one for deadlines. Loops: each owns its thread, and the jobs or calls that wait.

    connecting ──▶ connected ──job failed──▶ connecting      jobs wait
        │ cannot                     ▲
        └──▶ away, for a while ──────┘                       jobs are refused

A connection runs its jobs one at a time, in order, and serves one purpose (to look, to fetch, to write), so that none
of them delays another.
"""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from kvcpu.vector.numbers import SCALE_BYTES
from kvfleet.worker.blocks.block_codec import BlockShape
from kvfleet.worker.blocks.chain_location import StateForm
from kvproto.dataplane.block import STATE_IDS, BlockCodec
from kvproto.dataplane.client import DataPlaneClient
from kvproto.dataplane.errors import DataPlaneError, HandshakeRefused, PeerTimeout, ProtocolError
from kvproto.errors import KvfleetError
from kvproto.messages import Tier, TierLoad
from kvservice.distribution import Distribution

logger = logging.getLogger(__name__)

LOOK_LIMIT_S = 0.02
TIERS = (Tier.VAULT, Tier.PEER)
SNR_DB = (35.0, 38.0, 40.0, 41.0, 42.0, 43.0, 44.0, 45.0, 46.0, 48.0, 50.0, 60.0, 200.0)  # from the gate to no loss

MAX_JOBS = 256
FIRST_PAUSE_S = 0.1  # after a connect that failed; doubles
LONGEST_PAUSE_S = 5.0
SHORT_LIFE_S = 1.0  # a connection that failed sooner is followed by a pause, too
TICK_S = 0.5
GONE = "gone"
REASONS = ((PeerTimeout, "timeout"), (HandshakeRefused, "refused"), (ProtocolError, "protocol"), (DataPlaneError, GONE))

Connect = Callable[[], DataPlaneClient]
Use = Callable[[DataPlaneClient], None]


@dataclass(frozen=True, slots=True)
class RemoteSettings:
    worker: str
    host: str
    kv_format: bytes  # of the worker's pool, as is the shape
    shape: BlockShape
    codec: BlockCodec = BlockCodec.RAW  # of what it writes to vaults
    max_queued_bytes: int = 256 * 1024 * 1024  # for one vault
    look_limit_s: float = LOOK_LIMIT_S
    states: StateForm | None = None

    def form(self, ids: bytes) -> tuple[bytes, BlockShape]:
        """Format and shape of the block, or state, with these ids."""
        if self.states is not None and ids == STATE_IDS:
            return self.states.format, BlockShape(1, self.states.nbytes - SCALE_BYTES, "int8")  # never encoded
        return self.kv_format, self.shape


@dataclass(eq=False, slots=True)
class RemoteCounts:
    snr_db: Distribution = field(default_factory=lambda: Distribution(SNR_DB))  # of blocks that were quantised
    quantised_raw_bytes: int = 0
    quantised_bytes: int = 0
    kept_raw: int = 0  # that would have lost too much, or held what is no number
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _offloaded: int = 0
    _failures: dict[Tier, Counter[str]] = field(default_factory=lambda: {tier: Counter() for tier in TIERS})
    _open: list[tuple[Tier, DataPlaneClient]] = field(default_factory=list)
    _received: Counter[Tier] = field(default_factory=Counter)  # over connections that have ended
    _sent: Counter[Tier] = field(default_factory=Counter)

    def offloaded(self, blocks: int) -> None:
        """Blocks that a vault did not have and has now."""
        with self._lock:
            self._offloaded += blocks

    def quantised(self, snr_db: float, raw_bytes: int, nbytes: int) -> None:
        with self._lock:
            self.snr_db.observe(snr_db)
            self.quantised_raw_bytes += raw_bytes
            self.quantised_bytes += nbytes

    def stayed_raw(self) -> None:
        with self._lock:
            self.kept_raw += 1

    def connected(self, tier: Tier, connection: DataPlaneClient) -> None:
        with self._lock:
            self._count_ended()
            self._open.append((tier, connection))

    def transfers(self) -> dict[Tier, tuple[int, int]]:
        """Bytes received and sent."""
        with self._lock:
            self._count_ended()
            received, sent = self._received.copy(), self._sent.copy()
            for tier, connection in self._open:
                received[tier] += connection.link.bytes_in
                sent[tier] += connection.link.bytes_out
            return {tier: (received[tier], sent[tier]) for tier in TIERS}

    def _count_ended(self) -> None:
        ended = [one for one in self._open if one[1].closed]
        self._open = [one for one in self._open if one not in ended]
        for tier, connection in ended:
            self._received[tier] += connection.link.bytes_in
            self._sent[tier] += connection.link.bytes_out

    def failed(self, tier: Tier, reason: str, count: int = 1) -> None:
        with self._lock:
            self._failures[tier][reason] += count

    @property
    def not_offloaded(self) -> int:
        """Blocks that were to be written to a vault, and were not."""
        with self._lock:
            reasons = self._failures[Tier.VAULT].items()
            return sum(count for reason, count in reasons if reason.startswith(("put_", "offload_")))

    def loads(self) -> dict[str, TierLoad]:
        with self._lock:
            return {
                tier.value: TierLoad(
                    offloaded_blocks_total=self._offloaded if tier is Tier.VAULT else 0,
                    failures_total=dict(self._failures[tier]),
                )
                for tier in TIERS
            }


@dataclass(frozen=True, slots=True, eq=False)
class ConnectionJob:
    """`run` is called on the connection's thread. If it raises, or is not called after all, `fail` is called with the
    reason, a metric's label, and raises nothing."""

    run: Use
    fail: Callable[[str], None]


@dataclass(eq=False)
class ConnectionThread:
    """`maintain` is called once connected, and about every TICK_S while there is nothing to do; it may raise."""

    name: str
    connect: Connect
    maintain: Use
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _jobs: deque[tuple[float, ConnectionJob]] = field(default_factory=deque)  # since when
    _running: tuple[float, ConnectionJob] | None = None
    _client: DataPlaneClient | None = None
    _away: bool = False
    _is_missed: bool = False  # said once
    _closed: bool = False
    used_at: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._run, name=self.name, daemon=True)

    def start(self) -> None:
        """Only when what `maintain` uses is there."""
        self.thread.start()

    def submit(self, job: ConnectionJob) -> bool:
        """False: neither `run` nor `fail` will be called, as the source is away, or too much waits."""
        with self._changed:
            if self._closed or self._away or len(self._jobs) >= MAX_JOBS:
                return False
            self.used_at = time.monotonic()
            self._jobs.append((self.used_at, job))
            self._changed.notify()
        return True

    @property
    def is_connected(self) -> bool:
        return self._client is not None

    @property
    def busy_since(self) -> float | None:
        """When the oldest job came that is not over."""
        with self._changed:
            oldest = self._running or (self._jobs[0] if self._jobs else None)
        return oldest and oldest[0]

    def cancel(self, job: ConnectionJob) -> None:
        """End a job now, as gone; if it runs, with the connection. Nothing if it is over."""
        with self._changed:
            waiting = next((entry for entry in self._jobs if entry[1] is job), None)
            if waiting is None:
                if self._running is not None and self._running[1] is job and self._client is not None:
                    self._client.abort()
                return
            self._jobs.remove(waiting)
        job.fail(GONE)

    def close(self) -> None:
        """Returns at once: `thread` ends soon, and its jobs have failed by then."""
        with self._changed:
            self._closed = True
            if self._client is not None:
                self._client.abort()
            self._changed.notify()

    def _run(self) -> None:
        pause = FIRST_PAUSE_S
        while not self._closed:
            client, began = self._connected(), time.monotonic()
            if client is None:
                with self._changed:
                    self._away = True
                self._fail_waiting()
            else:
                try:
                    in_order = self._serve(client)
                finally:
                    self._let_go(client)
                if in_order or time.monotonic() - began > SHORT_LIFE_S:
                    pause = FIRST_PAUSE_S
                    continue
            # also where a source accepts a connection and then ends it: else a thousand times a second
            with self._changed:
                self._changed.wait_for(lambda: self._closed, pause)
            self._away = False
            pause = min(2 * pause, LONGEST_PAUSE_S)
        self._fail_waiting()

    def _connected(self) -> DataPlaneClient | None:
        client = None
        try:
            client = self.connect()
            with self._changed:
                self._client = client
                if self._closed:
                    client.abort()
            self.maintain(client)
            if self._is_missed:
                logger.info("%s: connected again", self.name)
            self._is_missed = False
            return client
        except KvfleetError as error:
            if not self._is_missed and not self._closed:
                logger.warning("%s: cannot connect, and tries again: %s", self.name, error)
            self._is_missed = True
        except Exception:  # a loop's top
            logger.exception("%s: cannot connect", self.name)
        if client is not None:
            self._let_go(client)
        return None

    def _let_go(self, client: DataPlaneClient) -> None:
        with self._changed:
            self._client = None
        client.close()

    def _serve(self, client: DataPlaneClient) -> bool:
        """Returns when the connection is of no further use, with whether it ended in order. No job fails because it
        ended while idle."""
        while not self._closed and not client.has_ended():
            with self._changed:
                if not self._jobs:
                    self._changed.wait(TICK_S)
                if self._closed or client.has_ended():
                    break
                self._running = self._jobs.popleft() if self._jobs else None
            job = self._running and self._running[1]
            reason = ""
            try:
                (job.run if job is not None else self.maintain)(client)
            except KvfleetError as error:
                logger.info("%s: %s", self.name, error)
                reason = next((label for kind, label in REASONS if isinstance(error, kind)), "internal")
            except Exception:  # a loop's top: one job's fault is not the next one's
                logger.exception("%s: a job failed", self.name)
                reason = "internal"
            if reason:
                client.close()
                if job is not None:
                    job.fail(reason)
            with self._changed:
                self._running = None
            if reason:
                return False
        return client.closed  # by this end: a fetch that nobody wanted any more

    def _fail_waiting(self) -> None:
        with self._changed:
            jobs = list(self._jobs)
            self._jobs.clear()
        for _, job in jobs:
            job.fail(GONE)


class Deadlines:
    """A worker has one: looks without an answer end in time, and no callback runs on the thread that asked."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="tiers-deadlines", daemon=True)
        self._thread.start()

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Call once, `seconds` from now. `close` makes the calls that wait; then only those due at once are made."""
        when = time.monotonic() + seconds
        with self._changed:
            if not self._closed:
                heapq.heappush(self._waiting, (when, next(self._numbers), call))
                if self._waiting[0][0] == when:
                    self._changed.notify()
                return
        if seconds <= 0:
            _make(call)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._closed and (not self._waiting or self._waiting[0][0] > time.monotonic()):
                    self._changed.wait(self._waiting[0][0] - time.monotonic() if self._waiting else None)
                if not self._waiting:
                    return  # closed
                _, _, call = heapq.heappop(self._waiting)
            _make(call)


def _make(call: Callable[[], None]) -> None:
    try:
        call()
    except Exception:  # the top of a loop: one call's fault is not the next one's
        logger.exception("a deadline's call failed")
