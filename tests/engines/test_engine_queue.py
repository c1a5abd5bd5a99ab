"""Who runs first, who gives way, and how busy the engine says it is."""

from __future__ import annotations

import pytest
from rigs import EngineRig, greedy, key_of

from kvfleet.worker.port.sequence_spec import SequenceSpec
from kvproto.errors import Overloaded
from kvproto.messages import FinishReason
from tests.support.waiting import until

LONG = 900


def ask(rig: EngineRig, request: str, number: int, priority: int = 0, max_tokens: int = 4) -> SequenceSpec:
    return rig.spec(request, rig.prompt(20, number), greedy(max_tokens), priority=priority)


async def occupied(rig: EngineRig) -> SequenceSpec:
    """One that runs and that no other pushes out."""
    blocker = ask(rig, "blocker", 0, 50, LONG)
    rig.submit(blocker)
    await rig.until_tokens(blocker)
    return blocker


async def test_a_higher_priority_starts_before_what_came_earlier(one_slot: EngineRig) -> None:
    rig = one_slot
    await occupied(rig)
    waiting = [ask(rig, "low", 1, -5), ask(rig, "zero", 2), ask(rig, "zero too", 3), ask(rig, "high", 4, 9)]
    rig.submit(*waiting)
    await rig.obeyed()
    assert rig.begun() == ["blocker"]
    rig.engine.cancel("blocker", 0)
    await rig.until(*map(key_of, waiting))
    assert rig.begun() == ["blocker", "high", "zero", "zero too", "low"]


async def test_fresh_ones_of_lower_priority_make_room(one_slot: EngineRig) -> None:
    rig = one_slot
    await occupied(rig)
    lower = [ask(rig, f"low {number}", number) for number in range(1, 4)]
    new = ask(rig, "new", 9, 5)
    rig.submit(*lower, new)
    going = await rig.engine.make_room("new", 0, 2)
    assert going < {key_of(spec)[:2] for spec in lower}
    assert len(going) == 2
    rig.engine.cancel("blocker", 0)
    await rig.until(*map(key_of, (*lower, new)))
    for spec in (*lower, new):
        stream = rig.stream(key_of(spec))
        if key_of(spec)[:2] not in going:
            assert stream.reason is FinishReason.LENGTH
            continue
        assert isinstance(stream.error, Overloaded)
        assert stream.error.retryable
        assert stream.error.retry_after_s is not None
        assert stream.ids == ()


@pytest.mark.parametrize("count", [1, 2])
async def test_else_the_one_that_asks_goes(one_slot: EngineRig, count: int) -> None:
    """Equals do not give way, and neither does what has begun; nor is there any use in one where two are needed."""
    rig = one_slot
    blocker = await occupied(rig)
    equal, new = ask(rig, "equal", 1, 0 if count == 1 else -1), ask(rig, "new", 2)
    rig.submit(equal, new)
    assert await rig.engine.make_room("new", 0, count) == {("new", 0)}
    await rig.until(key_of(new))
    assert isinstance(rig.stream(key_of(new)).error, Overloaded)
    assert await rig.engine.make_room("new", 0, 1) == frozenset(), "it has gone"
    assert rig.stream(key_of(blocker)).end is None
    rig.engine.cancel("blocker", 0)
    await rig.until(key_of(equal))
    assert rig.stream(key_of(equal)).reason is FinishReason.LENGTH


async def test_one_that_has_begun_stays_though_there_is_no_room(one_slot: EngineRig) -> None:
    rig = one_slot
    await occupied(rig)
    assert await rig.engine.make_room("blocker", 0, 1) == frozenset()
    assert await rig.engine.make_room("nobody", 0, 1) == frozenset()
    rig.engine.cancel("blocker", 0)


async def test_load_counts_what_runs_and_waits_and_what_was_generated(one_slot: EngineRig) -> None:
    rig = one_slot
    assert (rig.engine.measured[0].running, rig.engine.measured[0].waiting) == (0, 0)
    before = rig.engine.measured[0].generated_tokens_total
    await occupied(rig)
    waiting = [ask(rig, f"r{number}", number) for number in range(1, 4)]
    rig.submit(*waiting)
    await until(lambda: (rig.engine.measured[0].running, rig.engine.measured[0].waiting) == (1, 3))
    assert rig.engine.measured[0].slots == 1
    rig.engine.cancel("blocker", 0)
    await rig.until(*map(key_of, waiting))
    await rig.until_idle()
    load, rates = rig.engine.measured
    assert load.generated_tokens_total >= before + 3 * 4 + 1
    assert load.blocks_total == rig.engine.facts.blocks > 0
    assert rates.decode_tokens_per_s > 0


async def test_generated_tokens_are_counted_once(rig: EngineRig) -> None:
    before = rig.engine.measured[0].generated_tokens_total
    specs = [ask(rig, f"r{number}", number, max_tokens=8) for number in range(5)]
    await rig.run_all(*specs)
    await until(lambda: rig.engine.measured[0].generated_tokens_total == before + 40)


async def test_an_idle_engine_is_in_no_step(rig: EngineRig) -> None:
    await rig.run(ask(rig, "r", 1))
    await until(lambda: rig.engine.step_age_s == 0.0)
