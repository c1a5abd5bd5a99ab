"""Requests stay in their region while it can serve them, go to another one when it cannot, and lose no token."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import msgpack
import pytest
from nats.aio.msg import Msg

from kvproto.client import Client, Generation
from kvproto.connection import JSON_HEADER, Connection, Message
from kvproto.errors import KvfleetError, ModelNotFound
from kvproto.messages import Finished, Sampling, Started, Tokens
from tests.integration.regions.conftest import Region, TwoRegions
from tests.support.waiting import LIMIT_S, until

PROMPT = tuple(range(100, 140))
SAMPLING = Sampling(max_tokens=40, temperature=0.0, ignore_eos=True)


def ready(client: Client) -> int:
    return len(list(client.members.view.ready()))


async def ask(client: Client, prompt: tuple[int, ...] = PROMPT, **changes: object) -> tuple[str, list[int]]:
    """The worker that finished it, and the tokens."""
    worker, ids = "", []
    wanted = Generation("demo", SAMPLING, prompt_ids=prompt)
    async with client.generate(replace(wanted, **changes)) as stream:  # type: ignore[arg-type]
        async for event in stream:
            if isinstance(event, Tokens):
                assert event.index == len(ids)
                ids += event.ids
            elif isinstance(event, Finished):
                worker = str(stream.worker)
    return worker, ids


async def ask_and_then(client: Client, then: Callable[[], Awaitable[None]]) -> tuple[str, list[int]]:
    """As `ask`; `then` once five tokens are there."""
    ids: list[int] = []
    async with client.generate(Generation("demo", SAMPLING, prompt_ids=PROMPT)) as stream:
        async for event in stream:
            if isinstance(event, Tokens):
                ids += event.ids
                if len(ids) == 5:
                    await then()
    return str(stream.worker), ids


def cut_off(region: Region) -> None:
    """As if its placement was killed: it says nothing more, not even goodbye."""
    _, connection = region.placements[0]
    connection.raw.options["allow_reconnect"] = False
    connection.raw._transport._io_writer.transport.abort()  # type: ignore[union-attr]


async def hears_of(regions: TwoRegions) -> None:
    """Until us knows that eu serves."""
    us = regions.us.placement
    await until(lambda: us.core.region_summaries.regions.ready("demo", us.now()))


async def test_what_can_be_served_at_home_stays_there(regions: TwoRegions) -> None:
    await regions.us.worker("w0")
    await regions.eu.worker("w0")  # the same name: regions do not share names
    client = await regions.us.client()
    await until(lambda: ready(client) == 1)
    await hears_of(regions)
    answers = [await ask(client, (*PROMPT, i)) for i in range(10)]
    assert {worker for worker, _ in answers} == {"w0"}
    assert client.counters.spilled_total == 0
    assert regions.eu.fleet.workers["w0"].loop.requests.requests_total == 0


async def test_without_a_worker_at_home_another_region_serves_and_the_tokens_are_the_same(regions: TwoRegions) -> None:
    home = await regions.us.worker("w0")
    await regions.eu.worker("w7")
    client = await regions.us.client()
    await until(lambda: ready(client) == 1)
    await hears_of(regions)
    worker, expected = await ask(client)
    assert worker == "w0"
    await home.stop()
    await until(lambda: ready(client) == 0)
    assert await ask(client) == ("eu.w7", expected)
    assert client.counters.spilled_total == 1
    await regions.us.worker("w0")
    await until(lambda: regions.us.placement.core.fleet.ready("demo").workers)  # who decides has seen it
    assert await ask(client) == ("w0", expected)


async def test_a_model_that_only_another_region_serves(regions: TwoRegions) -> None:
    await regions.eu.worker("w7")
    client = await regions.us.client()
    await hears_of(regions)
    worker, ids = await ask(client)
    assert worker == "eu.w7"
    assert len(ids) == 40
    with pytest.raises(ModelNotFound):
        async with client.generate(Generation("no-such-model", SAMPLING, prompt_ids=PROMPT)) as stream:
            await stream.read()


async def test_a_long_wait_at_home_sends_requests_away_and_they_come_back_after_it(regions: TwoRegions) -> None:
    await regions.us.worker("w0", slots=1, fake_tokens_per_s=100)
    await regions.eu.worker("w7")
    client = await regions.us.client()
    await until(lambda: ready(client) == 1)
    await hears_of(regions)
    await ask(client, (7,) * 40)  # so that rates are known
    long = replace(SAMPLING, max_tokens=1_500)
    there = {"sampling": long, "worker": "w0", "patience_s": LIMIT_S}  # until they are told to end
    queued = [asyncio.create_task(ask(client, (number, *range(200)), **there)) for number in range(16)]

    async def until_at(worker: str) -> None:
        """On a machine so busy that placement answers too late, the ring says home: then it is asked again."""
        async with asyncio.timeout(LIMIT_S):
            found = ""
            while found != worker:
                with contextlib.suppress(TimeoutError):
                    found, _ = await asyncio.wait_for(ask(client, (8,) * 40), 2.0)

    await until_at("eu.w7")
    for one in queued:
        one.cancel()
    await asyncio.gather(*queued, return_exceptions=True)
    await until_at("w0")


async def test_a_stream_in_another_region_survives_its_worker(regions: TwoRegions) -> None:
    first = await regions.eu.worker("w7", fake_tokens_per_s=100)
    client = await regions.us.client()
    await hears_of(regions)

    async def another_takes_over() -> None:
        await regions.eu.worker("w8")
        await first.kill()

    worker, ids = await ask_and_then(client, another_takes_over)
    assert worker == "eu.w8"
    other = await regions.eu.client()
    _, expected = await ask(other)
    assert ids == expected


async def test_a_drain_in_another_region_moves_the_stream_with_its_blocks(regions: TwoRegions) -> None:
    first = await regions.eu.worker("w7", fake_tokens_per_s=100)
    client = await regions.us.client()
    await hears_of(regions)
    ids: list[int] = []
    started: list[Started] = []
    async with client.generate(Generation("demo", SAMPLING, prompt_ids=PROMPT)) as stream:
        async for event in stream:
            if isinstance(event, Started):
                started.append(event)
            if isinstance(event, Tokens):
                ids += event.ids
                if len(ids) == 5:
                    await regions.eu.worker("w8")
                    drained = asyncio.create_task(first.stop())
    await drained
    assert stream.worker == "eu.w8"
    assert len(ids) == 40
    assert client.counters.lost_total == 0


async def test_a_link_that_breaks_costs_no_token(regions: TwoRegions) -> None:
    await regions.eu.worker("w7", fake_tokens_per_s=60)
    client = await regions.us.client()
    await hears_of(regions)

    async def the_link_breaks() -> None:
        await regions.us.worker("w0")
        await until(lambda: ready(client) == 1)
        regions.link.cut()

    at, ids = await ask_and_then(client, the_link_breaks)
    assert at == "w0"
    assert await ask(client) == ("w0", ids)
    eu = regions.eu.fleet.workers["w7"].loop
    await until(lambda: not list(eu.frames.running))  # nobody reads there any more, so nothing runs on
    region_summaries = regions.us.placement.core.region_summaries.regions
    await until(lambda: not region_summaries.records(regions.us.placement.now()))
    regions.link.mend()
    await hears_of(regions)


async def test_a_region_that_refuses_is_not_insisted_on(regions: TwoRegions) -> None:
    """Its placement is gone, and its last summary is not."""
    await regions.eu.worker("w7")
    client = await regions.us.client()
    await hears_of(regions)
    cut_off(regions.eu)
    with pytest.raises(KvfleetError) as caught:
        await ask(client, patience_s=0.0)
    assert caught.value.retryable or isinstance(caught.value, ModelNotFound)
    assert client.counters.region_refusals_total >= 1


class Bare:
    """A producer that only speaks NATS: what it asked for, and what it hears."""

    def __init__(self, *, as_json: bool = True) -> None:
        self.frames: list[dict[str, Any]] = []
        self._as_json = as_json

    async def ask(self, url: str, **more: Any) -> None:
        self.connection = await Connection.open(url, name="bare", inbox_prefix="_prd.public.bare")
        await self.connection.subscribe("_prd.public.bare.x", self._hear)
        said = more or {"prompt_ids": list(PROMPT)}
        body = {**said, "max_tokens": 5, "temperature": 0, "ignore_eos": True}
        data = json.dumps(body).encode() if self._as_json else msgpack.packb(body)
        headers = JSON_HEADER if self._as_json else None
        await self.connection.publish("kvf.generate.public.demo", data, reply="_prd.public.bare.x", headers=headers)

    async def _hear(self, message: Message) -> None:
        self.frames.append(json.loads(message.data) if self._as_json else msgpack.unpackb(message.data))

    @property
    def ended(self) -> bool:
        return bool(self.frames) and self.frames[-1]["type"] in ("finished", "failed")

    @property
    def ids(self) -> list[int]:
        return [one for frame in self.frames if frame["type"] == "tokens" for one in frame["ids"]]


@pytest.mark.parametrize("as_json", [True, False])
async def test_a_bare_producers_request_goes_too(regions: TwoRegions, as_json: bool) -> None:
    await regions.eu.worker("w7")
    await hears_of(regions)
    producer = Bare(as_json=as_json)
    await producer.ask(regions.us.url)
    await until(lambda: producer.ended)
    assert len(producer.ids) == 5
    await producer.connection.close()


@pytest.mark.parametrize("as_json", [True, False])
async def test_a_bare_producers_chat_goes_too(regions: TwoRegions, as_json: bool) -> None:
    await regions.eu.worker("w7")
    await hears_of(regions)
    producer = Bare(as_json=as_json)
    said = [{"role": "user", "content": "Who goes thère?"}]
    await producer.ask(regions.us.url, messages=said, chat_template_kwargs={"deep": [[{"er": None}]]})
    await until(lambda: producer.ended)
    text = "".join(text for frame in producer.frames if frame["type"] == "tokens" for text in frame["text"])
    assert producer.frames[-1]["message"] == {"finish_reason": "length", "content": text}
    await producer.connection.close()


async def test_a_bare_producer_hears_of_a_region_that_is_gone(regions: TwoRegions) -> None:
    """Its last summary still counts, and nobody is at home: one failure, and soon."""
    await regions.eu.worker("w7")
    await hears_of(regions)
    cut_off(regions.eu)
    producer = Bare()
    await producer.ask(regions.us.url)
    await until(lambda: producer.ended)
    assert [frame["type"] for frame in producer.frames] == ["failed"]
    await producer.connection.close()


async def test_a_bare_producer_is_served_at_home_late_if_the_other_region_is_gone(regions: TwoRegions) -> None:
    home = await regions.us.worker("w0", slots=1, fake_tokens_per_s=100)
    await regions.eu.worker("w7")
    client = await regions.us.client()
    await until(lambda: ready(client) == 1)
    await hears_of(regions)
    await ask(client, (7,) * 40)  # so that rates are known
    queued = [asyncio.create_task(ask(client, (number, *range(200)), patience_s=60.0)) for number in range(8)]
    await until(lambda: home.loop.requests.requests_total > 1)
    cut_off(regions.eu)
    referred = regions.us.placement.core.region_summaries.referred_total
    producer = Bare()
    await producer.ask(regions.us.url)
    await until(lambda: regions.us.placement.core.region_summaries.referred_total > referred)
    for one in queued:
        one.cancel()
    await asyncio.gather(*queued, return_exceptions=True)
    await until(lambda: producer.ended)
    assert len(producer.ids) == 5
    await producer.connection.close()


async def test_a_begun_stream_waits_for_a_model_that_is_only_abroad(regions: TwoRegions) -> None:
    """While the own placement is silent nobody here knows who serves it: that is no reason to give up."""
    worker = await regions.eu.worker("w7", fake_tokens_per_s=100)
    client = await regions.us.client()
    await hears_of(regions)
    back: list[asyncio.Task[Any]] = []

    async def placement_is_another() -> None:
        loop, connection = regions.us.placements.pop()
        await loop.stop(grace_s=0)
        await connection.close()
        await worker.kill()
        await regions.eu.worker("w8")
        back.append(asyncio.create_task(regions.us.start_placement("p-us2")))

    at, ids = await ask_and_then(client, placement_is_another)
    await back[0]
    assert len(ids) == 40
    assert at == "eu.w8"


async def test_nothing_else_of_a_fleet_crosses(regions: TwoRegions) -> None:
    """Heartbeats, events, records, sessions: all of it stays, so that regions can fail apart and grow apart."""
    await regions.eu.worker("w7")
    await regions.us.worker("w0")
    client = await regions.us.client()
    seen: set[str] = set()

    async def see(message: Msg) -> None:
        seen.add(message.subject)

    async with contextlib.AsyncExitStack() as ends:
        eyes = await Connection.open(regions.us.url, name="eyes", inbox_prefix="_adm.eyes")
        ends.push_async_callback(eyes.close)
        await eyes.subscribe(">", see)
        await until(lambda: ready(client) == 1)
        await hears_of(regions)
        connection = await Connection.open(regions.eu.url, name="ingress", inbox_prefix="_ing.eu-i0")
        ends.push_async_callback(connection.close)
        eu = await Client.over(connection, regions.eu.subjects)
        ends.push_async_callback(eu.close)
        await until(lambda: ready(eu) == 1)
        await ask(eu)
        await until(lambda: {"kvf.region.eu.summary", "kvf.heartbeat.w0"} <= seen)
    foreign = {one for one in seen if "w7" in one or "p-eu" in one}
    assert all(one.startswith(("kvf.region.", "_ing.", "_plc.", "_prd.")) for one in foreign), foreign
    assert not any(one.startswith("kvf.heartbeat.w7") for one in seen)
