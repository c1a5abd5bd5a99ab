"""Wiring of an ingress process: settings, NATS, client, lease, uvicorn."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys

import uvicorn
from prometheus_client import CollectorRegistry

from kvfleet.ingress.app import create_app, for_browsers
from kvfleet.ingress.auth.access import Access
from kvfleet.ingress.config import IngressConfig, RunLimits, SessionLimits, WebRules
from kvfleet.ingress.ingress import Ingress
from kvfleet.ingress.probes import IngressProbes
from kvfleet.ingress.settings import IngressSettings
from kvproto.buckets import Bucket
from kvproto.client import Client
from kvproto.errors import Draining, InvalidRequest, Unavailable
from kvproto.members import Lease
from kvproto.messages import Role
from kvproto.subjects import INGRESS_INBOX, Subjects
from kvservice import lifecycle, logs
from kvservice.membership import member_record, open_bucket
from kvservice.nats_connection import connect
from kvservice.process_metrics import common_readings
from kvservice.settings import load
from kvservice.tracing_start import open_tracer

log = logging.getLogger(__name__)

SETTLE_S = 3.0


def config_of(settings: IngressSettings, member: str) -> IngressConfig:
    return IngressConfig(
        id=member,
        max_body_bytes=settings.max_body_bytes,
        body_timeout_s=settings.body_timeout_s,
        max_concurrent=settings.max_streams,
        default_max_tokens=settings.default_max_tokens,
        request_deadline_s=settings.request_deadline_s,
        max_wait_s=settings.max_wait_s,
        splice_bytes=settings.splice_memory_bytes,
        fleet_key=settings.fleet_key.encode(),
        slo_ttft_s=settings.slo_ttft_s,
        slo_itl_s=settings.slo_itl_s,
        sessions=SessionLimits(
            idle_expiry_s=settings.session_ttl_s,
            per_tenant=settings.max_sessions_per_tenant,
            max_tokens=settings.max_session_tokens,
        ),
        runs=RunLimits(
            settings.resume_grace_s,
            settings.replay_s,
            settings.resume_memory_bytes,
            running_bytes=settings.stream_memory_bytes,
        ),
        web=WebRules(
            own_hosts=(settings.host, socket.gethostname()),
            allowed_hosts=listed(settings.allowed_hosts) if settings.allowed_hosts is not None else None,
            cors_origins=listed(settings.cors_origins),
        ),
    )


def listed(text: str) -> tuple[str, ...]:
    return tuple(one.strip() for one in text.split(",") if one.strip())


class _Server(uvicorn.Server):
    """Signals belong to the lifecycle."""

    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]
        yield


def _socket(settings: IngressSettings, config: uvicorn.Config) -> socket.socket:
    """Its own, or one that it inherited: who holds that too keeps clients waiting, not refused, until the next life."""
    if settings.listen_fd is None:
        try:
            return config.bind_socket()
        except SystemExit:
            raise Unavailable(f"cannot listen on {settings.host}:{settings.port}") from None
    try:
        return socket.socket(fileno=settings.listen_fd)
    except OSError as error:
        raise InvalidRequest(f"{settings.listen_fd} is no socket: {error.strerror}", field="listen_fd") from None


async def _listen(settings: IngressSettings, ingress: Ingress, access: Access, life: lifecycle.Lifecycle) -> None:
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
        ingress.unready = True
        await asyncio.sleep(settings.unready_s)
        if not await ingress.drain(settings.drain_s):
            ingress.end_streams(
                Draining("this ingress is shutting down: send the request again, with Last-Event-ID to go on from here")
            )
            await ingress.drain(1.0)
        server.should_exit = True
        await asyncio.wait([serving])

    life.closing("http", close, settings.unready_s + settings.drain_s + 3.0)
    log.info("listening on %s://%s:%d", "https" if config.is_ssl else "http", *sockets[0].getsockname()[:2])


async def _settle(ingress: Ingress) -> None:
    """Clients wait on an inherited socket: they need not see an ingress that has not heard of its workers yet."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(SETTLE_S):
            while ingress.routes.missing():
                await asyncio.sleep(0.01)


async def serve(settings: IngressSettings, life: lifecycle.Lifecycle) -> None:
    tracer = open_tracer(settings, "ingress", life)
    access = Access(settings, asyncio.get_running_loop().time)
    access.start(life)
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, access.reload_now)
    probes = IngressProbes(settings, life)
    member = settings.member
    subjects = Subjects(settings.namespace, settings.region)
    record = member_record(Role.INGRESS, member, address=f"{settings.host}:{settings.port}")
    connection = await connect(
        settings,
        role="ingress",
        role_inbox=INGRESS_INBOX,
        member=member,
        fleet_key=settings.fleet_key,
        on_closed=lambda: life.fatal("the NATS connection is closed for good"),
    )
    life.closing("connection", connection.close)
    bucket = await open_bucket(connection, subjects.members_bucket, settings.prestart_s)
    client = await Client.over(connection, subjects)
    life.closing("client", client.close)
    ingress = Ingress(
        client,
        config_of(settings, member),
        await Bucket.open(connection, subjects.sessions_bucket),
        access.tenancy,
        CollectorRegistry(),
        access.audit,
        access.readings(),
        tracer,
    )
    await ingress.start()
    certificates = {"nats": settings.nats_cert, "https": settings.tls_cert}
    ingress.metrics.show_common(common_readings("ingress", connection, certificates))
    life.closing("ingress", ingress.close)
    lease = Lease(bucket, record)
    await lease.renew()  # first: others take the turns of an ingress that is no member as free
    life.closing("lease", lease.release)
    life.spawn(lease.run(lambda error: life.fatal(str(error))), "lease")
    if settings.listen_fd is not None:
        await _settle(ingress)
    await _listen(settings, ingress, access, life)
    probes.serving(ingress)


def main(argv: list[str] | None = None) -> None:
    settings = load(IngressSettings, sys.argv[1:] if argv is None else argv, "kvfleet ingress")
    logs.set_up(f"ingress-{settings.member}", settings)
    lifecycle.run("kvfleet ingress", lambda life: serve(settings, life), parent_pid=settings.parent_pid)


if __name__ == "__main__":
    main()
