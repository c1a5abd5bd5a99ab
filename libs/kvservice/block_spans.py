"""Spans of a data plane's listener: one for each Get and Has that was asked for by a traced request."""

from __future__ import annotations

from kvproto.dataplane.serving import OnTraced, TracedRequest
from kvproto.messages import Tier
from kvservice.tracing import Tracer


def recorder_of(tracer: Tracer, tier: Tier) -> OnTraced | None:
    """What a DataPlaneServer tells; called on its connections' threads. None: nothing is to be told."""
    if not tracer.enabled:
        return None

    def record(request: TracedRequest) -> None:
        span = tracer.begin(
            f"{tier.value} {request.kind}",
            request.traceparent,
            {
                "kvfleet.tier": tier.value,
                "kvfleet.client.id": request.client,
                "kvfleet.blocks": request.blocks,
                "kvfleet.blocks.hit": request.hits,
                "kvfleet.blocks.from_disk": request.from_disk,
                "kvfleet.bytes": request.nbytes,
            },
            kind="server",
            at=request.began_ns,
        )
        if span is not None:
            span.end(error=request.error or None, at=request.ended_ns)

    return record
