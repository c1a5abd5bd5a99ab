"""The span of one traced question to a vault or peer, on the transfer thread that asks it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from kvproto.messages import Tier
from kvservice.tracing import Span, Tracer


@contextlib.contextmanager
def asking(tracer: Tracer, parent: str, name: str, tier: Tier, source: str) -> Iterator[Span | None]:
    """None where nothing is recorded."""
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
