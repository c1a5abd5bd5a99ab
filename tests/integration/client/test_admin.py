"""What a worker says of a token sequence's blocks and how it forgets them, however long the sequence."""

from __future__ import annotations

import asyncio

import pytest

from kvfleet.worker.serve import admin
from kvproto import codec
from kvproto.client import Client, Generation
from kvproto.errors import InvalidRequest
from kvproto.messages import AdminCommand, AdminRequest, CancelRequest, Inspection, Sampling, Stray, Tokens
from tests.support.fake_fleet import FakeFleet, FakeWorker
from tests.support.waiting import LIMIT_S

PROMPT = tuple(range(100, 164))
TOO_LONG = PROMPT + tuple(i % 1000 for i in range(300_000))  # 1.2 MB


@pytest.fixture
async def worker(fleet: FakeFleet, client: Client) -> FakeWorker:
    worker = await fleet.start("w0")
    async with asyncio.timeout(LIMIT_S):
        while not list(client.members.view.ready()):
            await asyncio.sleep(0.01)
    return worker


async def ask(client: Client, prompt: tuple[int, ...]) -> None:
    async with client.generate(Generation("demo", Sampling(max_tokens=1, temperature=0.0), prompt)) as stream:
        async for _ in stream:
            pass


async def inspect(client: Client, ids: tuple[int, ...], tenant: str = "public") -> Inspection:
    return codec.decode(Inspection, await client.admin("w0", AdminRequest(AdminCommand.INSPECT, tenant, ids)))


async def erase(client: Client, ids: tuple[int, ...], tenant: str = "public") -> None:
    assert await client.admin("w0", AdminRequest(AdminCommand.ERASE, tenant, ids)) == b""


async def test_inspection_tells_the_tiers(worker: FakeWorker, client: Client) -> None:
    assert (await inspect(client, PROMPT)).tiers == {"device": 0, "host": 0}
    await ask(client, PROMPT)
    found = await inspect(client, PROMPT)
    assert (found.cached_tokens, found.tiers) == (64, {"device": 64, "host": 64})
    assert (await inspect(client, PROMPT, "other")).tiers == {"device": 0, "host": 0}


async def test_what_a_sequence_shares_stays_and_the_rest_is_erased(worker: FakeWorker, client: Client) -> None:
    fork = PROMPT[:40] + tuple(range(500, 540))
    await ask(client, PROMPT)
    await ask(client, fork)
    await erase(client, fork, tenant="other")  # nobody's business
    assert (await inspect(client, fork)).cached_tokens == 80
    await erase(client, fork)
    assert (await inspect(client, PROMPT)).cached_tokens == 64
    assert (await inspect(client, fork)).cached_tokens == 40
    await erase(client, PROMPT)
    await erase(client, PROMPT)
    assert (await inspect(client, PROMPT)).cached_tokens == (await inspect(client, fork)).cached_tokens == 0
    assert worker.fatal == []


async def test_an_erased_block_is_told_to_whoever_follows(worker: FakeWorker, client: Client) -> None:
    await ask(client, PROMPT)
    await erase(client, PROMPT)
    view = client.members.view.workers["w0"]
    async with asyncio.timeout(LIMIT_S):
        while view.heartbeat is None or view.heartbeat.event_seq < 2 or view.heartbeat.held:
            await asyncio.sleep(0.02)
    assert view.heartbeat.digest == 0  # each block was stored once and removed once


async def test_questions_longer_than_a_message(
    worker: FakeWorker, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert 4 * len(TOO_LONG) > client.connection.max_payload
    await ask(client, PROMPT)
    monkeypatch.setattr(admin, "PART_BYTES", 16)  # the answer comes in parts, too
    found = await inspect(client, TOO_LONG)
    assert (found.cached_tokens, len(found.blocks)) == (64, 4)
    await erase(client, TOO_LONG)
    assert (await inspect(client, PROMPT)).cached_tokens == 0


async def test_half_a_long_question_is_refused(worker: FakeWorker, client: Client) -> None:
    half = AdminRequest(AdminCommand.ERASE, "public", PROMPT[32:], question="q", ids_before=32)
    await ask(client, PROMPT)
    with pytest.raises(InvalidRequest, match="ids_before"):
        await client.admin("w0", half)
    assert (await inspect(client, PROMPT)).cached_tokens == 64


@pytest.mark.parametrize("tenant", ["a.b", "*", "x" * 65])
async def test_what_is_no_tenant_is_refused(worker: FakeWorker, client: Client, tenant: str) -> None:
    with pytest.raises(InvalidRequest, match="tenant"):
        await erase(client, PROMPT, tenant)


async def test_strays_beside_a_sequence_go_with_it_however_long_it_is(worker: FakeWorker, client: Client) -> None:
    strays = (Stray(48, tuple(range(500, 540))), Stray(64, tuple(range(600, 640))))
    for stray in strays:
        await ask(client, PROMPT[: stray.start] + stray.ids)
    await client.admin("w0", AdminRequest(AdminCommand.ERASE, "public", TOO_LONG, strays=strays))
    for stray in strays:
        assert (await inspect(client, PROMPT[: stray.start] + stray.ids)).cached_tokens == 0
    with pytest.raises(InvalidRequest, match="65 ids"):
        await client.admin("w0", AdminRequest(AdminCommand.ERASE, "public", PROMPT, strays=(Stray(65, (1,)),)))


async def test_what_is_to_be_kept_stays(worker: FakeWorker, client: Client) -> None:
    await ask(client, PROMPT)
    await client.admin("w0", AdminRequest(AdminCommand.ERASE, "public", PROMPT, keep=40))
    assert (await inspect(client, PROMPT)).cached_tokens == 32


@pytest.mark.parametrize("command", [AdminCommand.LOAD_ADAPTER, AdminCommand.UNLOAD_ADAPTER])
async def test_the_own_engine_has_no_adapters(worker: FakeWorker, client: Client, command: AdminCommand) -> None:
    with pytest.raises(InvalidRequest, match="the own engine has no adapters"):
        await client.admin("w0", AdminRequest(command, model="a", path="/a"))
    assert worker.fatal == []


LEFT_AFTER = 20  # tokens that a reader had when it left, of 60


async def ended(client: Client) -> tuple[int, ...]:
    """An attempt that has ended at the worker; all its tokens."""
    asked = Generation("demo", Sampling(max_tokens=60, temperature=0.0, ignore_eos=True), PROMPT, request="left")
    async with client.generate(asked) as stream:
        return PROMPT + tuple([token async for event in stream if isinstance(event, Tokens) for token in event.ids])


async def test_a_cancel_that_comes_after_the_end_forgets_what_its_reader_did_not_receive(
    worker: FakeWorker, client: Client
) -> None:
    ids = await ended(client)
    assert (await inspect(client, ids)).cached_tokens > 112
    (record,) = worker.loop.parts.frames._finished.values()

    async def cancel(inbox: str, *received: int) -> None:
        said = CancelRequest(*record.key, inbox, received)
        await client.connection.publish(client.subjects.worker_cancel("w0"), codec.encode(said))

    await cancel("_ing.another.b", 0)  # does not read it
    await cancel(client.inbox.batch, LEFT_AFTER)
    async with asyncio.timeout(LIMIT_S):
        while (await inspect(client, ids)).cached_tokens > len(PROMPT) + LEFT_AFTER:
            await asyncio.sleep(0.01)
    assert (await inspect(client, ids)).cached_tokens == 80, "whole blocks that it received stay"


async def test_erasing_what_a_reader_had_when_it_left_takes_what_its_request_went_on_with(
    worker: FakeWorker, client: Client
) -> None:
    ids = await ended(client)
    had = ids[: len(PROMPT) + LEFT_AFTER]
    await erase(client, had, tenant="other")
    assert (await inspect(client, ids)).cached_tokens > 112
    await erase(client, had)
    found = await inspect(client, ids)
    assert (found.cached_tokens, found.tiers) == (0, {"device": 0, "host": 0})
    await ask(client, ids)
    await ask(client, ids + PROMPT)
    await erase(client, had)
    assert (await inspect(client, ids)).cached_tokens > 112, "others go on from all of it"
