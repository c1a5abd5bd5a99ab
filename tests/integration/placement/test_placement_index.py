"""Placement knows what real workers hold, and what became of what it placed: over NATS, with real worker loops."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial

import pytest
from fake_fleet import StartPlacement

from kvfleet.placement.index.kv_indexer import Follows
from kvfleet.placement.loop import PlacementLoop
from kvfleet.placement.workers import bookings
from kvproto.block_hash import chain
from kvproto.client import Client
from kvproto.codec import encode, encode_events
from kvproto.messages import Finished, KvEvents, Sampling, Started
from kvproto.streams.generation import Generation
from kvproto.subjects import Subjects
from tests.support.fake_fleet import FakeFleet
from tests.support.waiting import LIMIT_S, until

KEY = "secret"
SAMPLING = Sampling(max_tokens=8, temperature=0.0, ignore_eos=True)
PROMPT = tuple(range(1, 641))


@pytest.fixture(params=[200.0])
async def fleet(request: pytest.FixtureRequest, nats_url: str, fleet_buckets: Subjects) -> AsyncIterator[FakeFleet]:
    """Of three workers that draw so many tokens a second."""
    fleet = FakeFleet(nats_url, fleet_buckets)
    for worker in ("w0", "w1", "w2"):
        await fleet.start(worker, fleet_key=KEY, fake_tokens_per_s=request.param)
    yield fleet
    await fleet.stop()


async def all_ready(loop: PlacementLoop) -> None:
    await until(lambda: len(loop.core.fleet.ready("demo").workers) == 3)


def running(loop: PlacementLoop) -> int:
    return loop.core.bookings.running


def generation(prompt: tuple[int, ...] = PROMPT, **changes: object) -> Generation:
    """By a policy by name: without an answer by placement, which would not know of it, nothing begins."""
    base = Generation("demo", SAMPLING, prompt_ids=prompt, tenant="public", deadline_s=20.0, policy="cost")
    return replace(base, **changes)  # type: ignore[arg-type]


async def generate(client: Client, asked: Generation) -> tuple[str, int, int]:
    """(worker, tokens that placement expected to be cached, tokens that were)."""
    async with client.generate(asked) as stream:
        events = [event async for event in stream]
    started = next(event for event in events if isinstance(event, Started))
    placed = stream.placement
    assert placed is not None
    assert isinstance(events[-1], Finished)
    return started.worker, sum(placed.expected_hit.values()), started.cached_tokens


def follows_all(loop: PlacementLoop) -> bool:
    return all(loop.core.indexer.state_of(worker) is Follows.EXACT for worker in ("w0", "w1", "w2"))


async def test_a_prompt_goes_where_its_blocks_are_and_finds_what_was_expected(
    fleet: FakeFleet, client: Client, start_placement: StartPlacement
) -> None:
    loop = await start_placement("cost", KEY.encode())
    await all_ready(loop)
    first, expected, cached = await generate(client, generation())
    assert (expected, cached) == (0, 0)
    await until(lambda: bool(loop.core.indexer.index))
    for turn in range(5):
        worker, expected, cached = await generate(client, generation((*PROMPT, *range(900, 940 + turn))))
        assert worker == first
        assert expected >= 640
        assert cached >= expected
        await asyncio.sleep(0.1)
    await until(lambda: not len(loop.core.bookings) and not loop.core.bookings.running)
    assert loop.core.ledger.hits.lost_total == 0
    assert loop.core.ledger.hits.attained_total >= 5 * 640


async def test_another_tenant_is_told_of_nothing(
    fleet: FakeFleet, client: Client, start_placement: StartPlacement, nats_url: str, fleet_buckets: Subjects
) -> None:
    loop = await start_placement("cost", KEY.encode())
    await all_ready(loop)
    await generate(client, generation())
    await until(lambda: bool(loop.core.indexer.index))
    async with await Client.open(nats_url, tenant="acme", namespace=fleet_buckets.namespace) as other:
        assert (await generate(other, generation(tenant="acme")))[1:] == (0, 0)
    assert (await generate(client, generation()))[2] >= 600


async def test_a_replica_that_starts_late_knows_everything_within_a_moment(
    fleet: FakeFleet, client: Client, start_placement: StartPlacement
) -> None:
    first = await start_placement("cost", KEY.encode())
    await all_ready(first)
    at = {}
    for chat in range(6):
        prompt = tuple(range(100 * chat + 1, 100 * chat + 321))
        at[prompt] = (await generate(client, generation(prompt)))[0]
    await first.stop()
    late = await start_placement("cost", KEY.encode())
    # a first heartbeat may be older than the blocks, and count no event yet: the next one tells
    await until(lambda: follows_all(late) and len(late.core.indexer.index) >= sum(len(prompt) // 16 for prompt in at))
    for prompt, worker in at.items():
        await until(lambda: not running(late))  # a worker that is busy is not worth the wait for 320 tokens
        assert (await generate(client, generation(prompt)))[:2] == (worker, 319)


async def test_a_lost_event_is_noticed_and_made_good_while_serving_goes_on(
    fleet: FakeFleet, client: Client, start_placement: StartPlacement
) -> None:
    loop = await start_placement("cost", KEY.encode())
    await until(lambda: follows_all(loop))
    deaf = next(s for s in loop.subscriptions._subscriptions if "events" in s.subject)
    await deaf.unsubscribe()
    worker, _, _ = await generate(client, generation())
    await until(lambda: bool(loop.core.indexer.index))  # the heartbeat told, a snapshot made it good
    await until(lambda: follows_all(loop))
    assert (await generate(client, generation()))[0] == worker


async def test_of_a_hybrid_model_what_is_expected_ends_at_the_last_snapshot(
    nats_url: str, fleet_buckets: Subjects, client: Client, start_placement: StartPlacement
) -> None:
    """What its worker tells counts as the worker itself does: by events, and by a snapshot of all that it holds."""
    fleet = FakeFleet(nats_url, fleet_buckets)
    try:
        await fleet.start("w0", fleet_key=KEY, states=32, state_every=8, host_bytes=2**20)
        loop = await start_placement("cost", KEY.encode())
        await until(lambda: loop.core.indexer.state_of("w0") is Follows.EXACT)
        assert (await generate(client, generation()))[1:] == (0, 0)
        roots = fleet.workers["w0"].loop.parts.models.all_roots("", "public", PROMPT)
        hashes = chain(roots[-1], PROMPT, 16)
        await until(lambda: loop.core.indexer.find_matches(hashes) == {"w0": 40})
        loops = [loop, await start_placement("cost", KEY.encode())]
        for told in loops:
            await until(partial(lambda told: told.core.indexer.find_matches(hashes) == {"w0": 40}, told))
            assert told.core.indexer.find_matches([*hashes[:23], bytes(16)]) == {"w0": 16}
            assert told.core.indexer.find_matches([*hashes[:7], bytes(16)]) == {}
        expected = {}
        for cut in (376, 120):  # 23 blocks and a half; 7
            asked = generation((*PROMPT[:cut], *range(900, 980)))
            # Of requests under way all blocks are expected, until word of what they left is there.
            await until(lambda: not any(len(one.core.inflight) for one in loops))
            _, expected[cut], cached = await generate(client, asked)
            assert cached == expected[cut]
        assert expected == {376: 256, 120: 0}
    finally:
        await fleet.stop()


async def test_garbage_and_lies_on_its_subjects_do_no_harm(
    fleet: FakeFleet, client: Client, start_placement: StartPlacement
) -> None:
    loop = await start_placement("cost", KEY.encode())
    await until(lambda: follows_all(loop))
    worker, _, _ = await generate(client, generation())
    await until(lambda: bool(loop.core.indexer.index))
    names, publish = client.subjects, client.connection.publish
    for subject in (
        names.events(worker),
        names.events("nobody"),
        names.milestones(worker),
        names.placement_bookings(),
        f"{loop.connection.inbox_prefix}.s.{worker}",
        f"{loop.connection.inbox_prefix}.s.nobody",
    ):
        for data in (b"", b"\x01", b"\xff" * 50, b'{"json": 1}', encode(SAMPLING)):
            await publish(subject, data)
    old = KvEvents("another life", 7, ())
    await publish(names.events(worker), encode_events(old))
    await until(lambda: loop.malformed_total >= 20)
    await asyncio.sleep(0.2)  # what an old life says changes nothing
    assert loop.malformed_total >= 20
    assert follows_all(loop)
    assert (await generate(client, generation()))[:2] == (worker, 639)


@pytest.mark.parametrize("fleet", [40.0], indirect=True)
async def test_replicas_count_one_anothers_bookings_and_release_them_however_a_request_ends(
    fleet: FakeFleet, client: Client, start_placement: StartPlacement, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a busy machine word of acceptance may come after the next heartbeat, which counts the request instead.
    monkeypatch.setattr(bookings, "HEARTBEAT_PERIOD_S", LIMIT_S)
    loops = [await start_placement("cost", KEY.encode()) for _ in range(2)]
    for loop in loops:
        await all_ready(loop)
    async with asyncio.timeout(LIMIT_S):
        while not all(loop.core.decider.decisions_total for loop in loops):  # the queue group shares them, by chance
            async with client.generate(generation((1, 2, 3))) as short:
                _ = [event async for event in short]
    for loop in loops:
        await until(partial(lambda loop: not running(loop), loop))
    endless = {"sampling": replace(SAMPLING, max_tokens=3000), "deadline_s": 120.0}  # at 40 tokens/s
    prompts = (tuple(range(start, start + 64)) for start in range(0, 900, 100))
    streams = [client.generate(generation(prompt, **endless)) for prompt in prompts]
    try:
        for loop in loops:
            await until(partial(lambda loop: running(loop) == 9, loop))
            columns = loop.core.fleet.ready("demo").columns
            loads = loop.core.workloads  # a heartbeat may be older than what it is taken to know of
            await until(
                partial(lambda loads, columns: sum(loads.view(columns, loads.now).requests) >= 9, loads, columns)
            )
        for stream in streams[:3]:
            await stream.cancel()
        victim = fleet.workers[streams[5].worker or ""]
        await victim.kill()
        for loop in loops:
            await until(partial(lambda loop: victim.id not in loop.core.fleet.workers and running(loop) == 6, loop))
    finally:
        for stream in streams:
            await stream.cancel()
    for loop in loops:
        await until(partial(lambda loop: not running(loop) and not len(loop.core.bookings), loop))
        loop.core.check_integrity()
        loop.core.indexer.check_integrity()
