"""A long prompt's step over the wire: heartbeats say how old it is, and a cancel ends it long before it is done."""

from __future__ import annotations

import asyncio

import pytest

from kvfleet.worker.model.fake import FakePace, FakeRunner
from kvproto import codec
from kvproto.client import Client, Generation
from kvproto.connection import Message
from kvproto.messages import CancelRequest, Failed, Frame, GenerateRequest, Sampling, Started, Tokens
from tests.support.fake_fleet import FakeFleet, FakeWorker
from tests.support.waiting import LIMIT_S, until

SAMPLING = Sampling(max_tokens=4, temperature=0.0, ignore_eos=True)
LONG = tuple(range(400))


class Reader:
    def __init__(self) -> None:
        self.frames: list[Frame] = []

    def on_frame(self, frame: Frame) -> None:
        self.frames.append(frame)

    def on_no_responders(self, attempt: int) -> None:
        raise AssertionError("the worker is gone")


@pytest.fixture
async def worker(fleet: FakeFleet) -> FakeWorker:
    """A prompt token takes 50 ms: the long one's step 20 s."""
    worker = await fleet.start("w0", blocks=128)
    runner = worker.thread.engine.runner
    assert isinstance(runner, FakeRunner)
    runner.pace = FakePace(prefill_tokens_per_s=20)
    return worker


async def test_a_cancel_ends_the_step_and_frees_its_blocks(worker: FakeWorker, client: Client) -> None:
    inbox = client.inbox.of("long", 0)
    body = GenerateRequest("long", 0, "demo", SAMPLING, inbox, prompt_ids=LONG)
    reader = Reader()
    client.inbox.receivers["long"] = reader
    async with asyncio.timeout(LIMIT_S):
        while (view := client.members.view.workers.get("w0")) is None:
            await asyncio.sleep(0.02)
        subject = client.subjects.worker_generate("w0", "public")
        await client.connection.publish(subject, codec.encode(body), reply=inbox)
        while view.heartbeat is None or view.heartbeat.step_age_s < 0.3:
            await asyncio.sleep(0.02)
        cancel = codec.encode(CancelRequest("long", 0))
        await client.connection.publish(client.subjects.worker_cancel("w0"), cancel)
        while not reader.frames or not isinstance(reader.frames[-1], Failed):
            await asyncio.sleep(0.01)
    del client.inbox.receivers["long"]
    assert reader.frames[-1].code == "cancelled"
    assert any(isinstance(frame, Started) for frame in reader.frames), "it had begun"
    assert worker.thread.counters.steps_aborted_total == 1
    assert worker.thread.cancel_to_free.count == 1
    assert worker.thread.cancel_to_free.max < 5, "the step would have taken twenty"
    used, listed = await worker.thread.call(lambda engine: (engine.pool.used, engine.pool.index.hashes()))
    assert (used, listed) == (0, []), "nothing of the step that nobody waited for is cached"
    async with asyncio.timeout(LIMIT_S):
        while view.heartbeat.step_age_s:
            await asyncio.sleep(0.02)


async def test_heartbeats_carry_the_longest_of_the_last_steps(worker: FakeWorker, client: Client) -> None:
    body = GenerateRequest("r", 0, "demo", SAMPLING, client.inbox.of("r", 0), prompt_ids=LONG[:10])
    subject = client.subjects.worker_generate("w0", "public")
    await client.connection.publish(subject, codec.encode(body), reply=client.inbox.of("r", 0))
    view = client.members.view.workers["w0"]
    async with asyncio.timeout(LIMIT_S):
        while view.heartbeat is None or not view.heartbeat.rates.step_s:
            await asyncio.sleep(0.02)
    assert view.heartbeat.rates.step_s >= 0.5


async def test_a_worker_that_was_away_is_told_again_what_was_cancelled(fleet: FakeFleet, client: Client) -> None:
    """What was said while its connection was broken is lost."""
    await fleet.start("w0", fake_tokens_per_s=100)
    await until(lambda: list(client.members.view.ready()))
    said: list[CancelRequest] = []

    async def hear(message: Message) -> None:
        said.append(codec.decode(CancelRequest, message.data))

    await client.connection.subscribe(client.subjects.worker_cancel("w0", "public"), hear)
    async with client.generate(Generation("demo", Sampling(max_tokens=500, ignore_eos=True), LONG[:10])) as stream:
        async for event in stream:
            if isinstance(event, Tokens):
                break
    await until(lambda: said and not client.streams)
    await client.members.drop("w0")  # as placement does
    await until(lambda: len(said) == 2)  # it has registered again
    assert said[0] == said[1]
    assert said[0].request == stream.request
