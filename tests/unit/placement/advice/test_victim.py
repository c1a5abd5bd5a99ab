"""Who is the cheapest to lose: what one has alone, and what of it is in demand."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from placement_rig import RATE, Rig, tokens
from test_preload import demand

from kvfleet.placement.advice import questions
from kvfleet.placement.events import WorkerLeft
from kvfleet.placement.index.prefix_index import PrefixIndex, pack
from kvproto.messages import State, Tier, VictimCost

RESTORE = {"peer": 2e9, "vault": 2e9}
A, B, C = tokens(1, 1600), tokens(2, 800), tokens(3, 480)


def begin(rig: Rig, model: str = "") -> Iterator[tuple[VictimCost, ...]]:
    return questions.survey(model, rig.core.decider.heat, rig.core.fleet, rig.core.indexer, rig.now)


def survey(rig: Rig, model: str = "") -> tuple[VictimCost, ...]:
    *_, costs = begin(rig, model)
    return costs


def by_worker(rig: Rig, model: str = "") -> dict[str, VictimCost]:
    return {one.worker: one for one in survey(rig, model)}


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 130), st.integers(1, 4))
def test_what_one_has_alone_is_counted_as_plain_sets_would(seed: int, count: int, vaults: int) -> None:
    chance = random.Random(seed)
    index = PrefixIndex(600, 140, 3)
    names = [chance.randbytes(16) for _ in range(400)]
    has: dict[bytes, set[int]] = defaultdict(set)
    holders = [index.add_holder() for _ in range(count)]
    pool = [index.add_holder(pooled=True) for _ in range(vaults)]
    for holder in (*holders, *pool):
        for tier in (2,) if holder in pool else (0, 1):
            some = chance.sample(names, chance.randrange(1 + min(400, 600 // count) if holder in holders else 60))
            index.store(holder, tier, pack(some))
            for one in some:
                has[one].add(holder)
    counted = set(chance.sample(holders, chance.randint(0, count)))
    sole = {
        one: next(iter(who & counted)) for one, who in has.items() if len(who & counted) == 1 and not who & set(pool)
    }
    counts = np.zeros(64 * 3, dtype=np.int64)
    mask = index.mask_of(counted)
    for first in range(0, 600, 97):
        index.count_sole(mask, first, first + 97, counts)
    assert {holder: number for holder, number in enumerate(counts.tolist()) if number} == Counter(sole.values())
    asked = [*names, b"nobody has it..."]
    found = index.sole_holders(pack(asked), mask)[:, 1].tolist()
    assert found == [sole.get(one, -1) for one in asked]


def test_vaults_and_others_that_stay_make_a_block_cheap() -> None:
    rig = Rig()
    rig.join_tiered("w0", "w1", "w2", restore=RESTORE)
    rig.join_vault("v0")
    rig.store("w0", A)
    rig.store("w1", A[:800])
    rig.store("w1", B, tier=Tier.HOST)
    rig.store("w2", C)
    rig.store("v0", C, tier=Tier.VAULT, blocks=slice(25))
    costs = by_worker(rig)
    assert {name: one.unique_blocks for name, one in costs.items()} == {"w0": 50, "w1": 50, "w2": 5}
    assert {one.seconds for one in costs.values()} == {0.0}, "nobody asks for any of it"
    rig.beat("w0", state=State.DRAINING)
    costs = by_worker(rig)
    assert costs.keys() == {"w1", "w2"}
    assert costs["w1"].unique_blocks == 100, "whoever leaves takes its copies along"


def test_what_is_in_demand_costs_the_seconds_to_compute_it_again() -> None:
    rig = Rig()
    rig.join_tiered("w0", "w1", restore={})
    rig.store("w0", A)
    rig.store("w1", B)
    rig.store("w1", C)
    demand(rig, A, 3)
    demand(rig, B, 9)
    demand(rig, (*A[:800],), 4)  # a part of A: its blocks are asked for by both
    first, second = survey(rig)
    assert (first.worker, second.worker) == ("w1", "w0")
    assert first.seconds == pytest.approx(800 / RATE * 9 / 10, rel=0.01)
    assert second.seconds == pytest.approx(800 / RATE * 7 / 8 + 800 / RATE * 3 / 4, rel=0.01)
    assert (first.unique_blocks, first.unique_hot_blocks) == (80, 50)
    assert (second.unique_blocks, second.unique_hot_blocks) == (100, 100)
    rig.now += 4 * 3600
    assert all(one.seconds < 0.001 for one in survey(rig)), "it has cooled down"


def test_of_equals_whoever_has_least_to_do() -> None:
    rig = Rig()
    rig.join_tiered("w0", "w1", "w2", restore=RESTORE)
    rig.beat("w0", running=3)
    rig.beat("w1", running=1, waiting=1)
    rig.beat("w2", running=7)
    assert [(one.worker, one.requests) for one in survey(rig)] == [("w1", 2), ("w0", 3), ("w2", 7)]


def test_a_model_has_victims_of_its_own() -> None:
    rig = Rig()
    rig.join_tiered("w0", restore=RESTORE)
    rig.join_tiered("x0", restore=RESTORE, model="other", model_revision="r2")
    rig.store("w0", A)
    demand(rig, A, 3)
    assert [one.worker for one in survey(rig, "demo")] == ["w0"]
    (other,) = survey(rig, "other")
    assert (other.worker, other.seconds, other.unique_blocks) == ("x0", 0.0, 0)
    assert survey(rig) == (), "the last one of a model is nobody's victim, unless its model is asked for"
    rig.join("w1")
    assert [one.worker for one in survey(rig)] == ["w1", "w0"]
    assert survey(rig, "never seen") == ()


def test_it_begins_again_when_somebody_comes_or_goes_meanwhile() -> None:
    rig = Rig(blocks=400_000)
    rig.join_tiered("w0", "w1", restore=RESTORE)
    rig.store("w0", A)
    rig.store("w1", A)
    asked = begin(rig, "demo")
    assert next(asked) == ()
    rig.tell(WorkerLeft("w1"))
    *_, costs = asked
    assert {one.worker: one.unique_blocks for one in costs} == {"w0": 100}, "who is gone is nobody's victim"


def test_somebody_who_comes_and_goes_for_ever_does_not_keep_it_from_ending() -> None:
    rig = Rig(blocks=400_000)
    rig.join_tiered("w0", restore=RESTORE)
    asked = begin(rig)
    for _ in range(60):
        rig.join("w9", epoch="e1")
        if next(asked, None) is None:
            break
        rig.tell(WorkerLeft("w9"))
    else:
        pytest.fail("it never ended")
