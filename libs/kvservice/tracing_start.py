"""Wiring: a process's tracer, and its last export."""

from __future__ import annotations

import logging
import os
from functools import partial

from kvproto.errors import InvalidRequest
from kvservice.lifecycle import Lifecycle, in_daemon_thread
from kvservice.settings import ServiceSettings
from kvservice.tracing import NULL, Tracer

log = logging.getLogger(__name__)

CLOSE_S = 2.0  # for the last spans; later ones are lost


def endpoint_of(settings: ServiceSettings) -> str | None:
    """The collector's base URL, from the settings or OpenTelemetry's variables; None: no tracing."""
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    standard = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    return settings.otlp_endpoint or next((os.environ[name] for name in standard if os.environ.get(name)), None)


def open_tracer(settings: ServiceSettings, role: str, life: Lifecycle) -> Tracer:
    """Closed after everything that is registered later. Raises InvalidRequest for a wrong URL."""
    endpoint = endpoint_of(settings)
    if endpoint is None:
        return NULL
    if not endpoint.startswith(("http://", "https://")):
        raise InvalidRequest("must be an http:// or https:// URL", field="otlp_endpoint")
    from kvservice.tracing_otel import OtelTracer  # the SDK is imported only for an endpoint

    tracer = OtelTracer(
        service=f"kvfleet-{role}",
        instance=settings.member,
        endpoint=settings.otlp_endpoint,
        sample_ratio=settings.trace_sample_ratio,
    )
    # The loop's executor would be waited for at the end.
    life.closing("tracing", partial(in_daemon_thread, partial(tracer.close, CLOSE_S)), CLOSE_S + 0.5)
    log.info("spans go to %s", endpoint.rsplit("@", 1)[-1])
    return tracer
