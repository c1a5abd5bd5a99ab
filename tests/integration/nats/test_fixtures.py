"""What kvproto.testing promises to other projects: shared server, own buckets, servers that may be broken."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvproto.testing
from kvproto.buckets import Bucket
from kvproto.connection import Connection
from kvproto.errors import Unavailable
from kvproto.subjects import Subjects
from kvproto.testing import docker_daemon, nats_container
from kvproto.testing.fixtures import ConfiguredNats, ProcessFactory, ServerSource
from kvproto.testing.nats_process import NatsProcess, ServerFailed, ServerSpec, check_identity, greeting
from tests.support.waiting import LIMIT_S


async def connect(url: str) -> Connection:
    return await Connection.open(url, name="test", inbox_prefix="_adm.test")


async def test_shared_server_has_jetstream_and_buckets(nats_url: str, fleet_buckets: Subjects) -> None:
    connection = await connect(nats_url)
    bucket = await Bucket.open(connection, fleet_buckets.sessions_bucket)
    revision = await bucket.update("public.a", b"1", 0)
    assert (await bucket.get("public.a")).revision == revision
    assert (await bucket.get("public.b")).value is None
    await connection.close()


def test_namespaces_differ(namespace: str, fleet_buckets: Subjects) -> None:
    assert fleet_buckets.namespace == namespace != "kvf"


async def test_killed_server_comes_back_on_its_port_with_its_store(nats_process: ProcessFactory) -> None:
    server = nats_process()
    url = server.url
    connection = await connect(url)
    await connection.raw.jetstream().create_key_value(bucket="kept")
    await (await Bucket.open(connection, "kept")).update("k", b"v", 0)
    await connection.close()
    await asyncio.sleep(0.2)  # it writes to its disk a moment after it has answered
    server.kill()
    with pytest.raises(OSError):
        greeting(url)
    with pytest.raises(Unavailable):
        await Connection.open(url, name="test", inbox_prefix="_adm.test", connect_timeout_s=0.5)
    server.start()
    assert server.url == url
    connection = await connect(url)
    assert (await (await Bucket.open(connection, "kept")).get("k")).value == b"v"
    await connection.close()


async def test_hung_server_answers_nothing_until_it_wakes(nats_process: ProcessFactory) -> None:
    server = nats_process()
    server.hang()
    with pytest.raises(TimeoutError):
        await asyncio.to_thread(greeting, server.url, 0.3)
    server.wake()
    assert (await asyncio.to_thread(greeting, server.url))["jetstream"] is True


def test_hung_server_is_stopped_too(nats_process: ProcessFactory) -> None:
    server = nats_process()
    pid = server.pid
    server.hang()
    server.stop()
    assert pid is not None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_server_with_a_configuration_of_several_files(nats_with_config: ConfiguredNats, tmp_path: Path) -> None:
    (tmp_path / "limits.conf").write_text("max_payload: $LIMIT\n")
    (tmp_path / "main.conf").write_text("include ./limits.conf\n")
    server = nats_with_config(tmp_path / "main.conf", {"LIMIT": "4096"})
    info = greeting(server.url)
    assert info["max_payload"] == 4096
    assert not info.get("jetstream")
    assert "Server is ready" in server.log()
    server.stop()
    server.stop()


def test_broken_configuration_is_an_error_with_the_servers_words(tmp_path: Path) -> None:
    (tmp_path / "main.conf").write_text("no_such_option: 1\n")
    with pytest.raises(ServerFailed, match="no_such_option"):
        NatsProcess(tmp_path / "run", ServerSpec(tmp_path / "main.conf")).start()


def test_port_of_a_stranger_is_refused(nats_url: str) -> None:
    with pytest.raises(ServerFailed, match="not 'somebody-else'"):
        check_identity(nats_url, "somebody-else")


def test_unknown_backend_is_named() -> None:
    with pytest.raises(ValueError, match="'podman', must be one of auto, docker, process"):
        ServerSource("podman")


SMOKE = """
pytest_plugins = ["kvproto.testing.fixtures"]
"""
SMOKE_TEST = """
def test_it(nats_url):
    assert nats_url
"""


@pytest.mark.parametrize(
    ("backend", "passes", "words"),
    [("auto", True, "NATS: 1 server, process (no container: "), ("docker", False, "1 error")],
)
def test_without_a_daemon_auto_falls_back_and_docker_is_an_error(
    tmp_path: Path, backend: str, passes: bool, words: str
) -> None:
    """As another project would use it, in its own pytest run, with a daemon that does not exist."""
    (tmp_path / "conftest.py").write_text(SMOKE)
    (tmp_path / "test_smoke.py").write_text(SMOKE_TEST)
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("NATS_", "PYTEST_"))}
    environment |= {"NATS_TEST_BACKEND": backend, "DOCKER_HOST": f"unix://{tmp_path}/none.sock"}
    environment["PYTHONPATH"] = str(Path(kvproto.testing.__file__).parents[2])
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:schemathesis", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=2 * LIMIT_S,
        env=environment,
        cwd=tmp_path,
    )
    assert (run.returncode == 0) is passes, run.stdout + run.stderr
    assert words in run.stdout


# ---------------------------------------------------------------------------------------------- containers


@pytest.fixture
def daemon() -> Iterator[Any]:
    """A docker-py client, where the run may use containers."""
    if os.environ.get("NATS_TEST_BACKEND") == "process":
        pytest.skip("the run asks for processes")
    try:
        client = docker_daemon.client()
    except Exception as error:  # noqa: BLE001 (docker's own, and only a reason to skip)
        pytest.skip(f"no Docker daemon: {error}")
    yield client
    client.close()


def test_container_on_an_own_network_leaves_nothing(daemon: Any) -> None:
    """Where the host's network cannot be shared with the daemon."""

    def present() -> set[str]:
        return {found.id for found in [*daemon.containers.list(all=True), *daemon.networks.list()]}

    before = present()
    server = nats_container.NatsContainer._on_own_network(nats_container._image(daemon), ServerSpec())
    try:
        assert greeting(server.url)["jetstream"] is True
        assert len(present() - before) == 2
    finally:
        server.stop()
    assert present() == before


def test_what_a_killed_run_left_is_removed_and_nothing_else(daemon: Any) -> None:
    image = nats_container._image(daemon)
    gone, elsewhere = f"999999999@{socket.gethostname()}", "1@another-host"
    made = {owner: daemon.containers.create(image, labels={nats_container.LABEL: owner}) for owner in (gone, elsewhere)}
    try:
        nats_container.NatsContainer.start(ServerSpec()).stop()
        left = {found.id for found in daemon.containers.list(all=True)}
        assert made[gone].id not in left
        assert made[elsewhere].id in left
    finally:
        made[elsewhere].remove(force=True)


def test_a_broken_configuration_is_told_from_inside_the_container(daemon: Any, tmp_path: Path) -> None:
    (tmp_path / "main.conf").write_text("no_such_option: 1\n")
    with pytest.raises(ServerFailed, match="no_such_option"):
        nats_container.NatsContainer.start(ServerSpec(tmp_path / "main.conf"))
