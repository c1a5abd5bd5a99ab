"""Wiring: whether this process traces, where to, and how its last spans leave."""

from __future__ import annotations

import asyncio
import logging
import os
import threading

from kvproto.errors import InvalidRequest
from kvservice.lifecycle import Lifecycle
from kvservice.settings import ServiceSettings
from kvservice.tracing import NULL, Tracer

log = logging.getLogger(__name__)

CLOSE_S = 2.0  # for the last spans to leave; what is not out by then is lost


def endpoint_of(settings: ServiceSettings) -> str | None:
    """The collector's base URL: of ours, else OpenTelemetry's own variables, which its exporter reads; None: no
    tracing."""
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    standard = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    return settings.otlp_endpoint or next((os.environ[name] for name in standard if os.environ.get(name)), None)


def open_tracer(settings: ServiceSettings, role: str, life: Lifecycle) -> Tracer:
    """This process's, closed last of all that is registered after it. Raises InvalidRequest for what is no URL."""
    endpoint = endpoint_of(settings)
    if endpoint is None:
        return NULL
    if not endpoint.startswith(("http://", "https://")):
        raise InvalidRequest("must be an http:// or https:// URL", field="otlp_endpoint")
    from kvservice.tracing_otel import OtelTracer  # the SDK is imported where there is something to export to

    tracer = OtelTracer(
        service=f"kvfleet-{role}",
        instance=settings.member,
        endpoint=settings.otlp_endpoint,
        sample_ratio=settings.trace_sample_ratio,
    )

    async def close() -> None:
        closing = threading.Thread(target=tracer.close, args=(CLOSE_S,), name="tracing-close", daemon=True)
        closing.start()
        while closing.is_alive():  # a thread of our own: the loop's executor would be waited for at the end
            await asyncio.sleep(0.01)

    life.closing("tracing", close, CLOSE_S + 0.5)
    log.info("spans go to %s", endpoint.rsplit("@", 1)[-1])
    return tracer
