"""Secrets as `kvfleet secrets` makes them, of two fleets that have nothing to do with each other."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from kvproto.testing.nats_process import NatsProcess, ServerSpec
from tests.support.secrets_rig import Secrets, production

StartNats = Callable[..., NatsProcess]


@pytest.fixture(scope="session")
def own(tmp_path_factory: pytest.TempPathFactory) -> Secrets:
    return Secrets.make(tmp_path_factory.mktemp("secrets"), "acme")


@pytest.fixture(scope="session")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Secrets:
    """Another fleet's: the same names, another CA."""
    return Secrets.make(tmp_path_factory.mktemp("foreign"), "acme")


@pytest.fixture(scope="session")
def expired(own: Secrets, tmp_path_factory: pytest.TempPathFactory) -> Secrets:
    """Of the same CA and nkeys, with certificates that ended yesterday."""
    folder = tmp_path_factory.mktemp("expired") / "s"
    shutil.copytree(own.folder, folder)
    for path in (*folder.glob("n*.crt"), *folder.glob("producer-*.crt")):
        path.unlink()
    return Secrets.make(folder, days=1, ago=timedelta(days=2))


@pytest.fixture
def start_nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartNats]:
    """`start_nats(secrets, server="nats")`: production.conf with these, started."""
    servers: list[NatsProcess] = []

    def start(secrets: Secrets, server: str = "nats", environment: Secrets | None = None) -> NatsProcess:
        folder = tmp_path_factory.mktemp("production")
        config = production(folder / "nats", secrets, "acme", server=server)
        servers.append(NatsProcess(folder / "run", ServerSpec(config, (environment or secrets).nats_env)))
        servers[-1].start()
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture(scope="session")
def nats(own: Secrets, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsProcess]:
    """One server of the own fleet for all tests that leave it as it is."""
    folder: Path = tmp_path_factory.mktemp("production")
    server = NatsProcess(folder / "run", ServerSpec(production(folder / "nats", own, "acme"), own.nats_env))
    server.start()
    yield server
    server.stop()
