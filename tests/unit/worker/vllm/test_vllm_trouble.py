"""A server that dies, hangs, loses its connector or comes back as another one, with sequences that run on it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import reduce
from operator import xor

import pytest

from kvfleet.worker.vllm import vllm_engine, vllm_server
from kvfleet.worker.vllm.foreign_blocks import ForeignHash
from kvproto.block_hash import chain, digest_term
from kvproto.errors import EngineFailure, Unavailable
from kvproto.messages import FinishReason, Tier
from kvproto.streams.silence import UNMEASURED_S
from kvproto.testing.nats_process import free_port
from tests.engines.rigs import greedy, key_of, sampled
from tests.support.vllm_double.event_publisher import EventPublisher
from tests.support.vllm_double.made_with import Spoiled
from tests.support.vllm_rig import VllmRig
from tests.support.waiting import LIMIT_S, PAUSE_S, until

LONG = 900


async def running(rig: VllmRig, count: int = 3) -> None:
    """Some that run, and one of several choices whose second one waits for the first."""
    specs = [rig.spec(f"r{number}", rig.prompt(40, number), sampled(LONG)) for number in range(count)]
    specs += [rig.spec("n", rig.prompt(40, 9), sampled(LONG, n=2), choice=choice) for choice in range(2)]
    rig.submit(*specs)
    for spec in specs[:count]:
        await rig.until_tokens(spec, 4)


async def all_fail(rig: VllmRig) -> None:
    await rig.until(*rig.owed)
    for key in rig.owed:
        error = rig.stream(key).error
        assert type(error) is EngineFailure
        assert error.retryable


async def is_back(rig: VllmRig) -> None:
    await until(lambda: rig.engine.is_ready, pause_s=0.005)
    assert rig.states[-2:] == [False, True]
    assert rig.fatal == []
    stream = await rig.run(rig.spec("later", rig.prompt(70, 50), greedy(4)))
    assert stream.reason is FinishReason.LENGTH
    assert rig.engine.measured[0].running == rig.engine.measured[0].waiting == 0
    await agrees(rig)


async def agrees(rig: VllmRig) -> list[bytes]:
    """Holdings, their digest and that of the events; returns the holdings."""
    held, told = await rig.engine.holdings()
    assert told == reduce(xor, map(digest_term, held[Tier.DEVICE]), 0) == rig.recorder.events.digest
    return list(held[Tier.DEVICE])


async def test_one_that_dies_fails_all_and_comes_back_with_nothing(rig: VllmRig) -> None:
    prompt = rig.prompt(100, 30)
    first = await rig.run(rig.spec("before", prompt, greedy(4)))
    assert len(await agrees(rig)) > 0
    del rig.owed["before", 0, 0]
    await running(rig)
    await rig.double.die()
    await all_fail(rig)
    await until(lambda: rig.states == [False], pause_s=0.001)
    refused = await rig.run(rig.spec("meanwhile", prompt, greedy(4)))
    assert isinstance(refused.error, EngineFailure)
    assert rig.engine.step_age_s == 0
    await rig.double.start()
    await is_back(rig)
    assert rig.server.restarts_total == 1
    assert rig.held_chain(await agrees(rig), prompt) == 0
    again = await rig.run(rig.spec("again", prompt, greedy(4)))
    assert (again.cached_tokens, again.result) == (0, first.result)
    third = await rig.run(rig.spec("third", prompt, greedy(4)))
    assert third.cached_tokens == 96


async def test_one_that_restarts_again_and_again(rig: VllmRig) -> None:
    for number in range(1, 4):
        await rig.run(rig.spec(f"r{number}", rig.prompt(100), greedy(4)))
        await rig.double.die()
        await until(lambda: not rig.engine.is_ready, pause_s=0.001)
        await rig.double.start()
        await until(lambda: rig.engine.is_ready, pause_s=0.005)
        assert rig.server.restarts_total == number
    await is_back(rig)


async def test_one_that_hangs_is_away_until_it_steps_again(rig: VllmRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its HTTP server answers all the time, and its cache is as it was."""
    prompt = rig.prompt(100, 30)
    await rig.run(rig.spec("before", prompt, greedy(4)))
    del rig.owed["before", 0, 0]
    await running(rig)
    rig.double.hang()
    began = time.monotonic()
    monkeypatch.setattr(vllm_server, "HANG_S", 0.2)
    await all_fail(rig)
    monkeypatch.setattr(vllm_server, "HANG_S", 30.0)
    assert 0.1 < time.monotonic() - began < 5
    assert "in one step" in str(rig.stream(("r0", 0, 0)).error)
    assert rig.states == [False]
    rig.double.wake()
    await is_back(rig)
    assert rig.server.restarts_total == 0
    again = await rig.run(rig.spec("again", prompt, greedy(4)))
    assert again.cached_tokens == 96
    await until(lambda: not rig.double.engine.scheduler.has_work)


async def test_what_a_prompt_may_take_is_known_from_the_first_request_on(rig: VllmRig) -> None:
    """A long one is no hang."""
    await rig.run(rig.spec("r", rig.prompt(100), greedy(1)))
    assert 0 < rig.engine.step_rates.patience_s < UNMEASURED_S


async def test_one_whose_connector_hangs_up_keeps_its_blocks(rig: VllmRig) -> None:
    prompt = rig.prompt(100, 30)
    await rig.run(rig.spec("before", prompt, greedy(4)))
    del rig.owed["before", 0, 0]
    await running(rig)
    rig.double.engine.connector.close()
    await all_fail(rig)
    await is_back(rig)
    assert (await rig.run(rig.spec("again", prompt, greedy(4)))).cached_tokens == 96


@pytest.mark.parametrize(
    ("made", "says"),
    [
        ({"name": "other"}, "came back as another: name 'other', it was 'demo'"),
        ({"model": "/elsewhere"}, "came back as another: model '/elsewhere'"),
        ({"block_size": 64}, "block_size 64, it was 32"),
        ({"has_sampler": False}, "started without: --logits-processors"),
        ({"answers": {"/version": (404, b"")}}, "is no vLLM"),
    ],
)
async def test_one_that_comes_back_as_another_ends_the_worker(rig: VllmRig, made: dict[str, object], says: str) -> None:
    await rig.double.die()
    for name, value in made.items():
        setattr(rig.double.made, name, value)
    await rig.double.start()
    await until(lambda: rig.fatal, pause_s=0.005)
    assert says in rig.fatal[0]
    assert len(rig.fatal[0].splitlines()) == 1
    assert rig.states == [False]


@pytest.mark.parametrize("told", [{"error": "the engine is dead"}, {"finish": "error"}, {"finish": "abort"}])
async def test_an_error_in_a_stream_is_that_requests_alone(rig: VllmRig, told: dict[str, str]) -> None:
    other = rig.spec("other", rig.prompt(40, 1), sampled(60))
    expected = await rig.run(rig.spec("plain", rig.prompt(40, 1), sampled(60)))
    rig.submit(other)
    await rig.until_tokens(other)
    rig.double.spoil_next(Spoiled(3, told=told))
    failed = await rig.run(rig.spec("r", rig.prompt(40, 2), sampled(20)))
    assert isinstance(failed.error, EngineFailure)
    assert len(failed.ids) == 3
    await rig.until(key_of(other))
    assert rig.stream(key_of(other)).result == expected.result
    assert rig.engine.is_ready


@pytest.mark.parametrize("logit", [float("nan"), float("-inf"), float("inf")])
@pytest.mark.parametrize("after", [0, 5])
async def test_a_token_that_cannot_be_drawn_fails_its_request_alone(rig: VllmRig, logit: float, after: int) -> None:
    other = rig.spec("other", rig.prompt(40, 1), sampled(60))
    expected = await rig.run(rig.spec("plain", rig.prompt(40, 1), sampled(60)))
    rig.submit(other)
    await rig.until_tokens(other)
    rig.double.spoil_next(Spoiled(after, logit=logit))
    failed = await rig.run(rig.spec("r", rig.prompt(40, 2), sampled(20)))
    assert isinstance(failed.error, Unavailable)
    assert "not finite" in str(failed.error)
    assert len(failed.ids) == after
    await rig.until(key_of(other))
    assert rig.stream(key_of(other)).result == expected.result
    await until(lambda: not rig.double.engine.scheduler.has_work)


async def test_news_that_do_not_come_hold_up_the_first_token_alone(
    rig: VllmRig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = rig.prompt(40, 1)
    expected = await rig.run(rig.spec("plain", prompt, sampled(20)))
    monkeypatch.setattr(vllm_engine, "NEWS_S", 0.1)
    rig.double.made.has_connector = False
    silent = await rig.run(rig.spec("silent", prompt, sampled(20)))
    assert silent.result == expected.result
    assert "did not tell that request silent was scheduled" in caplog.text
    rig.double.made.has_connector = True
    assert (await rig.run(rig.spec("again", prompt, sampled(20)))).cached_tokens == 32


async def test_an_erase_as_it_dies_fails_as_retryable(rig: VllmRig) -> None:
    prompt = rig.prompt(100)
    await rig.run(rig.spec("r", prompt, greedy(4)))
    rig.double.hang()
    erasing = asyncio.ensure_future(rig.engine.erase(rig.root, prompt, 0))
    await until(lambda: rig.double.engine.scheduler.has_work, pause_s=0.001)
    await rig.double.die()
    with pytest.raises(EngineFailure):
        await asyncio.wait_for(erasing, 10)
    with pytest.raises(EngineFailure):
        await rig.engine.erase(rig.root, prompt, 0)
    await rig.double.start()
    await is_back(rig)
    assert await rig.engine.erase(rig.root, prompt, 0) == 0


async def test_an_erase_goes_on_where_its_connector_is_hung_up(rig: VllmRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is when a worker of vLLM was lost; the blocks may be wrong ones."""
    prompt, news = rig.prompt(100), rig.server.news
    await rig.run(rig.spec("r", prompt, greedy(4)))
    async with asyncio.timeout(LIMIT_S):
        while (await rig.engine.inspect(rig.root, prompt)).cached_tokens < 96:  # vLLM tells of them later
            await asyncio.sleep(PAUSE_S)
    erase, tries = news.erase, []

    async def hung_up(hashes: Sequence[ForeignHash]) -> int:
        tries.append(len(hashes))
        if len(tries) == 1:
            news.hang_up()
        return await erase(hashes)

    monkeypatch.setattr(news, "erase", hung_up)
    rig.engine.discard(chain(rig.root, prompt, rig.block_size)[0])
    assert (await rig.engine.inspect(rig.root, prompt)).cached_tokens == 0
    assert tries[:2] == [3, 3]
    assert rig.engine.is_ready


async def test_what_was_cancelled_as_it_died_is_no_trouble(rig: VllmRig) -> None:
    await running(rig)
    for number in range(3):
        rig.engine.cancel(f"r{number}", 0, (1,))
    await rig.double.die()
    await rig.until(*rig.owed)
    await rig.double.start()
    await is_back(rig)


async def test_the_events_of_two_servers_end_the_worker(rig: VllmRig) -> None:
    """Each seems to begin anew after the other."""
    other = EventPublisher(rig.double.made.events, f"tcp://127.0.0.1:{free_port()}", rig.double.made.topic)
    try:
        async with asyncio.timeout(10):
            for number in range(1000):
                await other.say([{"type": "AllBlocksCleared"}])
                await rig.run(rig.spec(f"r{number}", rig.prompt(40, number), greedy(2)))
                if rig.fatal:
                    break
    finally:
        await other.close()
    assert "KV events of several servers arrive at tcp://" in rig.fatal[0]
