"""Ends that die, stall, trickle and flip bits: deadlines hold, what is right is kept, nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvproto.dataplane.block import BlockHeader
from kvproto.dataplane.client import DataPlaneClient, GetStatus, PutStatus
from kvproto.dataplane.errors import DataPlaneError, PeerGone, PeerTimeout
from kvproto.dataplane.keys import KeyRing
from kvproto.dataplane.server import ServingLimits
from tests.integration.dataplane.conftest import Plane, soon
from tests.integration.dataplane.stores import IDENTITY, ROOT, SECRET, hashes_of, made, made_many
from tests.support.slow_proxy import SlowProxy
from tests.support.waiting import LIMIT_S, wait_until

MB = 1_000_000
Start = Callable[..., Plane]
REPOSITORY = Path(__file__).parents[3]


def room(at: int, header: BlockHeader) -> memoryview:
    return memoryview(bytearray(header.length))


def get_all(client: DataPlaneClient, hashes: list[bytes], deadline: float) -> list[GetStatus]:
    return client.get(ROOT, hashes, False, room, lambda *_: True, deadline)


@pytest.fixture(params=["unix", "tcp"])
def plain(request: pytest.FixtureRequest, start: Start) -> Plane:
    return start(request.param)


# ---------------------------------------------------------------------- killed


@contextmanager
def server_process(path: Path, blocks: int, size: int) -> Iterator[tuple[int, list[str]]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.integration.dataplane.stores", str(path), str(blocks), str(size)],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            assert process.stdout is not None
            yield process.pid, process.stdout.readline().split()
        finally:
            process.kill()


def test_the_server_is_killed_during_get_and_during_put(socket_path: Path) -> None:
    """Both at once, on Unix socket and TCP; every client is told within a second or two, long before its deadline."""
    blocks = made_many(20, MB)
    arrived: list[bytes] = []
    failures: list[DataPlaneError] = []

    with server_process(socket_path, 20, MB) as (pid, addresses):
        proxies = [SlowProxy(address, bytes_per_s=10 * MB) for address in addresses]
        clients = [
            DataPlaneClient.connect(
                [proxy.address], KeyRing({"k": SECRET}), identity="w", expect=IDENTITY, same_host=True
            )
            for proxy in proxies
            for _ in range(2)
        ]

        def on_block(at: int, header: BlockHeader, payload: memoryview) -> bool:
            assert payload == blocks[at][1]
            arrived.append(header.hash)
            return True

        def run(client: DataPlaneClient, work: str) -> None:
            try:
                if work == "get":
                    client.get(ROOT, hashes_of(blocks), False, room, on_block, soon())
                else:
                    client.put(ROOT, [made(1000 + at, MB) for at in range(20)], soon())
            except DataPlaneError as error:
                failures.append(error)

        threads = [
            threading.Thread(target=run, args=(client, work))
            for client, work in zip(clients, ("get", "put", "get", "put"), strict=True)
        ]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(arrived) >= 2 and all(proxy.passed > 3 * MB for proxy in proxies))
        os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        for thread in threads:
            thread.join(LIMIT_S)
        assert time.monotonic() - killed < 8
        for closing in (*clients, *proxies):
            closing.close()
    assert [type(failure) for failure in failures] == [PeerGone] * 4
    assert all(client.closed for client in clients)


def test_the_client_is_gone_during_get_and_during_put(plain: Plane) -> None:
    blocks = made_many(10, MB)
    plain.store.fill(blocks)
    with SlowProxy(plain.address, bytes_per_s=5 * MB) as proxy:
        for work in ("get", "put"):
            client = plain.connect(proxy.address)
            threading.Timer(0.15, client.abort).start()
            with pytest.raises(PeerGone):
                if work == "get":
                    get_all(client, hashes_of(blocks), soon())
                else:
                    client.put(ROOT, [made(100 + at, MB) for at in range(10)], soon())
    wait_until(lambda: plain.server.counters.open_connections == 0)
    plain.settle()
    assert len(plain.store.blocks) < 20


def test_a_connection_cut_in_the_middle(plain: Plane) -> None:
    blocks = made_many(10, MB)
    plain.store.fill(blocks)
    with SlowProxy(plain.address, bytes_per_s=5 * MB) as proxy:
        client = plain.connect(proxy.address)
        threading.Timer(0.15, proxy.cut).start()
        with pytest.raises(PeerGone):
            get_all(client, hashes_of(blocks), soon())
        assert client.closed
        again = plain.connect(proxy.address)
        assert get_all(again, hashes_of(blocks[:1]), soon()) == [GetStatus.OK]
    plain.settle()


# ---------------------------------------------------------------------- slow


def test_the_deadline_holds_when_nothing_comes(plain: Plane) -> None:
    block = made(1, MB)
    plain.store.fill([block])
    for ask in (
        lambda client, deadline: get_all(client, [block[0].hash], deadline),
        lambda client, deadline: client.put(ROOT, [made(2, MB)], deadline),
        lambda client, deadline: client.has(ROOT, [block[0].hash], False, deadline),
        lambda client, deadline: client.erase(ROOT, [block[0].hash], deadline),
        lambda client, deadline: client.echo(100, deadline),
    ):
        with SlowProxy(plain.address) as proxy:
            client = plain.connect(proxy.address)
            proxy.stall.set()
            began = time.monotonic()
            with pytest.raises(PeerTimeout):
                ask(client, began + 0.1)
            assert time.monotonic() - began < 2
            assert client.closed


def test_the_deadline_is_of_the_whole_and_not_of_each_piece(plain: Plane) -> None:
    """Bytes trickle all the time; in twenty times the deadline they would all have come."""
    block = made(1, MB)
    plain.store.fill([block])
    with SlowProxy(plain.address, bytes_per_s=MB / 6) as proxy:
        for work in ("get", "put"):
            client = plain.connect(proxy.address)
            before, began = proxy.passed, time.monotonic()
            with pytest.raises(PeerTimeout):
                if work == "get":
                    get_all(client, [block[0].hash], began + 0.3)
                else:
                    client.put(ROOT, [made(2, MB)], began + 0.3)
            assert time.monotonic() - began < 3
            assert proxy.passed > before + 5_000
    plain.settle()


def test_a_connect_has_a_deadline(plain: Plane) -> None:
    with SlowProxy(plain.address) as proxy:
        proxy.stall.set()
        began = time.monotonic()
        with pytest.raises(PeerTimeout):
            plain.connect(proxy.address, timeout_s=0.1)
        assert time.monotonic() - began < 2


def test_a_slow_reader_holds_one_batch_and_not_for_ever(start: Start) -> None:
    plane = start("unix", ServingLimits(batch_bytes=4 * MB, request_s=0.5))
    blocks = made_many(30, MB)
    plane.store.fill(blocks)
    with SlowProxy(plane.address) as proxy:
        client = plane.connect(proxy.address)
        taken = 0

        def on_block(at: int, header: BlockHeader, payload: memoryview) -> bool:
            nonlocal taken
            taken += 1
            if taken == 5:
                proxy.stall.set()
            return True

        with pytest.raises(DataPlaneError):
            client.get(ROOT, hashes_of(blocks), False, room, on_block, soon(1.2))
        wait_until(lambda: plane.server.counters.open_connections == 0)
    assert plane.server.counters.timeouts == 1
    assert plane.store.lent == 0
    assert plane.store.most_blocks_lent <= 4


def test_a_slow_link_moves_everything_in_the_end(plain: Plane) -> None:
    blocks = made_many(10, 200_000)
    with SlowProxy(plain.address, bytes_per_s=10 * MB, latency_s=0.001) as proxy:
        client = plain.connect(proxy.address)
        began = time.monotonic()
        assert client.put(ROOT, blocks, soon()) == [PutStatus.STORED] * 10
        assert get_all(client, hashes_of(blocks), soon()) == [GetStatus.OK] * 10
        assert time.monotonic() - began > 0.3


def test_a_stop_on_a_slow_link_does_not_wait_for_the_rest(plain: Plane) -> None:
    blocks = made_many(40, MB // 2)
    plain.store.fill(blocks)
    with SlowProxy(plain.address, bytes_per_s=3 * MB) as proxy:
        client = plain.connect(proxy.address)
        began = time.monotonic()
        statuses = client.get(ROOT, hashes_of(blocks), False, room, lambda at, *_: at < 1, soon())
        assert statuses == [GetStatus.OK] + [GetStatus.REFUSED] * 39
        assert time.monotonic() - began < 4  # all of it would take seven
    assert client.closed
    plain.settle()


# ---------------------------------------------------------------------- damaged


def test_flipped_bits_are_found_on_the_way_back(plain: Plane) -> None:
    """One bit of every 3 MB of ten blocks of 1 MB: three are corrupt, seven are right."""
    blocks = made_many(10, MB)
    plain.store.fill(blocks)
    with SlowProxy(plain.address) as proxy:
        client = plain.connect(proxy.address)
        proxy.flip_every = 3 * MB
        landed: dict[int, memoryview] = {}

        def on_block(at: int, header: BlockHeader, payload: memoryview) -> bool:
            landed[at] = payload
            return True

        statuses = client.get(ROOT, hashes_of(blocks), False, room, on_block, soon())
        assert proxy.flipped == 3
    assert sorted(statuses) == [GetStatus.CORRUPT] * 3 + [GetStatus.OK] * 7
    assert landed == {at: blocks[at][1] for at in range(10) if statuses[at] == GetStatus.OK}


def test_flipped_bits_are_found_on_the_way_there(plain: Plane) -> None:
    blocks = made_many(10, MB)
    with SlowProxy(plain.address) as proxy:
        client = plain.connect(proxy.address)
        proxy.flip_every_sent = 3 * MB
        statuses = client.put(ROOT, blocks, soon())
        assert proxy.flipped == 3
    assert sorted(statuses) == [PutStatus.CORRUPT] * 3 + [PutStatus.STORED] * 7
    assert plain.server.counters.checksum_failures == 3
    assert [block for block, status in zip(blocks, statuses, strict=True) if status == PutStatus.STORED] == list(
        plain.store.blocks.values()
    )


@pytest.mark.parametrize("every", [97, 263])
def test_flipped_bits_in_frames_never_become_blocks(plain: Plane, every: int) -> None:
    """Heads and headers are hit, too: errors and statuses, but never wrong bytes, and the server goes on."""
    blocks = made_many(8, 300)
    plain.store.fill(blocks)
    with SlowProxy(plain.address) as proxy:
        for way in ("flip_every", "flip_every_sent"):
            for _ in range(3):
                client = plain.connect(proxy.address, timeout_s=5)
                setattr(proxy, way, every)

                def on_block(at: int, header: BlockHeader, payload: memoryview) -> bool:
                    assert (header, payload) == blocks[at]
                    return True

                try:
                    statuses = client.get(ROOT, hashes_of(blocks), False, room, on_block, soon(0.3))
                    assert way == "flip_every_sent" or GetStatus.CORRUPT in statuses
                except DataPlaneError:
                    assert client.closed
                setattr(proxy, way, 0)
    assert get_all(plain.connect(), hashes_of(blocks), soon()) == [GetStatus.OK] * 8


# ---------------------------------------------------------------------- closed


def test_close_while_transfers_run(plane: Plane) -> None:
    blocks = made_many(30, MB)
    plane.store.fill(blocks)
    clients = [plane.connect() for _ in range(4)]
    ends: list[str] = []

    def run(client: DataPlaneClient) -> None:
        try:
            while True:
                get_all(client, hashes_of(blocks), soon())
        except DataPlaneError as error:
            ends.append(type(error).__name__)

    threads = [threading.Thread(target=run, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    wait_until(lambda: plane.server.counters.blocks_served > 60)
    began = time.monotonic()
    plane.server.close()
    assert time.monotonic() - began < 4
    for thread in threads:
        thread.join(LIMIT_S)
    assert ends == ["PeerGone"] * 4
    assert plane.store.lent == 0
    with pytest.raises(DataPlaneError):
        plane.connect()
    plane.server.close()


def test_a_client_may_be_closed_twice_and_aborted_when_closed(plain: Plane) -> None:
    client = plain.connect()
    client.close()
    client.abort()
    client.close()
    wait_until(lambda: plain.server.counters.open_connections == 0)
    assert plain.server.counters.malformed == 0
