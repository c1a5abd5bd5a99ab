"""Wiring: the ingress's metrics and probes on a port of their own (`--metrics-port`), beside the public one.

It is open from the start, and not ready until a request would be served. Its server has threads of its own; what the
event loop owns is read on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from kvfleet.ingress.ingress import Ingress
from kvfleet.ingress.settings import IngressSettings
from kvservice.lifecycle import Lifecycle
from kvservice.metrics import MetricsServer
from kvservice.probes import STUCK_S

READ_S = 3.0
log = logging.getLogger(__name__)
T = TypeVar("T")


class IngressProbes(Collector):
    """Owned by the process's main coroutine. Without a metrics port it does nothing. As a collector it has the event
    loop collect the ingress's own registry."""

    def __init__(self, settings: IngressSettings, life: Lifecycle) -> None:
        """Raises Unavailable for a port that is taken."""
        self._registry = CollectorRegistry()
        self._life = life
        self._loop = asyncio.get_running_loop()
        self._ingress: Ingress | None = None
        if settings.metrics_port is None:
            return
        server = MetricsServer(
            self._registry, settings.host, settings.metrics_port, self._is_ready, lambda: life.idle_s < STUCK_S
        )
        life.closing("metrics", server.close)
        log.info("metrics on http://%s:%d/metrics", settings.host, server.port)

    def serving(self, ingress: Ingress) -> None:
        """From now on requests may be served, and its metrics are shown."""
        self._ingress = ingress
        self._registry.register(self)

    def collect(self) -> Iterable[Metric]:
        assert self._ingress is not None
        registry = self._ingress.metrics.registry
        return self._read(lambda: list(registry.collect()))

    def describe(self) -> Iterable[Metric]:
        return ()  # registering must not ask the event loop, which it runs on

    def _is_ready(self) -> bool:
        ingress = self._ingress if not self._life.stopping.is_set() else None
        try:
            return ingress is not None and not self._read(ingress.routes.missing)
        except TimeoutError:
            return False

    def _read(self, question: Callable[[], T]) -> T:
        """Have the event loop answer. Raises TimeoutError."""

        async def ask() -> T:
            return question()

        return asyncio.run_coroutine_threadsafe(ask(), self._loop).result(READ_S)
