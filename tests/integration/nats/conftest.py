"""A server under the configuration of deploy/nats, with one further tenant, and a connection per role."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from kvproto.connection import Connection
from kvproto.subjects import (
    ADMIN_INBOX,
    INGRESS_INBOX,
    PLACEMENT_INBOX,
    PRODUCER_INBOX,
    VAULT_INBOX,
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
    "vault": VAULT_INBOX,
    "producer-public": f"{PRODUCER_INBOX}.public",
    "producer-acme": f"{PRODUCER_INBOX}.acme",
    "sys": PLACEMENT_INBOX,
}

USERS = tuple(INBOXES)
ConnectAs = Callable[[str], Awaitable[Connection]]


@dataclass(frozen=True, slots=True)
class Roles:
    """A running server and how to come in as each of its users."""

    server: NatsServer
    inboxes: dict[str, str]  # user -> inbox space

    @property
    def url(self) -> str:
        return self.server.url

    def password(self, user: str) -> str:
        """Unlike the development ones, so that a password written into the configuration would be noticed."""
        return f"secret-of-{user}"

    async def connect(self, user: str, process: str) -> Connection:
        """A connection as the services make it."""
        return await Connection.open(
            self.url,
            name=f"{user}-{process}",
            inbox_prefix=inbox_prefix(self.inboxes[user], process),
            user=user,
            password=self.password(user),
        )


def passwords() -> dict[str, str]:
    """The environment of the server: one variable per user."""
    variables = {}
    for user in USERS:
        role, _, tenant = user.partition("-")
        variables["_".join(filter(None, ("KVF", role.upper(), tenant, "PASSWORD")))] = f"secret-of-{user}"
    return variables


def copy_with_tenant(folder: Path, tenant: str) -> Path:
    """The configuration with one more producer, added exactly as its README says; returns the main file."""
    shutil.copytree(DEPLOY, folder)
    template = (folder / "roles" / "producer.conf.template").read_text()
    (folder / "roles" / f"producer-{tenant}.conf").write_text(template.replace("TENANT", tenant))
    accounts = (folder / "accounts.conf").read_text()
    accounts = accounts.replace(
        "include ./roles/sys.conf", f"include ./roles/producer-{tenant}.conf\ninclude ./roles/sys.conf"
    ).replace("$producer_public ]", f"$producer_public, $producer_{tenant} ]")
    (folder / "accounts.conf").write_text(accounts)
    return folder / "nats-server.conf"


def start_roles(nats_with_config: ConfiguredNats, folder: Path) -> Roles:
    return Roles(nats_with_config(copy_with_tenant(folder / "nats", "acme"), passwords()), INBOXES)


@pytest.fixture(scope="session")
def roles(nats_with_config: ConfiguredNats, tmp_path_factory: pytest.TempPathFactory) -> Roles:
    return start_roles(nats_with_config, tmp_path_factory.mktemp("roles"))


@pytest.fixture(scope="session")
def long_streams(
    nats_with_config: ConfiguredNats, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[subprocess.Popen[str]]:
    """Streams that take over a minute, on a server and in a process of their own. Begun by the session's first test."""
    folder = tmp_path_factory.mktemp("long-streams")
    roles = start_roles(nats_with_config, folder)
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.integration.nats.long_streams", roles.url, str(folder)],
        cwd=Path(__file__).parents[3],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        yield process
        process.terminate()


@pytest.fixture(scope="session")
def cluster_trouble(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    """Three servers and their trouble, in a process of its own. Begun by the session's first test."""
    folder = tmp_path_factory.mktemp("cluster-trouble")
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.integration.nats.cluster_trouble", str(folder)],
        cwd=Path(__file__).parents[3],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        yield process
        process.terminate()


@pytest_asyncio.fixture
async def connect_as(roles: Roles) -> AsyncIterator[ConnectAs]:
    """`await connect_as(user)`: a new connection, closed after the test."""
    async with AsyncExitStack() as closing:
        opened: list[Connection] = []

        async def connect(user: str) -> Connection:
            connection = await roles.connect(user, f"t{len(opened)}")
            opened.append(connection)
            closing.push_async_callback(connection.close)
            return connection

        yield connect
