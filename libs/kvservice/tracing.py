"""Spans, as services use them. `tracing_start` opens a process's tracer, `tracing_otel` is the adapter.

Without an endpoint OpenTelemetry is not imported, and `begin` returns None, as it does for spans that are not sampled.
Roots begin where requests enter the fleet: at the ingress, and at placement for a bare producer.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Literal, NamedTuple, Protocol

Value = str | bool | int | float | Sequence[str]
Attributes = Mapping[str, Value]
Kind = Literal["internal", "server", "client", "consumer"]


class SpanIds(NamedTuple):
    """As logs show them: lower-case hex."""

    trace_id: str
    span_id: str


class Span(Protocol):
    """One recorded span. Any one thread at a time; times are Unix nanoseconds, now where none is given."""

    @property
    def ids(self) -> SpanIds: ...

    @property
    def traceparent(self) -> str:
        """The context for other processes."""

    def child(
        self, name: str, attributes: Attributes | None = None, *, kind: Kind = "internal", at: int | None = None
    ) -> Span: ...

    def set(self, attributes: Attributes) -> None: ...

    def event(self, name: str, attributes: Attributes | None = None, *, at: int | None = None) -> None: ...

    def link(self, traceparent: str | None) -> None:
        """To another span; does nothing without a valid context."""

    def end(self, *, error: str | None = None, at: int | None = None) -> None:
        """`error` is a short code, the `error.type`. Ended spans are exported; further calls do nothing."""


class Tracer:
    """Thread-safe. This one records nothing, at no cost; `tracing_otel` has the one that does."""

    enabled = False

    def begin(
        self,
        name: str,
        parent: str | None,
        attributes: Attributes | None = None,
        *,
        kind: Kind = "internal",
        root: bool = False,
        at: int | None = None,
    ) -> Span | None:
        """A span below `parent`, a traceparent; None if that is not sampled, or there is none and this is no `root`.
        Of roots `trace_sample_ratio` are sampled."""
        return None

    def close(self, timeout_s: float) -> None:
        """Export the ended spans. Blocks for `timeout_s` at most."""


NULL = Tracer()

_current: ContextVar[SpanIds | None] = ContextVar("kvfleet_span", default=None)
current = _current.get  # the span that this task works for; logs show it


def work_for(span: Span | None) -> None:
    """This task, and tasks that it starts from now on, log with this span, or with none."""
    _current.set(None if span is None else span.ids)


@contextlib.contextmanager
def within(span: Span | None) -> Iterator[None]:
    """`work_for` in a block, for callbacks that serve many requests."""
    if span is None:
        yield
        return
    token = _current.set(span.ids)
    try:
        yield
    finally:
        _current.reset(token)


def by_nats(
    operation: str, kind: Literal["send", "process"], model: Value, tenant: Value, request: Value
) -> dict[str, Value]:
    """The attributes of a message about a request."""
    return {
        "messaging.system": "nats",
        "messaging.operation.name": operation,
        "messaging.operation.type": kind,
        "gen_ai.request.model": model,
        "kvfleet.tenant": tenant,
        "kvfleet.request.id": request,
    }


def unix_ns(monotonic_s: float) -> int:
    return time.time_ns() - int((time.monotonic() - monotonic_s) * 1e9)
