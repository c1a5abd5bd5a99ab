"""An exporter that keeps spans in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult


class Kept(SpanExporter):
    """`before` is called on the exporter's thread, with each batch."""

    def __init__(self, before: Callable[[], None] = lambda: None) -> None:
        self.spans: list[ReadableSpan] = []
        self._before = before

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self._before()
        self.spans += spans
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        pass
