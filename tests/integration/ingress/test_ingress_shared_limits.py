"""Limits hold for all ingresses of a fleet together: two of them, one real NATS server between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from ingress_process import IngressProcess
from ingress_rig import Serve, Served, serve, until
from scripted_worker import ScriptedWorker
from test_ingress_limits_http import BODY, COMPLETION, ask, keys_of

from kvfleet.ingress.limits import shared_usage
from kvfleet.ingress.limits.limiter import Account
from kvproto.connection import Connection, Message
from kvproto.subjects import Subjects
from kvproto.testing.nats_process import free_ports
from tests.support.nats_proxy import NatsProxy
from tests.support.waiting import LIMIT_S


class Ear:
    """All that ingresses tell one another."""

    def __init__(self) -> None:
        self.reports = 0

    async def hear(self, message: Message) -> None:
        self.reports += 1


@pytest.fixture
async def anybody(nats_url: str, fleet_buckets: Subjects) -> AsyncIterator[tuple[Connection, Ear, str]]:
    """Hears and says what it likes on the ingresses' subject."""
    connection, ear = await Connection.open(nats_url, name="ear", inbox_prefix="_ing.ear"), Ear()
    subject = fleet_buckets.ingress_usage()
    await connection.subscribe(subject, ear.hear)
    await connection.synced()
    yield connection, ear, subject
    await connection.close()


def account_of(served: Served, name: str = "") -> Account:
    """The tenant's, or that of a key."""
    return served.ingress.admission.limiter.find(("t", name)) or Account(("t", name))


async def metric(served: Served, name: str) -> float:
    text = (await served.http.get("/metrics", headers={"x-api-key": "root"})).text
    (line,) = (line for line in text.splitlines() if line.startswith(f"kvfleet_ingress_{name} "))
    return float(line.split()[1])


async def test_limits_hold_across_two_ingresses(serving: Serve, worker: ScriptedWorker) -> None:
    tenants = {"t": {"max_concurrent": 2}}
    keys = keys_of(
        tenants=tenants,
        a={},
        b={},
        fast={"requests_per_minute": 60, "tokens_per_minute": 10_000, "tokens_per_day": 20_000},
        root={"admin": True},
    )
    one, two = await asyncio.gather(serving(keys=keys), serving(keys=keys))

    # At once: what runs there counts here, whichever key of the tenant it is of, and no longer than it runs.
    worker.held.clear()
    running = [asyncio.create_task(ask(each, key)) for each, key in ((one, "a"), (two, "b"))]
    await until(lambda: account_of(one).running_elsewhere == account_of(two).running_elsewhere == 1)
    for each in (one, two):
        refused = await ask(each, "a")
        assert refused.status_code == 429
        assert "at most 2 requests at once with tenant t" in refused.json()["error"]["message"]
    worker.held.set()
    assert [answer.status_code for answer in await asyncio.gather(*running)] == [200, 200]
    await until(lambda: account_of(one).running_elsewhere == account_of(two).running_elsewhere == 0)
    assert (await ask(two, "a")).status_code == 200

    # A minute's: the burst of 10 is one, and an ingress that was not asked yet tells what is left of it.
    answers = [await ask(one, "fast") for _ in range(10)]
    assert [answer.status_code for answer in answers] == [200] * 10
    await until(lambda: account_of(two, "fast").day_tokens == 10 * 44)
    refused = await ask(two, "fast")
    assert (refused.status_code, refused.headers["x-ratelimit-remaining-requests"]) == (429, "0")
    assert "60 requests per minute with this API key" in refused.json()["error"]["message"]
    assert 9_400 <= int(refused.headers["x-ratelimit-remaining-tokens"]) <= 9_800, "440 gone, and some have come back"
    assert await metric(two, "counting_ingresses") == 1
    assert await metric(two, "heard_usage_reports_total") >= 3
    for each in (one, two):
        each.ingress.usage.check_integrity()
        each.ingress.admission.check_integrity()


async def test_what_ran_at_a_killed_ingress_counts_no_longer(
    serving: Serve,
    worker: ScriptedWorker,
    nats_url: str,
    fleet_buckets: Subjects,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared_usage, "SILENT_S", 2.0)
    keys = keys_of(a={"max_concurrent": 1, "requests_per_minute": 600})
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    process = IngressProcess(nats_url, fleet_buckets, tmp_path, port=port, host="127.0.0.1", api_keys=keys)
    try:
        living = await serving(keys=keys)
        await process.ready(url)
        worker.held.clear()
        async with httpx.AsyncClient(timeout=LIMIT_S, trust_env=False) as http:
            running = asyncio.create_task(http.post(url + COMPLETION, json=BODY, headers={"x-api-key": "a"}))
            await until(lambda: account_of(living, "a").running_elsewhere)
            assert (await ask(living, "a")).status_code == 429
            process.kill()
            with pytest.raises(httpx.TransportError):
                await running
        assert (await ask(living, "a")).status_code == 429, "nobody knows yet"
        worker.held.set()
        await until(lambda: not account_of(living, "a").running_elsewhere)
        assert (await ask(living, "a")).status_code == 200
        assert living.ingress.usage.peers == 0
    finally:
        await process.stop()


async def test_nothing_is_published_without_limits(
    serving: Serve, worker: ScriptedWorker, anybody: tuple[Connection, Ear, str]
) -> None:
    _, ear, _ = anybody
    open_to_all, keyed = await asyncio.gather(serving(), serving(keys=keys_of(a={"max_tokens": 50})))
    assert (await open_to_all.http.post(COMPLETION, json=BODY)).status_code == 200
    assert (await ask(keyed, "a")).status_code == 200
    for each in (open_to_all, keyed):
        await each.ingress.usage_exchange.turn()
        await each.client.connection.synced()
    assert ear.reports == 0


async def test_what_is_no_report_is_counted_and_changes_nothing(
    serving: Serve, worker: ScriptedWorker, anybody: tuple[Connection, Ear, str]
) -> None:
    connection, _, subject = anybody
    served = await serving(keys=keys_of(a={"requests_per_minute": 60}, root={"admin": True}))
    assert (await ask(served, "a")).status_code == 200
    broken: list[Any] = [b"", b"\x01", b"\x01\xc1", b"{}", b"\x01\x80", b"\xff" * 5000, b"\x02\x80"]
    for data in broken:
        await connection.publish(subject, data)
    await connection.synced()
    await until(lambda: served.ingress.usage_exchange.malformed_total == len(broken))
    assert await metric(served, "ignored_usage_reports_total") == len(broken)
    assert (await ask(served, "a")).status_code == 200
    served.ingress.usage.check_integrity()


async def test_an_ingress_that_goes_says_that_nothing_runs_there(serving: Serve, worker: ScriptedWorker) -> None:
    keys = keys_of(a={"max_concurrent": 1})
    one, two = await asyncio.gather(serving(keys=keys), serving(keys=keys))
    limiter, caller = one.ingress.admission.limiter, one.ingress.tenancy.keys.keys[0].caller
    limiter.admit(caller, one.client.now(), 0.0)
    await until(lambda: account_of(two, "a").running_elsewhere)
    limiter.release(caller)
    await one.ingress.usage_exchange.stop()
    await until(lambda: not account_of(two, "a").running_elsewhere, shared_usage.SILENT_S / 2)  # told, not forgotten


async def test_what_was_used_without_nats_is_told_afterwards(
    serving: Serve, worker: ScriptedWorker, nats_url: str, fleet_buckets: Subjects
) -> None:
    """Nobody is refused for its absence."""
    keys = keys_of(a={"requests_per_minute": 600, "tokens_per_day": 1000})
    async with NatsProxy(nats_url) as proxy:
        one, two = await asyncio.gather(serve(proxy.url, fleet_buckets, keys=keys), serving(keys=keys))
        try:
            assert (await ask(one, "a")).status_code == 200
            await until(lambda: account_of(two, "a").day_tokens == 44)
            admission, caller = one.ingress.admission, one.ingress.tenancy.keys.keys[0].caller
            told = one.ingress.usage_exchange.sent_total
            proxy.partition()
            proxy.cut()
            await until(lambda: not one.client.connection.is_connected)
            for _ in range(5):
                admission.admit(caller, one.client.now())
                admission.charge(admission.limiter.usage_of(caller), 100, one.client.now())
                admission.release(caller)
                await one.ingress.usage_exchange.turn()
            assert one.ingress.usage_exchange.sent_total == told
            proxy.heal()
            await until(lambda: account_of(two, "a").day_tokens == 544)
        finally:
            await one.stop()
