"""Wiring: how a process with blocks listens on the data plane, how others are told to reach it, and the spans of what
it serves."""

from __future__ import annotations

import logging
import resource
import socket
import ssl
from collections.abc import Callable, Sequence
from pathlib import Path

from pydantic import Field

from kvproto.dataplane.serving import OnTraced, ServingLimits, TracedRequest
from kvproto.errors import InvalidRequest
from kvproto.messages import Tier
from kvservice.lifecycle import Lifecycle
from kvservice.own_folder import make_own_folder, remove_own_folder
from kvservice.settings import ServiceSettings
from kvservice.tls import FollowingContext
from kvservice.tracing import Tracer

log = logging.getLogger(__name__)

OTHER_FILES = 512  # than connections of the data plane
ALL_ADDRESSES = ("", "0.0.0.0", "::")
HANDSHAKE_REFUSALS = (  # a metric's labels from the start; others exist once they happen
    "unknown_key", "no_key", "bad_proof", "identity", "version", "busy", "malformed", "tls", "timeout", "gone",
)  # fmt: skip


class DataPlaneSettings(ServiceSettings):
    """Of workers and vaults."""

    data_plane_host: str = Field("127.0.0.1", description="address to serve blocks on")
    data_plane_port: int = Field(0, ge=0, le=65535, description="its port; 0: any")
    data_plane_advertise: str | None = Field(
        None,
        description="host that others reach it at; default: the address, or this host's name if that is all of them",
    )
    data_plane_connections: int = Field(
        4096, ge=4, le=1_000_000, description="connections served on it; a worker makes three to each vault"
    )
    runtime_dir: Path | None = Field(
        None, description="folder for its Unix socket, this user's alone; default: a temporary one"
    )
    data_plane_cert: Path | None = Field(None, description="certificate: serve TCP by TLS")
    data_plane_key: Path | None = Field(None, description="its key")
    data_plane_ca: Path | None = Field(None, description="CA file: speak TLS to others, who must show a certificate")


def limits_of(settings: DataPlaneSettings) -> ServingLimits:
    """Of its listener. The process gets as many file descriptors as that needs, if the system lets it."""
    wanted = settings.data_plane_connections + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
        if most < wanted:
            log.warning("%d files may be open, %d connections want %d", most, settings.data_plane_connections, wanted)
    return ServingLimits(connections=settings.data_plane_connections)


def server_context(settings: DataPlaneSettings) -> ssl.SSLContext | None:
    """None: TCP without TLS. Raises InvalidRequest, or Unavailable for files that cannot be used."""
    if settings.data_plane_cert is None:
        if settings.data_plane_key is not None or settings.data_plane_ca is not None:
            raise InvalidRequest("needs --data-plane-cert too", field="data_plane_key, data_plane_ca")
        return None

    def build() -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        _load(context, settings)
        if settings.data_plane_ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    return _following(build, settings)


def client_context(settings: DataPlaneSettings) -> ssl.SSLContext | None:
    """For connections to others; their certificates must be of the CA. Raises Unavailable."""
    if settings.data_plane_ca is None:
        return None

    def build() -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False  # who it is, it proves by the data plane's own challenge
        _load(context, settings)
        return context

    return _following(build, settings)


def _load(context: ssl.SSLContext, settings: DataPlaneSettings) -> None:
    if settings.data_plane_cert is not None:
        context.load_cert_chain(settings.data_plane_cert, settings.data_plane_key)
    if settings.data_plane_ca is not None:
        context.load_verify_locations(cafile=settings.data_plane_ca)


def _following(build: Callable[[], ssl.SSLContext], settings: DataPlaneSettings) -> ssl.SSLContext:
    files = (settings.data_plane_cert, settings.data_plane_key, settings.data_plane_ca)
    return FollowingContext.of("the data plane's TLS files", build, files)


def reachable(addresses: Sequence[str], settings: DataPlaneSettings) -> tuple[str, ...]:
    """As others reach them: TCP at the advertised host."""
    host = settings.data_plane_advertise
    if host is None and settings.data_plane_host in ALL_ADDRESSES:
        host = socket.gethostname()
    if host is None:
        return tuple(addresses)
    return tuple(
        f"tcp:{host}:{address.rpartition(':')[2]}" if address.startswith("tcp:") else address for address in addresses
    )


def runtime_folder(settings: DataPlaneSettings, life: Lifecycle) -> Path:
    """For its socket: the one that was set, which stays, or one of its own, which goes."""
    if settings.runtime_dir is not None:
        return settings.runtime_dir
    folder = make_own_folder()

    async def remove() -> None:
        remove_own_folder(folder)

    life.closing("runtime folder", remove)
    return folder


def recorder_of(tracer: Tracer, tier: Tier) -> OnTraced | None:
    """Of a DataPlaneServer: a span for each Get and Has of a traced request, on its connection's thread. None: nothing
    is traced."""
    if not tracer.enabled:
        return None

    def record(request: TracedRequest) -> None:
        span = tracer.begin(
            f"{tier.value} {request.kind}",
            request.traceparent,
            {
                "kvfleet.tier": tier.value,
                "kvfleet.client.id": request.client,
                "kvfleet.blocks": request.blocks,
                "kvfleet.blocks.hit": request.hits,
                "kvfleet.blocks.from_disk": request.from_disk,
                "kvfleet.bytes": request.nbytes,
            },
            kind="server",
            at=request.began_ns,
        )
        if span is not None:
            span.end(error=request.error or None, at=request.ended_ns)

    return record
