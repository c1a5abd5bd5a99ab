"""Wiring: how a process joins the fleet: its NATS connection under a role's name and inbox space, and its record in the
members bucket."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import time

from kvproto import codec
from kvproto.buckets import Bucket
from kvproto.connection import Connection
from kvproto.errors import InvalidRequest, Unavailable
from kvproto.ids import is_token, new_epoch
from kvproto.messages import MemberRecord, Role, State
from kvproto.subjects import Subjects, sealed_prefix
from kvservice.lifecycle import Lifecycle
from kvservice.settings import ServiceSettings
from kvservice.tls import FollowingContext


async def join(
    settings: ServiceSettings, life: Lifecycle, role: str, role_inbox: str, *, fleet_key: str = "", prestart_s: float
) -> tuple[Connection, Subjects, Bucket]:
    """The connection, whose own end is fatal, and the members bucket, which may be created up to `prestart_s` later.
    Raises InvalidRequest for an id that is no subject token, Unavailable."""
    if not is_token(settings.member):
        raise InvalidRequest("must be 1 to 64 of A-Z a-z 0-9 _ -", field="id")
    subjects = Subjects(settings.namespace, settings.region)
    connection = await connect(settings, role=role, role_inbox=role_inbox, fleet_key=fleet_key)
    connection.on_closed = lambda: life.fatal("the NATS connection is closed for good")
    life.closing("connection", connection.close)
    end = time.monotonic() + prestart_s
    while True:
        try:
            return connection, subjects, await Bucket.open(connection, subjects.members_bucket)
        except Unavailable:
            if time.monotonic() > end:
                raise
            await asyncio.sleep(0.25)


async def connect(settings: ServiceSettings, *, role: str, role_inbox: str, fleet_key: str) -> Connection:
    """Connect as `<role>-<id>`, the name under which $SYS reports the connection's end. With a `fleet_key` its inboxes
    are sealed. Raises Unavailable."""
    return await Connection.open(
        settings.nats_servers,
        name=f"{role}-{settings.member}",
        inbox_prefix=sealed_prefix(role_inbox, settings.member, fleet_key.encode()),
        user=settings.nats_user,
        password=settings.nats_password,
        nkey_seed=settings.nats_nkey_seed,
        credentials=settings.nats_credentials,
        tls=tls_context(settings),
    )


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


def member_record(role: Role, member: str, *, address: str = "") -> MemberRecord:
    """A new life of a process that is no worker."""
    return MemberRecord(
        id=member,
        epoch=new_epoch(),
        lease="",
        state=State.READY,
        role=role,
        host=socket.gethostname(),
        pid=os.getpid(),
        versions=codec.supported_versions(),
        address=address,
        started_unix_ms=int(time.time() * 1000),
    )
