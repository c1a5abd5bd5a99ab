"""W3C trace context (https://www.w3.org/TR/trace-context/) as the header `traceparent` of requests. Pure.

Only sampled contexts travel, so an unsampled request costs no header. A malformed context is ignored. The client calls
a `Trail` in this order:

    placing ──▶ placed ──▶ attempting ──▶ started ──▶ first_token ──▶ attempt_ended ──┬──▶ closed
       ▲  └────▶ unplaced       └────────────┴──────────────────────────▲              │
       └──────────────────────────────── next attempt ◀────────────────────────────────┘
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from kvproto.errors import KvfleetError
from kvproto.messages import Placement, Started

TRACEPARENT = "traceparent"
HEADER_BYTES = 128  # at most, with its name

_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)
_SAMPLED = 1


class TraceContext(NamedTuple):
    """`trace_id` and `span_id` are lower-case hex, 32 and 16 digits."""

    trace_id: str
    span_id: str
    sampled: bool

    def __str__(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{'01' if self.sampled else '00'}"


def parse(value: str | None) -> TraceContext | None:
    """None for a malformed context. Later versions are read as version 00."""
    if not value or len(value) > 512 or (found := _FORM.fullmatch(value)) is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if version == "ff" or (version == "00" and more is not None) or not trace_id.strip("0") or not span_id.strip("0"):
        return None
    return TraceContext(trace_id, span_id, bool(int(flags, 16) & _SAMPLED))


def sampled(value: str | None) -> str | None:
    """The context in the form of version 00; None where it is malformed or not sampled."""
    context = parse(value)
    return str(context) if context is not None and context.sampled else None


def headers_of(traceparent: str | None, room: int = HEADER_BYTES) -> dict[str, str] | None:
    """Headers of a NATS message; None where `room`, the bytes left of `max_payload`, is too small for them."""
    return None if traceparent is None or room < HEADER_BYTES else {TRACEPARENT: traceparent}


def in_headers(headers: Mapping[str, str] | None) -> str | None:
    """The value in a NATS message's headers, whatever the case of the name."""
    if not headers:
        return None
    if (value := headers.get(TRACEPARENT)) is not None:
        return value.strip()
    return next((value.strip() for name, value in headers.items() if name.lower() == TRACEPARENT), None)


class Trail:
    """Carries one request's trace context to placement and workers; subclasses record spans. All methods run on the
    client's loop, none per token. `closed` always comes last."""

    __slots__ = ("traceparent",)

    def __init__(self, traceparent: str | None = None) -> None:
        self.traceparent = sampled(traceparent)

    def placing(self, attempt: int) -> str | None:
        """The context that the placement request carries."""
        return self.traceparent

    def placed(self, placement: Placement) -> None: ...

    def unplaced(self, error: KvfleetError) -> None: ...

    def attempting(self, worker: str, attempt: int) -> str | None:
        """The context that the attempt carries."""
        return self.traceparent

    def started(self, frame: Started) -> None: ...

    def first_token(self) -> None:
        """Of this attempt."""

    def attempt_ended(self, error: KvfleetError | None, *, moved: bool) -> None: ...

    def closed(self, error: KvfleetError | None) -> None: ...
