"""Snapshots of a hybrid model in host memory: down with their chain, up behind their block, bounded, forgotten."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from engine_rig import ROOT, expected_tokens
from memory_remote import Faults
from tier_rig import SIZE, TieredRig

from kvfleet.worker.blocks.chain_location import names_of
from kvfleet.worker.tiers.host import CopyJob
from kvproto.block_hash import chain, state_after
from kvproto.messages import Sampling, Tier

PROMPT = list(range(100, 142))  # 10 blocks and a half, with snapshots behind every second one
HASHES = chain(ROOT, PROMPT, SIZE)
MakeRig = Callable[..., TieredRig]
STANDS_STILL = lambda: 0.0  # noqa: E731 - no restore is late


@pytest.fixture
def make_rig() -> Iterator[MakeRig]:
    rigs: list[TieredRig] = []

    def make(**settings: object) -> TieredRig:
        rigs.append(TieredRig(**({"states": 12, "host_states": 12} | settings)))  # type: ignore[arg-type]
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


def expected(prompt: list[int], count: int = 4) -> list[int]:
    return expected_tokens(prompt, Sampling(count, temperature=0.0), recurrent=True)


def settle(rig: TieredRig) -> None:
    rig.settle()
    assert rig.states is not None
    rig.until(lambda: not rig.states or not (rig.states._copying or rig.states._wanted))


def test_blocks_and_the_state_behind_them_come_back(make_rig: MakeRig) -> None:
    rig = make_rig()
    assert rig.run("a", PROMPT) == expected(PROMPT)
    settle(rig)
    rig.flush_device()
    assert rig.slots is not None
    assert rig.slots.snapshots == 0, "a snapshot outlived its block"
    assert rig.run("b", PROMPT) == expected(PROMPT)
    assert rig.cached("b") == {"host": 40}
    told = rig.engine.load().tiers["state"]
    assert (told.offloaded_blocks_total, told.restores_total) == (5, 1)
    assert told.bytes_total == 24 * 8 >= told.bytes_used > 0
    fork = [*PROMPT[:30], 1, 2, 3]
    rig.flush_device()
    assert rig.run("c", fork) == expected(fork)
    assert rig.cached("c") == {"host": 24}


def test_a_wrong_state_is_not_without_effect(make_rig: MakeRig) -> None:
    """The control: the comparison of tokens above can fail."""
    rig = make_rig()
    rig.run("a", PROMPT)
    settle(rig)
    rig.flush_device()
    assert rig.states is not None
    for at in range(len(rig.states.host)):
        rig.states.host[at] ^= 1
    assert rig.run("b", PROMPT) != expected(PROMPT)


def test_only_the_state_is_brought_where_the_blocks_are_still_there(make_rig: MakeRig) -> None:
    rig = make_rig(blocks=96)
    rig.run("a", PROMPT)
    settle(rig)
    assert rig.slots is not None
    while (slot := next(iter(rig.slots), None)) is not None:  # others needed all of its states
        rig.slots._drop(slot)
    assert rig.run("b", PROMPT) == expected(PROMPT)
    assert rig.started["b"].cached_tokens == 40
    assert rig.cached("b") == {"device": 40}


def test_without_a_state_the_blocks_alone_are_not_brought(make_rig: MakeRig) -> None:
    rig = make_rig(host_states=0)
    rig.run("a", PROMPT)
    settle(rig)
    rig.flush_device()
    assert rig.run("b", PROMPT) == expected(PROMPT)
    assert rig.cached("b") == {}


def test_it_is_bounded_and_the_least_recently_used_goes_first(make_rig: MakeRig) -> None:
    rig = make_rig(host_states=3, host=256, blocks=64)
    for number in range(4):
        prompt = [number, *PROMPT[1:20]]
        rig.run(f"r{number}", prompt)
        settle(rig)
    assert rig.states is not None
    assert rig.states.stored == 3
    assert rig.states.evictions > 0
    assert rig.states.deepest(chain(ROOT, [3, *PROMPT[1:20]], SIZE)) == 4
    assert rig.states.deepest(chain(ROOT, [0, *PROMPT[1:20]], SIZE)) == 0


def test_what_is_erased_has_no_state_left(make_rig: MakeRig) -> None:
    rig = make_rig()
    output = rig.run("a", PROMPT)
    settle(rig)
    assert rig.states is not None
    assert rig.slots is not None
    rig.engine.kv.erase(ROOT, [*PROMPT, *output])
    rig.turn()
    assert (rig.states.stored, rig.slots.snapshots) == (0, 0)
    assert rig.run("b", PROMPT) == expected(PROMPT)
    assert rig.cached("b") == {}


def test_conversations_that_do_not_fit_the_device_stay_right(make_rig: MakeRig) -> None:
    chance = random.Random(7)
    rig = make_rig(blocks=28, host=200, states=6, host_states=20, prefill_tokens_per_s=500.0)
    turns = [[chance.randrange(1000) for _ in range(chance.randint(9, 40))] for _ in range(5)]
    restored = 0
    for number in range(40):
        one = chance.choice(turns)
        if len(one) > 80:
            del one[chance.randint(10, 60) :]
        one.append(chance.randrange(1000))
        name = f"r{number}"
        assert rig.run(name, one) == expected(one), name
        restored += rig.cached(name).get("host", 0)
        one += rig.transcript.tokens[name, 0]
        if chance.random() < 0.3:
            settle(rig)
    assert restored > 0


def test_states_that_are_being_copied_leave_enough_for_all_that_may_run(make_rig: MakeRig) -> None:
    """The copier is slow: snapshots that it reads cannot make room."""
    rig = make_rig(states=4, slots=8, blocks=96, host=200)
    copier, waiting = rig.tiers.copier, list[CopyJob]()
    offload, copier.offload = copier.offload, waiting.append  # type: ignore[method-assign]
    for number in range(4):
        prompt = [number, *PROMPT[1:20]]
        assert rig.run(f"r{number}", prompt) == expected(prompt)
    assert waiting
    prompts = {f"s{number}": [50 + number, *PROMPT[1:20]] for number in range(5)}
    for name, prompt in prompts.items():
        rig.add(name, prompt)
    rig.until(lambda: not rig.engine.has_work)
    assert {name: rig.transcript.tokens[name, 0] for name in prompts} == {
        name: expected(prompt) for name, prompt in prompts.items()
    }
    copier.offload = offload  # type: ignore[method-assign]
    for job in waiting:
        offload(job)
    settle(rig)


@pytest.mark.parametrize("seed", range(2))
def test_however_requests_end_no_slot_is_lost_and_all_that_end_well_are_right(make_rig: MakeRig, seed: int) -> None:
    """Few states, few blocks: cancelled, paused and erased at any moment."""
    chance = random.Random(seed)
    rig = make_rig(blocks=40, host=60, states=5, host_states=6, slots=8)
    bases = [[chance.randrange(1000) for _ in range(40)] for _ in range(3)]
    asked: dict[str, list[int]] = {}
    live: dict[str, list[int]] = {}
    paused: set[str] = set()
    ended = 0
    for number in range(150):
        name, engine = f"r{number}", rig.engine
        live[name] = [*chance.choice(bases)[: chance.randint(2, 40)], chance.randrange(1000)]
        asked[name] = live[name]
        rig.add(name, live[name])
        for _ in range(chance.randint(0, 4)):
            rig.turn()
        one = chance.choice([*live])
        match chance.randrange(5):
            case 0:
                engine.cancel(one, 0)
                del live[one]
                paused.discard(one)
            case 1 if (one, 0) not in rig.transcript.ends:
                engine.pause(one, 0)
                paused.add(one)
            case 2:
                engine.kv.erase(ROOT, live[one])
        while len(live) > 6 or (number == 149 and live):
            for one in paused:
                engine.resume(one, 0)
            paused.clear()
            rig.turn()
            for one in [one for one in live if (one, 0) in rig.transcript.ends]:
                ended += 1
                assert rig.transcript.tokens[one, 0] == expected(live.pop(one)), one
        engine.check_integrity()
    settle(rig)
    assert ended > 40
    assert rig.slots is not None
    assert rig.states is not None
    assert rig.slots.free + rig.slots.snapshots == 5
    assert rig.states.offloaded_total > rig.states.restored_total > 0
    for prompt, name in sorted(((prompt, name) for name, prompt in asked.items()), reverse=True):
        rig.engine.kv.erase(ROOT, [*prompt, *rig.transcript.tokens[name, 0]])
    assert (rig.pool.cached, rig.slots.snapshots, rig.states.stored) == (0, 0, 0)


def vaulted(rig: TieredRig) -> None:
    settle(rig)
    rig.until(lambda: rig.tiers.is_settled)


def empty(rig: TieredRig) -> None:
    """Vaults have got all, and device and host have lost it."""
    vaulted(rig)
    assert rig.states is not None
    rig.flush_device()
    rig.flush_host()
    rig.states.forget([block_hash for block_hash, _ in rig.states.items()])


def test_blocks_and_the_state_behind_them_come_back_from_a_vault(make_rig: MakeRig) -> None:
    rig = make_rig(remote=True, clock=STANDS_STILL)
    assert rig.run("a", PROMPT) == expected(PROMPT)
    empty(rig)
    assert rig.run("b", PROMPT) == expected(PROMPT)
    assert rig.cached("b") == {"vault": 40}
    empty(rig)
    fork = [*PROMPT[:30], 1, 2, 3]
    assert rig.run("c", fork) == expected(fork)
    assert rig.cached("c") == {"vault": 24}
    assert rig.tiers.snapshots is not None
    assert rig.tiers.snapshots.fetched_total == 2


def test_the_next_state_counts_where_one_is_lost_and_none_is_brought_without_its_blocks(make_rig: MakeRig) -> None:
    rig = make_rig(remote=True, clock=STANDS_STILL)
    rig.run("a", PROMPT)
    vaulted(rig)
    assert rig.remote is not None
    kept = rig.remote.kept[Tier.VAULT]
    look = rig.remote._states
    lost = state_after(HASHES[9])

    def forgets(*asked: Any) -> tuple[int, ...]:
        found = look(*asked)
        kept.pop(lost, None)
        return found

    rig.remote._states = forgets  # type: ignore[method-assign]
    empty(rig)
    assert rig.run("b", PROMPT) == expected(PROMPT)
    assert rig.cached("b") == {"vault": 32}
    assert rig.engine.load().tiers["state"].failures_total == {"missing": 1}
    empty(rig)
    for name in HASHES[:4]:
        kept.pop(name)
    assert rig.run("c", PROMPT) == expected(PROMPT)
    assert rig.cached("c") == {}


def test_a_peer_has_what_its_device_and_host_have(make_rig: MakeRig) -> None:
    """Blocks and states over `PeerStore`, as the data plane would bring them."""
    lender, rig = make_rig(), make_rig(remote=True, clock=STANDS_STILL)
    lender.run("a", PROMPT)
    assert lender.lend(rig, PROMPT) == 15
    assert rig.run("b", PROMPT, peer="w2") == expected(PROMPT)
    assert rig.cached("b") == {"peer": 40}


def test_a_worker_for_prompts_alone_keeps_the_state_behind_each_prompts_last_block(make_rig: MakeRig) -> None:
    rig = make_rig()
    assert rig.slots is not None
    rig.slots.every, rig.slots.at_prompt_ends = 1024, True
    assert rig.run("a", PROMPT) == expected(PROMPT)
    assert [at for at, name in enumerate(HASHES, 1) if rig.slots.at(name) is not None] == [10]


def test_an_exact_state_takes_the_place_of_a_lossy_one_on_the_host(make_rig: MakeRig) -> None:
    rig = make_rig()
    assert rig.states is not None
    name = names_of(ROOT, HASHES, PROMPT, SIZE)[1].state()
    for lossy, kept in ((True, True), (False, False), (True, False)):
        place = rig.states.claim()
        assert place is not None
        rig.states.fill(place, name, lossy=lossy)
        assert [state.lossy for _, state in rig.states.items()] == [kept]
        rig.turn()


def test_a_state_that_is_being_written_to_a_vault_stays_as_it_is(make_rig: MakeRig) -> None:
    """Its place is free again only then, whatever is forgotten or evicted meanwhile."""
    rig = make_rig(host_states=1)
    assert rig.states is not None
    rig.run("a", PROMPT)
    settle(rig)
    ((block_hash, state),) = rig.states.items()
    assert rig.states.hold(block_hash) is not None
    assert rig.states.hold(block_hash) is None
    assert rig.states.claim() is None
    rig.states.forget([block_hash])
    assert (rig.states.stored, rig.states.claim()) == (0, None)
    rig.turn()
    rig.states.let_go(state.place)
    rig.turn()
    assert rig.states.claim() == state.place


def test_what_is_erased_leaves_no_state_in_vaults(make_rig: MakeRig) -> None:
    rig = make_rig(remote=True, clock=STANDS_STILL)
    output = rig.run("a", PROMPT)
    vaulted(rig)
    assert rig.remote is not None
    assert len(rig.remote.kept[Tier.VAULT]) > 10
    rig.engine.kv.erase(ROOT, [*PROMPT, *output])
    rig.turn()
    assert rig.remote.kept[Tier.VAULT] == {}


def test_with_faulty_vaults_and_pools_that_are_too_small_all_stays_right(make_rig: MakeRig) -> None:
    chance = random.Random(11)
    faults = Faults(lost=0.1, stall=0.1, unready=0.1, refuses=0.1)
    rig = make_rig(remote=True, faults=faults, blocks=40, host=60, states=5, host_states=4, prefill_tokens_per_s=400.0)
    bases = [[chance.randrange(1000) for _ in range(40)] for _ in range(4)]
    restored = 0
    for number in range(60):
        prompt = [*chance.choice(bases)[: chance.randint(9, 40)], chance.randrange(1000)]
        assert rig.run(f"r{number}", prompt) == expected(prompt), number
        restored += rig.cached(f"r{number}").get("vault", 0)
        if chance.random() < 0.5:
            rig.turn()
        if chance.random() < 0.3:
            empty(rig)
        if chance.random() < 0.1:
            rig.engine.kv.erase(ROOT, prompt)
    assert restored > 0
