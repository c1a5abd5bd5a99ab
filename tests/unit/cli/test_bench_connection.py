"""Connections to servers that end them in every way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import httpx
import pytest

from kvfleet.cli.bench.answer_stream import AnswerStream, Meter
from kvfleet.cli.bench.connection import ConnectionBroken, StreamConnection, StreamConnections

EVENT = b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n'
DONE = b"data: [DONE]\n\n"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (
    len(EVENT + DONE),
    EVENT + DONE,
)
CLOSING = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"


@asynccontextmanager
async def serving(*answers: bytes, then_close: Sequence[bool] = ()) -> AsyncIterator[StreamConnections]:
    """The n-th request gets the n-th answer; the connection ends where `then_close` says, or the answers end."""
    left = list(zip(answers, then_close or [True] * len(answers), strict=True))

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while left:
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(int(head.lower().partition(b"content-length:")[2].split(b"\r\n", 1)[0]))
                answer, closes = left.pop(0)
                writer.write(answer)
                if closes:
                    break
        except asyncio.IncompleteReadError:
            pass
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        connections = StreamConnections(httpx.URL(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/base"), "key")
        yield connections
        connections.close()
    finally:
        server.close()
        await server.wait_closed()


async def ask(connections: StreamConnections) -> tuple[StreamConnection, AnswerStream]:
    into = AnswerStream(Meter())
    connection = await connections.post("/v1/x", b"{}", into)
    connections.give_back(connection)
    return connection, into


async def test_a_body_without_a_length_ends_with_its_connection() -> None:
    async with serving(CLOSING + EVENT + DONE) as connections:
        connection, into = await ask(connections)
    assert (connection.status, into.texts, into.done) == (200, ["a"], True)


@pytest.mark.parametrize("answer", [CLOSING + EVENT, CHUNKED[:-30], b"HTTP/1.1 200 OK\r\n", b"", b"ssh-2.0\r\n\r\n"])
async def test_what_ends_too_soon_or_is_no_http_is_broken(answer: bytes) -> None:
    async with serving(answer) as connections:
        with pytest.raises(ConnectionBroken):
            await ask(connections)


@pytest.mark.parametrize(
    ("body", "line"),
    [
        (b'{"error": {"message": "slow down"}}', "slow down"),
        (b'{"error": "busy"}', "busy"),
        (b"<h1>Bad Gateway</h1>", "<h1>Bad Gateway</h1>"),
        (b"", ""),
    ],
)
async def test_a_refusal_is_told_whatever_its_form(body: bytes, line: str) -> None:
    async with serving(b"HTTP/1.1 502 Bad Gateway\r\nConnection: close\r\n\r\n" + body) as connections:
        connection, into = await ask(connections)
    assert (connection.status, connection.refusal, into.times) == (502, line, [])


async def test_a_connection_is_used_again_and_one_that_the_server_let_go_is_not() -> None:
    async with serving(CHUNKED, CHUNKED, CHUNKED, then_close=(False, True, True)) as connections:
        first, _ = await ask(connections)
        second, _ = await ask(connections)
        assert first is second
        await asyncio.sleep(0.05)
        third, into = await ask(connections)
    assert third is not first
    assert into.done


async def test_one_that_it_lets_go_at_that_moment_is_asked_for_anew() -> None:
    async with serving(CHUNKED, b"", CHUNKED, then_close=(False, True, True)) as connections:
        first, _ = await ask(connections)
        second, into = await ask(connections)
    assert second is not first
    assert into.texts == ["a"]


async def test_the_request_names_the_path_below_the_base_and_the_key() -> None:
    request = StreamConnections(httpx.URL("http://h:81/base/"), "key").request("/v1/x", b"{}")
    assert request.startswith(b"POST /base/v1/x HTTP/1.1\r\nHost: h:81\r\n")
    assert b"Authorization: Bearer key\r\n" in request
    assert b"Content-Length: 2\r\n" in request
    assert "key" not in repr(StreamConnections(httpx.URL("http://h"), "key"))
