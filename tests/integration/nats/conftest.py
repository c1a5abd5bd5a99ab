"""A server under the configuration of deploy/nats, with one further tenant, and a connection per role."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import pytest_asyncio
from kvproto.connection import Connection
from kvproto.subjects import (
    ADMIN_INBOX,
    INGRESS_INBOX,
    PLACEMENT_INBOX,
    PRODUCER_INBOX,
    WORKER_INBOX,
    inbox_prefix,
)
from kvproto.testing.fixtures import ConfiguredNats
from kvproto.testing.nats_server import NatsServer

DEPLOY = Path(__file__).parents[3] / "deploy" / "nats"

INBOXES = {
    "admin": ADMIN_INBOX,
    "ingress": INGRESS_INBOX,
    "placement": PLACEMENT_INBOX,
    "worker": WORKER_INBOX,
    "producer-public": f"{PRODUCER_INBOX}.public",
    "producer-acme": f"{PRODUCER_INBOX}.acme",
    "sys": PLACEMENT_INBOX,
}

ConnectAs = Callable[[str], Awaitable[Connection]]


def password(user: str) -> str:
    """Unlike the development ones, so that a password written into the configuration would be noticed."""
    return f"secret-of-{user}"


def passwords() -> dict[str, str]:
    """The environment of the server: one variable per user."""
    return {f"KVF_{user.upper().replace('-', '_')}_PASSWORD": password(user) for user in INBOXES}


def copy_with_tenant(folder: Path, tenant: str) -> Path:
    """The configuration with one more producer, added exactly as its README says; returns the main file."""
    shutil.copytree(DEPLOY, folder)
    template = (folder / "roles" / "producer.conf.template").read_text()
    role = template.replace("TENANT_PASSWORD", f"KVF_PRODUCER_{tenant.upper()}_PASSWORD").replace("TENANT", tenant)
    (folder / "roles" / f"producer-{tenant}.conf").write_text(role)
    accounts = (folder / "accounts.conf").read_text()
    accounts = accounts.replace(
        "include ./roles/sys.conf", f"include ./roles/producer-{tenant}.conf\ninclude ./roles/sys.conf"
    ).replace("$producer_public ]", f"$producer_public, $producer_{tenant} ]")
    (folder / "accounts.conf").write_text(accounts)
    return folder / "nats-server.conf"


@pytest.fixture(scope="session")
def roles_server(nats_with_config: ConfiguredNats, tmp_path_factory: pytest.TempPathFactory) -> NatsServer:
    config = copy_with_tenant(tmp_path_factory.mktemp("roles") / "nats", "acme")
    return nats_with_config(config, passwords())


@pytest_asyncio.fixture
async def connect_as(roles_server: NatsServer) -> AsyncIterator[ConnectAs]:
    """`await connect_as(user)`: a Connection as the services make it, closed after the test."""
    async with AsyncExitStack() as closing:
        opened = 0

        async def connect(user: str) -> Connection:
            nonlocal opened
            opened += 1
            connection = await Connection.open(
                roles_server.url,
                name=f"{user}-{opened}",
                inbox_prefix=inbox_prefix(INBOXES[user], f"t{opened}"),
                user=user,
                password=password(user),
            )
            closing.push_async_callback(connection.close)
            return connection

        yield connect
