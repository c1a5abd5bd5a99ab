"""An OpenTelemetry collector as far as senders see one: POST /v1/traces with protobuf, decoded and kept."""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from tests.support.waiting import LIMIT_S

KINDS = {1: "internal", 2: "server", 3: "client", 4: "producer", 5: "consumer"}
ERROR = 2


@dataclass(frozen=True)
class SeenSpan:
    """One exported span, in plain values."""

    name: str
    service: str
    instance: str
    trace: str
    id: str
    parent: str
    kind: str
    began: int
    ended: int
    attributes: dict[str, Any]
    events: dict[str, dict[str, Any]]
    links: tuple[str, ...]  # ids of spans
    failed: bool
    resource: dict[str, Any] = field(default_factory=dict)


class Collector:
    """Listens until `close`. `status` is what it answers."""

    def __init__(self) -> None:
        self.spans: list[SeenSpan] = []
        self.requests = 0
        self.status = 200
        self._changed = threading.Condition()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                status = collector.status if self.path == "/v1/traces" else 404
                if status == 200:
                    collector._take(ExportTraceServiceRequest.FromString(body))
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(status)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _take(self, request: ExportTraceServiceRequest) -> None:
        found = []
        for of_resource in request.resource_spans:
            resource = _values(of_resource.resource.attributes)
            for of_scope in of_resource.scope_spans:
                found += [_seen(span, resource) for span in of_scope.spans]
        with self._changed:
            self.requests += 1
            self.spans += found
            self._changed.notify_all()

    def wait(self, enough: Callable[[list[SeenSpan]], bool]) -> list[SeenSpan]:
        """All spans, once there are enough of them."""
        end = time.monotonic() + LIMIT_S
        with self._changed:
            while not enough(self.spans):
                left = end - time.monotonic()
                if left <= 0:
                    raise AssertionError("spans that came:\n" + "\n".join(map(str, self.spans)))
                self._changed.wait(left)
            return list(self.spans)

    def trace(self, trace: str, *names: str) -> dict[str, list[SeenSpan]]:
        """One trace's spans by name, in the order of their beginnings, once each of these names is there (as often as
        it is named)."""

        def of_trace(spans: list[SeenSpan]) -> list[SeenSpan]:
            return [span for span in spans if span.trace == trace]

        def enough(spans: list[SeenSpan]) -> bool:
            here = [span.name for span in of_trace(spans)]
            return all(here.count(name) >= names.count(name) for name in names)

        by_name: dict[str, list[SeenSpan]] = {}
        for span in sorted(of_trace(self.wait(enough)), key=lambda span: span.began):
            by_name.setdefault(span.name, []).append(span)
        return by_name


def _seen(span: Any, resource: dict[str, Any]) -> SeenSpan:
    return SeenSpan(
        span.name,
        resource["service.name"],
        resource["service.instance.id"],
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        KINDS[span.kind],
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        _values(span.attributes),
        {event.name: _values(event.attributes) for event in span.events},
        tuple(link.span_id.hex() for link in span.links),
        span.status.code == ERROR,
        resource,
    )


def _values(attributes: Any) -> dict[str, Any]:
    return {one.key: _value(one.value) for one in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, kind)
