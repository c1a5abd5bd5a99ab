"""One question to several vaults and a peer at once: which of these blocks do they have? Owns the answers.

It is complete with the last answer, when vaults have all blocks, or when its time is up. Thread-safe.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from kvfleet.worker.blocks.chain_location import BlockName, Finding, RingShare
from kvfleet.worker.tiers.source import Source
from kvproto.dataplane.client import DataPlaneClient
from kvproto.dataplane.wire import MAX_BLOCKS
from kvproto.messages import Tier
from kvservice import tracing
from kvservice.tracing import Span, Tracer

ANSWER_S = 2.0  # a late answer is read too: it says that the source answers again
MEASURE_S = 0.01  # between looks at whether a far peer has been measured


@dataclass(eq=False)
class Look:
    """`expect` is called before any answer can come. `names`: of blocks, then of the states that stand behind `points`
    of them. `on_strays` gets, just before the finding is ready, the vaults of what its owner does not have, by hash."""

    names: Sequence[BlockName]
    finding: Finding
    on_ready: Callable[[], None]
    on_strays: Callable[[dict[bytes, str]], None]
    exact: bool = False
    tracer: Tracer = tracing.NULL
    traceparent: str = ""
    points: Sequence[int] = ()
    is_over: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _expected: Counter[Tier] = field(default_factory=Counter)
    _elsewhere: dict[int, str] = field(default_factory=dict)  # another vault than its owner, that has a block

    def __post_init__(self) -> None:
        self._blocks = len(self.names) - len(self.points)
        self._at_owner = bytearray(len(self.names))  # 1 where the vault that should keep a block has it
        self._at_peer = bytearray(len(self.names))

    def expect(self, tiers: Iterable[Tier]) -> None:
        self._expected = Counter(tiers)

    def has(self, tier: Tier, source: str, at: Iterable[int], *, owned: bool) -> None:
        with self._lock:
            for index in at:
                if tier is Tier.PEER:
                    self._at_peer[index] = 1
                elif owned:
                    self._at_owner[index] = 1
                else:
                    self._elsewhere[index] = source

    def answered(self, tier: Tier) -> None:
        with self._lock:
            self._expected[tier] -= 1
            vaults = self._expected[Tier.VAULT] <= 0 or self._has_all()
            complete = vaults and self._expected[Tier.PEER] <= 0
        if complete:
            self.end()

    def end(self) -> None:
        """Only the first call counts."""
        with self._lock:
            if self.is_over:
                return
            self.is_over = True
            depth = self._vault_depth()
            strays = {
                self.names[at].hash: vault
                for at, vault in self._elsewhere.items()
                if (at < depth or at >= self._blocks) and not self._at_owner[at]
            }
        if strays:
            self.on_strays(strays)
        self.finding.vault = depth
        self.finding.peer = _depth(self._at_peer[: self._blocks])
        if self.points:
            states = list(enumerate(self.points, self._blocks))
            self.finding.vault_states = tuple(point for at, point in states if self._in_vault(at))
            self.finding.peer_states = tuple(point for at, point in states if self._at_peer[at])
        self.finding.ready = True
        self.on_ready()

    def _in_vault(self, at: int) -> bool:
        return bool(self._at_owner[at]) or at in self._elsewhere

    def _has_all(self) -> bool:
        return self._vault_depth() == self._blocks and (not self.points or self._in_vault(len(self.names) - 1))

    def _vault_depth(self) -> int:
        depth = _depth(self._at_owner[: self._blocks])
        while depth < self._blocks and self._in_vault(depth):
            depth += 1
        return depth


def _depth(present: bytearray) -> int:
    gap = present.find(0)
    return len(present) if gap < 0 else gap


@contextlib.contextmanager
def asking(tracer: Tracer, parent: str, name: str, source: Source) -> Iterator[Span | None]:
    """The span of one question to a vault or peer; None where nothing is recorded, or without a `parent`."""
    fields = {"kvfleet.tier": source.tier.value, "kvfleet.source.id": source.id}
    span = tracer.begin(name, parent, fields, kind="client") if parent else None
    error: str | None = None
    try:
        yield span
    except Exception as failure:
        error = type(failure).__name__
        raise
    finally:
        if span is not None:
            span.end(error=error)


@dataclass(eq=False, slots=True)
class SourceQuestion:
    look: Look
    source: Source
    shares: Sequence[RingShare]

    def run(self, client: DataPlaneClient) -> None:
        look, source = self.look, self.source
        if look.is_over:
            return
        with asking(look.tracer, look.traceparent, "look", source) as span:
            traceparent = span.traceparent if span is not None else ""
            began = time.monotonic()
            for share in self.shares:
                for at in share.parts(MAX_BLOCKS):
                    hashes = [look.names[index].hash for index in at]
                    held = client.has(share.root, hashes, look.exact, began + ANSWER_S, traceparent)
                    present = [index for index, has in zip(at, held, strict=True) if has]
                    look.has(source.tier, source.id, present, owned=share.owned)
            source.answered(time.monotonic() - began)
            if source.tier is Tier.PEER:  # nothing is fetched before it is measured
                while source.own_speed() is None and not look.is_over:
                    time.sleep(MEASURE_S)
            look.answered(source.tier)

    def fail(self, reason: str) -> None:
        self.source.answered(ANSWER_S)
        self.look.answered(self.source.tier)
