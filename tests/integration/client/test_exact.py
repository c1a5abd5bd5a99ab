"""Exact results through a real worker: the flag reaches the engine, which then reads no lossy block."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from kvfleet.worker.engine.engine import Engine
from kvfleet.worker.port.sequence_spec import SequenceSpec
from kvproto.block_hash import chain
from kvproto.client import Client, Generation
from kvproto.errors import KvfleetError
from kvproto.messages import Sampling, Started
from tests.support.fake_fleet import FakeFleet, FakeWorker
from tests.support.waiting import LIMIT_S

PROMPT = tuple(range(100, 140))
ASK = Generation("demo", Sampling(max_tokens=4, temperature=0.0, ignore_eos=True), PROMPT)


@pytest.fixture
async def worker(fleet: FakeFleet, client: Client) -> FakeWorker:
    worker = await fleet.start("w0")
    async with asyncio.timeout(LIMIT_S):
        while not list(client.members.view.ready()):
            await asyncio.sleep(0.01)
    return worker


async def started(client: Client, generation: Generation) -> Started:
    seen = []
    async with client.generate(generation) as stream:
        async for event in stream:
            seen += [event] if isinstance(event, Started) else []
    (one,) = seen
    return one


@pytest.mark.parametrize("choices", [1, 3])
async def test_the_flag_reaches_the_engine(
    worker: FakeWorker, client: Client, choices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs: list[SequenceSpec] = []
    submit = worker.thread.submit
    monkeypatch.setattr(worker.thread, "submit", lambda spec: (specs.append(spec), submit(spec)))
    several = replace(ASK, sampling=replace(ASK.sampling, n=choices))
    for exact in (False, True):
        await started(client, replace(several, exact=exact))
    assert [spec.exact for spec in specs] == [False] * choices + [True] * choices


async def test_an_exact_request_finds_nothing_lossy(worker: FakeWorker, client: Client) -> None:
    def have_lossy_blocks(engine: Engine) -> None:
        root, size = worker.loop.parts.models.root("demo", "public", PROMPT), engine.pool.block_size
        hashes, blocks = chain(root, PROMPT, size), engine.pool.allocate(2)
        for at in range(len(hashes)):
            ids = PROMPT[at * size : (at + 1) * size]
            blocks[at] = engine.pool.fill(blocks[at], root, hashes, at, ids, lossy=True)
        engine.pool.release(blocks)

    await worker.thread.call(have_lossy_blocks)
    assert (await started(client, replace(ASK, exact=True))).cached == {}
    assert (await started(client, ASK)).cached["device"] >= 32


async def test_what_is_no_boolean_is_refused_by_name(worker: FakeWorker, client: Client) -> None:
    with pytest.raises(KvfleetError, match="exact") as refused:
        await started(client, replace(ASK, exact="yes"))  # type: ignore[arg-type]
    assert refused.value.http_status == 400
