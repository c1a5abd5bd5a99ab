"""W3C trace context as the wire carries it: the header `traceparent` of requests. Pure.

    00-<trace id, 32 hex>-<span id, 16 hex>-<flags, 2 hex>      https://www.w3.org/TR/trace-context/

Only what is sampled is carried between processes: a process that finds no context, or one that is not sampled, does
nothing, so an unsampled request costs no header anywhere. What is no context is as if it were not there: a caller's
mistake never fails its request.

What a client tells of a request's way, for a caller that traces it:

    placing ──▶ placed ──▶ attempting ──▶ attempt_ended ──┬──▶ closed
       ▲  └────▶ unplaced                                 │
       └──────────────── next attempt ◀───────────────────┘
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from kvproto.errors import KvfleetError
from kvproto.messages import Placement

TRACEPARENT = "traceparent"
HEADER_BYTES = 128  # that a message with it is longer, at most

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
    """None for what is no trace context. Later versions are read as far as this one knows them."""
    if not value or len(value) > 512 or (found := _FORM.fullmatch(value)) is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if version == "ff" or (version == "00" and more is not None) or not trace_id.strip("0") or not span_id.strip("0"):
        return None
    return TraceContext(trace_id, span_id, bool(int(flags, 16) & _SAMPLED))


def sampled(value: str | None) -> str | None:
    """The context to pass on, in this version's form; None where there is none, or it is not sampled."""
    context = parse(value)
    return str(context) if context is not None and context.sampled else None


def headers_of(traceparent: str | None, room: int = HEADER_BYTES) -> dict[str, str] | None:
    """For a NATS message. The server counts headers in what it takes at most: without `room` there is none."""
    return None if traceparent is None or room < HEADER_BYTES else {TRACEPARENT: traceparent}


def in_headers(headers: Mapping[str, str] | None) -> str | None:
    """What a NATS message's headers say, whatever the case of the name."""
    if not headers:
        return None
    if (value := headers.get(TRACEPARENT)) is not None:
        return value.strip()
    return next((value.strip() for name, value in headers.items() if name.lower() == TRACEPARENT), None)


class Trail:
    """Of one request: carries the caller's trace context to placement and workers, and records nothing itself; the
    ingress records spans in one of its own. Methods are called on the client's loop, none per token, and `closed` last,
    in any case."""

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
