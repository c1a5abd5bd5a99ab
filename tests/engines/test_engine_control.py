"""What is cancelled, paused or let go in every state, and what the engine leaves when it stops."""

from __future__ import annotations

import asyncio

import pytest
from rigs import EngineRig, greedy, key_of, sampled

from kvfleet.worker.port.sequence_spec import SequenceSpec
from kvproto.errors import Cancelled, EngineFailure
from kvproto.messages import FinishReason

LONG = 900  # tokens; ends after all that a test does to it


def long_one(rig: EngineRig, request: str, number: int = 1) -> SequenceSpec:
    return rig.spec(request, rig.prompt(30, number), greedy(LONG))


async def is_usable(rig: EngineRig) -> None:
    await rig.until_idle()
    later = await rig.run(rig.spec("later", rig.prompt(20, 99), greedy(4)))
    assert (len(later.ids), later.reason) == (4, FinishReason.LENGTH)
    await rig.until_idle()


@pytest.mark.parametrize("state", ["submitted", "waiting", "running", "paused", "resumed"])
async def test_it_is_cancelled_once_in_every_state(one_slot: EngineRig, state: str) -> None:
    rig, other, one = one_slot, long_one(one_slot, "other", 2), long_one(one_slot, "r")
    if state == "waiting":
        rig.submit(other)
        await rig.until_tokens(other)
    rig.submit(one)
    if state in ("running", "paused", "resumed"):
        await rig.until_tokens(one, 3)
    if state in ("paused", "resumed"):
        rig.engine.pause("r", 0)
        await rig.obeyed()
    if state == "resumed":
        rig.engine.resume("r", 0)
    rig.engine.cancel("r", 0)
    await rig.until(key_of(one))
    stream = rig.stream(key_of(one))
    assert isinstance(stream.error, Cancelled)
    if state == "waiting":
        assert stream.ids == ()
        assert rig.stream(key_of(other)).end is None
        rig.engine.cancel("other", 0)
    await is_usable(rig)


async def test_what_has_ended_or_never_was_is_not_disturbed(rig: EngineRig) -> None:
    ended, one = rig.spec("ended", rig.prompt(20), greedy(4)), long_one(rig, "r")
    await rig.run(ended)
    rig.submit(one)
    await rig.until_tokens(one)
    for request, attempt in (("ended", 0), ("nobody", 0), ("r", 1)):
        rig.engine.cancel(request, attempt)
        rig.engine.pause(request, attempt)
        rig.engine.resume(request, attempt)
    await rig.obeyed()
    seen = len(rig.stream(key_of(one)).ids)
    await rig.until_tokens(one, seen + 3)
    assert rig.stream(key_of(ended)).reason is FinishReason.LENGTH
    rig.engine.cancel("r", 0)
    await is_usable(rig)


async def test_kv_past_what_its_reader_received_is_forgotten_with_a_cancel(rig: EngineRig) -> None:
    """No erase could name it."""
    one = long_one(rig, "r")
    rig.submit(one)
    await rig.until_tokens(one, 70)
    rig.engine.cancel("r", 0, (10,))
    await rig.until(key_of(one))
    computed = [*one.prompt_ids, *rig.stream(key_of(one)).ids]
    assert (await rig.engine.inspect(rig.root, computed)).cached_tokens <= 30 + 10


@pytest.mark.parametrize("begun", [0, 3])
async def test_a_paused_one_leaves_its_place_and_goes_on_as_if_nothing_had_been(
    one_slot: EngineRig, begun: int
) -> None:
    rig, prompt = one_slot, one_slot.prompt(40)
    plain = await rig.run(rig.spec("plain", prompt, sampled(100)))
    paused = rig.spec("paused", prompt, sampled(100))
    rig.submit(paused)
    await rig.until_tokens(paused, begun)
    rig.engine.pause("paused", 0)
    await rig.obeyed()
    seen = rig.stream(key_of(paused))
    assert seen.end is None
    await rig.run(rig.spec("other", rig.prompt(20, 2), greedy(4)))  # there is one place
    await asyncio.sleep(0.02)
    assert rig.stream(key_of(paused)) == seen
    rig.engine.resume("paused", 0)
    await rig.until(key_of(paused))
    assert rig.stream(key_of(paused)).result == plain.result
    await rig.until_idle()


async def test_all_choices_of_an_attempt_are_paused_and_cancelled_together(rig: EngineRig) -> None:
    choices = [rig.spec("r", rig.prompt(30), sampled(LONG, n=3), choice=choice) for choice in range(3)]
    rig.submit(*choices)
    for choice in choices:
        await rig.until_tokens(choice, 2)
    rig.engine.pause("r", 0)
    await rig.obeyed()
    seen = [rig.stream(key_of(choice)) for choice in choices]
    await asyncio.sleep(0.02)
    assert [rig.stream(key_of(choice)) for choice in choices] == seen
    rig.engine.resume("r", 0)
    for choice, before in zip(choices, seen, strict=True):
        await rig.until_tokens(choice, len(before.ids) + 1)
    rig.engine.cancel("r", 0)
    await rig.until(*map(key_of, choices))
    assert [type(rig.stream(key_of(choice)).error) for choice in choices] == [Cancelled] * 3
    await is_usable(rig)


@pytest.mark.parametrize("keep", [False, True])
async def test_what_is_let_go_has_no_further_output(one_slot: EngineRig, keep: bool) -> None:
    rig, runs, waits = one_slot, long_one(one_slot, "runs", 1), long_one(one_slot, "waits", 2)
    rig.submit(runs, waits)
    await rig.until_tokens(runs, 3)
    await rig.let_go(runs, waits, keep=keep)
    seen = len(rig.recorder.order)
    await is_usable(rig)
    assert {output.request for output in rig.recorder.order[seen:]} == {"later"}
    assert rig.stream(key_of(runs)).end is rig.stream(key_of(waits)).end is None


async def test_what_runs_when_it_stops_and_what_comes_later_fails_as_retryable(one_slot: EngineRig) -> None:
    rig, runs, waits = one_slot, long_one(one_slot, "runs", 1), long_one(one_slot, "waits", 2)
    rig.submit(runs, waits)
    await rig.until_tokens(runs)
    await rig.close()
    late = await rig.run(long_one(rig, "late"))
    for stream in (rig.stream(key_of(runs)), rig.stream(key_of(waits)), late):
        assert isinstance(stream.error, EngineFailure)
        assert stream.error.retryable
    for question in (rig.engine.holdings, lambda: rig.engine.inspect(rig.root, (1,))):
        with pytest.raises(EngineFailure):
            await question()
