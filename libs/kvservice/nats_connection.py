"""Wiring: settings to a `kvproto.connection.Connection` under a role's name and inbox space."""

from __future__ import annotations

import ssl
from collections.abc import Callable

from kvproto.connection import Connection
from kvproto.errors import InvalidRequest
from kvproto.subjects import sealed_prefix
from kvservice.settings import ServiceSettings
from kvservice.tls import FollowingContext


def tls_context(settings: ServiceSettings) -> ssl.SSLContext | None:
    """TLS when a CA is set, mutual when a client certificate is too. Raises InvalidRequest or Unavailable."""
    if settings.nats_ca is None:
        if settings.nats_cert is not None or settings.nats_key is not None:
            raise InvalidRequest("needs --nats-ca too", field="nats_cert, nats_key")
        return None

    def build() -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=settings.nats_ca)
        if settings.nats_cert is not None:
            context.load_cert_chain(settings.nats_cert, settings.nats_key)
        return context

    files = (settings.nats_ca, settings.nats_cert, settings.nats_key)
    return FollowingContext.of("the TLS files for NATS", build, files)


async def connect(
    settings: ServiceSettings,
    *,
    role: str,
    role_inbox: str,
    member: str,
    fleet_key: str = "",
    on_closed: Callable[[], None] | None = None,
) -> Connection:
    """Connect as `<role>-<id>`: the name under which $SYS reports the connection's end. With the `fleet_key` its
    inboxes are sealed. Raises Unavailable."""
    connection = await Connection.open(
        settings.nats_servers,
        name=f"{role}-{member}",
        inbox_prefix=sealed_prefix(role_inbox, member, fleet_key.encode()),
        user=settings.nats_user,
        password=settings.nats_password,
        nkey_seed=settings.nats_nkey_seed,
        credentials=settings.nats_credentials,
        tls=tls_context(settings),
    )
    connection.on_closed = on_closed
    return connection
