"""What a client tells of a request's way, for a caller that traces it. Pure.

    placing ──▶ placed ──▶ attempting ──▶ attempt_ended ──┬──▶ closed
       ▲  └────▶ unplaced                                 │
       └──────────────── next attempt ◀───────────────────┘

`Trail` itself records nothing: it carries the caller's trace context to placement and workers. The ingress records
spans in one of its own. Nothing here is called per token.
"""

from __future__ import annotations

from kvproto.errors import KvfleetError
from kvproto.messages import Placement
from kvproto.trace_context import sampled


class Trail:
    """Of one request. Methods are called on the client's loop, and `closed` last, in any case."""

    __slots__ = ("traceparent",)

    def __init__(self, traceparent: str | None = None) -> None:
        """What is no trace context, or not sampled, is not carried."""
        self.traceparent = sampled(traceparent)

    def placing(self, attempt: int) -> str | None:
        """Placement is about to be asked: the context that the question carries."""
        return self.traceparent

    def placed(self, placement: Placement) -> None:
        """By placement, or by the client's own ring."""

    def unplaced(self, error: KvfleetError) -> None:
        """Nobody was found, for now."""

    def attempting(self, worker: str, attempt: int) -> str | None:
        """A worker is about to be asked: the context that the request carries."""
        return self.traceparent

    def attempt_ended(self, error: KvfleetError | None, *, moved: bool) -> None:
        """It finished, moved, or failed."""

    def closed(self, error: KvfleetError | None) -> None:
        """No attempt follows."""
