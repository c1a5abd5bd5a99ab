"""A proxy that mangles messages: what it does to real connections of nats-py, and to its parser's every input."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvproto.connection import Connection, Message
from tests.support.nats_proxy import EVENTS, FRAMES, Mangling, NatsProxy, ProtocolBroken, ServerParser
from tests.support.waiting import LIMIT_S, until


class Reader:
    """A connection through the proxy that notes what it hears."""

    def __init__(self, proxy: NatsProxy, connection: Connection, writer: Connection) -> None:
        self.proxy, self.connection, self.writer = proxy, connection, writer
        self.heard: list[int] = []

    async def hear(self, message: Message) -> None:
        self.heard.append(int(message.data))

    async def send(self, subject: str, numbers: range) -> None:
        for number in numbers:
            await self.writer.publish(subject, b"%d" % number)
        await self.writer.synced()

    async def until(self, count: int) -> None:
        await until(lambda: len(self.heard) >= count)


@pytest.fixture
async def reader(nats_url: str, namespace: str) -> AsyncIterator[Reader]:
    async with NatsProxy(nats_url) as proxy:
        prefix = f"_ing.{namespace}"
        connection = await Connection.open(proxy.url, name="reader", inbox_prefix=prefix)
        writer = await Connection.open(nats_url, name="writer", inbox_prefix="_wrk.writer")
        one = Reader(proxy, connection, writer)
        await connection.subscribe(f"{prefix}.b", one.hear)
        await connection.subscribe(f"{namespace}.plain", one.hear)
        await connection.synced()
        try:
            yield one
        finally:
            await connection.close()
            await writer.close()


async def test_everything_passes_in_order(reader: Reader) -> None:
    subject = f"{reader.connection.inbox_prefix}.b"
    await reader.send(subject, range(500))
    await reader.until(500)
    assert reader.heard == list(range(500))
    await reader.writer.publish(subject, b"%900000d" % 7)
    await reader.until(501)
    assert not reader.proxy.counts


async def test_what_is_mangled(reader: Reader) -> None:
    subject = f"{reader.connection.inbox_prefix}.b"
    reader.proxy.mangling = Mangling(lost=0.5, seed=1)
    await reader.send(subject, range(200))
    await until(lambda: len(reader.heard) + reader.proxy.counts["lost"] == 200)
    lost = reader.proxy.counts["lost"]
    assert 50 < lost < 150
    assert len(reader.heard) == 200 - lost
    reader.heard.clear()
    reader.proxy.mangling = Mangling(duplicated=1.0)
    await reader.send(subject, range(20))
    await reader.until(40)
    assert sorted(reader.heard) == sorted([*range(20), *range(20)])
    reader.heard.clear()
    reader.proxy.mangling = Mangling(reordered=0.4, seed=2)
    await reader.send(subject, range(100))
    await reader.until(100)
    assert sorted(reader.heard) == list(range(100))
    assert reader.heard != list(range(100))
    reader.heard.clear()
    reader.proxy.mangling = Mangling(reordered=1.0)
    await reader.send(subject, range(1))
    await reader.until(1), "the last one is not held for ever"
    reader.heard.clear()
    reader.proxy.mangling = Mangling(stale=1.0, seed=3)
    await reader.send(subject, range(1000, 1010))
    await reader.until(11)
    assert reader.heard[:10] == list(range(1000, 1010))
    reader.proxy.mangling = None


async def test_other_subjects_are_left_alone(reader: Reader, namespace: str) -> None:
    reader.proxy.mangling = Mangling(lost=1.0)
    await reader.send(f"{namespace}.plain", range(50))
    await reader.until(50)
    assert not reader.proxy.counts["passed"]


async def test_a_partition_holds_everything_and_ends_nothing(reader: Reader) -> None:
    subject = f"{reader.connection.inbox_prefix}.b"
    reader.proxy.partition()
    await reader.send(subject, range(10))
    await asyncio.sleep(0.3)  # nothing comes
    assert reader.heard == []
    assert reader.connection.is_connected
    reader.proxy.heal()
    await reader.until(10)
    assert reader.heard == list(range(10))
    assert reader.connection.reconnects_total == 0


async def test_cut_connections_come_back(reader: Reader) -> None:
    reader.proxy.cut()
    async with asyncio.timeout(LIMIT_S):
        while not reader.connection.reconnects_total:
            await asyncio.sleep(0.02)
    await reader.connection.synced()
    await reader.send(f"{reader.connection.inbox_prefix}.b", range(5))
    await reader.until(5)
    assert reader.proxy.links == 1


async def test_a_server_that_is_not_there() -> None:
    async with NatsProxy("nats://127.0.0.1:1") as proxy:
        read, write = await asyncio.open_connection("127.0.0.1", int(proxy.url.rsplit(":", 1)[1]))
        with contextlib.suppress(ConnectionResetError):
            assert await asyncio.wait_for(read.read(), LIMIT_S) == b""
        write.close()


async def test_nothing_is_left(nats_url: str) -> None:
    before = len(asyncio.all_tasks())
    async with NatsProxy(nats_url) as proxy:
        proxy.partition()
        read, write = await asyncio.open_connection("127.0.0.1", int(proxy.url.rsplit(":", 1)[1]))
        await asyncio.sleep(0.05)
        proxy.heal()
        info = await asyncio.wait_for(read.readline(), LIMIT_S)
        assert json.loads(info[5:])["server_id"]
        write.close()
    assert len(asyncio.all_tasks()) == before


def test_subjects() -> None:
    frames = Mangling(FRAMES).pattern
    for yes in ("_ing.i0.b", "_ing.i0.r.abc.0", "_prd.public.x1.b", "_prd.public.x1.r.abc.12"):
        assert frames.match(yes.encode()), yes
    for no in ("_ing.i0.xyz", "_ing.b", "_ing.i0.b.x", "_prd.public.b", "kvf.events.w0", "x_ing.i0.b", "_ing.i0.r"):
        assert not frames.match(no.encode()), no
    assert Mangling(EVENTS).pattern.match(b"kvf.events.w0")


OPERATIONS = st.one_of(
    st.just((b"", b"PING\r\n")),
    st.just((b"", b"+OK\r\n")),
    st.just((b"", b'INFO {"server_id":"x"}\r\n')),
    st.builds(lambda data: (b"a.b", b"MSG a.b 1 %d\r\n%b\r\n" % (len(data), data)), st.binary(max_size=60)),
    st.builds(lambda data: (b"a", b"MSG a 1 reply.to %d\r\n%b\r\n" % (len(data), data)), st.binary(max_size=60)),
    st.builds(
        lambda data: (b"h", b"HMSG h 9 12 %d\r\nNATS/1.0\r\n\r\n%b\r\n" % (12 + len(data), data)),
        st.binary(max_size=60),
    ),
)


@given(operations=st.lists(OPERATIONS, max_size=12), cuts=st.lists(st.integers(1, 50), max_size=40))
def test_the_parser_finds_the_same_however_it_is_cut(operations: list[tuple[bytes, bytes]], cuts: list[int]) -> None:
    stream = b"".join(data for _, data in operations)
    parser, found, at = ServerParser(), [], 0
    for cut in [*cuts, len(stream)]:
        found += parser.feed(stream[at : at + cut])
        at += cut
    found += parser.feed(stream[at:])
    assert found == operations


@pytest.mark.parametrize("data", [b"MSG a\r\n", b"MSG a 1 x\r\n", b"HMSG \r\n", b"MSG a 1 2 3 4 5\r\n", b"x" * 70_000])
def test_what_is_not_nats(data: bytes) -> None:
    with pytest.raises(ProtocolBroken):
        ServerParser().feed(data)
