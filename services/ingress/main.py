"""Wiring of an ingress process: settings, NATS, client, lease, uvicorn, and a port for metrics and probes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Iterable
from typing import TypeVar

import uvicorn
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from kvfleet.ingress.app import create_app, for_browsers
from kvfleet.ingress.auth.access import Access
from kvfleet.ingress.ingress import Ingress, IngressBuckets
from kvfleet.ingress.settings import IngressSettings, config_of, listed
from kvproto.client import Client
from kvproto.errors import Draining, InvalidRequest, Unavailable
from kvproto.members import Lease
from kvproto.messages import Role
from kvproto.subjects import INGRESS_INBOX
from kvservice import lifecycle
from kvservice.lifecycle import Lifecycle
from kvservice.membership import join, member_record
from kvservice.metrics import LiveCollector, common_readings, open_port
from kvservice.tracing_start import open_tracer

log = logging.getLogger(__name__)

SETTLE_S = 3.0
READ_S = 3.0
T = TypeVar("T")


class _Server(uvicorn.Server):
    """Signals belong to the lifecycle."""

    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]
        yield


def _socket(settings: IngressSettings, config: uvicorn.Config) -> socket.socket:
    """Its own, or an inherited one: its other holder keeps clients waiting, not refused, between two processes."""
    if settings.listen_fd is None:
        try:
            return config.bind_socket()
        except SystemExit:
            raise Unavailable(f"cannot listen on {settings.host}:{settings.port}") from None
    try:
        return socket.socket(fileno=settings.listen_fd)
    except OSError as error:
        raise InvalidRequest(f"{settings.listen_fd} is no socket: {error.strerror}", field="listen_fd") from None


async def _listen(settings: IngressSettings, ingress: Ingress, access: Access, life: Lifecycle) -> None:
    config = uvicorn.Config(
        for_browsers(create_app(ingress), listed(settings.cors_origins)),
        host=settings.host,
        port=settings.port,
        http="httptools",
        loop="none",
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=1,
        timeout_keep_alive=settings.keep_alive_s,
        backlog=2048,
        proxy_headers=settings.trusted_proxies is not None,
        forwarded_allow_ips=settings.trusted_proxies or "",
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
    )
    config.load()
    if config.ssl is not None:
        access.serve_tls(config.ssl, life)
    server = _Server(config)
    sockets = [_socket(settings, config)]
    serving = life.spawn(server.serve(sockets), "http")

    async def close() -> None:
        ingress.routes.unready = True
        await asyncio.sleep(settings.unready_s)
        if not await ingress.drain(settings.drain_s):
            ingress.client.fail_streams(
                Draining("this ingress is shutting down: send the request again, with Last-Event-ID to go on from here")
            )
            await ingress.drain(1.0)
        server.should_exit = True
        await asyncio.wait([serving])

    life.closing("http", close, settings.unready_s + settings.drain_s + 3.0)
    log.info("listening on %s://%s:%d", "https" if config.is_ssl else "http", *sockets[0].getsockname()[:2])


async def _settle(ingress: Ingress) -> None:
    """Wait for the first workers: clients wait on an inherited socket meanwhile."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(SETTLE_S):
            while ingress.routes.missing():
                await asyncio.sleep(0.01)


class IngressProbes(Collector):
    """Metrics and probes on `--metrics-port`, if there is one. Owned by the process's main coroutine.

    The port is open from the start, and ready once a request would be served. Its server has threads of its own, which
    read in the event loop what that owns.
    """

    def __init__(self, settings: IngressSettings, life: Lifecycle) -> None:
        """Raises Unavailable for a port that is taken."""
        self._registry = CollectorRegistry()
        self._loop = asyncio.get_running_loop()
        self._ingress: Ingress | None = None
        open_port(settings, life, self._registry, self._is_ready)

    def serving(self, ingress: Ingress) -> None:
        """Requests may be served from now on."""
        self._ingress = ingress
        self._registry.register(self)

    def collect(self) -> Iterable[Metric]:
        assert self._ingress is not None
        registry = self._ingress.metrics.registry
        return self._read(lambda: list(registry.collect()))

    def describe(self) -> Iterable[Metric]:
        return ()  # registering runs in the event loop, which `collect` waits for

    def _is_ready(self) -> bool:
        ingress = self._ingress
        try:
            return ingress is not None and not self._read(ingress.routes.missing)
        except TimeoutError:
            return False

    def _read(self, question: Callable[[], T]) -> T:
        """Called in the event loop. Raises TimeoutError."""

        async def ask() -> T:
            return question()

        return asyncio.run_coroutine_threadsafe(ask(), self._loop).result(READ_S)


async def serve(settings: IngressSettings, life: Lifecycle) -> None:
    tracer = open_tracer(settings, "ingress", life)
    access = Access(settings, asyncio.get_running_loop().time)
    access.start(life)
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, access.reload_now)
    probes = IngressProbes(settings, life)
    member = settings.member
    record = member_record(Role.INGRESS, member, address=f"{settings.host}:{settings.port}")
    connection, subjects, bucket = await join(
        settings, life, "ingress", INGRESS_INBOX, fleet_key=settings.fleet_key, prestart_s=settings.prestart_s
    )
    client = await Client.over(connection, subjects)
    life.closing("client", client.close)
    ingress = Ingress(
        client,
        config_of(settings, member),
        await IngressBuckets.open(connection, subjects),
        access.tenancy,
        CollectorRegistry(),
        access.audit,
        access.readings(),
        tracer,
    )
    await ingress.start()
    certificates = {"nats": settings.nats_cert, "https": settings.tls_cert}
    ingress.metrics.registry.register(LiveCollector(common_readings("ingress", connection, certificates)))
    life.closing("ingress", ingress.close)
    lease = Lease(bucket, record)
    await lease.take()  # first: others take the turns of an ingress that is no member as free
    life.closing("lease", lease.release)
    life.spawn(lease.run(lambda error: life.fatal(str(error))), "lease")
    if settings.listen_fd is not None:
        await _settle(ingress)
    await _listen(settings, ingress, access, life)
    probes.serving(ingress)


def main() -> None:
    lifecycle.run_service("ingress", IngressSettings, serve)


if __name__ == "__main__":
    main()
