"""Tracing as services see it: begin a span, end it, and hand its context on. `tracing_start` opens a process's
tracer, the adapter is `tracing_otel`.

Nothing of OpenTelemetry is imported, and nothing is recorded, without an endpoint: `begin` returns None then, as it
does for what is not sampled, so a caller asks `if span is not None` and nothing else. Roots are begun where requests
enter the fleet (`root=True`: the ingress, a bare producer's request at placement); everybody else goes on with a
sampled context or does nothing.
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
        """For a process that works for this span elsewhere."""

    def child(
        self, name: str, attributes: Attributes | None = None, *, kind: Kind = "internal", at: int | None = None
    ) -> Span: ...

    def set(self, attributes: Attributes) -> None: ...

    def event(self, name: str, attributes: Attributes | None = None, *, at: int | None = None) -> None: ...

    def link(self, traceparent: str | None) -> None:
        """To another span; nothing for what is no context."""

    def end(self, *, error: str | None = None, at: int | None = None) -> None:
        """`error` is a short code, the `error.type`. Ended spans are exported; further calls do nothing."""


class Tracer:
    """One process's. This one records nothing, at no cost; `tracing_otel` has the one that does. Thread-safe."""

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
        """Export what has ended. Blocks, for `timeout_s` at most."""


NULL = Tracer()

# ---------------------------------------------------------------------- the present request, for logs

_current: ContextVar[SpanIds | None] = ContextVar("kvfleet_span", default=None)


def current() -> SpanIds | None:
    """The span that this task works for."""
    return _current.get()


def work_for(span: Span | None) -> None:
    """From here on this task, and tasks that it starts, log as a part of this span, or of none."""
    _current.set(None if span is None else span.ids)


@contextlib.contextmanager
def within(span: Span | None) -> Iterator[None]:
    """The same for a block of a callback that serves many requests."""
    if span is None:
        yield
        return
    token = _current.set(span.ids)
    try:
        yield
    finally:
        _current.reset(token)


def unix_ns(monotonic_s: float) -> int:
    """When something was, by the monotonic clock that loops and engines keep."""
    return time.time_ns() - int((time.monotonic() - monotonic_s) * 1e9)
