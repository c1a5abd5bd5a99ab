"""The client against real worker loops (fake model) over a real nats-server: streams survive what breaks."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from kvfleet.worker.serve import request_desk
from kvproto import codec
from kvproto.client import Client, Generation
from kvproto.errors import (
    Cancelled,
    ContextLengthExceeded,
    DeadlineExceeded,
    InvalidRequest,
    KvfleetError,
    ModelNotFound,
    NoWorkers,
    OutOfMemory,
    PermissionDenied,
    VersionMismatch,
)
from kvproto.messages import Finished, FinishReason, GenerateRequest, Sampling, Started, Tokens
from tests.support.fake_fleet import FakeFleet
from tests.support.waiting import LIMIT_S, until

PROMPT = tuple(range(100, 140))
SAMPLING = Sampling(max_tokens=40, temperature=0.0, ignore_eos=True)


async def ready(client: Client, count: int) -> None:
    async with asyncio.timeout(LIMIT_S):
        while len(list(client.members.view.ready())) < count:
            await asyncio.sleep(0.02)


async def collect(client: Client, generation: Generation) -> tuple[list[int], str, Started, Finished]:
    ids: list[int] = []
    text = ""
    started: Started | None = None
    async with client.generate(generation) as stream:
        async for event in stream:
            if isinstance(event, Tokens):
                assert event.index == len(ids)
                ids += event.ids
                text += "".join(event.text)
            elif isinstance(event, Started):
                started = event
            else:
                assert started is not None
                return ids, text, started, event
    raise AssertionError("no terminal event")


async def test_a_request_and_its_repetition_from_the_cache(fleet: FakeFleet, client: Client) -> None:
    await fleet.start("w0")
    await ready(client, 1)
    ids, text, started, finished = await collect(client, Generation("demo", SAMPLING, PROMPT))
    assert len(ids) == 40
    assert text
    assert started.cached == {}
    assert finished.reason is FinishReason.LENGTH
    assert (finished.prompt_tokens, finished.output_tokens) == (40, 40)
    again = await collect(client, Generation("demo", SAMPLING, PROMPT))
    assert again[0] == ids
    assert again[2].cached == {"device": 39}, "all but the last prompt token, which must be fed to get logits"
    history = (*PROMPT, *ids, 7, 8, 9)
    third = await collect(client, Generation("demo", SAMPLING, history))
    assert third[2].cached_tokens == len(PROMPT) + len(ids) - 1, "generated tokens are reused too, exact to the token"
    assert client.streams == 0
    assert client.counters.fallback_total == 3, "no placement runs: the ring placed"


async def test_a_killed_workers_stream_goes_on_elsewhere_with_the_same_tokens(fleet: FakeFleet, client: Client) -> None:
    """Also one that was asked of this worker by name."""
    for worker in ("w0", "w1"):
        await fleet.start(worker, fake_tokens_per_s=200)
    await ready(client, 2)
    for sampling, named in ((SAMPLING, "w0"), (replace(SAMPLING, temperature=0.9, seed=7), None)):
        expected, expected_text, *_ = await collect(client, Generation("demo", sampling, PROMPT))
        ids: list[int] = []
        text = ""
        killed = None
        async with client.generate(Generation("demo", sampling, PROMPT, worker=named)) as stream:
            async for event in stream:
                if isinstance(event, Tokens):
                    ids += event.ids
                    text += "".join(event.text)
                    if len(ids) >= 10 and killed is None:
                        killed = stream.worker
                        assert killed is not None
                        await fleet.workers[killed].kill()
        assert ids == expected
        assert text == expected_text
        assert stream.attempts == 2
        assert stream.worker != killed
        await fleet.start(str(killed) + "b", fake_tokens_per_s=200)
        async with asyncio.timeout(LIMIT_S):
            while client.members.view.is_alive(str(killed)):
                await asyncio.sleep(0.05)
        await ready(client, 2)


async def test_a_draining_worker_hands_its_streams_over(fleet: FakeFleet, client: Client) -> None:
    for worker in ("w0", "w1"):
        await fleet.start(worker, fake_tokens_per_s=40, drain_s=0.1)
    await ready(client, 2)
    drained: asyncio.Task[None] | None = None
    ids: list[int] = []
    async with client.generate(Generation("demo", SAMPLING, PROMPT)) as stream:
        async for event in stream:
            if isinstance(event, Tokens):
                ids += event.ids
                if len(ids) >= 5 and drained is None:
                    drained = asyncio.create_task(fleet.workers[str(stream.worker)].stop())
    assert len(ids) == 40
    assert stream.attempts == 2
    assert drained is not None
    await drained
    alone = await collect(client, Generation("demo", SAMPLING, PROMPT))
    assert alone[0] == ids


async def test_lost_frames_are_asked_for_again(fleet: FakeFleet, client: Client) -> None:
    worker = await fleet.start("w0", fake_tokens_per_s=400)
    await ready(client, 1)
    sent = 0
    real_send = worker.loop.outbox.send

    def lossy(subject: str, data: bytes) -> None:
        nonlocal sent
        if subject == client.inbox.batch:
            sent += 1
            if sent % 3 == 0:
                return  # as NATS would: silently
        real_send(subject, data)

    worker.loop.outbox.send = lossy  # type: ignore[method-assign]
    for _ in range(3):
        ids, *_ = await collect(client, Generation("demo", SAMPLING, PROMPT))
        assert len(ids) == 40
    assert client.counters.resends_total > 0
    assert client.counters.lost_total == 0


async def test_a_lost_started_is_sent_again_and_still_comes_first(fleet: FakeFleet, client: Client) -> None:
    worker = await fleet.start("w0", fake_tokens_per_s=400)
    await ready(client, 1)
    real_send, dropped = worker.loop.outbox.send, []

    def lossy(subject: str, data: bytes) -> None:
        if subject == client.inbox.batch and not dropped:
            dropped.extend(codec.decode_frames(data))  # the first message to the batch inbox
            return
        real_send(subject, data)

    worker.loop.outbox.send = lossy  # type: ignore[method-assign]
    async with client.generate(Generation("demo", SAMPLING, PROMPT)) as stream:
        events = [event async for event in stream]
    assert isinstance(dropped[0], Started)
    assert isinstance(events[0], Started)
    assert isinstance(events[-1], Finished)
    assert sum(len(event.ids) for event in events if isinstance(event, Tokens)) == 40


async def test_cancel_frees_the_worker(fleet: FakeFleet, client: Client) -> None:
    worker = await fleet.start("w0", fake_tokens_per_s=10)
    await ready(client, 1)
    stream = client.generate(Generation("demo", replace(SAMPLING, max_tokens=1000), PROMPT))
    async for event in stream:
        if isinstance(event, Tokens):
            break
    await stream.cancel()
    with pytest.raises(Cancelled):
        await stream.read()
    async with asyncio.timeout(LIMIT_S):
        while worker.loop.frames.running:
            await asyncio.sleep(0.01)
    load = await worker.thread.call(lambda engine: engine.load())
    assert (load.running, load.waiting) == (0, 0)
    assert load.blocks_used == 0
    assert client.streams == 0


async def test_a_slow_reader_is_paused_and_misses_nothing(fleet: FakeFleet, client: Client) -> None:
    worker = await fleet.start("w0")
    await ready(client, 1)
    many = replace(SAMPLING, max_tokens=1500)
    stream = client.generate(Generation("demo", many, PROMPT))
    stream._limit = 100
    async with asyncio.timeout(LIMIT_S):
        while stream.paused_since is None:
            await asyncio.sleep(0.01)
    await until(lambda: not worker.thread.engine.load().running)
    load = await worker.thread.call(lambda engine: engine.load())
    assert load.running == 0, "a paused sequence takes part in no step"
    ids: list[int] = []
    async for event in stream:
        if isinstance(event, Tokens):
            ids += event.ids
    assert len(ids) == 1500
    assert (await collect(client, Generation("demo", many, PROMPT)))[0] == ids


@pytest.mark.parametrize(
    ("generation", "error", "field"),
    [
        (Generation("nobody", SAMPLING, PROMPT), ModelNotFound, "model"),
        (Generation("demo", SAMPLING, tuple([5] * 5000)), ContextLengthExceeded, "prompt_ids"),
        (Generation("demo", SAMPLING, (2**31,)), InvalidRequest, "prompt_ids"),
        (Generation("demo", SAMPLING, PROMPT, worker="absent"), KvfleetError, "worker"),
        (Generation("demo", replace(SAMPLING, max_tokens=20_000_000), PROMPT), InvalidRequest, "sampling.max_tokens"),
        (Generation("demo", replace(SAMPLING, temperature=-1.0), PROMPT), InvalidRequest, "sampling.temperature"),
    ],
)
async def test_what_is_wrong_is_named(
    fleet: FakeFleet, client: Client, generation: Generation, error: type[KvfleetError], field: str
) -> None:
    await fleet.start("w0")
    await ready(client, 1)
    with pytest.raises(error) as caught:
        await collect(client, generation)
    assert caught.value.field == field


async def test_no_worker_is_an_error_at_once_and_a_deadline_is_kept(fleet: FakeFleet, client: Client) -> None:
    for asking in (collect(client, Generation("demo", SAMPLING, PROMPT)), client.miss("demo")):
        with pytest.raises(NoWorkers):  # of a fleet that has shown no worker, nobody can say what it serves
            await asking
    await fleet.start("w0", fake_tokens_per_s=20)
    await ready(client, 1)
    with pytest.raises(DeadlineExceeded):
        await collect(client, Generation("demo", SAMPLING, PROMPT, deadline_s=0.5))


async def test_random_bytes_on_every_subject_leave_a_worker_as_it_was(fleet: FakeFleet, client: Client) -> None:
    worker = await fleet.start("w0")
    await ready(client, 1)
    await collect(client, Generation("demo", SAMPLING, PROMPT))
    tasks, subscriptions = len(asyncio.all_tasks()), worker.connection.subscriptions
    names = client.subjects
    subjects = [
        names.worker_generate("w0", "public"),
        names.worker_cancel("w0"),
        names.worker_resend("w0"),
        names.worker_pause("w0"),
        names.worker_admin("w0"),
        names.blocks("w0"),
        names.events("w0"),
        names.heartbeat("w0"),
        client.inbox.batch,
        client.inbox.of("x", 0),
    ]
    garbage = [b"", b"\x00", b"\x01", b"\x01\xc1", b"\x01\x80", b"{}", bytes(range(256)), b"\x01" + b"\x91" * 600]
    garbage.append(codec.encode(replace(Finished("r", 0, FinishReason.STOP, 1, 1), attempt=5)))
    for subject in subjects:
        for data in garbage:
            await client.connection.publish(subject, data, reply=client.inbox.of("garbage", 0))
    await client.connection.synced()
    ids, *_ = await collect(client, Generation("demo", SAMPLING, PROMPT))
    assert len(ids) == 40
    await until(lambda: len(asyncio.all_tasks()) <= tasks and worker.loop.requests.malformed_total)
    assert worker.connection.subscriptions == subscriptions
    load = await worker.thread.call(lambda engine: engine.load())
    assert (load.running, load.waiting, load.blocks_used) == (0, 0, 0)


async def test_a_producers_client_speaks_for_its_tenant_alone(client: Client) -> None:
    with pytest.raises(PermissionDenied, match="the tenant public's"):
        client.generate(Generation("demo", SAMPLING, PROMPT, tenant="a"))
    assert client.streams == 0


async def test_many_streams_at_once(fleet: FakeFleet, client: Client) -> None:
    for worker in ("w0", "w1", "w2"):
        await fleet.start(worker, fake_tokens_per_s=20_000)
    await ready(client, 3)
    asked = [Generation("demo", SAMPLING, (*PROMPT, i, i + 1)) for i in range(100)]
    results = await asyncio.gather(*(collect(client, one) for one in asked))
    assert all(len(ids) == 40 for ids, *_ in results)
    assert len({finished.worker for *_, finished in results}) == 3
    assert client.streams == 0


async def test_the_only_worker_comes_back_and_its_stream_goes_on(fleet: FakeFleet, client: Client) -> None:
    """No placement, one worker: nobody to go on at for a moment. The stream waits instead of using up its attempts."""
    await fleet.start("w0", fake_tokens_per_s=100)
    await ready(client, 1)
    ids: list[int] = []
    returning: asyncio.Task[object] | None = None

    async def come_back() -> None:
        await asyncio.sleep(0.7)
        await fleet.start("w0", fake_tokens_per_s=100)

    async with client.generate(Generation("demo", SAMPLING, PROMPT)) as stream:
        async for event in stream:
            if isinstance(event, Tokens):
                ids += event.ids
                if len(ids) >= 10 and returning is None:
                    await fleet.workers["w0"].kill()
                    returning = asyncio.create_task(come_back())
    assert returning is not None
    await returning
    assert len(ids) == 40
    assert (await collect(client, Generation("demo", SAMPLING, PROMPT)))[0] == ids


async def test_what_no_worker_can_hold_is_named_in_the_end(fleet: FakeFleet, client: Client) -> None:
    await fleet.start("w0", blocks=8)
    await ready(client, 1)
    with pytest.raises(OutOfMemory, match="blocks are needed, this worker has 8"):
        await collect(client, Generation("demo", SAMPLING, tuple(range(300)), attempts=2))


async def test_a_seed_is_drawn_where_none_is_given(fleet: FakeFleet, client: Client) -> None:
    await fleet.start("w0")
    await ready(client, 1)
    free = replace(SAMPLING, temperature=1.0)
    assert (await collect(client, Generation("demo", free, PROMPT)))[0] != (
        await collect(client, Generation("demo", free, PROMPT))
    )[0]
    fixed = replace(free, seed=5)
    assert (await collect(client, Generation("demo", fixed, PROMPT)))[0] == (
        await collect(client, Generation("demo", fixed, PROMPT))
    )[0]


async def test_a_lost_resume_is_sent_again(fleet: FakeFleet, client: Client) -> None:
    await fleet.start("w0", fake_tokens_per_s=1500)
    await ready(client, 1)
    real, dropped = client.connection.publish, []

    async def lossy(subject: str, data: bytes, **options: Any) -> None:
        if (
            subject == client.subjects.worker_pause("w0", "public") and b"\xc2" in data and not dropped
        ):  # msgpack's false
            dropped.append(data)
            return
        await real(subject, data, **options)

    client.connection.publish = lossy  # type: ignore[method-assign]
    stream = client.generate(Generation("demo", replace(SAMPLING, max_tokens=600), PROMPT))
    stream._limit = 100
    async with asyncio.timeout(LIMIT_S):
        while stream.paused_since is None:
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.2)
    ids = [one async for event in stream if isinstance(event, Tokens) for one in event.ids]
    assert len(ids) == 600
    assert dropped


@pytest.mark.parametrize(
    ("generation", "field"),
    [
        (Generation("demo", SAMPLING, (-1,)), "prompt_ids"),
        (Generation("demo", SAMPLING, (2**40,)), "prompt_ids"),
        (Generation("demo", SAMPLING, prompt="\ud800"), "prompt"),
        (Generation("demo", replace(SAMPLING, stop=("\ud800",)), PROMPT), "stop"),
        (Generation("demo", SAMPLING), "prompt"),
        (Generation("demo", SAMPLING, PROMPT, tenant="a.b"), "tenant"),
    ],
)
async def test_what_the_wire_cannot_carry_is_refused_at_once(
    client: Client, generation: Generation, field: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        client.generate(generation)
    assert caught.value.field == field
    assert client.streams == 0


async def test_a_listener_that_fails_does_not_blind_the_client(fleet: FakeFleet, client: Client) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a listener's fault")

    client.members.listeners.insert(0, broken)
    await fleet.start("w0")
    await ready(client, 1)
    await fleet.start("w1")
    await ready(client, 2)


async def test_a_released_lease_stays_released(fleet: FakeFleet, client: Client) -> None:
    worker = await fleet.start("w0")
    await ready(client, 1)
    await worker.loop.parts.lease.release()
    await worker.loop.parts.lease.renew()
    await asyncio.sleep(0.3)  # in which it could be written again
    entry = await worker.loop.parts.lease.bucket.get("worker.w0")
    assert entry.value is None


async def test_a_worker_that_was_replaced_by_an_older_release_is_written_to_in_its_version(
    fleet: FakeFleet, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the client knows of it is out of date: it slept, or the record is on its way."""
    monkeypatch.setattr(codec, "VERSION", 2)
    decode = codec.decode
    refused: list[int] = []

    def older(kind: Any, data: bytes, **limit: int) -> Any:
        if kind is GenerateRequest and data[0] == 2:
            refused.append(data[0])
            raise VersionMismatch("version 2, this reader accepts 1 to 1")
        return decode(kind, data, **limit)

    monkeypatch.setattr(codec, "decode", older)
    await fleet.start("w0")
    await ready(client, 1)
    async with client.generate(Generation("demo", SAMPLING, PROMPT)) as stream:
        events = [event async for event in stream]
    assert isinstance(events[-1], Finished)
    assert refused == [2]


async def test_a_worker_whose_clock_is_ahead_serves_all_the_same(
    fleet: FakeFleet, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its clock the deadline passed an hour ago; by the client's, which does not jump, there is time."""
    check = request_desk.check_request

    def ahead(request: GenerateRequest, *, unix_ms: float, **rest: Any) -> None:
        check(request, unix_ms=unix_ms + 7_200_000, **rest)

    monkeypatch.setattr(request_desk, "check_request", ahead)
    await fleet.start("w0")
    await ready(client, 1)
    async with client.generate(Generation("demo", SAMPLING, PROMPT)) as stream:
        events = [event async for event in stream]
    assert isinstance(events[-1], Finished)
    assert stream.attempts == 2
