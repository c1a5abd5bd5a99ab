"""One connection's thread: jobs in order, each over exactly once, whatever the other end does."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from kvfleet.worker.tiers.transfers import MAX_JOBS, ConnectionThread
from kvproto.dataplane.client import DataPlaneClient
from kvproto.dataplane.errors import PeerGone
from tests.integration.worker_tiers.rig import KEYS, Vault
from tests.support.waiting import LIMIT_S, wait_until


class Echo:
    """Job: counts how it ended."""

    def __init__(self, log: list[str], name: str = "job", before: Callable[[], object] = lambda: None) -> None:
        self._log = log
        self._name = name
        self._before = before

    def run(self, client: DataPlaneClient) -> None:
        self._before()
        client.echo(10, time.monotonic() + LIMIT_S)
        self._log.append(self._name)

    def fail(self, reason: str) -> None:
        self._log.append(f"{self._name}: {reason}")


Begin = Callable[..., ConnectionThread]


@pytest.fixture
def begin(vault: Vault) -> Iterator[Begin]:
    made: list[ConnectionThread] = []

    def begin(connect: Callable[[], DataPlaneClient] | None = None) -> ConnectionThread:
        made.append(ConnectionThread("test", connect or (lambda: connected(vault)), lambda client: None))
        made[-1].start()
        return made[-1]

    yield begin
    for one in made:
        one.close()
        one.thread.join(LIMIT_S)


def connected(vault: Vault) -> DataPlaneClient:
    return DataPlaneClient.connect(vault.address.data_plane, KEYS, identity="me", expect=vault.id, same_host=True)


def test_jobs_run_in_order_and_wait_while_it_connects(begin: Begin) -> None:
    thread, log = begin(), list[str]()
    for at in range(50):
        assert thread.submit(Echo(log, str(at)))
    wait_until(lambda: len(log) == 50)
    assert log == [str(at) for at in range(50)]
    wait_until(lambda: thread.busy_since is None)


def test_what_waits_is_bounded(begin: Begin) -> None:
    thread, log, go_on = begin(), list[str](), threading.Event()
    assert thread.submit(Echo(log, "first", lambda: go_on.wait(2 * LIMIT_S)))
    wait_until(lambda: thread.is_connected and not thread._jobs)
    assert all(thread.submit(Echo(log)) for _ in range(MAX_JOBS))
    assert not thread.submit(Echo(log))
    go_on.set()
    wait_until(lambda: len(log) == 1 + MAX_JOBS)


def test_while_nobody_is_there_jobs_are_refused_or_fail(begin: Begin) -> None:
    tries = []

    def nobody() -> DataPlaneClient:
        tries.append(1)
        raise PeerGone("nobody")

    thread, log = begin(nobody), list[str]()
    accepted = sum(thread.submit(Echo(log)) for _ in range(1000) if time.sleep(0.0005) is None)
    wait_until(lambda: len(log) == accepted)
    assert set(log) <= {"job: gone"}
    assert accepted < 1000
    assert len(tries) < 10, "it is not tried all the time"


def test_a_job_that_raises_what_it_should_not_is_over_and_the_next_one_runs(begin: Begin) -> None:
    thread, log = begin(), list[str]()
    thread.submit(Echo(log, "bad", lambda: 1 / 0))
    thread.submit(Echo(log, "good"))
    wait_until(lambda: len(log) == 2)
    assert log == ["bad: internal", "good"]


def test_cancelled_jobs_are_over_at_once_running_or_not(begin: Begin, vault: Vault) -> None:
    thread, log = begin(), list[str]()
    vault.store.pause_s = 1.0

    class Has(Echo):
        def run(self, client: DataPlaneClient) -> None:
            client.has(b"r" * 16, [b"h" * 16], False, time.monotonic() + 10)

    running, waiting = Has(log, "running"), Echo(log, "waiting")
    thread.submit(running)
    wait_until(lambda: vault.store.asked)
    thread.submit(waiting)
    began = time.monotonic()
    thread.cancel(waiting)
    assert log == ["waiting: gone"]
    thread.cancel(running)
    wait_until(lambda: len(log) == 2)
    assert time.monotonic() - began < 3
    thread.cancel(running)
    assert log == ["waiting: gone", "running: gone"], "nothing is over twice"
    vault.store.pause_s = 0.0
    thread.submit(Echo(log, "next"))
    wait_until(lambda: log[-1] == "next")


def test_a_connection_that_ends_while_idle_costs_no_job_anything(begin: Begin, vault: Vault) -> None:
    links: list[DataPlaneClient] = []

    def connect() -> DataPlaneClient:
        links.append(connected(vault))
        return links[-1]

    thread, log = begin(connect), list[str]()
    for at in range(3):
        thread.submit(Echo(log, str(at)))
        wait_until(lambda at=at: len(log) == at + 1)  # type: ignore[misc]
        links[-1].link._sock.shutdown(socket.SHUT_RDWR)
    assert log == ["0", "1", "2"]
    assert len(links) >= 3


def test_who_lets_everybody_in_and_then_hangs_up_is_not_asked_all_the_time(begin: Begin, vault: Vault) -> None:
    tries: list[int] = []

    def connect() -> DataPlaneClient:
        tries.append(1)
        client = connected(vault)
        client.abort()
        return client

    thread = begin(connect)
    wait_until(lambda: tries)
    time.sleep(0.5)
    assert len(tries) < 8
    began = time.monotonic()
    thread.close()
    thread.thread.join(LIMIT_S)
    assert time.monotonic() - began < 2, "a pause is no reason to stay"
