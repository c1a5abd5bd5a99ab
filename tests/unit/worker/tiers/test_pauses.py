"""Pauses: what goes down while a tool runs, what comes up before the next turn, and what becomes of no-shows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from engine_rig import ROOT, Clock
from tier_rig import SIZE, TieredRig

from kvproto.block_hash import chain

PROMPT = tuple(range(1, 33))  # 8 blocks
OTHER = tuple(range(500, 532))
SOONEST_S, LATEST_S = 30.0, 100.0


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def rig(clock: Clock) -> Iterator[TieredRig]:
    made = TieredRig(clock=clock)
    yield made
    made.close()


def first_turn(rig: TieredRig, request: str = "a", prompt: tuple[int, ...] = PROMPT) -> tuple[int, ...]:
    """Returns the prompt of the next turn, whose full blocks the first one left."""
    said = rig.run(request, prompt, 4)
    return (*prompt, *said, 900, 901, 902, 903)


def expect(rig: TieredRig, request: str = "a", soonest_s: float = SOONEST_S) -> bool:
    taken = rig.tiers.pauses.expect((request, 0), soonest_s, LATEST_S)
    rig.settle()
    rig.turn()
    return taken


def evict(rig: TieredRig, blocks: int) -> None:
    """Others need so many blocks that are cached on the device."""
    taken = rig.pool.allocate(rig.pool.available - rig.pool.cached + blocks)
    rig.pool.release(taken)


def depth(rig: TieredRig, prompt: tuple[int, ...]) -> int:
    return rig.pool.index.depth(chain(ROOT, prompt, SIZE))


def test_blocks_of_a_paused_conversation_go_first(rig: TieredRig) -> None:
    first_turn(rig)
    first_turn(rig, "b", OTHER)
    rig.run("a2", PROMPT, 1)  # used last, so without a pause the other one's would go
    rig.settle()
    assert rig.tiers.pauses.expect(("a2", 0), SOONEST_S, LATEST_S)
    rig.turn()
    evict(rig, 4)
    assert depth(rig, PROMPT) < 8
    assert depth(rig, OTHER) == 8
    rig.engine.check_integrity()


def test_blocks_are_up_before_the_soonest_return(rig: TieredRig, clock: Clock) -> None:
    again = first_turn(rig)
    assert expect(rig)
    rig.flush_device()
    assert depth(rig, PROMPT) == 0
    clock.now += SOONEST_S / 2
    rig.turn()
    assert depth(rig, PROMPT) == 0
    clock.now += SOONEST_S / 2
    rig.until(lambda: depth(rig, PROMPT) == 8)
    rig.run("a2", again, 1)
    assert rig.cached("a2").keys() == {"device"}
    assert rig.started["a2"].saved_s >= 0
    assert rig.tiers.pauses.brought_total == 8
    assert rig.tiers.pauses.waiting == 0


def test_tokens_are_those_of_a_run_without_pauses(rig: TieredRig, clock: Clock) -> None:
    again = first_turn(rig)
    plain = TieredRig()
    want = plain.run("x", again, 6)
    plain.close()
    assert expect(rig)
    rig.flush_device()
    clock.now += SOONEST_S
    rig.until(lambda: depth(rig, PROMPT) == 8)
    assert rig.run("a2", again, 6) == want


def test_a_no_show_goes_first_again(rig: TieredRig, clock: Clock) -> None:
    first_turn(rig)
    assert expect(rig)
    rig.flush_device()
    clock.now += SOONEST_S
    rig.until(lambda: depth(rig, PROMPT) == 8)
    first_turn(rig, "b", OTHER)
    rig.settle()
    rig.run("a2", PROMPT[:4], 1)  # of a conversation that begins alike
    clock.now += LATEST_S
    rig.turn()
    assert rig.tiers.pauses.given_back_total == 8
    assert rig.tiers.pauses.waiting == 0
    evict(rig, 4)
    assert depth(rig, PROMPT) < 8
    assert depth(rig, OTHER) == 8


def test_its_return_says_what_it_did_not_wait_for() -> None:
    rig = TieredRig()
    again = first_turn(rig)
    assert expect(rig, soonest_s=0.3)
    rig.flush_device()
    rig.until(lambda: depth(rig, PROMPT) == 8)
    rig.run("a2", again, 1)
    saved_s = rig.started["a2"].saved_s
    assert 0 < saved_s == rig.tiers.pauses.saved_s_total
    rig.run("a3", again, 1)
    assert rig.started["a3"].saved_s == 0  # it is back already
    rig.close()


def test_a_turn_that_is_asked_again_is_back(rig: TieredRig, clock: Clock) -> None:
    """Its answer is not in the prompt, nor are the blocks that the answer filled."""
    rig.run("a", PROMPT, 8)
    assert expect(rig)
    rig.flush_device()
    clock.now += SOONEST_S
    rig.until(lambda: depth(rig, PROMPT) == 8)
    rig.run("a2", PROMPT, 8)
    assert rig.tiers.pauses.waiting == 0


def test_short_pauses_do_not_pay(rig: TieredRig) -> None:
    first_turn(rig)
    assert not expect(rig, soonest_s=0.01)
    assert rig.tiers.pauses.waiting == 0


def test_unknown_attempts_are_nobodys(rig: TieredRig) -> None:
    assert not rig.tiers.pauses.expect(("nobody", 0), SOONEST_S, LATEST_S)


def test_only_half_of_the_device_waits_for_returns(clock: Clock) -> None:
    rig = TieredRig(blocks=32, host=128, clock=clock)
    for number in range(4):
        prompt = tuple(range(100 * number, 100 * number + 24))  # 6 blocks
        rig.run(f"r{number}", prompt, 1)
        assert expect(rig, f"r{number}")
    rig.flush_device()
    clock.now += SOONEST_S
    rig.turn()
    rig.until(lambda: not rig.tiers.restorer.held())
    assert 0 < rig.tiers.pauses.brought_total <= 16
    rig.close()


def test_running_sequences_take_room_from_what_waits(rig: TieredRig, clock: Clock) -> None:
    first_turn(rig)
    assert expect(rig)
    rig.flush_device()
    clock.now += SOONEST_S
    rig.until(lambda: depth(rig, PROMPT) == 8)
    rig.run("big", tuple(range(200, 320)), 4)  # 31 of 32 blocks
    assert ("big", 0) in rig.transcript.ends


def test_what_was_erased_is_not_brought_up(rig: TieredRig, clock: Clock) -> None:
    said = rig.run("a", PROMPT, 4)
    assert expect(rig)
    ids = (*PROMPT, *said)
    rig.tiers.erase(ROOT, chain(ROOT, ids, SIZE), ids)
    assert rig.tiers.pauses.waiting == 0
    clock.now += SOONEST_S
    rig.turn()
    assert depth(rig, PROMPT) == 0


def test_without_a_host_tier_nothing_is_remembered() -> None:
    rig = TieredRig(host=0)
    first_turn(rig)
    assert not rig.tiers.pauses.expect(("a", 0), SOONEST_S, LATEST_S)
    rig.close()
