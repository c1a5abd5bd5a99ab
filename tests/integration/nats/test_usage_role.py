"""deploy/nats: ingresses hear one another's use of limits; who may not is none the worse for it."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import pytest

from kvfleet.ingress.limits.callers import Caller, KeyLimits
from kvfleet.ingress.limits.limiter import Limiter
from kvfleet.ingress.limits.shared_usage import SharedUsage
from kvfleet.ingress.limits.shared_usage_exchange import UsageExchange
from kvproto.connection import Connection
from kvproto.subjects import Subjects
from tests.support.waiting import LIMIT_S

CALLER = Caller("k", "t", limits=KeyLimits(requests_per_minute=600))


async def exchange(connection: Connection, name: str) -> tuple[UsageExchange, Limiter]:
    limiter, now = Limiter(), asyncio.get_running_loop().time
    usage = SharedUsage(limiter, name, "e", now())
    one = UsageExchange(connection, Subjects().ingress_usage(), usage, now, time.time)
    await one.start()
    await connection.synced()
    return one, limiter


async def test_of_all_roles_ingresses_alone_share_what_is_used(
    connect_as: Any, caplog: pytest.LogCaptureFixture
) -> None:
    one, limiter = await exchange(await connect_as("ingress"), "i1")
    two, heard = await exchange(await connect_as("ingress"), "i2")
    limiter.admit(CALLER, asyncio.get_running_loop().time(), time.time())
    with caplog.at_level(logging.WARNING):
        connection = await connect_as("vault")
        refused, refuseds = await exchange(connection, "i3")
        refuseds.admit(CALLER, asyncio.get_running_loop().time(), time.time())
        await refused.turn()
        await connection.synced()
    await one.turn()
    async with asyncio.timeout(LIMIT_S):
        while not two.received_total:
            await asyncio.sleep(0.01)
    assert [account.running_elsewhere for account in heard.every()] == [1]
    assert connection.is_connected
    assert refused.received_total == 0
    assert "kvf.ingress.usage" in caplog.text, "the log of an ingress whose server has older roles says why"
    for each in (one, two, refused):
        await each.stop()
