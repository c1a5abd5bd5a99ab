"""One question to several holders at once: who has what of these blocks? Complete with the last answer, with all that
could be hoped for, or when its time is up. Owns its answers; any thread may bring one.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from kvfleet.worker.blocks.chain_location import BlockName, Finding
from kvfleet.worker.tiers.source import Source
from kvfleet.worker.tiers.vault_ring import RingShare
from kvproto.dataplane.client import DataPlaneClient
from kvproto.dataplane.wire import MAX_BLOCKS
from kvproto.messages import Tier
from kvservice.tracing import Span, Tracer

ANSWER_S = 2.0  # of a look whose time is long over: it tells when its source answers again
MEASURE_S = 0.01  # between looks at whether a far peer has been measured


class Look:
    """One answer of each holder is awaited; `expect` says whose before any can come. `on_strays` is told, just before
    the finding is ready, which vault has blocks of it that are not at their owner, by hash."""

    def __init__(
        self,
        names: Sequence[BlockName],
        finding: Finding,
        on_ready: Callable[[], None],
        on_strays: Callable[[dict[bytes, str]], None],
    ) -> None:
        self._lock = threading.Lock()
        self._names = names
        self._finding = finding
        self._on_ready = on_ready
        self._on_strays = on_strays
        self._at_owner = bytearray(len(names))  # 1 where the vault that should keep a block has it
        self._elsewhere: dict[int, str] = {}  # another vault that has it
        self._at_peer = bytearray(len(names))
        self._expected: Counter[Tier] = Counter()
        self._over = False

    def expect(self, tiers: Iterable[Tier]) -> None:
        self._expected = Counter(tiers)

    @property
    def is_over(self) -> bool:
        return self._over

    def has(self, tier: Tier, source: str, at: Iterable[int], *, owned: bool) -> None:
        """The source has these blocks."""
        with self._lock:
            for index in at:
                if tier is Tier.PEER:
                    self._at_peer[index] = 1
                elif owned:
                    self._at_owner[index] = 1
                else:
                    self._elsewhere[index] = source

    def answered(self, tier: Tier) -> None:
        """One holder has said all it will, be it nothing."""
        with self._lock:
            self._expected[tier] -= 1
            vaults = self._expected[Tier.VAULT] <= 0 or self._vault_depth() == len(self._names)
            complete = vaults and self._expected[Tier.PEER] <= 0
        if complete:
            self.end()

    def end(self) -> None:
        """What is known by now is the finding. Only the first call counts."""
        with self._lock:
            if self._over:
                return
            self._over = True
            depth = self._vault_depth()
            strays = {
                self._names[at].hash: vault
                for at, vault in self._elsewhere.items()
                if at < depth and not self._at_owner[at]
            }
        if strays:
            self._on_strays(strays)
        self._finding.vault = depth
        self._finding.peer = _depth(self._at_peer)
        self._finding.ready = True
        self._on_ready()

    def _vault_depth(self) -> int:
        depth = _depth(self._at_owner)
        while depth < len(self._names) and (self._at_owner[depth] or depth in self._elsewhere):
            depth += 1
        return depth


def _depth(present: bytearray) -> int:
    gap = present.find(0)
    return len(present) if gap < 0 else gap


@contextlib.contextmanager
def asking(tracer: Tracer, parent: str, name: str, tier: Tier, source: str) -> Iterator[Span | None]:
    """The span of one traced question to a vault or peer, on the transfer thread that asks it; None where nothing is
    recorded."""
    span = tracer.begin(name, parent, {"kvfleet.tier": tier.value, "kvfleet.source.id": source}, kind="client")
    error: str | None = None
    try:
        yield span
    except Exception as failure:
        error = type(failure).__name__
        raise
    finally:
        if span is not None:
            span.end(error=error)


class SourceQuestion:
    """Job: what one source has of a look's blocks."""

    def __init__(
        self, source: Source, look: Look, names: Sequence[BlockName], shares: Sequence[RingShare], exact: bool
    ) -> None:
        self.source = source
        self._look = look
        self._names = names
        self._shares = shares
        self._exact = exact
        self.traced: tuple[Tracer, str] | None = None

    def run(self, client: DataPlaneClient) -> None:
        if self._look.is_over:
            return
        if self.traced is None:
            self._ask(client, "")
            return
        with asking(*self.traced, "look", self.source.tier, self.source.id) as span:
            self._ask(client, span.traceparent if span is not None else "")

    def _ask(self, client: DataPlaneClient, traceparent: str) -> None:
        began = time.monotonic()
        for share in self._shares:
            for start in range(0, len(share.at), MAX_BLOCKS):
                at = share.at[start : start + MAX_BLOCKS]
                hashes = [self._names[index].hash for index in at]
                held = client.has(share.root, hashes, self._exact, began + ANSWER_S, traceparent)
                present = [index for index, has in zip(at, held, strict=True) if has]
                self._look.has(self.source.tier, self.source.id, present, owned=share.owned)
        self.source.answered(time.monotonic() - began)
        if self.source.tier is Tier.PEER:  # of which nothing is fetched before it is measured
            while self.source.own_speed() is None and not self._look.is_over:
                time.sleep(MEASURE_S)
        self._look.answered(self.source.tier)

    def fail(self, reason: str) -> None:
        self.source.answered(ANSWER_S)
        self._look.answered(self.source.tier)
