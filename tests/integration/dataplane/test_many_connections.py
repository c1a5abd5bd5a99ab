"""Connections that ask for nothing cost no thread; of those that ask at once, some wait their turn."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvproto.dataplane.client import DataPlaneClient
from kvproto.dataplane.serving import ServingLimits
from tests.integration.dataplane.conftest import Plane, soon
from tests.support.waiting import wait_until

Start = Callable[..., Plane]


def serving() -> int:
    return sum(thread.name.endswith("-c") and thread.name.startswith("dataplane-") for thread in threading.enumerate())


@pytest.mark.parametrize("link", ["unix", "tcp", "tls"])
def test_connections_that_ask_nothing_have_no_thread_and_are_answered_when_they_ask(start: Start, link: str) -> None:
    plane = start(link)
    clients = [plane.connect() for _ in range(40)]
    for _ in range(2):
        wait_until(lambda: serving() == 0)
        assert plane.server.counters.open_connections == 40
        for client in clients:
            assert client.echo(100_000, soon()) > 0
    clients[0].close()
    wait_until(lambda: plane.server.counters.open_connections == 39)


def test_more_at_once_than_there_are_threads_wait_their_turn(start: Start) -> None:
    plane = start("unix", ServingLimits(threads=2))
    clients = [plane.connect() for _ in range(12)]
    most = 0

    def work(client: DataPlaneClient) -> int:
        nonlocal most
        for _ in range(50):
            client.echo(10_000, soon(30))
            most = max(most, len(plane.server._serving))
        return 50

    with ThreadPoolExecutor(len(clients)) as pool:
        assert sum(pool.map(work, clients)) == 600
    assert most <= 2
    assert plane.server.counters.timeouts == 0
