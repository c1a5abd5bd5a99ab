"""Wiring: a process's data plane: its settings, limits, TLS, addresses and spans."""

from __future__ import annotations

import logging
import resource
import socket
import ssl
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from kvproto.dataplane.serving import OnTraced, ServingLimits, TracedRequest
from kvproto.errors import InvalidRequest
from kvproto.messages import Tier
from kvservice.lifecycle import Lifecycle
from kvservice.private_files import make_own_folder, remove_own_folder
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
    """Settings of workers and vaults."""

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
    """Limits of the listener. Raises the process's limit of open files to match, as far as the system lets it."""
    wanted = settings.data_plane_connections + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
        if most < wanted:
            log.warning("%d files may be open, %d connections want %d", most, settings.data_plane_connections, wanted)
    return ServingLimits(connections=settings.data_plane_connections)


def server_context(settings: DataPlaneSettings) -> ssl.SSLContext | None:
    """None: TCP without TLS. Raises InvalidRequest, Unavailable for unusable files."""
    if settings.data_plane_cert is None:
        if settings.data_plane_key is not None or settings.data_plane_ca is not None:
            raise InvalidRequest("needs --data-plane-cert too", field="data_plane_key, data_plane_ca")
        return None

    return _context(settings, ssl.PROTOCOL_TLS_SERVER)


def client_context(settings: DataPlaneSettings) -> ssl.SSLContext | None:
    """For connections to others; their certificates must be of the CA. Raises Unavailable."""
    return None if settings.data_plane_ca is None else _context(settings, ssl.PROTOCOL_TLS_CLIENT)


def _context(settings: DataPlaneSettings, protocol: int) -> ssl.SSLContext:
    def build() -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.check_hostname = False  # the data plane's own challenge proves the identity
        if settings.data_plane_cert is not None:
            context.load_cert_chain(settings.data_plane_cert, settings.data_plane_key)
        if settings.data_plane_ca is not None:
            context.load_verify_locations(cafile=settings.data_plane_ca)
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    files = (settings.data_plane_cert, settings.data_plane_key, settings.data_plane_ca)
    return FollowingContext.of("the data plane's TLS files", build, files)


def reachable(addresses: Sequence[str], settings: DataPlaneSettings) -> tuple[str, ...]:
    """The addresses for others: TCP at the advertised host."""
    host = settings.data_plane_advertise
    if host is None and settings.data_plane_host in ALL_ADDRESSES:
        host = socket.gethostname()
    if host is None:
        return tuple(addresses)
    return tuple(
        f"tcp:{host}:{address.rpartition(':')[2]}" if address.startswith("tcp:") else address for address in addresses
    )


def runtime_folder(settings: DataPlaneSettings, life: Lifecycle) -> Path:
    """For the Unix socket: the one of the settings, or a temporary one."""
    if settings.runtime_dir is not None:
        return settings.runtime_dir
    folder = make_own_folder()

    async def remove() -> None:
        remove_own_folder(folder)

    life.closing("runtime folder", remove)
    return folder


def recorder_of(tracer: Tracer, tier: Tier) -> OnTraced | None:
    """Records a span for each Get and Has of a traced request, on its connection's thread."""
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
