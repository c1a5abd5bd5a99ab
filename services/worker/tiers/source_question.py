"""One question to a source: which blocks of a chain it has, and how long it may take to say so."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence

from kvfleet.worker.tiers.base import BlockName
from kvfleet.worker.tiers.looking import Look
from kvfleet.worker.tiers.source import Source
from kvfleet.worker.tiers.vault_ring import RingShare
from kvproto.dataplane.client import DataPlaneClient
from kvproto.dataplane.wire import MAX_BLOCKS
from kvproto.messages import Tier
from kvservice.tracing import Span, Tracer

ANSWER_S = 2.0  # of a look whose time is long over: it tells when its source answers again
MEASURE_S = 0.01  # between looks at whether a far peer has been measured


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
