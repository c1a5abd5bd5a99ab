"""Adapter: OpenTelemetry's SDK with its OTLP exporter over HTTP. Its standard variables (OTEL_*) apply.

Spans wait in a bounded queue for the exporter's own thread. A collector that is slow, gone or wrong costs spans and one
log line a minute; no caller ever waits for it.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Sequence

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)
from opentelemetry.trace import Span as OtelSpan
from opentelemetry.trace import Tracer as ApiTracer

from kvproto.trace_context import TraceContext, parse
from kvservice.tracing import Attributes, Kind, SpanIds, Tracer

log = logging.getLogger(__name__)

SAY_AGAIN_S = 60.0
MAX_ATTRIBUTE_CHARS = 512
FAILING_CLOSE_S = 0.3
SLOW_S = 0.5
_TRACES_PATH = "/v1/traces"


class OtelTracer(Tracer):
    """`endpoint`: a collector's base URL; None: OTEL_EXPORTER_OTLP_ENDPOINT's. `exporter` replaces the OTLP one."""

    enabled = True

    def __init__(
        self,
        *,
        service: str,
        instance: str,
        endpoint: str | None = None,
        sample_ratio: float = 1.0,
        exporter: SpanExporter | None = None,
    ) -> None:
        _quieten()
        own = {"service.name": service, "service.instance.id": instance}
        said = OTELResourceDetector().detect().attributes
        self._quiet = QuietExporter(exporter or _otlp(endpoint))
        self._provider = TracerProvider(
            sampler=ALWAYS_ON,  # what is not sampled never gets here
            resource=Resource.create({**own, **said}),
            shutdown_on_exit=False,
            span_limits=SpanLimits(max_attribute_length=MAX_ATTRIBUTE_CHARS),
        )
        self._processor = BatchSpanProcessor(self._quiet)
        self._provider.add_span_processor(self._processor)
        self._tracer = self._provider.get_tracer("kvfleet")
        self._ratio = sample_ratio

    def begin(
        self,
        name: str,
        parent: str | None,
        attributes: Attributes | None = None,
        *,
        kind: Kind = "internal",
        root: bool = False,
        at: int | None = None,
    ) -> RecordedSpan | None:
        context = parse(parent)
        if context is None:
            if not root or random.random() >= self._ratio:
                return None
            return RecordedSpan(self._tracer, None, name, attributes, kind, at)
        if not context.sampled:
            return None
        return RecordedSpan(self._tracer, _remote(context), name, attributes, kind, at)

    def close(self, timeout_s: float) -> None:
        self._quiet.closing = True
        if self._quiet.seems_away:  # waiting would not help
            timeout_s = min(timeout_s, FAILING_CLOSE_S)
        # The SDK's own way to end with a limit; its provider's has none, and waits for 30 s.
        self._processor._batch_processor.shutdown(timeout_millis=int(timeout_s * 1000))


class RecordedSpan:
    __slots__ = ("_context", "_span", "_tracer")

    def __init__(
        self,
        tracer: ApiTracer,
        parent: OtelSpan | None,
        name: str,
        attributes: Attributes | None,
        kind: Kind,
        at: int | None,
    ) -> None:
        self._tracer = tracer
        above = None if parent is None else set_span_in_context(parent)
        self._span = tracer.start_span(name, above, kind=SpanKind[kind.upper()], attributes=attributes, start_time=at)
        own = self._span.get_span_context()
        self._context = TraceContext(f"{own.trace_id:032x}", f"{own.span_id:016x}", True)

    @property
    def ids(self) -> SpanIds:
        return SpanIds(self._context.trace_id, self._context.span_id)

    @property
    def traceparent(self) -> str:
        return str(self._context)

    def child(
        self, name: str, attributes: Attributes | None = None, *, kind: Kind = "internal", at: int | None = None
    ) -> RecordedSpan:
        return RecordedSpan(self._tracer, self._span, name, attributes, kind, at)

    def set(self, attributes: Attributes) -> None:
        self._span.set_attributes(attributes)

    def event(self, name: str, attributes: Attributes | None = None, *, at: int | None = None) -> None:
        self._span.add_event(name, attributes, at)

    def link(self, traceparent: str | None) -> None:
        context = parse(traceparent)
        if context is not None:
            self._span.add_link(_remote(context).get_span_context())

    def end(self, *, error: str | None = None, at: int | None = None) -> None:
        if not self._span.is_recording():
            return
        if error is not None:
            self._span.set_attribute("error.type", error)
            self._span.set_status(Status(StatusCode.ERROR))
        self._span.end(at)


class QuietExporter(SpanExporter):
    """Spans that fail to leave are lost, counted, and logged once a minute. Owned by the batch processor's thread."""

    def __init__(self, exporter: SpanExporter) -> None:
        self.closing = False
        self._failing = False  # as of the last batch
        self._busy_since: float | None = None
        self.lost_total = 0
        self._exporter = exporter
        self._lost_before = 0
        self._said_at = -SAY_AGAIN_S

    @property
    def seems_away(self) -> bool:
        """The last batch was lost, or the present one is tried again and again."""
        busy_since = self._busy_since
        return self._failing or (busy_since is not None and time.monotonic() - busy_since > SLOW_S)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self._busy_since = time.monotonic()
        try:
            result = self._exporter.export(spans)
        except Exception as error:  # noqa: BLE001 - whatever it is, it costs these spans and no more
            self._lose(len(spans), type(error).__name__)
            return SpanExportResult.FAILURE
        finally:
            self._busy_since = None
        self._failing = result is not SpanExportResult.SUCCESS
        if self._failing:
            self._lose(len(spans), "the collector did not take them")
        return result

    def _lose(self, count: int, why: str) -> None:
        self.lost_total += count
        self._failing = True
        now = time.monotonic()
        if now - self._said_at >= SAY_AGAIN_S and not self.closing:
            lost, self._lost_before = self.lost_total - self._lost_before, self.lost_total
            self._said_at = now
            log.warning("%d spans are lost: %s", lost, why)

    def shutdown(self) -> None:
        self._exporter.shutdown()


def _otlp(endpoint: str | None) -> OTLPSpanExporter:
    """Adds the path for traces, as the standard variable does, unless the URL has it."""
    if endpoint is None:
        return OTLPSpanExporter()
    base = endpoint.rstrip("/")
    return OTLPSpanExporter(base if base.endswith(_TRACES_PATH) else base + _TRACES_PATH)


def _remote(context: TraceContext) -> NonRecordingSpan:
    return NonRecordingSpan(
        SpanContext(
            int(context.trace_id, 16), int(context.span_id, 16), is_remote=True, trace_flags=TraceFlags(context.sampled)
        )
    )


def _quieten() -> None:
    """OpenTelemetry logs every failed batch, and every span that finds the queue full."""
    for name in ("opentelemetry", "urllib3"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
