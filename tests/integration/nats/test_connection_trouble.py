"""One connection and a server that hangs, wakes, refuses it for a while, or is one of several."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvproto.connection import Connection, Message
from kvproto.errors import Unavailable, WorkerLost
from kvproto.testing.fixtures import ProcessFactory
from kvproto.testing.nats_process import NatsProcess
from tests.support.waiting import LIMIT_S, until


@pytest.fixture
def server(nats_process: ProcessFactory) -> NatsProcess:
    return nats_process()


@pytest.fixture
async def connection(server: NatsProcess) -> AsyncIterator[Connection]:
    connection = await Connection.open(server.url, name="trouble", inbox_prefix="_adm.trouble")
    yield connection
    server.wake()
    await connection.close()


async def test_a_server_that_takes_nothing_holds_no_sender_up(server: NatsProcess, connection: Connection) -> None:
    """nats-py would wait a second for each message, and buffer without limit."""
    server.hang()
    began, refused = time.monotonic(), 0
    for _ in range(600):  # 36 MB; what may wait and what sockets hold is less than half of it
        try:
            await connection.publish("x", bytes(60_000))
        except Unavailable:
            refused += 1
    assert time.monotonic() - began < 5
    assert refused > 200
    assert connection.raw.pending_data_size < 12 * 1024 * 1024
    server.wake()
    await until(lambda: connection.raw.pending_data_size < 1024)
    await connection.publish("x", b"taken again")


async def test_a_late_answer_to_a_ping_does_no_harm(server: NatsProcess, connection: Connection) -> None:
    """nats-py's flush() cancels what waits, and its reader dies of the answer: connected, and deaf."""
    heard: list[bytes] = []

    async def on_message(message: Message) -> None:
        heard.append(message.data)

    await connection.subscribe("x", on_message)
    await connection.synced()
    server.hang()
    await connection.synced(1.0)
    await until(lambda: connection.is_silent)
    server.wake()
    await until(lambda: not connection.is_silent)
    await connection.publish("x", b"1")
    await until(lambda: heard)
    assert connection.reconnects_total == 0


async def test_nothing_is_lost_where_a_subscription_is_drained(server: NatsProcess, connection: Connection) -> None:
    """The server knows of it when it is: who asks then hears at once that nobody listens."""
    other = await Connection.open(server.url, name="asker", inbox_prefix="_ing.asker")

    async def answer(message: Message) -> None:
        await connection.publish(message.reply, b"here")

    for _ in range(10):
        subscription = await connection.subscribe("asked", answer, queue="q")
        await connection.synced()
        assert (await other.request("asked", b"", LIMIT_S)).data == b"here"
        for _ in range(7):
            await connection.publish("nobody", bytes(1_000_000))
        await subscription.drain()
        with pytest.raises(WorkerLost):
            await other.request("asked", b"", LIMIT_S)
    await other.close()


async def test_it_is_away_until_all_that_a_reconnect_does_is_done(connection: Connection) -> None:
    """nats-py says "connected" while it still subscribes anew."""
    assert connection.is_settled(60), "never away"
    await connection._on_disconnected()
    assert connection.is_connected
    assert connection.connected_for_s == 0.0
    assert not connection.is_settled(0.0)
    await connection._on_reconnected()
    await asyncio.sleep(0.01)
    assert connection.is_settled(0.005)
    assert not connection.is_settled(60)


async def test_silence_is_told_from_quiet(server: NatsProcess, connection: Connection) -> None:
    """Nobody sends anything: the server is asked now and then, and answers."""
    for _ in range(15):
        await asyncio.sleep(0.2)
        assert not connection.is_silent
    server.kill()
    await until(lambda: not connection.is_connected)
    assert not connection.is_silent, "down is another thing"
    server.start()
    await until(lambda: connection.is_connected)


async def test_credentials_refused_for_a_while_are_not_final(nats_process: ProcessFactory, tmp_path: Path) -> None:
    """Restarted with other passwords, as in a rollout, and with the right ones again."""
    config = tmp_path / "auth.conf"
    config.write_text('authorization { user: a, password: "right" }\n')
    server = nats_process(config)
    credentials = {"user": "a", "password": "right"}
    connection = await Connection.open(server.url, name="x", inbox_prefix="_adm.x", **credentials)
    closed = asyncio.Event()
    connection.on_closed = closed.set
    try:
        config.write_text('authorization { user: a, password: "other" }\n')
        server.restart()
        await asyncio.sleep(2.0)
        assert not connection.is_connected
        assert not closed.is_set()
        config.write_text('authorization { user: a, password: "right" }\n')
        server.restart()
        await until(lambda: connection.is_connected)
        assert not closed.is_set()
    finally:
        await connection.close()


async def test_the_first_server_that_answers_is_taken(server: NatsProcess) -> None:
    """Of several, given as services are given them."""
    urls = f"nats://127.0.0.1:1, {server.url}"
    connection = await Connection.open(urls, name="x", inbox_prefix="_adm.x")
    assert connection.is_connected
    await connection.close()
    server.stop()
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1, "):
        await Connection.open(urls, name="x", inbox_prefix="_adm.x", connect_timeout_s=1.0)


async def test_a_cancelled_waiter_for_the_same_end_does_not_cancel_who_closes(server: NatsProcess) -> None:
    """A transport's waiters share one future: whoever is cancelled with it cancels the others' wait."""
    connection = await Connection.open(server.url, name="trouble", inbox_prefix="_adm.trouble")
    transport = connection.raw._transport
    other = asyncio.create_task(transport.wait_closed())
    await asyncio.sleep(0)
    other.cancel()
    await asyncio.wait([other])
    await connection.close()
    assert connection.raw.is_closed


async def test_who_closes_can_be_cancelled(server: NatsProcess) -> None:
    connection = await Connection.open(server.url, name="trouble", inbox_prefix="_adm.trouble")
    server.hang()
    closing = asyncio.create_task(connection.close(timeout_s=LIMIT_S))
    await asyncio.sleep(0.05)
    closing.cancel()
    server.wake()
    with pytest.raises(asyncio.CancelledError):
        await closing
    await connection.raw.close()
