"""Wiring: the port for metrics and probes of a process that serves no HTTP otherwise.

It is open from the start, so that an orchestrator sees a process that loads a model as alive and not yet ready:

    starting   /livez 200   /readyz 503
    ready      /livez 200   /readyz 200
    stopping   /livez 200   /readyz 503
    stuck      /livez 503: the event loop has not run for `STUCK_S`
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, ProcessCollector

from kvservice.lifecycle import Lifecycle
from kvservice.metrics import LiveCollector, MetricsServer, Reading
from kvservice.settings import ServiceSettings

STUCK_S = 30.0

log = logging.getLogger(__name__)


class Probes:
    """Owned by the process's main coroutine. Without a metrics port it does nothing."""

    def __init__(self, settings: ServiceSettings, life: Lifecycle) -> None:
        """Raises Unavailable for a port that is taken."""
        registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self._registry = registry
        self._ready = False
        self.port = open_port(settings, life, registry, lambda: self._ready)

    def ready(self, readings: Iterable[Reading]) -> None:
        """From now on requests are served, and these are shown."""
        self._registry.register(LiveCollector(readings))
        self._ready = True


def open_port(
    settings: ServiceSettings, life: Lifecycle, registry: CollectorRegistry, is_ready: Callable[[], bool]
) -> int | None:
    """The metrics port, if one is set; `is_ready` runs on its threads. Raises Unavailable for a port that is taken."""
    if settings.metrics_port is None:
        return None
    server = MetricsServer(
        registry,
        settings.host,
        settings.metrics_port,
        is_ready=lambda: not life.stopping.is_set() and is_ready(),
        is_alive=lambda: life.idle_s < STUCK_S,
    )
    life.closing("metrics", server.close)
    log.info("metrics on http://%s:%d/metrics", settings.host, server.port)
    return server.port
