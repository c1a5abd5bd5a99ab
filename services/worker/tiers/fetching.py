"""One landing's fetch: a part of it from each source, all at once, each in the order of the chain.

    receive ──▶ staging, checksum ──▶ is it what was asked for? ──▶ decode to its place, if the landing is still open

A block that is missing or bad cuts the chain there: no later block is requested. A part runs on its source's fetch
connection and ends exactly once; the fetch ends with its last part, or once its landing is closed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvfleet.worker.blocks.block_codec import decode, encoded_bytes
from kvfleet.worker.blocks.chain_location import BlockName, RingShare
from kvfleet.worker.tiers.host import Landing
from kvfleet.worker.tiers.link_speed import LinkSpeedMeter, seconds_of
from kvfleet.worker.tiers.looking import asking
from kvfleet.worker.tiers.source import Source
from kvfleet.worker.tiers.transfers import GONE, ConnectionJob, Deadlines, RemoteCounts, RemoteSettings
from kvproto.dataplane.block import BlockCodec, BlockHeader
from kvproto.dataplane.client import DataPlaneClient, GetStatus
from kvproto.dataplane.wire import MAX_BLOCKS
from kvproto.errors import CodecError
from kvproto.messages import Tier
from kvservice.tracing import Tracer

FOREIGN = "foreign"  # of a pool of another layout or dtype, in which workers of one model may differ

WATCH_S = 0.02  # how soon a closed landing is noticed while nothing arrives
GRACE_S = 0.3  # for an unwanted part to end in good order, keeping its connection
SLACK_S = 2.0
TIMEOUT_FACTOR = 4.0  # times the predicted seconds, and the slack: then a part has failed
LONGEST_S = 60.0


def fault_of(header: BlockHeader, name: BlockName, settings: RemoteSettings, *, exact: bool) -> str:
    """A metric's label, or "". The data plane checks the checksum. The hash of `name` is that of its ids after its
    parent, so a header with the same fields is genuine; where its ids are not known here the header must prove them."""
    if (header.root, header.hash, header.parent) != (name.root, name.hash, name.parent):
        return "other"
    if header.ids != name.ids and (name.ids or not header.is_genuine()):
        return "other"
    kv_format, shape = settings.form(name.ids)
    if header.format != kv_format:
        return FOREIGN
    if header.raw_bytes != shape.raw_bytes:
        return "format"
    quantised = header.codec is not BlockCodec.RAW
    if quantised and (shape.dtype == "int8" or not header.lossy):
        return "format"
    if header.length != encoded_bytes(header.codec, shape):
        return "format"
    return "lossy" if exact and header.lossy else ""


@dataclass(frozen=True, slots=True)
class Intake:
    """What all fetches of a worker share."""

    settings: RemoteSettings
    counts: RemoteCounts
    deadlines: Deadlines
    fault: Callable[[Source, str], None]  # a block failed its checks: its source, the reason
    missing: Callable[[str, bytes], None]  # a block was not there: the source's id, its hash
    tracer: Tracer


@dataclass(eq=False)
class Fetch:
    """Guarded by its lock, apart from `landing`, which has its own."""

    tier: Tier
    names: Sequence[BlockName]
    targets: Sequence[memoryview]
    landing: Landing
    intake: Intake
    exact: bool
    on_progress: Callable[[], None]
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _failure: str = ""
    _ended: bool = False

    def __post_init__(self) -> None:
        self._gap = len(self.names)
        self._parts: list[FetchPart] = []

    def start(self, shares: Sequence[tuple[Source, list[RingShare]]]) -> None:
        self._parts = [FetchPart(self, source, share) for source, share in shares]
        self._open = len(self._parts)
        if not self._parts:
            self.intake.deadlines.after(0.0, self.end)
            return
        for part in self._parts:
            if not part.source.fetch(part.job, part.wanted_bytes):  # it is away, or too much waits for it
                self.intake.deadlines.after(0.0, partial(part.job.fail, GONE))
        self.intake.deadlines.after(WATCH_S, self._watch)

    def wants(self, at: int) -> bool:
        return at < self._gap and not self.landing.closed

    def cut(self, at: int, reason: str = "") -> None:
        """Block `at` will not come."""
        with self._lock:
            if at <= self._gap:
                self._gap = at
                self._failure = reason or self._failure

    def part_ended(self) -> None:
        with self._lock:
            self._open -= 1
            if self._open:
                return
        self.end()

    def end(self) -> None:
        """Nothing lands any more. Only the first call counts."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
            complete = all(header is not None for header in self.landing.headers[: len(self.names)])
            failure = "" if complete else self._failure or ("given_up" if self.landing.closed else "missing")
        if failure:
            self.intake.counts.failed(self.tier, failure)
        self.landing.failure = failure
        self.landing.ended = True
        self.on_progress()

    def _watch(self) -> None:
        if self._ended:
            return
        if self.landing.closed:
            self.end()
            self.intake.deadlines.after(GRACE_S, self._cancel)
            return
        self.intake.deadlines.after(WATCH_S, self._watch)

    def _cancel(self) -> None:
        for part in self._parts:
            part.source.cancel(part.job)


@dataclass(eq=False)
class FetchPart:
    fetch: Fetch
    source: Source
    shares: list[RingShare]
    _blocks: int = 0
    _raw_bytes: int = 0
    _wire_bytes: int = 0
    _began: float | None = None
    _stopped: float | None = None
    _traceparent: str = ""

    def __post_init__(self) -> None:
        self.job = ConnectionJob(self._run, self._fail)
        self._intake = self.fetch.intake
        self.wanted_bytes = sum(self.fetch.targets[at].nbytes for share in self.shares for at in share.at)
        self._next = self.shares[0].at[0]  # the first block that has neither come nor failed

    def _run(self, client: DataPlaneClient) -> None:
        with asking(self._intake.tracer, self.fetch.landing.traceparent, "fetch", self.source) as span:
            self._traceparent = span.traceparent if span is not None else ""
            now = self._began = time.monotonic()
            speed = self.source.own_speed()
            predicted = seconds_of(speed, self.wanted_bytes) if speed is not None else 0.0
            deadline = now + min(SLACK_S + TIMEOUT_FACTOR * predicted, LONGEST_S)
            for share in self.shares:
                for at in share.parts(MAX_BLOCKS):
                    if self._stopped is None and self.fetch.wants(at[0]):
                        self._next = at[0]
                        self._get(client, share.root, at, deadline)
            self._over(gave_up=self.fetch.landing.closed)
            if span is not None:
                span.set({"kvfleet.blocks.hit": self._blocks, "kvfleet.bytes": self._wire_bytes})

    def _fail(self, reason: str) -> None:
        self.fetch.cut(self._next, reason)
        self._over(gave_up=True)
        if self._began is not None:
            self.source.measured(LinkSpeedMeter.doubt)

    def _over(self, *, gave_up: bool) -> None:
        self.source.ended(self.wanted_bytes)
        if self._began is not None:
            now = time.monotonic()
            seconds = (self._stopped or now) - self._began
            nbytes = self._raw_bytes
            if gave_up:
                self.source.measured(lambda meter: meter.given_up(nbytes, seconds, now))
            else:
                self.source.measured(lambda meter: meter.fetched(nbytes, seconds, now, self._wire_bytes))
        self.fetch.part_ended()

    def _get(self, client: DataPlaneClient, root: bytes, at: list[int], deadline: float) -> None:
        fetch, names = self.fetch, self.fetch.names
        reached = 0  # in `at`: of what was before, all has come

        def sink(index: int, header: BlockHeader) -> memoryview | None:
            if index != reached:
                fetch.cut(at[reached])  # its status will say why
            fault = fault_of(header, names[at[index]], self._intake.settings, exact=fetch.exact)
            if fault == FOREIGN:  # honest, and of no use here
                fetch.cut(at[index], fault)
            elif fault:
                self._fault(at[index], fault)
            return None if fault else self.source.staging(header.length)

        def on_block(index: int, header: BlockHeader, payload: memoryview) -> bool:
            nonlocal reached
            if not (fetch.wants(at[index]) and self._land(at[index], header, payload)):
                self._stopped = time.monotonic()
                return False
            reached = index + 1
            self._next = at[reached] if reached < len(at) else self._next
            return True

        hashes = [names[one].hash for one in at]
        statuses = client.get(root, hashes, fetch.exact, sink, on_block, deadline, self._traceparent)
        for index, status in enumerate(statuses):
            if status is GetStatus.CORRUPT:
                self._fault(at[index], "checksum")
            elif status is GetStatus.MISSING:
                fetch.cut(at[index], "missing")
                self._intake.missing(self.source.id, names[at[index]].hash)

    def _land(self, at: int, header: BlockHeader, payload: memoryview) -> bool:
        def write() -> None:
            decode(header.codec, self._intake.settings.form(header.ids)[1], payload, self.fetch.targets[at])

        try:
            landed = self.fetch.landing.land(at, header, write)
        except CodecError:
            self._fault(at, "format")
            return False
        if landed:
            self._blocks += 1
            self._raw_bytes += header.raw_bytes
            self._wire_bytes += header.length
            self.fetch.landing.sources[at] = self.source.id
        return landed

    def _fault(self, at: int, reason: str) -> None:
        self.fetch.cut(at, reason)
        self._intake.fault(self.source, reason)
