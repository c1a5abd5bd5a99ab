"""Metrics and probes of a process, those that all processes have, and the port that shows them.

Counters are plain integers where the work is done; a collector reads them when it is scraped, so they cost the hot path
nothing, and every series exists from the start at 0. The port is open from the start, for orchestrators:

    starting   /livez 200   /readyz 503
    ready      /livez 200   /readyz 200
    stopping   /livez 200   /readyz 503
    stuck      /livez 503: the event loop has not run for `STUCK_S`
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server
from wsgiref.types import StartResponse, WSGIEnvironment

from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvproto.connection import Connection
from kvproto.errors import Unavailable
from kvservice.lifecycle import Lifecycle
from kvservice.settings import ServiceSettings

STUCK_S = 30.0

log = logging.getLogger(__name__)

Reader = Callable[[], float]
LabelledReader = Callable[[], Mapping[tuple[str, ...], float]]
Buckets = Sequence[tuple[str, float]]  # (upper bound, count of values up to it), the last one "+Inf"
HistogramReader = Callable[[], tuple[Buckets, float]]  # and their sum
LabelledHistogramReader = Callable[[], Mapping[tuple[str, ...], tuple[Buckets, float]]]


@dataclass(frozen=True, slots=True)
class Reading:
    """One metric read from live state: a histogram by `read_histogram` or `read_histograms`, else a counter if its name
    ends in `_total`, else a gauge."""

    name: str
    help: str
    read: Reader | None = None
    labels: tuple[str, ...] = ()
    read_labelled: LabelledReader | None = None
    read_histogram: HistogramReader | None = None
    read_histograms: LabelledHistogramReader | None = None


class LiveCollector(Collector):
    def __init__(self, readings: Iterable[Reading]) -> None:
        self._readings = tuple(readings)

    def collect(self) -> Iterator[Metric]:
        for reading in self._readings:
            family = _family(reading)
            if reading.read is not None:
                family.add_metric([], float(reading.read()))
            if reading.read_labelled is not None:
                for labels, value in reading.read_labelled().items():
                    family.add_metric(list(labels), float(value))
            if reading.read_histogram is not None:
                family.add_metric([], *reading.read_histogram())
            if reading.read_histograms is not None:
                for labels, histogram in reading.read_histograms().items():
                    family.add_metric(list(labels), *histogram)
            yield family

    def describe(self) -> Iterator[Metric]:
        """Names and labels alone, so that registering reads nothing."""
        return map(_family, self._readings)


def _family(reading: Reading) -> Any:
    if reading.read_histogram is not None or reading.read_histograms is not None:
        return HistogramMetricFamily(reading.name, reading.help, labels=reading.labels)
    kind = CounterMetricFamily if reading.name.endswith("_total") else GaugeMetricFamily
    return kind(reading.name.removesuffix("_total"), reading.help, labels=reading.labels)


def common_readings(role: str, connection: Connection, certificates: Mapping[str, str | Path | None]) -> list[Reading]:
    """`certificates`: PEM files by their use."""
    there = {use: Path(path) for use, path in certificates.items() if path is not None}
    return [
        Reading(
            "kvfleet_build_info",
            "1; its labels say what runs",
            labels=("version", "role"),
            read_labelled=lambda: {(build_version(), role): 1.0},
        ),
        Reading(
            "kvfleet_nats_connections",
            "connections to NATS that stand: 1, or 0 in an outage",
            lambda: connection.is_connected,
        ),
        Reading("kvfleet_nats_reconnects_total", "reconnects to NATS", lambda: connection.reconnects_total),
        Reading("kvfleet_nats_errors_total", "errors of NATS or its client", lambda: connection.errors_total),
        Reading(
            "kvfleet_certificate_expiry_seconds",
            "when this process's own certificate ends, in Unix time",
            labels=("certificate",),
            read_labelled=lambda: {(use,): end for use, path in there.items() if (end := _ends_at(path)) is not None},
        ),
    ]


@cache
def build_version() -> str:
    try:
        return version("kvfleet")
    except PackageNotFoundError:  # run from a checkout that was never installed
        return "unknown"


def _ends_at(path: Path) -> float | None:
    """Read at each scrape, as certificates are renewed while a process runs."""
    from cryptography import x509  # only a process with certificates loads it

    try:
        return x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc.timestamp()
    except (OSError, ValueError) as error:
        log.debug("certificate %s cannot be read: %s", path, error)
        return None


class _Server(ThreadingMixIn, WSGIServer):
    """A thread per connection, so that a silent one does not block probes."""

    daemon_threads = True
    block_on_close = False


class _Quiet(WSGIRequestHandler):
    timeout = 5  # seconds for a request to arrive

    def log_message(self, format: str, *args: object) -> None:
        pass


class MetricsServer:
    """`/metrics`, `/livez` and `/readyz`, served by daemon threads."""

    def __init__(
        self,
        registry: CollectorRegistry,
        host: str,
        port: int,
        is_ready: Callable[[], bool],
        is_alive: Callable[[], bool] = lambda: True,
    ) -> None:
        metrics = make_wsgi_app(registry)

        def app(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
            path = environ.get("PATH_INFO", "")
            if path == "/metrics":
                body: Iterable[bytes] = metrics(environ, start_response)
                return body
            if path not in ("/livez", "/readyz"):
                start_response("404 Not Found", [("Content-Type", "text/plain")])
                return [b"not found\n"]
            good = is_alive() if path == "/livez" else is_ready()
            start_response("200 OK" if good else "503 Service Unavailable", [("Content-Type", "text/plain")])
            return [b"ok\n" if good else b"no\n"]

        try:
            self._server: WSGIServer = make_server(host, port, app, server_class=_Server, handler_class=_Quiet)
        except OSError as error:
            raise Unavailable(f"cannot listen on {host}:{port} for metrics: {error.strerror}") from None
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self._server.shutdown)
        self._server.server_close()


class Probes:
    """Owned by the process's main coroutine. Without a metrics port it does nothing."""

    def __init__(self, settings: ServiceSettings, life: Lifecycle) -> None:
        """Raises Unavailable for a port that is taken."""
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._ready = False
        self.port = open_port(settings, life, self._registry, lambda: self._ready)

    def ready(self, readings: Iterable[Reading], others: Iterable[Collector] = ()) -> None:
        """From now on requests are served, and these are shown."""
        for collector in (LiveCollector(readings), *others):
            self._registry.register(collector)
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
