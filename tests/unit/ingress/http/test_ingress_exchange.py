"""One HTTP exchange: a client that stays and does not read gives its place up in the end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvfleet.ingress.http import exchange as http_exchange
from kvfleet.ingress.http.exchange import Exchange
from kvproto.errors import Cancelled
from tests.support.waiting import LIMIT_S


async def test_a_client_that_does_not_read_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_exchange, "SEND_LIMIT_S", 0.05)
    sent: list[Any] = []

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()  # the socket's buffers are full

    exchange = Exchange({"type": "http", "headers": []}, receive, send, "r1")
    await exchange.start_events()
    with pytest.raises(Cancelled, match="did not read"):
        await asyncio.wait_for(exchange.write(b"data: x\n\n"), LIMIT_S)
    assert exchange.gone
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]


async def test_a_send_that_waits_for_a_while_is_one_send(monkeypatch: pytest.MonkeyPatch) -> None:
    """No timer is begun for one that does not wait; one that does goes on where it was, and is cancelled as any."""
    timers: list[float] = []
    timeout = asyncio.timeout

    def counting(seconds: float) -> Any:
        timers.append(seconds)
        return timeout(seconds)

    monkeypatch.setattr(asyncio, "timeout", counting)
    sent: list[bytes] = []
    drained = asyncio.Event()
    drained.set()

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        await asyncio.sleep(0)
        await drained.wait()
        sent.append(message.get("body", b""))

    async def quick(message: Any) -> None:
        sent.append(message.get("body", b""))

    exchange = Exchange({"type": "http", "headers": []}, receive, quick, "r1")
    await exchange.start_events()
    await exchange.write(b"quick")
    assert not timers
    exchange = Exchange({"type": "http", "headers": []}, receive, send, "r1")
    await exchange.write(b"slow")
    assert timers == [http_exchange.SEND_LIMIT_S]
    drained.clear()
    stuck = asyncio.create_task(exchange.write(b"never"))
    await asyncio.sleep(0)
    stuck.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stuck
    assert sent[1:] == [b"quick", b"slow"]
    assert not exchange.gone
