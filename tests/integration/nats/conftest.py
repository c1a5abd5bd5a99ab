"""A server under the configuration of deploy/nats, with one further tenant, and a connection per role."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import nkeys
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
from kvproto.testing.fixtures import ConfiguredNats, NatsServer
from tests.support.secrets_rig import add_tenant

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
    by_nkey: bool = False

    @property
    def url(self) -> str:
        return self.server.url

    def password(self, user: str) -> str:
        """Unlike the development ones, so that a password written into the configuration would be noticed."""
        return f"secret-of-{user}"

    def login(self, user: str) -> dict[str, str]:
        """As `Connection.open` takes it."""
        if self.by_nkey:
            return {"nkey_seed": seed_of(user).decode()}
        return {"user": user, "password": self.password(user)}

    async def connect(self, user: str, process: str) -> Connection:
        """A connection as the services make it."""
        return await Connection.open(
            self.url,
            name=f"{user}-{process}",
            inbox_prefix=inbox_prefix(self.inboxes[user], process),
            **self.login(user),  # type: ignore[arg-type]
        )


def variable(user: str, kind: str) -> str:
    role, _, tenant = user.partition("-")
    return "_".join(filter(None, ("KVF", role.upper(), tenant, kind)))


def passwords() -> dict[str, str]:
    """The environment of the server: one variable per user."""
    return {variable(user, "PASSWORD"): f"secret-of-{user}" for user in USERS}


def seed_of(user: str) -> bytes:
    """The same in each run, which a production's never is."""
    return nkeys.encode_seed(user.encode().ljust(32, b"."), nkeys.PREFIX_BYTE_USER)


def public_keys() -> dict[str, str]:
    """The same for accounts-nkeys.conf."""
    users = (*USERS, "region_link")  # a server's, not a client's: tests/integration/security/test_region_link.py
    return {variable(user, "NKEY"): nkeys.from_seed(bytearray(seed_of(user))).public_key.decode() for user in users}


def copy_with_tenant(folder: Path, tenant: str, accounts: str = "accounts.conf") -> Path:
    """The configuration with one more producer, added exactly as its README says; returns the main file."""
    shutil.copytree(DEPLOY, folder)
    add_tenant(folder, tenant, accounts)
    main = folder / "nats-server.conf"
    main.write_text(main.read_text().replace("include ./accounts.conf", f"include ./{accounts}"))
    return main


def start_roles(nats_with_config: ConfiguredNats, folder: Path) -> Roles:
    return Roles(nats_with_config(copy_with_tenant(folder / "nats", "acme"), passwords()), INBOXES)


@pytest.fixture(scope="session")
def roles(nats_with_config: ConfiguredNats, tmp_path_factory: pytest.TempPathFactory) -> Roles:
    return start_roles(nats_with_config, tmp_path_factory.mktemp("roles"))


@pytest.fixture(scope="session")
def nkey_roles(nats_with_config: ConfiguredNats, tmp_path_factory: pytest.TempPathFactory) -> Roles:
    """The same with accounts-nkeys.conf: who is who is told by nkeys."""
    main = copy_with_tenant(tmp_path_factory.mktemp("nkey-roles") / "nats", "acme", "accounts-nkeys.conf")
    return Roles(nats_with_config(main, public_keys()), INBOXES, by_nkey=True)


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
