"""A worker beside vLLM in a fleet: its streams survive vLLM's death and its own drain, and others see what it holds."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import reduce
from operator import xor

import httpx
import jsonschema
import pytest

from kvproto import codec
from kvproto.block_hash import digest_term
from kvproto.chats import chat_of
from kvproto.client import Client, Generation
from kvproto.messages import Finished, Sampling, Snapshot, SnapshotRequest, State, Tier, Tokens
from kvproto.streams.stream import Stream
from kvproto.testing.nats_process import free_port
from tests.support.vllm_worker import VllmFleet
from tests.support.waiting import until

PROMPT = tuple(range(100, 200))
SAMPLED = Sampling(max_tokens=80, temperature=0.9, seed=7, ignore_eos=True, repetition_penalty=1.2)
ASKED = Generation("demo", SAMPLED, PROMPT)


async def ready(client: Client, count: int) -> None:
    await until(lambda: len(list(client.members.view.ready())) >= count)


def state_of(client: Client, worker: str) -> State:
    return client.members.view.workers[worker].record.state


async def read(stream: Stream, at: int = -1, then: Callable[[str], Awaitable[object]] | None = None) -> list[int]:
    """The ids; after `at` of them something happens to the worker."""
    ids: list[int] = []
    async with stream:
        async for event in stream:
            if isinstance(event, Tokens):
                ids += event.ids
            if then is not None and len(ids) >= at >= 0:
                at = -1
                await then(str(stream.worker))
    return ids


async def held_by(client: Client, worker: str) -> frozenset[bytes]:
    """By its snapshot."""
    question = codec.encode(SnapshotRequest(Tier.DEVICE))
    answer = await client.connection.request(client.subjects.blocks(worker), question, 5.0)
    found = codec.decode(Snapshot, answer.data)
    hashes = [found.hashes[at : at + 16] for at in range(0, len(found.hashes), 16)]
    assert found.digest == reduce(xor, map(digest_term, hashes), 0)
    return frozenset(hashes)


async def agrees(client: Client, worker: str) -> bool:
    heartbeat = client.members.view.workers[worker].heartbeat
    held = await held_by(client, worker)
    return heartbeat is not None and heartbeat.digest == reduce(xor, map(digest_term, held), 0)


async def test_a_stream_goes_on_elsewhere_when_its_vllm_dies(vllm_fleet: VllmFleet, client: Client) -> None:
    for worker in ("v0", "v1"):
        await vllm_fleet.start(worker, {"step_s": 0.005})
    await ready(client, 2)
    whole = await read(client.generate(ASKED))
    assert len(whole) == 80
    broken, held = "", frozenset[bytes]()

    async def die(worker: str) -> None:
        nonlocal broken, held
        broken, held = worker, await held_by(client, worker)
        await vllm_fleet.workers[worker].double.die()

    stream = client.generate(ASKED)
    began = time.monotonic()
    assert await read(stream, 20, die) == whole
    assert stream.attempts > 1
    assert stream.worker != broken
    await until(lambda: state_of(client, broken) is State.STARTING, 5.0)
    assert time.monotonic() - began < 10
    assert [one.record.id for one in client.members.view.ready()] != [broken]
    await vllm_fleet.workers[broken].double.start()
    await until(lambda: state_of(client, broken) is State.READY)
    assert len(held) >= 6
    assert not held & await held_by(client, broken)
    assert await read(client.generate(replace(ASKED, worker=broken))) == whole
    assert len(held & await held_by(client, broken)) >= 6
    async with asyncio.timeout(10):
        while not await agrees(client, broken):
            await asyncio.sleep(0.05)
    assert vllm_fleet.workers[broken].life.exit_code == 0


async def test_a_drain_hands_its_streams_over(vllm_fleet: VllmFleet, client: Client) -> None:
    """Those that take longer than a moment."""
    for worker in ("v0", "v1"):
        await vllm_fleet.start(worker, {"step_s": 0.004})
    await ready(client, 2)
    asked = replace(ASKED, sampling=replace(SAMPLED, max_tokens=300))
    whole = await read(client.generate(asked))
    draining: list[asyncio.Task[None]] = []

    async def drain(worker: str) -> None:
        draining.append(asyncio.create_task(vllm_fleet.workers[worker].stop()))

    stream = client.generate(asked)
    assert await read(stream, 20, drain) == whole
    assert stream.attempts > 1
    await asyncio.wait_for(draining[0], 20)
    assert [worker.double.engine.scheduler.has_work for worker in vllm_fleet.workers.values()] == [False, False]


async def test_sessions_hit_their_last_turn_and_tenants_are_apart(vllm_fleet: VllmFleet, client: Client) -> None:
    worker = await vllm_fleet.start("v0", fleet_key="a fleet's secret")
    await ready(client, 1)
    first = await read(client.generate(ASKED))
    await read(client.generate(replace(ASKED, prompt_ids=(*PROMPT, *first, *range(300, 310)))))
    other = await Client.open(vllm_fleet.nats_url, namespace=vllm_fleet.namespace, tenant="other")
    await ready(other, 1)
    assert await read(other.generate(replace(ASKED, tenant="other"))) == first
    await other.close()
    cached = [one for one in worker.double.cached if one is not None]
    assert cached == [0, (180 - 1) // 32 * 32, 0]
    assert len({body["cache_salt"] for body in worker.double.bodies}) == 2


async def test_vllms_metrics_keep_their_names_beside_the_workers(vllm_fleet: VllmFleet, client: Client) -> None:
    port = free_port()
    worker = await vllm_fleet.start("v0", metrics_port=port)
    await ready(client, 1)
    await read(client.generate(ASKED))

    async def scrape() -> str:
        async with httpx.AsyncClient() as http:
            answer = await http.get(f"http://127.0.0.1:{port}/metrics")
        assert answer.status_code == 200
        return answer.text

    text = await scrape()
    assert 'vllm:num_requests_running{engine="0",model_name="demo"} 0.0' in text
    assert 'vllm:generation_tokens_total{engine="0",model_name="demo"}' in text
    assert "kvfleet_worker_engine_restarts_total 0.0" in text
    assert 'device="vllm"' in text
    assert text.count("\nprocess_open_fds ") == 1
    await worker.double.die()
    text = await scrape()
    assert "vllm:" not in text
    assert "kvfleet_worker_engine_restarts_total" in text


async def test_one_that_comes_back_as_another_ends_its_worker(
    vllm_fleet: VllmFleet, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    worker = await vllm_fleet.start("v0")
    await ready(client, 1)
    await worker.double.die()
    worker.double.made.name = "another"
    await worker.double.start()
    await asyncio.wait_for(worker.life.stopping.wait(), 20)
    assert worker.life.exit_code == 1
    told = [one.message for one in caplog.records if one.message.startswith("stopping: ")]
    assert told == [f"stopping: vLLM at {worker.double.url} came back as another: name 'another', it was 'demo'"]
    await worker.stop()
    await until(lambda: not list(client.members.view.ready()))


async def test_a_chats_call_goes_on_elsewhere_when_its_vllm_dies(vllm_fleet: VllmFleet, client: Client) -> None:
    """The worker beside vLLM renders it, keeps it to its tool, and reads its message, as any other does."""
    for worker in ("v0", "v1"):
        await vllm_fleet.start(worker, {"step_s": 0.005})
    await ready(client, 2)
    words = {"type": "array", "minItems": 8, "maxItems": 8, "items": {"type": "string", "pattern": "^[a-z]{4,8}$"}}
    schema = {"type": "object", "properties": {"words": words}, "required": ["words"], "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "say", "parameters": schema}}
    said = [{"role": "user", "content": "Speak."}]
    chat = chat_of(said, tools=[tool], tool_choice="required", parallel_tool_calls=False)
    asked = Generation("demo", Sampling(300, temperature=0.9, seed=7), chat=chat)

    async def call(*, dies: bool) -> str:
        count, joined, dead = 0, "", ""
        async with client.generate(asked) as stream:
            async for event in stream:
                if isinstance(event, Tokens):
                    count += len(event.ids)
                    parts = [part for delta in event.deltas for part in delta.tool_calls]
                    joined += "".join(part.arguments for part in parts)
                    if dies and not dead and count > 20:
                        dead = str(stream.worker)
                        await vllm_fleet.workers[dead].double.die()
        assert isinstance(event, Finished)
        assert bool(dead) == dies
        assert event.worker != dead
        assert event.message is not None
        assert event.message.finish_reason == "tool_calls"
        assert event.message.tool_calls[0].arguments == joined
        return joined

    whole = await call(dies=False)
    jsonschema.validate(json.loads(whole), schema)
    assert await call(dies=True) == whole
