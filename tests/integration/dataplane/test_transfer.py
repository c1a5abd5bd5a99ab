"""Blocks there and back, the same over Unix socket, TCP and TLS: every status, and the bytes that were put."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from kvproto.dataplane.block import BlockHeader
from kvproto.dataplane.client import DataPlaneClient, GetStatus, PutStatus
from kvproto.dataplane.errors import PeerTimeout, ProtocolError
from kvproto.dataplane.server import ServingLimits
from kvproto.dataplane.wire import MAX_BLOCKS, MAX_ECHO_BYTES
from kvproto.errors import InvalidRequest
from tests.integration.dataplane.conftest import Plane, soon
from tests.integration.dataplane.stores import OTHER_ROOT, ROOT, Block, hashes_of, made, made_many
from tests.support.waiting import LIMIT_S, wait_until

OK, MISSING, CORRUPT, REFUSED = GetStatus.OK, GetStatus.MISSING, GetStatus.CORRUPT, GetStatus.REFUSED
Start = Callable[..., Plane]


class Fetched:
    """Where a `get` puts blocks, and what it said of them."""

    def __init__(self) -> None:
        self.room: dict[int, memoryview] = {}
        self.blocks: dict[int, Block] = {}

    def sink(self, at: int, header: BlockHeader) -> memoryview | None:
        self.room[at] = memoryview(bytearray(header.length))
        return self.room[at]

    def on_block(self, at: int, header: BlockHeader, payload: memoryview) -> bool:
        assert payload.obj is self.room[at].obj
        self.blocks[at] = (header, payload)
        return True


def fetch(
    client: DataPlaneClient, hashes: Sequence[bytes], root: bytes = ROOT, exact: bool = False
) -> tuple[list[GetStatus], dict[int, Block]]:
    fetched = Fetched()
    return client.get(root, hashes, exact, fetched.sink, fetched.on_block, soon()), fetched.blocks


def test_what_is_put_can_be_had(plane: Plane) -> None:
    client, blocks = plane.connect(), made_many(20, 70_000)
    assert client.put(ROOT, blocks, soon()) == [PutStatus.STORED] * 20
    statuses, fetched = fetch(client, hashes_of(blocks))
    assert statuses == [OK] * 20
    assert list(fetched) == list(range(20))
    assert [fetched[at] for at in range(20)] == blocks
    counters = plane.server.counters
    assert (counters.connections, counters.open_connections) == (1, 1)
    assert (counters.blocks_stored, counters.blocks_served) == (20, 20)
    assert counters.bytes_in > 20 * 70_000
    assert counters.bytes_out > 20 * 70_000


def test_a_put_is_seen_by_another_connection(plane: Plane) -> None:
    block = made(1)
    plane.connect().put(ROOT, [block], soon())
    assert fetch(plane.connect(), [block[0].hash]) == ([OK], {0: block})


def test_holes_are_data(plane: Plane) -> None:
    blocks = made_many(6)
    plane.store.fill(blocks[::2])
    client = plane.connect()
    statuses, fetched = fetch(client, hashes_of(blocks))
    assert statuses == [OK, MISSING] * 3
    assert fetched == {at: blocks[at] for at in (0, 2, 4)}
    assert client.has(ROOT, hashes_of(blocks), False, soon()) == [True, False] * 3


def test_a_block_of_another_root_is_missing(plane: Plane) -> None:
    block = made(1)
    plane.store.fill([block])
    client = plane.connect()
    assert fetch(client, [block[0].hash], root=OTHER_ROOT) == ([MISSING], {})
    assert client.has(OTHER_ROOT, [block[0].hash], False, soon()) == [False]
    assert client.erase(OTHER_ROOT, [block[0].hash], soon()) == 0
    assert fetch(client, [block[0].hash])[0] == [OK]


def test_a_store_that_mixes_up_blocks_gives_nobody_anothers(plane: Plane) -> None:
    mine, theirs, another = made(1), made(1, root=OTHER_ROOT), made(2)
    client = plane.connect()
    for wrong in (theirs, another, (mine[0], mine[1][:-1])):
        plane.store.finds = lambda root, name, wrong=wrong: wrong  # type: ignore[misc]
        assert fetch(client, [mine[0].hash]) == ([MISSING], {})


def test_exact_leaves_out_lossy_blocks(plane: Plane) -> None:
    blocks = [made(1), made(2, lossy=True)]
    plane.store.fill(blocks)
    client = plane.connect()
    assert fetch(client, hashes_of(blocks), exact=True)[0] == [OK, MISSING]
    assert fetch(client, hashes_of(blocks))[0] == [OK, OK]
    assert client.has(ROOT, hashes_of(blocks), True, soon()) == [True, False]


def test_a_lossy_block_gives_way_to_an_exact_one_only(plane: Plane) -> None:
    client = plane.connect()
    assert client.put(ROOT, [made(1, lossy=True)], soon()) == [PutStatus.STORED]
    assert client.put(ROOT, [made(1, lossy=True)], soon()) == [PutStatus.PRESENT]
    assert client.put(ROOT, [made(1)], soon()) == [PutStatus.STORED]
    assert client.put(ROOT, [made(1, lossy=True)], soon()) == [PutStatus.PRESENT]


def test_what_is_there_is_not_sent_again(plane: Plane) -> None:
    client, blocks = plane.connect(), made_many(4, 1_000_000)
    client.put(ROOT, blocks[:3], soon())
    before = plane.server.counters.bytes_in
    assert client.put(ROOT, blocks, soon()) == [PutStatus.PRESENT] * 3 + [PutStatus.STORED]
    assert plane.server.counters.bytes_in - before < 1_010_000


def test_a_store_may_refuse_before_and_after(plane: Plane) -> None:
    client, blocks = plane.connect(), made_many(6)
    plane.store.wants = lambda header: header.hash[-1] not in (1, 2)
    plane.store.takes = lambda header: header.hash[-1] != 4
    assert client.put(ROOT, blocks, soon()) == [
        PutStatus.STORED,
        PutStatus.REFUSED,
        PutStatus.REFUSED,
        PutStatus.STORED,
        PutStatus.REFUSED,
        PutStatus.STORED,
    ]
    assert client.has(ROOT, hashes_of(blocks), False, soon()) == [True, False, False, True, False, True]


def test_a_wrong_checksum_is_found_by_whoever_receives(plane: Plane) -> None:
    blocks = made_many(3)
    damaged = [blocks[0], (replace(blocks[1][0], checksum=blocks[1][0].checksum ^ 1), blocks[1][1]), blocks[2]]
    client = plane.connect()
    assert client.put(ROOT, damaged, soon()) == [PutStatus.STORED, PutStatus.CORRUPT, PutStatus.STORED]
    assert plane.server.counters.checksum_failures == 1
    assert plane.store.abandoned == 1
    plane.store.fill(damaged)
    statuses, fetched = fetch(client, hashes_of(blocks))
    assert statuses == [OK, CORRUPT, OK]
    assert fetched == {0: blocks[0], 2: blocks[2]}


def test_a_checksum_binds_every_field(plane: Plane) -> None:
    header, payload = made(1)
    changed = [
        replace(header, parent=b"x" * 16),
        replace(header, ids=bytes(60)),
        replace(header, format=b"x" * 16),
        replace(header, raw_bytes=header.raw_bytes + 1),
        replace(header, lossy=True),
        replace(header, snr_db=44.0),
    ]
    client = plane.connect()
    for lie in changed:
        plane.store.fill([(lie, payload)])
        assert fetch(client, [header.hash])[0] == [CORRUPT]
        plane.store.blocks.clear()
        assert client.put(ROOT, [(lie, payload)], soon()) == [PutStatus.CORRUPT]


def test_a_sink_may_skip(plane: Plane) -> None:
    blocks, fetched = made_many(5, 300_000), Fetched()
    plane.store.fill(blocks)
    client = plane.connect()

    def sink(at: int, header: BlockHeader) -> memoryview | None:
        return None if at in (1, 4) else fetched.sink(at, header)

    statuses = client.get(ROOT, hashes_of(blocks), False, sink, fetched.on_block, soon())
    assert statuses == [OK, REFUSED, OK, OK, REFUSED]
    assert fetched.blocks == {at: blocks[at] for at in (0, 2, 3)}


@pytest.mark.parametrize("last", [0, 3, 39])
def test_who_wants_no_more_gets_no_more(plane: Plane, last: int) -> None:
    blocks, fetched = made_many(40, 50_000), Fetched()
    plane.store.fill(blocks)
    client = plane.connect()

    def on_block(at: int, header: BlockHeader, payload: memoryview) -> bool:
        return fetched.on_block(at, header, payload) and at < last

    statuses = client.get(ROOT, hashes_of(blocks), False, fetched.sink, on_block, soon())
    assert statuses == [OK] * last + [REFUSED] * (40 - last)
    assert list(fetched.blocks) == list(range(last + 1))
    assert not client.closed
    assert fetch(client, hashes_of(blocks))[0] == [OK] * 40


def test_thousands_of_blocks_in_one_request(plane: Plane) -> None:
    blocks = made_many(5_000, 512)
    client = plane.connect()
    assert client.put(ROOT, blocks, soon()) == [PutStatus.STORED] * 5_000
    assert all(client.has(ROOT, hashes_of(blocks), True, soon()))
    statuses, fetched = fetch(client, hashes_of(blocks))
    assert statuses == [OK] * 5_000
    assert [fetched[at] for at in range(5_000)] == blocks
    assert client.erase(ROOT, hashes_of(blocks), soon()) == 5_000
    assert fetch(client, hashes_of(blocks))[0] == [MISSING] * 5_000


def test_sizes_of_every_kind(plane: Plane) -> None:
    sizes = [1, 2, 4095, 65_537, 1_000_003, 9_000_001]
    blocks = [made(at, size) for at, size in enumerate(sizes)]
    client = plane.connect()
    assert client.put(ROOT, blocks, soon()) == [PutStatus.STORED] * len(sizes)
    statuses, fetched = fetch(client, hashes_of(blocks))
    assert statuses == [OK] * len(sizes)
    assert [fetched[at] for at in range(len(sizes))] == blocks


def test_no_more_than_a_batch_is_held(start: Start) -> None:
    plane = start("unix", ServingLimits(batch_bytes=100_000))
    blocks = made_many(64, 30_000)
    most = 0

    def wants(header: BlockHeader) -> bool:
        nonlocal most
        most = max(most, plane.store.reserved)
        return True

    plane.store.wants = wants
    client = plane.connect()
    assert client.put(ROOT, blocks, soon()) == [PutStatus.STORED] * 64
    assert most == 2  # when the third of a batch is asked about
    assert fetch(client, hashes_of(blocks))[0] == [OK] * 64
    assert plane.store.most_blocks_lent == 4  # the first batch, before their size is known


def test_the_same_block_twice_in_a_request(plane: Plane) -> None:
    block = made(1)
    client = plane.connect()
    assert PutStatus.STORED in client.put(ROOT, [block, block], soon())
    statuses, fetched = fetch(client, [block[0].hash] * 3)
    assert statuses == [OK] * 3
    assert fetched == dict.fromkeys(range(3), block)


def test_nothing_asked_nothing_answered(plane: Plane) -> None:
    client = plane.connect()
    assert fetch(client, []) == ([], {})
    assert client.put(ROOT, [], soon()) == []
    assert client.has(ROOT, [], False, soon()) == []
    assert client.erase(ROOT, [], soon()) == 0


def test_echo_moves_bytes(plane: Plane) -> None:
    client = plane.connect()
    for nbytes in (0, 1, 300_000, MAX_ECHO_BYTES):
        before = plane.server.counters.bytes_out
        assert client.echo(nbytes, soon()) > 0
        wait_until(lambda before=before, nbytes=nbytes: plane.server.counters.bytes_out - before >= nbytes)  # type: ignore[misc]
    with pytest.raises(InvalidRequest):
        client.echo(MAX_ECHO_BYTES + 1, soon())
    assert not client.closed


def test_what_a_caller_gets_wrong_is_said_before_anything_is_sent(plane: Plane) -> None:
    client, (header, payload) = plane.connect(), made(1)
    with pytest.raises(InvalidRequest):
        client.has(ROOT, [bytes(16)] * (MAX_BLOCKS + 1), False, soon())
    with pytest.raises(InvalidRequest):
        client.has(b"short", [bytes(16)], False, soon())
    with pytest.raises(InvalidRequest):
        client.has(ROOT, [bytes(15)], False, soon())
    with pytest.raises(InvalidRequest):
        client.put(OTHER_ROOT, [(header, payload)], soon())
    with pytest.raises(InvalidRequest):
        client.put(ROOT, [(header, payload[:-1])], soon())
    with pytest.raises(PeerTimeout):
        client.has(ROOT, [header.hash], False, soon(-1))
    assert client.has(ROOT, [header.hash], False, soon()) == [False]


def test_a_sink_of_the_wrong_size_closes_the_connection(plane: Plane) -> None:
    plane.store.fill([made(1)])
    client = plane.connect()
    with pytest.raises(InvalidRequest):
        client.get(ROOT, [made(1)[0].hash], False, lambda at, header: memoryview(bytearray(5)), lambda *_: True, soon())
    assert client.closed


def test_more_than_a_server_allows(start: Start) -> None:
    plane = start("tcp", ServingLimits(request_blocks=10, request_bytes=50_000))
    blocks = made_many(20)
    for ask in (
        lambda: fetch(plane.connect(), hashes_of(blocks)),
        lambda: plane.connect().has(ROOT, hashes_of(blocks), False, soon()),
        lambda: plane.connect().erase(ROOT, hashes_of(blocks), soon()),
        lambda: plane.connect().put(ROOT, blocks, soon()),
        lambda: plane.connect().put(ROOT, [made(1, 50_001)], soon()),
    ):
        with pytest.raises(ProtocolError) as refused:
            ask()
        assert refused.value.reason == "too_large"
    assert plane.server.counters.malformed == 5
    plane.store.fill(made_many(10, 20_000))
    statuses, _ = fetch(plane.connect(), hashes_of(blocks[:10]))
    assert statuses == [OK] * 4 + [MISSING] * 6  # the batch that passed the limit is the last


def test_a_store_that_fails_ends_that_connection_only(plane: Plane) -> None:
    other = plane.connect()

    def fail(*_: object) -> bool:
        raise RuntimeError("the store's own fault")

    client, block = plane.connect(), made(1)
    plane.store.wants = fail
    with pytest.raises(ProtocolError, match="the store failed") as failed:
        client.put(ROOT, [block], soon())
    assert failed.value.reason == "store"
    assert client.closed
    plane.store.wants = lambda header: True
    assert other.put(ROOT, [block], soon()) == [PutStatus.STORED]
    assert plane.server.counters.store_failures == 1


def test_many_connections_at_once(plane: Plane) -> None:
    shared = made_many(8, 200_000)
    plane.store.fill(shared)
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            client = plane.connect()
            own = [made(1000 * (number + 1) + at, 100_000) for at in range(8)]
            for _ in range(3):
                assert set(client.put(ROOT, own, soon())) <= {PutStatus.STORED, PutStatus.PRESENT}
                statuses, fetched = fetch(client, hashes_of([*own, *shared]))
                assert statuses == [OK] * 16
                assert list(fetched.values()) == [*own, *shared]
        except BaseException as error:  # noqa: BLE001 (told by the test's own thread)
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert failures == []
    assert plane.server.counters.connections == 8
