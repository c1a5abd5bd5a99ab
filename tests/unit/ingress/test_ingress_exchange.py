"""One HTTP exchange: a client that stays and does not read gives its place up in the end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvproto.errors import Cancelled
from services.ingress import http_exchange
from services.ingress.http_exchange import Exchange


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
        await asyncio.wait_for(exchange.write(b"data: x\n\n"), 2)
    assert exchange.gone
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
