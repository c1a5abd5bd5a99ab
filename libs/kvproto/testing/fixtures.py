"""Pytest fixtures: `pytest_plugins = ["kvproto.testing.fixtures"]` in the top conftest.py.

Tests share one server and stay apart by `namespace`; a test that breaks its server takes `nats_process`.
NATS_TEST_URL names a running server; `ServerSource` explains NATS_TEST_BACKEND.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest

from kvproto.buckets import ensure_buckets
from kvproto.connection import Connection
from kvproto.subjects import Subjects
from kvproto.testing.fleet_containers import FleetContainers, ImageMissing
from kvproto.testing.nats_cluster import NatsCluster
from kvproto.testing.nats_container import NatsContainer
from kvproto.testing.nats_process import NatsProcess, ServerSpec
from kvproto.work_queue import ensure_work_queue

T = TypeVar("T")
FleetFactory = Callable[..., FleetContainers]
NatsServer = NatsContainer | NatsProcess  # running; listens on loopback only
ConfiguredNats = Callable[..., NatsServer]
ProcessFactory = Callable[..., NatsProcess]

BACKENDS = ("auto", "docker", "process")
_USED = pytest.StashKey[list[str]]()


class ServerSource:
    """Starts servers for one test run, all on the same backend, by NATS_TEST_BACKEND. `auto` (default) takes a
    container where a Docker daemon answers, else a process, and says why. `docker` fails without a daemon."""

    def __init__(self, wanted: str | None = None) -> None:
        self.wanted = wanted or os.environ.get("NATS_TEST_BACKEND") or "auto"
        if self.wanted not in BACKENDS:
            raise ValueError(f"NATS_TEST_BACKEND is {self.wanted!r}, must be one of {', '.join(BACKENDS)}")
        self._why_process = "asked for" if self.wanted == "process" else ""

    def start(self, make_directory: Callable[[], Path], spec: ServerSpec | None = None) -> NatsServer:
        """A running server. Raises if it cannot start."""
        spec = spec or ServerSpec()
        if not self._why_process:
            try:
                return NatsContainer.start(spec)
            except Exception as error:  # for any failure of a container there is the process
                if self.wanted == "docker":
                    raise
                text = next(iter(str(error).splitlines()), "")
                self._why_process = f"no container: {type(error).__name__}: {text[:160]}"
        process = NatsProcess(make_directory(), spec)
        process.start()
        return process

    def describe(self, server: NatsServer) -> str:
        return f"process ({self._why_process})" if server.kind == "process" else server.kind


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """A process of pytest-xdist reports its servers to the main process."""
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output["nats"] = session.config.stash.get(_USED, [])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash.setdefault(_USED, []).extend(getattr(node, "workeroutput", {}).get("nats", []))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    used: list[str] = terminalreporter.config.stash.get(_USED, [])
    for kind, count in Counter(used).items():
        terminalreporter.write_line(f"NATS: {count} server{'s' * (count > 1)}, {kind}")


@pytest.fixture(scope="session")
def nats_source() -> ServerSource:
    return ServerSource()


@pytest.fixture(scope="session")
def nats_url(
    nats_source: ServerSource, tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Iterator[str]:
    """URL of a server with JetStream and without accounts, shared by the whole run."""
    used = pytestconfig.stash.setdefault(_USED, [])
    given = os.environ.get("NATS_TEST_URL")
    if given:
        used.append(f"NATS_TEST_URL, {given.rsplit('@', 1)[-1]}")
        yield given
        return
    with contextlib.ExitStack() as undo:
        server = nats_source.start(lambda: tmp_path_factory.mktemp("nats"))
        undo.callback(server.stop)
        used.append(nats_source.describe(server))
        yield server.url


@pytest.fixture(scope="session")
def nats_with_config(
    nats_source: ServerSource, tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Iterator[ConfiguredNats]:
    """`nats_with_config(config: Path, environment: Mapping[str, str] = {}) -> NatsServer`, on the run's backend.

    `config` may include files beside it. Address, port and store are the fixture's. All servers stop with the session,
    unless the caller stops them before.
    """
    with contextlib.ExitStack() as undo:

        def start(config: Path, environment: Mapping[str, str] | None = None) -> NatsServer:
            spec = ServerSpec(config, environment or {})
            server = nats_source.start(lambda: tmp_path_factory.mktemp("nats-configured"), spec)
            undo.callback(server.stop)
            pytestconfig.stash.setdefault(_USED, []).append(nats_source.describe(server))
            return server

        yield start


@pytest.fixture
def nats_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessFactory]:
    """`nats_process(config: Path | None = None, environment: Mapping[str, str] = {}) -> NatsProcess`, started.

    Always a process, whatever the backend: `kill`, `hang`, `wake`, `stop` and `start` again on the same port and store.
    """
    with contextlib.ExitStack() as undo:

        def start(config: Path | None = None, environment: Mapping[str, str] | None = None) -> NatsProcess:
            server = NatsProcess(tmp_path_factory.mktemp("nats-process"), ServerSpec(config, environment or {}))
            undo.callback(server.stop)
            server.start()
            return server

        yield start


@pytest.fixture
def nats_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsCluster]:
    """Three servers, one JetStream cluster, started; `await cluster.ready()` before its first use."""
    cluster = NatsCluster(tmp_path_factory.mktemp("nats-cluster"))
    cluster.start()
    try:
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(scope="session")
def kvfleet_containers() -> Iterator[FleetFactory]:
    """`kvfleet_containers(workers=2, placements=1, vaults=0, environment={}) -> FleetContainers`, serving.

    Skips, saying why, where there is no daemon or no image; KVFLEET_TEST_CONTAINERS=demand makes that a failure. All
    fleets stop with the session, unless the caller stops them before.
    """
    with contextlib.ExitStack() as undo:

        def start(**wanted: Any) -> FleetContainers:
            try:
                fleet = FleetContainers.start(**wanted)
            except (ImportError, ConnectionError, ImageMissing) as error:
                if os.environ.get("KVFLEET_TEST_CONTAINERS") == "demand":
                    raise
                pytest.skip(f"no fleet in containers: {error}")
            undo.callback(fleet.stop)
            return fleet

        yield start


@pytest.fixture
def namespace() -> str:
    """A namespace of subjects and buckets that no other test uses."""
    return f"t{uuid.uuid4().hex[:12]}"


@pytest.fixture
def fleet_buckets(nats_url: str, namespace: str) -> Iterator[Subjects]:
    """The fleet's buckets exist in `namespace` on the shared server; they are deleted after the test."""
    subjects = Subjects(namespace)

    async def delete_buckets(connection: Connection) -> None:
        for bucket in (
            subjects.members_bucket,
            subjects.sessions_bucket,
            subjects.keys_bucket,
            subjects.responses_bucket,
            subjects.batches_bucket,
        ):
            await connection.raw.jetstream().delete_key_value(bucket)
        await connection.raw.jetstream().delete_stream(subjects.batch_stream)

    async def connected(work: Callable[[Connection], Awaitable[Any]]) -> None:
        connection = await Connection.open(nats_url, name="fleet-buckets", inbox_prefix="_adm.fixture")
        try:
            await work(connection)
        finally:
            await connection.close()

    async def create(connection: Connection) -> None:
        await ensure_buckets(connection, subjects)
        await ensure_work_queue(connection, subjects)

    _run_apart(connected(create))
    yield subjects
    _run_apart(connected(delete_buckets))


def _run_apart(work: Coroutine[Any, Any, T]) -> T:
    """In a thread with its own loop: the test's loop stays untouched."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()
