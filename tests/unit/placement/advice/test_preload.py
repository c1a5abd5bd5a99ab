"""What is in demand is remembered by name, and planned for a worker that is about to be ready."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from placement_build import MODEL, a_record
from placement_rig import Rig, tokens

from kvfleet.placement.advice.questions import preload
from kvfleet.placement.events import WorkerRegistered
from kvfleet.placement.index.prefix_index import pack
from kvfleet.placement.workers.prompts import AddressSpace, Heat, SharedPrefix
from kvproto import codec
from kvproto.block_hash import ForkedRoot, TenantRoots, chain, public_prefix, root
from kvproto.messages import HotChain, PreloadPlan, PreloadRequest, State, Tier

RESTORE = {"peer": 2e9, "vault": 2e9}
BLOCK = 16
NUMBERS = itertools.count(10_000)  # of requests
SPACE = AddressSpace("", BLOCK, ())


def a_prefix(number: int, blocks: int = 4) -> SharedPrefix:
    at = number * 1000
    return SharedPrefix(
        MODEL, SPACE, b"r" * 16, pack([(at + one).to_bytes(16, "little") for one in range(1, blocks + 1)])
    )


def end_of(prefix: SharedPrefix) -> bytes:
    return prefix.hashes[-1].tobytes()


# ---------------------------------------------------------------------------------------------- heat


def test_a_chain_is_wanted_once_a_second_request_parts_there_soon_enough() -> None:
    heat, prefix = Heat(), a_prefix(1)
    assert not heat.add(end_of(prefix), 0.0)
    assert not heat.add(end_of(prefix), 7200.0), "two hours later"
    assert heat.add(end_of(prefix), 7300.0)
    heat.keep(end_of(prefix), prefix, 7300.0)
    assert not heat.add(end_of(prefix), 7301.0), "it is known"
    ((kept, how_hot),) = heat.hottest(7301.0)
    assert kept is prefix
    assert 2.9 < how_hot < 3.1
    assert heat.hottest(7301.0 + 3600)[0][1] < 0.5
    heat.check_integrity()


def test_the_coolest_give_way_and_what_is_forgotten_keeps_no_chain() -> None:
    heat = Heat(kept=40, kept_prefixes=16)
    for number in range(30):
        for _ in range(2 + number % 7):
            wanted = heat.add(end_of(a_prefix(number)), float(number))
        if wanted:
            heat.keep(end_of(a_prefix(number)), a_prefix(number), float(number))
        heat.check_integrity()
    heats = [each for _, each in heat.hottest(30.0)]
    assert heats == sorted(heats, reverse=True)
    assert 12 <= len(heats) <= 16
    assert heats[0] > 7
    for number in range(1000, 1040):
        heat.add(end_of(a_prefix(number)), 31.0)
    assert heat.hottest(31.0) == []
    heat.check_integrity()


def test_all_chains_together_are_bounded() -> None:
    heat = Heat(kept_blocks=100)
    for number in range(50):
        prefix = a_prefix(number, 1 + number % 60)
        for _ in range(3):
            heat.add(end_of(prefix), 0.0)
        heat.keep(end_of(prefix), prefix, 0.0)
        heat.check_integrity()
    heat.keep(end_of(a_prefix(99)), a_prefix(99, 101), 0.0)
    assert sum(len(prefix.hashes) for prefix, _ in heat.hottest(0.0)) <= 100


# ---------------------------------------------------------------------------------------------- plans


def demand(rig: Rig, ids: tuple[int, ...], requests: int) -> None:
    """So many requests begin with what somebody holds, and go on with something of their own."""
    for number in itertools.islice(NUMBERS, requests):
        request = f"d{number}"
        placed = rig.place(request, (*ids, *tokens(number, 20)))
        rig.core.bookings.release(("public", request))
        rig.core.inflight.break_off(("public", request))
        assert placed.expected_hit


def plan(rig: Rig, blocks: int = 10_000, *, max_bytes: int = 700_000, **fields: object) -> tuple[HotChain, ...]:
    ask = PreloadRequest("new", MODEL, "", BLOCK, blocks)
    ask, core = replace(ask, **fields), rig.core  # type: ignore[arg-type]
    *_, found = preload(ask, core.decider.heat, core.fleet, core.indexer, max_bytes, rig.now)
    assert codec.decode(PreloadPlan, codec.encode(PreloadPlan("p", found))).chains == found
    return found


def a_rig() -> Rig:
    """w0 and w1 hold A (100 blocks), w1 B (50); v0 C (30) of which w0 has 10."""
    rig = Rig()
    rig.join_tiered("w0", "w1", restore=RESTORE)
    rig.join_vault("v0")
    rig.store("w0", A)
    rig.store("w1", A)
    rig.store("w1", B)
    rig.store("v0", C, tier=Tier.VAULT)
    rig.store("w0", C[:160])
    return rig


A, B, C, D = tokens(1, 1600), tokens(2, 800), tokens(3, 480), tokens(4, 320)


def hashes(rig: Rig, ids: tuple[int, ...], blocks: int | None = None) -> bytes:
    return rig.hashes(ids)[:blocks].tobytes()


def test_the_hottest_come_first_with_who_has_them() -> None:
    rig = a_rig()
    demand(rig, A, 3)
    demand(rig, B, 9)
    demand(rig, C, 5)
    rig.beat("w0", queued=10, running=3)
    chains = plan(rig)
    assert [one.hashes for one in chains] == [hashes(rig, B), hashes(rig, C), hashes(rig, A)]
    assert [one.source for one in chains] == ["w1", "", "w1"], "of those who have A w1 has less to do"
    assert [round(one.heat) for one in chains] == [9, 5, 3]
    own = TenantRoots("", BLOCK, (), b"key").of("public", A)
    assert {one.root for one in chains} == {own}
    assert {one.public_blocks for one in chains} == {0}


def test_conversations_and_what_nobody_has_any_more_are_left_out() -> None:
    rig = a_rig()
    demand(rig, A, 1)
    demand(rig, B, 4)
    assert [one.source for one in plan(rig)] == ["w1"]
    rig.store("w1", B, removed=True, blocks=slice(20, 50))
    assert plan(rig)[0].hashes == hashes(rig, B, 20)
    rig.store("w1", B, removed=True, blocks=slice(20))
    assert plan(rig) == ()


def test_no_more_than_was_asked_for_and_shared_beginnings_once() -> None:
    rig = Rig()
    rig.join_tiered("w0", restore=RESTORE)
    one, other = (*A, *B), (*A, *C)
    for ids, requests in ((one, 6), (other, 5), (A, 4), (D, 3)):
        rig.store("w0", ids)
        demand(rig, ids, requests)

    def lengths(blocks: int, max_bytes: int = 700_000) -> list[int]:
        return [len(chain.hashes) // 16 for chain in plan(rig, blocks, max_bytes=max_bytes)]

    assert lengths(10_000) == [150, 130, 20], "A is in both"
    assert lengths(187) == [150, 130, 7]
    assert lengths(160) == [150, 110]
    assert lengths(150) == [150]
    assert lengths(7) == [7]
    assert lengths(0) == []
    assert lengths(10_000, 1000) == [50]


@pytest.mark.parametrize(
    "other", [{"model": "another"}, {"model_revision": "r2"}, {"block_size": 32}, {"worker": "w1"}]
)
def test_chains_are_those_that_the_asker_can_use_from_others(other: dict[str, object]) -> None:
    rig = a_rig()
    demand(rig, B, 4)
    assert plan(rig, **other) == ()


def test_a_worker_of_another_format_is_sent_to_vaults_only() -> None:
    rig = a_rig()
    demand(rig, B, 4)
    demand(rig, C, 4)
    about = {"data_plane": ("tcp:h:1",), "kv_format": b"other format 16b", "state": State.STARTING}
    rig.tell(WorkerRegistered(replace(a_record("new"), **about)))  # type: ignore[arg-type]
    assert [(one.hashes, one.source) for one in plan(rig)] == [(hashes(rig, C), "")]


def test_a_worker_whose_format_is_not_heard_of_yet_is_sent_to_its_fellows() -> None:
    """A start that is fast asks before its record says what it loaded."""
    rig = a_rig()
    demand(rig, B, 4)
    rig.tell(WorkerRegistered(replace(a_record("new"), state=State.STARTING)))
    assert [(one.hashes, one.source) for one in plan(rig)] == [(hashes(rig, B), "w1")]


def test_public_prefixes_keep_their_root() -> None:
    ids = tokens(4, 320)
    prefix = public_prefix(ids[:160])
    rig = Rig()
    rig.join_tiered("w0", restore=RESTORE, public_prefixes=(prefix,))
    roots = TenantRoots("", BLOCK, (prefix,), b"key")
    forked = roots.of("public", ids)
    assert isinstance(forked, ForkedRoot)
    assert forked.public == root("", BLOCK, b"")
    rig.hashes = lambda of, tenant="public": pack(chain(roots.of(tenant, of), of, BLOCK))  # type: ignore[method-assign, assignment]
    rig.store("w0", ids)
    demand(rig, ids, 3)
    (found,) = plan(rig)
    assert (found.root, found.public_root, found.public_blocks) == (forked.own, forked.public, 10)


def test_thousands_of_prefixes_are_looked_at_a_few_at_a_time() -> None:
    rig = Rig()
    rig.join_tiered("w0", restore=RESTORE)
    heat = rig.core.decider.heat
    for number in range(200):
        for _ in range(3):
            heat.add(end_of(a_prefix(number)), 0.0)
        heat.keep(end_of(a_prefix(number)), a_prefix(number), 0.0)
    ask = PreloadRequest("new", MODEL, "", BLOCK, 10)
    *steps, plan = preload(ask, heat, rig.core.fleet, rig.core.indexer, 10_000, 0.0)
    assert len(steps) > 5
    assert plan == ()


def test_a_worker_that_goes_is_told_what_only_it_has() -> None:
    rig = Rig()
    rig.join_tiered("w0", "w1", restore=RESTORE)
    rig.join_vault("v0")
    alone, both, kept = (tokens(seed, 4 * BLOCK) for seed in (1, 2, 3))
    for ids in (alone, both, kept):
        rig.store("w0", ids)
        demand(rig, ids, 3)
    rig.store("w1", both)
    rig.store("v0", kept, tier=Tier.VAULT)

    def only_there() -> dict[bytes, str]:
        return {one.hashes: one.source for one in plan(rig, worker="w0", leaving=True)}

    assert only_there() == {hashes(rig, alone): "w0"}
    rig.beat("w1", state=State.DRAINING)  # it goes as well
    assert only_there() == {hashes(rig, alone): "w0", hashes(rig, both): "w0"}
